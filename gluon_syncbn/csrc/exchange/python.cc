#include "exchange/python.h"

#include <algorithm>
#include <stdexcept>

#include "failure.h"
#include "point.h"

namespace syncbn {
namespace {

class MxnetKvstore : public Exchange {
  public:
    explicit MxnetKvstore(AddInPython* add) : add_(add) {}

    // It takes as long as the interpreter and MXNet's engine like, so a thread that waits without a limit makes the total.
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override {
        return [=](double seconds) -> std::optional<Total> {
            if (seconds != kForEver) return std::nullopt;
            const size_t replicas = own.rows.size(), length = own.length;
            if (replicas == 1 || length == 0) return Total{combined(combine, own), 0, id.layer};
            // A store can only add. So rows that are to be merged stay apart, each in a place of its own in the sum.
            const size_t places = combine == Combine::kAdd ? 1 : replicas;
            Vector rows(replicas * places * length), sums(places * length);
            Contribution apart{{}, length};
            for (size_t i = 0; i < replicas; ++i)
                std::copy_n(own.rows[i], length, &rows[(i * places + i % places) * length]);
            for (size_t i = 0; i < places; ++i) apart.rows.push_back(&sums[i * length]);
            SYNCBN_POINT("before_exchange");
            if (!add_(join_names(id.contexts).c_str(), static_cast<int64_t>(replicas),
                      static_cast<int64_t>(sums.size()), rows.data(), sums.data()))
                throw std::runtime_error("the KVStore could not add the statistics: " + python_problem);
            SYNCBN_POINT("after_exchange");
            return Total{combined(combine, apart), 0, id.layer};
        };
    }

  private:
    AddInPython* const add_;
};

}  // namespace

std::shared_ptr<Exchange> kvstore_exchange(AddInPython* add) { return std::make_shared<MxnetKvstore>(add); }

}  // namespace syncbn

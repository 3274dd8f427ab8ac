// A gather on a CPU context. It outputs the rows of all replicas, in the order of their ranks. The gradient of a row is
// the sum of the gradients of its copies.
#include <type_traits>
#include <utility>

#include "cpu/backend.h"
#include "cpu/numbers.h"
#include "operator/call.h"

namespace syncbn {
namespace {

class GatherCall : public Call {
  public:
    using Call::Call;

  protected:
    void begin_normalise(const Arrays& arrays) override;
    void normalise(const Arrays& arrays, const int* reqs) override;
    void normalise_frozen(const Arrays&, int) override { refuse_to_gather(); }
    void begin_differentiate(const Arrays& arrays, const int* reqs) override;
    void differentiate(const Arrays& arrays, const int* reqs) override;
    void track(const Arrays&) override {}
    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        backend_.copy(data(from), type, n, to, add);
    }
    void fill(Array to, Type type, int64_t n, double value) override { backend_.fill(to, type, n, value); }
    void fill_with_zeros(Array, int64_t) override {}

  private:
    cpu::Backend backend_;
    int64_t first_ = 0;
};

void GatherCall::begin_normalise(const Arrays& arrays) {
    if (recall_.again) return;  // it may have to wait for the call that it repeats
    join_gather();
    contribute(Direction::kForward, contribution_of(head(), tensor_.shape.size() > 0 ? data(arrays[kX]) : nullptr));
}

void GatherCall::normalise(const Arrays& arrays, const int* reqs) {
    std::shared_ptr<const Rows> rows;
    if (recall_.again) {
        rows = std::static_pointer_cast<const Rows>(repeat());
    } else {
        rows = std::make_shared<Rows>(rows_of(total(Direction::kForward)));
        remember(rows);
    }
    first_ = rows->first;
    if (reqs[0] != kNull && !rows->all.empty())
        backend_.copy(rows->all.data(), tensor_.type, node_.rows * channels(), arrays[node_.output()], reqs[0] == kAdd);
}

void GatherCall::begin_differentiate(const Arrays& arrays, const int*) {
    Vector all(static_cast<size_t>(node_.rows * channels()));
    cpu::with_type(tensor_.type, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* dy = all.empty() ? nullptr : data<const T>(arrays[0]);
        for (size_t i = 0; i < all.size(); ++i) all[i] = cpu::Value<T>::load(dy + i);
    });
    contribute(Direction::kBackward, std::move(all));
}

void GatherCall::differentiate(const Arrays& arrays, const int* reqs) {
    const Total sums = total(Direction::kBackward);
    if (reqs[kX] == kNull || tensor_.shape.size() == 0) return;
    const auto own = sums.values.begin() + first_ * channels();
    backend_.write(Vector(own, own + tensor_.shape.size()), tensor_.type, arrays[node_.gradients()], reqs[kX] == kAdd);
}

}  // namespace

std::unique_ptr<Call> gather_call(Node node, std::string context, Type type, Shape shape, int64_t samples) {
    return std::make_unique<GatherCall>(std::move(node), std::move(context), type, shape, samples);
}

}  // namespace syncbn

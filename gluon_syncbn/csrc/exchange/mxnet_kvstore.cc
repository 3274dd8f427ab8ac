#include "exchange/mxnet_kvstore.h"

#include "exchange/python_transport.h"

namespace syncbn {
namespace {

class MxnetKvstore : public Exchange {
  public:
    explicit MxnetKvstore(int64_t number) : number_(number) {}

    bool calls_out() const override { return true; }

    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override {
        if (own.rows.size() == 1 || own.length == 0) return allgather(ticket, own);
        return reduce_in_python(number_, combine, ticket, own);
    }
    Total allgather(const Ticket& ticket, const Contribution& own) override {
        return {Vector(own.rows[0], own.rows[0] + own.length), 0, ticket.layer};
    }

  private:
    const int64_t number_;
};

}  // namespace

std::shared_ptr<Exchange> mxnet_kvstore(int64_t number) { return std::make_shared<MxnetKvstore>(number); }

}  // namespace syncbn

#include "exchange/exchange.h"

namespace syncbn {
namespace {

class Memory : public Exchange {
  public:
    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override {
        Vector total(own.length, 0.0);
        for (const double* row : own.rows) put(combine, total.data(), row, own.length);
        return {std::move(total), 0, ticket.layer};
    }
    Total allgather(const Ticket& ticket, const Contribution& own) override {
        return {Vector(own.rows[0], own.rows[0] + own.length), 0, ticket.layer};
    }
};

}  // namespace

std::shared_ptr<Exchange> memory_exchange() { return std::make_shared<Memory>(); }

}  // namespace syncbn

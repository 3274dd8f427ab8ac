#include "cuda/collective.h"
#include "exchange/exchange.h"

namespace syncbn {
namespace {

class Nccl : public Exchange {
  public:
    explicit Nccl(size_t replicas) : replicas_(replicas) {}

    Form form() const override { return Form::kDevice; }
    size_t replicas() const override { return replicas_; }

    Total allgather(const Ticket& ticket, const DeviceContribution& own) override {
        if (replicas_ > 1) cuda::post_allgather(own.parts, ticket.name, ticket.timeout, ticket.interrupts);
        return {own.counts, 0, ticket.layer};
    }

  private:
    const size_t replicas_;
};

}  // namespace

std::shared_ptr<Exchange> nccl_exchange(size_t replicas) { return std::make_shared<Nccl>(replicas); }

}  // namespace syncbn

#include "exchange/nccl.h"

#include "cuda/collective.h"
#include "exchange/rows.h"

namespace syncbn {
namespace {

class Nccl : public Exchange {
  public:
    Nccl(size_t replicas, Sharing sharing) : replicas_(replicas), gathers_rows_(sharing == Sharing::kRows) {}

    Form form() const override { return Form::kDevice; }
    size_t replicas() const override { return replicas_; }

    Total allgather(const Ticket& ticket, const DeviceContribution& own) override {
        if (replicas_ > 1) post(ticket, own);
        return {own.counts, 0, ticket.layer};
    }

  private:
    void post(const Ticket& ticket, const DeviceContribution& own) const {
        using cuda::Collective;
        cuda::Operation operation{gathers_rows_ ? Collective::kAllReduce : Collective::kAllGather};
        if (gathers_rows_) {
            const std::vector<RowsHead> heads = heads_of(own.counts);
            first_row_of(heads, 0);  // throws before a device writes beyond its memory
            if (heads[0].expected * heads[0].values == 0) return;
            if (ticket.phase == 0) operation.what = Collective::kAllGatherBytes;
            for (const RowsHead& head : heads) operation.bytes.push_back(static_cast<size_t>(head.bytes()));
        }
        cuda::post_collective(operation, own.parts, ticket.name, ticket.timeout, ticket.interrupts);
    }

    const size_t replicas_;
    const bool gathers_rows_;
};

}  // namespace

std::shared_ptr<Exchange> nccl_exchange(size_t replicas, Sharing sharing) {
    return std::make_shared<Nccl>(replicas, sharing);
}

}  // namespace syncbn

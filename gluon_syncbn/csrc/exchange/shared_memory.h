// The exchange between processes of one machine: no socket, no interpreter. What it does not offer goes to the transport
// that the processes have besides.
#pragma once

#include "exchange/exchange.h"
#include "exchange/segment.h"

namespace syncbn {

class SharedMemory : public Exchange {
  public:
    // `transport` spans the same processes. It knows the layers, and carries what has no room in the segment.
    SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport);
    ~SharedMemory() override;

    bool calls_out() const override { return true; }
    bool spans_processes() const override { return true; }
    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    Total allgather(const Ticket& ticket, const Contribution& own) override;
    GpuRoute gpu_route() const override { return transport_->gpu_route(); }
    int64_t gpus_of_all_processes(const Ticket& ticket) override { return transport_->gpus_of_all_processes(ticket); }
    Turn turn(const Ticket& ticket, const std::vector<OnDevice>& parts, const Vector& counts) override {
        return transport_->turn(ticket, parts, counts);
    }
    void check(const Ticket& ticket) override { transport_->check(ticket); }
    Agreed agreed(const Ticket& ticket) override { return transport_->agreed(ticket); }

    // This process has failed, or ends: the others hear of it.
    void fail(const std::string& reason);
    void end();

  private:
    // Calls `use` with each rank, its vector and the length of that, in the order of the ranks. False where they have no room
    // in the segment. `equal`: another length than ours is a Failure.
    template <typename Use>
    bool exchange(const Ticket& ticket, int64_t key, const double* own, size_t length, bool equal, const Use& use);
    Agreed known(const Ticket& ticket);

    struct State;
    const std::unique_ptr<Segment> segment_;
    const std::shared_ptr<Exchange> transport_;
    const std::unique_ptr<State> state_;
};

}  // namespace syncbn

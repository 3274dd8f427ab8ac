// The exchange between processes of one machine: no socket, no interpreter. What it does not offer goes to the transport
// that the processes have besides.
#pragma once

#include "exchange/exchange.h"
#include "exchange/segment.h"

namespace syncbn {

// Those that share a segment, where they are a part of a job: their ranks in it, ascending, and how many it has.
struct Members {
    std::vector<size_t> ranks;
    size_t of;
};

class SharedMemory : public Exchange {
  public:
    // `transport` spans the same processes. It knows the layers, and carries what has no room in the segment.
    SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport);
    // For the processes of one machine, of a job on several: see hierarchy.h. `transport` spans the job.
    SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport, Members members);
    ~SharedMemory() override;

    bool calls_out() const override { return true; }
    bool spans_processes() const override { return true; }
    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    Total allgather(const Ticket& ticket, const Contribution& own) override;
    std::unique_ptr<Underway> begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    std::unique_ptr<Underway> begin_allgather(const Ticket& ticket, const Contribution& own) override;
    int64_t gpus_of_all_processes(const Ticket& ticket) override { return transport_->gpus_of_all_processes(ticket); }
    Turn turn(const Ticket& ticket, const DeviceContribution& own) override { return transport_->turn(ticket, own); }
    void check(const Ticket& ticket) override { transport_->check(ticket); }
    Agreed agreed(const Ticket& ticket) override { return transport_->agreed(ticket); }

    // Parts of an allreduce over more than these processes. Member 0 speaks for all of them: it alone has the total of what
    // they contribute, and hands them that of all.
    bool speaks() const;
    static bool has_room(size_t length);
    // Whether the next three know what the processes have agreed on; else they ask the others first.
    bool knows(const Ticket& ticket) const { return known(ticket) != nullptr; }
    std::unique_ptr<Underway> begin_reduce(Combine combine, const Ticket& ticket, const Contribution& own);
    std::unique_ptr<Underway> begin_hearing(const Ticket& ticket, size_t length);  // all but member 0
    void broadcast(const Ticket& ticket, const Vector& total);                     // member 0

    // This process has failed, or ends: the others hear of it.
    void fail(const std::string& reason);
    void end();

  private:
    class Gathering;
    class Reduction;
    class SideBySide;
    class Contributing;
    class Hearing;
    struct State;
    uint64_t everybody() const;  // a bit for each rank
    // What the processes have agreed on; null, or a question to them, where that is not known here yet.
    const Agreed* known(const Ticket& ticket) const;
    const Agreed& learned(const Ticket& ticket);
    std::unique_ptr<Underway> gather(const Ticket& ticket, const Contribution& own, const Agreed& agreed);

    const std::unique_ptr<Segment> segment_;
    const std::shared_ptr<Exchange> transport_;
    const std::unique_ptr<State> state_;
};

}  // namespace syncbn

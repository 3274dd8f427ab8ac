// Exchanges between processes of one machine, without sockets or the interpreter. Other operations use the transport of
// the same processes.
#pragma once

#include "exchange/exchange.h"
#include "exchange/segment.h"
#include "exchange/sums.h"

namespace syncbn {

class SharedMemory : public Exchange {
  public:
    // `transport` spans the same processes. It knows the layers, and carries vectors that the segment has no space for.
    SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport);
    // For the processes of one machine, of a job on several: see hierarchy.h. `transport` spans the job.
    SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport, Members members);
    ~SharedMemory() override;

    bool spans_processes() const override { return true; }
    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    Total allgather(const Ticket& ticket, const Contribution& own) override;
    std::unique_ptr<Underway> begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    std::unique_ptr<Underway> begin_allgather(const Ticket& ticket, const Contribution& own) override;

    // Parts of an allreduce over more than these processes. Member 0 represents all of them. Only it gets the total of
    // their contributions, and gives them the total of all.
    bool speaks() const;
    static bool has_space(size_t length);
    // Whether the next three know the agreement of the processes; otherwise they first ask the others.
    bool knows(const Ticket& ticket) const { return known(ticket) != nullptr; }
    std::unique_ptr<Underway> begin_reduce(Combine combine, const Ticket& ticket, const Contribution& own);
    std::unique_ptr<Underway> begin_hearing(const Ticket& ticket, size_t length);  // all but member 0
    void broadcast(const Ticket& ticket, const Vector& total);                     // member 0

    // Sums of long arrays over the same processes.
    Sums& sums() { return sums_; }

    // Reports to the others that this process has failed, or ends.
    void fail(const std::string& reason);
    void end();

  private:
    class Gathering;
    class Reduction;
    class SideBySide;
    struct State;
    uint64_t everybody() const;  // a bit for each rank
    // Returns the agreement of the processes. If it is not known here yet: null, or a question to them.
    const Agreed* known(const Ticket& ticket) const;
    const Agreed& learned(const Ticket& ticket);
    std::unique_ptr<Underway> gather(const Ticket& ticket, const Contribution& own, const Agreed& agreed);

    const std::unique_ptr<Segment> segment_;
    const std::shared_ptr<Exchange> transport_;
    Sums sums_;
    const std::unique_ptr<State> state_;
};

}  // namespace syncbn

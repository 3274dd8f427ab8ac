// Exchanges between processes, in levels. Those of a machine share memory. Then one process of each machine, its leader,
// exchanges with the other leaders.
//
//     machine 0                                          machine 1
//     rank 1 ─► post ──────┐                             ┌────── post ◄─ rank 3
//     rank 0 ─► reduce ◄───┘                             └───► reduce ◄─ rank 2
//         leaders' allreduce ◄─── MPI or a carrier ───► leaders' allreduce
//     rank 1 ◄─ total ◄─ rank 0                                rank 2 ─► total ─► rank 3
//
// The total of a machine is rounded before the machines' totals are combined. All ranks have the same bits. They may
// differ from the bits of a single level in the last digits. An allgather needs the vector of every process, so with
// several machines it has one level.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/mailbox.h"
#include "exchange/mpi.h"
#include "exchange/segment.h"
#include "exchange/sums.h"
#include "exchange/tier.h"

namespace syncbn {

// The names of layers by their keys, for messages.
class Names {
  public:
    void add(int64_t key, const char* name);
    std::string of(int64_t key) const;

  private:
    mutable std::mutex mutex_;
    std::map<int64_t, std::string> names_;
};

// All processes of a job. They exchange by MPI, or by a carrier in Python.
struct Job {
    // `number`: of the exchange in Python, which knows the layers.
    Job(int64_t number, std::unique_ptr<Mailbox> mail) : number(number), all(std::move(mail)) {}
    const int64_t number;
    Tier all;
    Names names;
};

class Processes : public Exchange {
  public:
    explicit Processes(std::shared_ptr<Job> job);
    // With memory of this machine. `leaders`: of all machines. They add gradients by MPI; if `mpi` is null, see Machines.
    Processes(std::shared_ptr<Job> job, std::unique_ptr<Segment> segment, Members members, Ranks leaders,
              const Mpi* mpi, size_t carried_from);
    ~Processes() override;

    bool spans_processes() const override { return true; }
    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    Total allgather(const Ticket& ticket, const Contribution& own) override;
    std::unique_ptr<Underway> begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override;
    std::unique_ptr<Underway> begin_allgather(const Ticket& ticket, const Contribution& own) override;

    // Sends bytes to all ranks, the same or `own` for each. Returns theirs, this one's included, in the order of the
    // ranks: the sizes, then all bytes. `key` identifies the messages.
    std::string bytes_of(int64_t key, const char* what, double timeout, const std::vector<std::string>& own);
    // Sums of long arrays over the same processes, with memory of this machine.
    Sums& sums() { return *sums_; }
    const std::shared_ptr<Job>& job() const { return job_; }

    // Reports to the others that this process has failed, or ends.
    void leave(Mailbox::State state, const std::string& reason);

  private:
    class Gathering;
    class Doubling;
    class Levels;
    // Returns the agreement of the processes. If it is not known here yet: null, or a question to them.
    const Agreed* known(const Ticket& ticket) const;
    const Agreed& learned(const Ticket& ticket);
    std::unique_ptr<Underway> reduce(Combine combine, const Ticket& ticket, const Contribution& own, int64_t key);
    std::unique_ptr<Underway> reduce_in_job(Combine combine, const Ticket& ticket, const Contribution& own, int64_t key,
                                            const Ranks& ranks, double longer);
    std::unique_ptr<Underway> gather(const Ticket& ticket, const Contribution& own, const Agreed& agreed);
    std::unique_ptr<Underway> gather_in(Tier& tier, const Ticket& ticket, const Contribution& own,
                                        const Agreed& agreed);

    const std::shared_ptr<Job> job_;
    const std::unique_ptr<Tier> machine_;  // null if memory is not shared
    const Ranks leaders_;
    std::unique_ptr<Sums> sums_;
    mutable std::mutex learning_;       // guards the next one
    std::map<int64_t, Agreed> agreed_;  // by layer
};

}  // namespace syncbn

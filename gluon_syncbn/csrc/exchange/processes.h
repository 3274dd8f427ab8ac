// Exchanges between processes, by MPI or a transport in Python, and in levels: those of a machine share memory, and one
// process of each machine, its leader, exchanges with the other leaders: "Between processes" in docs/architecture.md.
//
// The total of a machine is rounded before the machines' totals are combined. All ranks have the same bits. They may
// differ from the bits of a single level in the last digits. An allgather needs the vector of every process, so with
// several machines it has one level.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/mailbox.h"
#include "exchange/mpi.h"
#include "exchange/segment.h"
#include "exchange/sums.h"
#include "lock.h"

namespace syncbn {

class Processes : public Exchange {
  public:
    // Over the processes of a job.
    explicit Processes(std::unique_ptr<Mailbox> job);
    // Before the first layer: `ranks` share the memory of a machine, of which each has one of the `leaders`. Without
    // memory, only gradients go that way, and each process is a machine. Leaders add gradients by MPI; if `mpi` is null,
    // see Machines.
    void meet(std::shared_ptr<Segment> memory, Ranks ranks, Ranks leaders, const Mpi* mpi, size_t adds_from);

    // The processes have agreed on a layer, which has so many replicas in each. All of them do so before its first call.
    std::shared_ptr<const Agreed> agree(int64_t key, const std::string& name, const Pooling& pooling, size_t channels,
                                        const std::vector<size_t>& replicas);

    bool spans_processes() const override { return true; }
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override;

    // Sends bytes to all ranks, the same or `own` for each. Returns theirs, this one's included, in the order of the
    // ranks: the sizes, then all bytes. `key` identifies the messages.
    std::string bytes_of(int64_t key, const char* what, double timeout, const std::vector<std::string>& own);
    // Sums of long arrays, after `meet`.
    Sums& sums() { return *sums_; }
    Mailbox& job() const { return *job_; }

    // Reports to the others that this process has failed, or ends.
    void report(Mailbox::State state, const std::string& reason);

  private:
    // In a hop of an exchange, this rank posts what it has for some others, and waits for the vectors of some.
    struct Hop {
        Mailbox* mail;
        int64_t piece;  // of the label
        Ranks readers, from;
        double longer = 0;        // seconds, beside the time limit
        bool contributes = true;  // to what comes; otherwise, that is a total already
        Label::Channel channel = Label::kVectors;
    };
    class WaitForVectors;
    class Hops;
    std::vector<Hop> levels(const Ranks& leaders) const;
    std::vector<Hop> between(const Ranks& ranks) const;

    const std::unique_ptr<Mailbox> job_;
    std::shared_ptr<Segment> machine_, memory_of_sums_;  // null if memory is not shared; before `meet`
    const std::vector<Hop> in_job_;
    std::vector<Hop> in_levels_;  // of reductions
    std::unique_ptr<Sums> sums_;
    mutable Mutex mutex_;                                    // guards the next two
    std::map<int64_t, std::weak_ptr<const Agreed>> agreed_;  // by key, of layers that are left
    std::vector<Label> here_;  // the exchanges that this rank has come to, and has not finished
};

}  // namespace syncbn

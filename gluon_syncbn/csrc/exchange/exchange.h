// Defines the interface that combines the statistics of a meeting, with one file for each implementation. A meeting
// keeps its exchange, and the last of its replicas to arrive calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/collective.h"
#include "exchange/mailbox.h"
#include "pooling/statistics.h"
#include "types.h"
#include "waiting/wait.h"

namespace syncbn {

// Identifies a contribution: `node`, `call` and `phase` are the same in every process. Also has the layer's name, and
// its timeout in seconds.
struct Ticket {
    int64_t layer, node, call, phase;
    const char* name;
    double timeout;
    int64_t interrupts;  // their number at the first call of a replica
};

// "the forward of call 2 of SyncBatchNorm 'bn0'". An exchange without a meeting, of a phase below 0, has only a name.
std::string name_of_call(const Ticket& ticket);

// The contribution of this process: a vector for each context. For an allgather, one vector for all contexts.
struct Contribution {
    std::vector<const double*> rows;
    size_t length;  // of each row
};

// The combined contributions of the replicas of all processes.
struct Total {
    Vector values;
    size_t first = 0;  // index of this process's first value
    int64_t key = 0;   // of the layer, the same in every process
    // The group of each replica whose vector is here, from 0, if the exchange knows the groups of all processes.
    std::vector<int> groups = {};
};

// The contribution of this process on its GPUs, one for each replica, in their order. Also has the samples of each
// slot, side by side.
struct DeviceContribution {
    std::vector<cuda::OnDevice> parts;
    Vector counts;
};

// The form of the replicas' contributions.
enum class Form {
    kHost,    // packed vectors in memory of the host
    kDevice,  // packed vectors on a GPU, which a stream computes
};

// The processes' agreement about a layer.
struct Agreed {
    int64_t key = 0;  // the same in every process
    // If the layer has groups, the processes that share some with this one, which is among them. The rest describes
    // these. Empty: all.
    Ranks ranks;
    int64_t channels = 0;
    int64_t replicas = 0;      // of this process
    std::vector<int> members;  // that share a group with these, including them: their places among those of the ranks
    std::vector<int> groups;   // of each member, from 0
    int64_t first = 0;         // the first member of this process
};

// An exchange that this process has contributed to, and that may wait for others. Leaving it early means a failure,
// which must be reported elsewhere.
class Underway {
  public:
    virtual ~Underway() = default;
    // Whether all have come; waits at most so many seconds.
    virtual bool comes_within(double seconds) = 0;
    // Waits without a limit of its own. Called once.
    virtual Total total() = 0;
};

// Contributes and waits when its total is requested. `at_once`: it does not have to wait.
std::unique_ptr<Underway> later(std::function<Total()> total, bool at_once);

class Exchange {
  public:
    virtual ~Exchange() = default;

    // Whether vectors of other processes take part.
    virtual bool spans_processes() const { return false; }
    // Whether a call may take as long as others like: other processes, or the interpreter and MXNet's engine.
    virtual bool calls_out() const { return spans_processes(); }
    virtual Form form() const { return Form::kHost; }
    // The number of vectors that a GPU needs memory for. With `kDevice`.
    virtual size_t replicas() const;

    // All of the following throw std::runtime_error, or Failure, with the reason.

    // With `kHost`: combines all rows, in the order of the ranks and of the contexts. The same inputs give the same
    // bits everywhere.
    virtual Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own);
    // With `kHost`: returns the one row of each process side by side, in the order of the ranks.
    virtual Total allgather(const Ticket& ticket, const Contribution& own);
    // With `kDevice`: brings each replica all vectors, side by side in the order of the ranks, or their sum. This may
    // only begin, in the replicas' streams. The total has the samples of all slots.
    virtual Total allgather(const Ticket& ticket, const DeviceContribution& own);
    // The same without a wait, for a thread that may be needed elsewhere. If that is impossible, `total` does all of
    // it. The rows and the name must stay valid.
    virtual std::unique_ptr<Underway> begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own);
    virtual std::unique_ptr<Underway> begin_allgather(const Ticket& ticket, const Contribution& own);
};

// Between threads of one process, whose memory holds all vectors already.
std::shared_ptr<Exchange> memory_exchange();
// Between GPUs of one process, one for each replica: NCCL brings each contribution to all of them, without the host.
std::shared_ptr<Exchange> nccl_exchange(size_t replicas);
// Over the contexts of this process by a KVStore of MXNet's, in Python, where `number` identifies the exchange.
std::shared_ptr<Exchange> kvstore_exchange(int64_t number);

}  // namespace syncbn

// How the statistics of a meeting come together: one interface, and one file for each way. A meeting has one exchange from
// its beginning to its end, and the last of its replicas to arrive calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace syncbn {

// Which handing-in this is: `node`, `call` and `phase` are the same in every process. With the layer's name, and the seconds
// that it waits.
struct Ticket {
    int64_t layer, node, call, phase;
    const char* name;
    double timeout;
};

// What an allreduce makes of vectors: the moments of all their values, or the sum.
enum class Combine { kMerge, kAdd };

// What the replicas of this process contribute: a vector for each context, or one for all of them where vectors are put side
// by side.
struct Contribution {
    std::vector<const double*> rows;
    size_t length;  // of each row
};

// What the replicas of all processes have contributed, put together.
struct Total {
    Vector values;
    size_t first = 0;  // of `values` that are of this process
    int64_t key = 0;   // of the layer, the same in every process
};

// What a replica on a GPU contributes where it is: `length` numbers, which are on their way in `stream`. `gathered` is where
// those of all replicas come to lie, side by side in their order. A KVStore can only add: for it, `own` has room for the
// numbers of all replicas, is zero but for this replica's, and is complete.
struct OnDevice {
    int device;
    void* stream;
    const double* own;
    double* gathered;
    int64_t length;
};

// Where the GPUs of a layer exchange their statistics.
enum class GpuRoute {
    kNcclOrHost,  // NCCL within the process; memory of the host, with a warning, where there is no NCCL
    kNccl,        // NCCL within the process, or an error
    kHost,        // memory of the host
    kStore,       // a KVStore adds the arrays
    kProcesses,   // NCCL over all processes where they have agreed on it, else memory of the host
};

// What processes agree on before their GPUs post a collective: that all are ready, and its place in the order of
// collectives.
//
//     process 0            rank 0            process 1        NCCL needs all processes to post their collectives in one
//      ready ───────────►  counts  ◄──────────── ready        order, and branches of a graph that run side by side come in
//        ◄── number 7 ──── all here ─── number 7 ──►          any. A collective gets a number when all processes are
//      posts 7 after 6                    posts 7 after 6     ready. Each process posts in the order of the numbers.
struct Turn {
    int64_t channel = 0;  // the agreements of a KVStore, which are numbered for themselves
    int64_t number = -1;  // of the collective, from 0, the same everywhere; -1 where it stays within the process
    int64_t clique = 0;   // which set of GPUs it is, the same everywhere
    size_t world = 0;     // how many they are
    size_t first = 0;     // of this process
    std::string id;       // that of the new communicator, where this is its first collective
    Vector counts;        // [world][slots]: the samples of each slot of each replica
    int64_t key = 0;      // of the layer, the same in every process
};

// What the processes have agreed on about a layer.
struct Agreed {
    int64_t key = 0;         // the same in every process
    bool in_groups = false;  // it exchanges vectors with some processes only
};

class Exchange {
  public:
    virtual ~Exchange() = default;

    // Whether a call leaves the memory of this process, and may take as long as others like.
    virtual bool calls_out() const { return false; }
    // Whether vectors of other processes take part.
    virtual bool spans_processes() const { return false; }

    // All rows combined, in the order of the ranks and of the contexts: the same inputs give the same bits everywhere.
    virtual Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) = 0;
    // The one row of each process side by side, in the order of the ranks.
    virtual Total allgather(const Ticket& ticket, const Contribution& own) = 0;

    virtual GpuRoute gpu_route() const = 0;
    // With `kStore`: the sum of what the parts contribute, to each of them.
    virtual void add_on_devices(const Ticket& ticket, const std::vector<OnDevice>& parts);
    // With `kProcesses`: how many replicas of all processes exchange their statistics on GPUs; 0 where they do so over the
    // host. The first question for a layer waits for the other processes.
    virtual int64_t gpus_of_all_processes(const Ticket& ticket);
    // With `kProcesses`: this process is ready; `parts` are those of its replicas, `counts` [parts][slots]. Waits until all
    // are.
    virtual Turn turn(const Ticket& ticket, const std::vector<OnDevice>& parts, const Vector& counts);
    // Over processes. The first question for a layer waits for the others.
    virtual Agreed agreed(const Ticket& ticket);
    // With `kProcesses`: throws where another process has said that it has failed.
    virtual void check(const Ticket& ticket);

    // All of them throw std::runtime_error, or Failure, with the reason.
};

// Puts `part` into `total`, which begins as zeros.
void put(Combine combine, double* total, const double* part, size_t length);

}  // namespace syncbn

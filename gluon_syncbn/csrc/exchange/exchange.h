// How the statistics of a meeting come together: one interface, and one file for each way. A meeting has one exchange from
// its beginning to its end, and the last of its replicas to arrive calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/collective.h"
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

// What the replicas of this process contribute where it is: on a GPU each, in their order. With the samples of each slot, side
// by side.
struct DeviceContribution {
    std::vector<cuda::OnDevice> parts;
    Vector counts;
};

// In what form replicas contribute.
enum class Form {
    kHost,    // packed vectors in memory of the host
    kDevice,  // packed vectors on a GPU, on their way in a stream
    kSummed,  // the same, as sums: only their total comes back
    kPadded,  // among zeros, in a vector for all replicas, and complete: their sum has them side by side
};

// What processes agree on before their GPUs post a collective: that all are ready, and its place in the order of
// collectives.
//
//     process 0                        process 1            NCCL needs all processes to post their collectives in one
//      ready ─────────── ballot ───────── ready              order, and branches of a graph that run side by side come in
//        ◄── number 7 ── all here ── number 7 ──►            any. A collective gets a number when all processes are
//      posts 7 after 6                  posts 7 after 6      ready. Each process posts in the order of the numbers.
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
    bool in_groups = false;  // it exchanges vectors with some processes only; all that follows is about these
    uint64_t ranks = 0;      // bits of them, of which this process is one; of the first 64
    int64_t channels = 0;
    int64_t replicas = 0;        // of this process
    int64_t begin = 0, end = 0;  // of the groups that have a replica here, among the replicas of these processes
};

// What this process has contributed to, and others may not have yet. Whoever leaves one before its end has failed, and says so
// elsewhere.
class Underway {
  public:
    virtual ~Underway() = default;
    // Whether all have come, for which it waits so many seconds at most.
    virtual bool comes_within(double seconds) = 0;
    // Waits as long as it takes. Once.
    virtual Total total() = 0;
};

// One that contributes and waits as its total is asked for. `at_once`: nobody has to be waited for.
std::unique_ptr<Underway> later(std::function<Total()> total, bool at_once);

class Exchange {
  public:
    virtual ~Exchange() = default;

    // Whether a call leaves the memory of this process, and may take as long as others like.
    virtual bool calls_out() const { return false; }
    // Whether vectors of other processes take part.
    virtual bool spans_processes() const { return false; }
    virtual Form form() const { return Form::kHost; }
    // For so many vectors a GPU needs room. With `kDevice` and `kSummed`.
    virtual size_t replicas() const;

    // All of the following throw std::runtime_error, or Failure, with the reason.

    // With `kHost`: all rows combined, in the order of the ranks and of the contexts: the same inputs give the same bits
    // everywhere.
    virtual Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own);
    // With `kHost`: the one row of each process side by side, in the order of the ranks.
    virtual Total allgather(const Ticket& ticket, const Contribution& own);
    // With the other forms: brings the vectors of all replicas to each of them, side by side in the order of the ranks, or
    // their sum, or begins to, in their streams. The total has the samples of all slots.
    virtual Total allgather(const Ticket& ticket, const DeviceContribution& own);
    // The same for a thread that may be needed elsewhere. They contribute without a wait, or leave it to the total. The rows
    // and the name have to stay.
    virtual std::unique_ptr<Underway> begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own);
    virtual std::unique_ptr<Underway> begin_allgather(const Ticket& ticket, const Contribution& own);
    std::unique_ptr<Underway> begin_allgather(const Ticket& ticket, DeviceContribution own);

    // What is on its way on the devices takes long: throws where another process has failed.
    virtual void check(const Ticket& ticket);

    // What the others are built on, over processes. The first question for a layer waits for the other processes.
    virtual Agreed agreed(const Ticket& ticket);
    // How many replicas of all processes exchange their statistics on GPUs; 0 where they do so over the host.
    virtual int64_t gpus_of_all_processes(const Ticket& ticket);
    // This process is ready. Waits until all are.
    virtual Turn turn(const Ticket& ticket, const DeviceContribution& own);
};

// Puts `part` into `total`, which begins as zeros.
void put(Combine combine, double* total, const double* part, size_t length);

}  // namespace syncbn

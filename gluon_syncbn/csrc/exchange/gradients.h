// Sums the gradients of Trainers over the processes of a job, as DistributedDataParallel of PyTorch does (Li et al., VLDB
// 2020): in buckets, while the backward still runs.
//
//   arrays, as the backward ends ──► buckets ──► MPI_Iallreduce ──► buckets ──► arrays, once all have ended
//        widened, and added over the contexts      of each Trainer            narrowed, in each context
//   a large array of one context ──────────────► MPI_Iallreduce, in place
//
// The arrays of one step are a round, which completes or fails as a whole. A Trainer has a communicator of its own, on which
// its rounds come in the same order in all processes, so no Trainer waits for another one. A round begins with a digest of
// its arrays and its update, of every rank, and only equal ones go on. The first round of some arrays has no overlap: then
// rank 0 tells the order in which its backward has ended, and the buckets follow it.
// MPI adds in an order that depends on the number of ranks and the size alone: all ranks and runs have the same bits.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "exchange/mailbox.h"
#include "lock.h"
#include "types.h"
#include "waiting/step.h"

namespace syncbn {

class Processes;

// An array of a round.
struct Summand {
    Type type;
    size_t size;
};

// What a process brings to a round.
struct Brought {
    int64_t trainer;     // counts from 1
    std::string update;  // what is done with the sums, in lines, the same in all processes
    // A line for each array, the same in all processes but for digits in quotes, which are Gluon's counters:
    // "the gradient of 'conv0_weight' (864 values of float32)".
    std::string list;
    double timeout;  // seconds
    std::vector<Summand> summands;
};

// "the gradient of 'conv0_weight' and 12 more", of the arrays of a list from `begin` to `end`.
std::string name_in(const std::string& list, size_t begin, size_t end);

class Gradients {
  public:
    class Round;

    explicit Gradients(Processes& processes);
    ~Gradients();
    // A Trainer, the next one in all processes. Returns its number.
    int64_t add_trainer();
    void begin(std::shared_ptr<Round> round);

  private:
    struct Bucket;
    struct Trainer;
    class WaitForRanks;
    void serve() noexcept;
    bool go_on(Trainer& trainer);
    bool wait(Trainer& trainer, bool for_ranks, size_t begin, size_t end);
    bool compare(Trainer& trainer);
    void tell_difference(const Trainer& trainer, size_t rank);
    bool make_buckets(Trainer& trainer);
    bool add_buckets(Trainer& trainer);
    void look();
    void give_up(const std::exception& reason) noexcept;

    Processes& processes_;
    Mailbox& mail_;
    Mutex mutex_;           // guards the next ones, and what a round knows of its arrays
    Condition changed_;     // an array has become available, or never will, or a round has begun
    uint64_t changes_ = 0;  // since the beginning
    bool started_ = false;
    std::list<Trainer> trainers_;  // that stay; what they have beside their queues is of the thread
    // The rest is of the thread, which lasts as long as the process, and so must all of this.
    std::vector<std::shared_ptr<Round>> failed_;  // MPI may still write to their arrays
    bool polls_ = false;                          // MPI has something to do
};

class Gradients::Round : public Brought {
  public:
    // Gets null when the sums of all arrays are in their places; otherwise, what has failed.
    using Done = std::function<void(const std::exception_ptr& failure)>;

    Round(Gradients& gradients, Brought brought);
    const int64_t step = syncbn::step().number;
    // The values of an array are there, in each context. What `done` holds lasts as long as MPI may write to them.
    void come(size_t summand, std::vector<void*> values, Done done);
    // They never will be.
    void lose(size_t summand, const std::string& reason);
    void end(const std::exception_ptr& failure) noexcept;

  private:
    friend class Gradients;
    struct Item {
        std::vector<void*> values;
        Done done;
    };
    void pack(size_t summand);
    void unpack(const Bucket& bucket) const;

    Gradients& gradients_;
    std::vector<Item> items_;   // of each array
    std::vector<size_t> come_;  // the arrays, in their order
    std::string lost_;          // why an array does not come
    std::exception_ptr failure_;
    Trainer* packs_ = nullptr;  // its buckets take arrays as they come
};

}  // namespace syncbn

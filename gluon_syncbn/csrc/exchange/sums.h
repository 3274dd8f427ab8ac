// Sums long arrays over processes, as gradients are, in a thread of its own. Nobody waits for a sum but those who need
// the array.
//
//   own arrays ─► in ──► add ──► [machines ─► total] ──► out ─► own arrays      1. in: pieces go into the segment, the
//                  │      ▲                               ▲                        last arrays first, as backwards end
//                  └──────┴── pieces of the others ───────┘                     2. add: each rank adds its own part of
//                                                                                  each piece, in the order of the ranks
//                                                                               3. out: the parts come from all ranks
//
// The arrays of one step are a round, which completes or fails as a whole. Rank 0 tells which of several rounds is next, so
// trainers in threads may come in any order. With one order for all ranks, no two rounds wait for each other. The order also
// has what is done with the sums and, if it is new, the list of the arrays, which each rank compares with its own.
// Each value is added in the order of the ranks, in any piece. So a sum has the same bits on all ranks and in all runs.
//
// Arrays on GPUs stay there: NCCL adds a piece instead of 3. A line without meaning takes the way of its values, so a
// piece is complete when all processes have its arrays. See cuda/collective.h.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/collective.h"
#include "exchange/machines.h"
#include "exchange/segment.h"
#include "lock.h"
#include "types.h"
#include "waiting/step.h"

namespace syncbn {

// An array of a round.
struct Summand {
    Type type;
    size_t size;
};

// What this process brings at a time.
struct Brought {
    int64_t channel;     // its rounds come in the same order in all processes
    int64_t number;      // within the channel, for messages
    std::string update;  // what is done with the sums, in lines, the same in all processes
    // A line for each array, the same in all processes but for digits in quotes, which are Gluon's counters:
    // "the gradient of 'conv0_weight' (864 values of float32)".
    std::string list;
    double timeout;  // seconds
    std::vector<Summand> summands;
    cuda::AllReduce* gpus;  // null if the arrays are on CPUs
};

// "the gradient of 'conv0_weight' and 12 more", of the arrays of a list from `begin` to `end`.
std::string name_in(const std::string& list, size_t begin, size_t end);

class Round : public Brought {
  public:
    explicit Round(Brought brought) : Brought(std::move(brought)) {}
    virtual ~Round() = default;
    const int64_t step = syncbn::step().number;
    // Returns where the values of an array are, in each context; null as long as they are not available. Throws Failure
    // if they never will be.
    virtual const std::vector<void*>* values(size_t summand) = 0;
    // Either all sums are in their places, or something has failed. One of the two is called, once.
    virtual void succeed() noexcept = 0;
    virtual void fail(const std::exception& reason) noexcept = 0;
};

class Sums {
  public:
    // Has a thread that lasts as long as the process, and so must all of this. `machines`: in a leader of several.
    // `report` tells all ranks of the job why this one has failed.
    Sums(Segment& machine, std::unique_ptr<Machines> machines, std::function<void(const std::string&)> report);
    ~Sums();
    void begin(std::shared_ptr<Round> round);
    // An array of a round has become available, or never will.
    void look() { segment_.advance(event_); }

  private:
    struct Piece;
    struct Need;
    class WaitForRanks;
    class Pass;
    void serve() noexcept;
    void serve_next();
    std::string order_of(const Round& round);
    void find_next(const Round& oldest);
    void compare(const Round& round);
    void wait(Round& round, size_t begin, size_t end, Need need, uint32_t seen, bool polls);
    // Whether this is rank 0 of the job.
    bool decides() const { return segment_.rank() == 0 && (machines_ == nullptr || machines_->is_first()); }
    bool is_on_several() const { return segment_.members.of > segment_.ranks(); }
    void announce();
    void give_up(const std::exception& reason) noexcept;

    Segment& segment_;
    const std::unique_ptr<Machines> machines_;
    const std::function<void(const std::string&)> report_;
    const uint32_t event_;                      // of this rank
    Mutex mutex_;                               // guards the next two
    std::deque<std::shared_ptr<Round>> queue_;  // in the order of their beginnings here
    bool started_ = false;
    // The rest is of the thread. A round is what rank 0 has told, and runs once it has begun here.
    int64_t rounds_ = 0;                    // that have come before
    std::map<int64_t, std::string> lists_;  // of rank 0, by channel
    std::string order_;                     // rank 0's order of the next one, as it came, or empty
    int64_t next_ = 0;                      // the channel in there
    std::shared_ptr<Round> current_;        // that runs
    std::shared_ptr<Round> overtaken_;      // the oldest here, if another one is next
    std::unique_ptr<WaitForRanks> wait_;
};

}  // namespace syncbn

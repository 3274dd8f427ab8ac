// Stores what a forward's recomputation needs to repeat its calls without a meeting. These are the statistics that
// normalised the slots, and the position at which the backward meets.
//
// The issuer of a forward opens a tape on its own thread, and the forward's calls find their memos there in program
// order. Recomputed forwards may be nested, so a thread has a stack of tapes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "meeting/meeting.h"
#include "pooling/pooling.h"
#include "tensor.h"
#include "waiting/wait.h"

namespace syncbn {

// The results of a call's forward.
struct Outcome {
    Place place;
    Pools pools;
    std::vector<Slot> slots;
    std::shared_ptr<const void> device;  // the statistics on a GPU
};

// Connects a call to those that repeat it.
class Memo {
  public:
    void keep(Outcome outcome);
    // Waits for the outcome: the recomputation may begin before the whole forward has ended. Throws as the wait does.
    std::shared_ptr<const Outcome> outcome(Wait& wait) const;
    // Counts earlier repetitions: each meets in its own backwards.
    int repeat() { return repeated_++; }

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::shared_ptr<const Outcome> outcome_;
    std::atomic<int> repeated_{0};
};

struct Tape {
    std::vector<std::shared_ptr<Memo>> memos;  // in the order of the calls
};

// From now on, calls on this thread add memos to this tape, or with `again` repeat its memos, until it ends.
void begin_tape(Tape& tape, bool again);
// Returns the number of memos that no call has taken since then. If there were more calls than memos, it is negative.
int64_t end_tape();
// Whether this thread has begun a tape.
bool tape_runs();

struct Recall {
    std::shared_ptr<Memo> memo;  // null if there is no recomputation
    bool again = false;
};
// Returns the recall of the call that this thread issues now.
Recall recall();

}  // namespace syncbn

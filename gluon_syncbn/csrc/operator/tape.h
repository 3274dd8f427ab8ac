// What the calls of a forward leave behind for its recomputation, which repeats them without meeting anybody: the
// statistics that slots were normalised with, and the seat at which the backward meets.
//
// Whoever issues a forward says so on its own thread, and the calls that it issues find their memos there in program
// order. Forwards that are recomputed may lie within each other, so a thread has a stack of tapes.
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

// What a call knows when its forward is done.
struct Outcome {
    Place place;
    Pools pools;
    std::vector<Slot> slots;
    std::shared_ptr<const void> device;  // what a GPU keeps its statistics in
};

// Of one call: from its forward to those that repeat it.
class Memo {
  public:
    void keep(Outcome outcome);
    // Waits for it: what the recomputation depends on may be less than the whole forward. Throws Failure as the wait does.
    std::shared_ptr<const Outcome> outcome(Wait& wait) const;
    // How many have repeated it before: each meets in backwards of its own.
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

// On this thread, from now on: calls leave memos on this tape, or with `again` repeat those that are on it.
void begin_tape(std::shared_ptr<Tape> tape, bool again);
// How many memos the calls since then have left over, or, where there were more calls, the number of those below 0.
int64_t end_tape();

struct Recall {
    std::shared_ptr<Memo> memo;  // null where nothing is recomputed
    bool again = false;
};
// For the call that this thread issues now.
Recall recall();

}  // namespace syncbn

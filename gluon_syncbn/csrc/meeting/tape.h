// Stores what a forward's recomputation needs to repeat its calls without a meeting. These are the statistics that
// normalised the slots, and the position at which the backward meets.
//
// The issuer of a forward opens a tape on its own thread, and the forward's calls find their memos there in program
// order. Recomputed forwards may be nested, so a thread has a stack of tapes. MXNet's executors issue nothing: they say
// how many forwards come, and a further one repeats the last.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/meeting.h"
#include "pooling/pooling.h"
#include "tensor.h"
#include "waiting/wait.h"

namespace syncbn {

// The results of a call's forward.
struct Outcome {
    Place place;
    std::shared_ptr<const Pools> pools;
    std::vector<Slot> slots;
    std::shared_ptr<const void> device;  // the statistics on a GPU
};

// Connects a call to those that repeat it.
class Memo {
  public:
    void keep(Outcome outcome) {
        std::lock_guard<std::mutex> lock(mutex_);
        outcome_ = std::make_shared<const Outcome>(std::move(outcome));
        changed_->notify_all();
    }
    // Waits for the outcome: the recomputation may begin before the whole forward has ended. Throws as the wait does.
    std::shared_ptr<const Outcome> outcome(Wait& wait) const {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!changed_->wait_for(lock, kSlice, [this] { return outcome_ != nullptr; })) wait.look();
        return outcome_;
    }
    // Counts earlier repetitions: each meets in its own backwards.
    int repeat() { return repeated_++; }

  private:
    mutable Mutex mutex_;
    mutable Condition changed_;
    std::shared_ptr<const Outcome> outcome_;
    std::atomic<int> repeated_{0};
};

struct Tape {
    std::vector<std::shared_ptr<Memo>> memos;  // in the order of the calls
    bool again = false;                        // calls repeat the memos; otherwise they add some
    size_t next = 0;                           // the memo of the next call that repeats one
};
inline thread_local std::vector<Tape*> tapes;  // that this thread has begun, the outermost first

struct Recall {
    std::shared_ptr<Memo> memo;  // null if there is no recomputation
    bool again = false;
};
// Returns the recall of the call that this thread issues now.
inline Recall recall() {
    Recall found;
    for (Tape* tape : tapes) {  // the recomputation of an outer one is new to the inner ones
        if (!tape->again) continue;
        if (tape->next < tape->memos.size()) found = {tape->memos[tape->next], true};
        ++tape->next;
    }
    if (!found.memo && !tapes.empty()) found.memo = std::make_shared<Memo>();
    for (Tape* tape : tapes)
        if (!tape->again) tape->memos.push_back(found.memo);
    return found;
}

}  // namespace syncbn

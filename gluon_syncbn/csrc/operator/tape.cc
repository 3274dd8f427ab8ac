#include "operator/tape.h"

namespace syncbn {
namespace {

struct Reel {
    Tape& tape;
    bool again;
    int64_t next = 0;
};
thread_local std::vector<Reel> reels;

}  // namespace

void Memo::keep(Outcome outcome) {
    std::lock_guard<std::mutex> lock(mutex_);
    outcome_ = std::make_shared<const Outcome>(std::move(outcome));
    changed_.notify_all();
}

std::shared_ptr<const Outcome> Memo::outcome(Wait& wait) const {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kSlice, [this] { return outcome_ != nullptr; })) wait.look();
    return outcome_;
}

void begin_tape(Tape& tape, bool again) { reels.push_back({tape, again}); }

int64_t end_tape() {
    const Reel reel = reels.back();
    reels.pop_back();
    return reel.again ? static_cast<int64_t>(reel.tape.memos.size()) - reel.next : 0;
}

bool tape_runs() { return !reels.empty(); }

Recall recall() {
    Recall found;
    for (Reel& reel : reels) {  // the outermost first: the recomputation is new to the inner ones
        const auto next = static_cast<size_t>(reel.next++);
        if (reel.again && next < reel.tape.memos.size()) found = {reel.tape.memos[next], true};
    }
    if (!found.memo && !reels.empty()) found.memo = std::make_shared<Memo>();
    for (Reel& reel : reels)
        if (!reel.again) reel.tape.memos.push_back(found.memo);
    return found;
}

}  // namespace syncbn

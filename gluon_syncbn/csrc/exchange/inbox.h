// A mailbox in memory of this process: what has arrived, and what is known of the other ranks. A carrier moves messages
// between those of all ranks.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/mailbox.h"

namespace syncbn {

// A message begins with this.
struct Head {
    // A vector; an end without a word, of which `length` is the process; a failure, whose text follows; another end.
    enum Kind : int64_t { kVector, kDied, kFailed, kEnded };
    Label label;
    int64_t kind, from;
    uint64_t length;
    uint64_t count = 0, begin = 0;  // of a message in several frames: all its values, and where this frame begins
};
static_assert(sizeof(Head) % sizeof(double) == 0, "what follows is aligned");

class Inbox : public Mailbox {
  public:
    Inbox(size_t rank, size_t ranks) : states_(ranks), rank_(rank), process_(getpid()), died_(ranks), reasons_(ranks) {
        for (auto& state : states_) state = State::kPresent;
    }

    size_t ranks() const override { return states_.size(); }
    size_t rank() const override { return rank_; }
    bool is_own() const override { return getpid() == process_; }

    void post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers) override {
        std::lock_guard<std::mutex> lock(mutex_);
        if (label.piece == 0) here_.push_back(label);
        if (!readers.empty()) send({label, Head::kVector, own(), length}, values, count * sizeof(double), readers);
    }
    Found find(size_t rank, const Label& label) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const Received& one : received_)
            if (one.from == rank && one.label == label) return {one.values, one.count, one.length, 0};
        return {};
    }
    void done(size_t rank, const Label& label, const Found&) override {
        std::lock_guard<std::mutex> lock(mutex_);
        received_.remove_if([&](const Received& one) { return one.from == rank && one.label == label; });
    }
    std::vector<Label> left_by(size_t rank) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Label> labels;
        for (const Received& one : received_)
            if (one.from == rank) labels.push_back(one.label);
        return labels;
    }
    bool is_here(const Label& label) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::find(here_.begin(), here_.end(), label) != here_.end();
    }
    void forget(const Label& label) override {
        std::lock_guard<std::mutex> lock(mutex_);
        here_.erase(std::remove(here_.begin(), here_.end(), label), here_.end());
    }

    uint32_t ring_of(const Label&) const override { return 0; }  // there is one for all

    State state_of(size_t rank) const override { return states_[rank]; }
    std::string reason_of(size_t rank) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return reasons_[rank];
    }
    bool crowded() const override { return false; }
    int64_t died(size_t rank) const override { return states_[rank] == State::kPresent ? died_[rank].load() : 0; }
    void leave(State state, const std::string& reason) override {
        if (!is_own()) return;
        std::lock_guard<std::mutex> lock(mutex_);
        if (states_[rank_] != State::kPresent) return;
        const std::string text = reason.substr(0, 4000);
        Ranks others = Members::all(ranks()).ranks;
        others.erase(others.begin() + static_cast<int64_t>(rank_));
        send({{}, state == State::kFailed ? Head::kFailed : Head::kEnded, own(), text.size()}, text.data(), text.size(),
             others);
        report(rank_, state, text);
        left();
    }

  protected:
    static constexpr size_t kHead = sizeof(Head) / sizeof(double);

    // The caller of the following holds the lock.
    virtual void send(Head head, const void* content, size_t size, const Ranks& to) = 0;
    // This rank has sent its last message.
    virtual void left() = 0;
    // Takes a whole message that has arrived, of so many values behind its head.
    void take(const std::shared_ptr<double>& message, size_t count) {
        const Head& head = *reinterpret_cast<const Head*>(message.get());
        const double* values = message.get() + kHead;
        const auto from = static_cast<size_t>(head.from);
        if (head.kind == Head::kVector)
            received_.push_back({from, head.label, head.length, count, values, message});
        else if (head.kind == Head::kDied)
            died_[from] = static_cast<int64_t>(head.length);
        else
            report(from, head.kind == Head::kFailed ? State::kFailed : State::kEnded,
                   {reinterpret_cast<const char*>(values), head.length});
        ++heard_;
    }

    mutable std::mutex mutex_;  // guards all but the states and what is heard
    std::vector<std::atomic<State>> states_;
    std::atomic<uint32_t> heard_{0};

  private:
    struct Received {
        size_t from;
        Label label;
        size_t length, count;
        const double* values;
        std::shared_ptr<double> memory;  // of the values
    };
    int64_t own() const { return static_cast<int64_t>(rank_); }
    // The first report of a rank stays.
    void report(size_t rank, State state, std::string reason) {
        if (states_[rank] != State::kPresent) return;
        reasons_[rank] = std::move(reason);  // complete before the state changes
        states_[rank] = state;
        ++heard_;
    }

    const size_t rank_;
    const pid_t process_;
    std::vector<std::atomic<int64_t>> died_;
    std::vector<std::string> reasons_;
    std::list<Received> received_;
    std::vector<Label> here_;
};

}  // namespace syncbn

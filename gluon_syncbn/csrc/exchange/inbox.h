// A mailbox in memory of this process: what has arrived, and what is known of the other ranks. A transport moves messages
// between those of all ranks.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/mailbox.h"
#include "lock.h"

namespace syncbn {

// A message begins with this.
struct Head {
    // A vector; the end of a `process` without a word; a failure, whose text follows; another end; a wait for the ranks
    // that follow.
    enum Kind : int64_t { kVector, kDied, kFailed, kEnded, kWaits };
    Label label;
    int64_t kind, from;
    uint64_t length;  // bytes of what follows
    int64_t process = 0;
};
static_assert(sizeof(Head) % sizeof(double) == 0, "what follows is aligned");

class Inbox : public Mailbox {
  public:
    Inbox(size_t rank, size_t ranks)
        : Mailbox(rank, ranks), states_(ranks), died_(ranks), reasons_(ranks), waits_(ranks) {}

    Found find(size_t rank, const Label& label) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const Message& one : received_)
            if (one.from() == rank && one.head().label == label) return {one.values(), one.head().length, 0};
        return {};
    }
    void done(size_t, const Found& found) override {
        std::lock_guard<std::mutex> lock(mutex_);
        received_.remove_if([&](const Message& one) { return one.values() == found.values; });
    }
    std::vector<Label> posted_by(size_t rank) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Label> labels;
        for (const Message& one : received_)
            if (one.from() == rank) labels.push_back(one.head().label);
        return labels;
    }

    void say_awaited(const Label& label, const Ranks& ranks) override {
        std::lock_guard<std::mutex> lock(mutex_);
        const size_t size = ranks.size() * sizeof ranks[0];
        send({label, Head::kWaits, own(), size}, ranks.data(), size, without(everybody, rank_));
    }
    Ranks awaited_by(size_t rank, const Label& label) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto& [said, ranks] = waits_[rank];
        return said.is_of_call(label) ? ranks : Ranks();
    }

    uint32_t event_of(const Label&) const override { return 0; }  // there is one for all

    State state_of(size_t rank) const override { return states_[rank]; }
    std::string reason_of(size_t rank) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return reasons_[rank];
    }
    int64_t died(size_t rank) const override { return states_[rank] == State::kPresent ? died_[rank].load() : 0; }

  protected:
    static constexpr size_t kHead = sizeof(Head) / sizeof(double);
    struct Message {
        std::shared_ptr<double> memory;  // begins with the head
        size_t size;
        const Head& head() const { return *reinterpret_cast<const Head*>(memory.get()); }
        double* values() const { return memory.get() + kHead; }
        const size_t* ranks() const { return reinterpret_cast<const size_t*>(values()); }
        size_t from() const { return static_cast<size_t>(head().from); }
    };

    void write(const Label& label, const void* values, size_t size, const Ranks& readers) override {
        std::lock_guard<std::mutex> lock(mutex_);
        send({label, Head::kVector, own(), size}, values, size, readers);
    }
    void tell(State state, const std::string& reason) override {
        std::lock_guard<std::mutex> lock(mutex_);
        const std::string text = reason.substr(0, 4000);
        send({{}, state == State::kFailed ? Head::kFailed : Head::kEnded, own(), text.size()}, text.data(), text.size(),
             without(everybody, rank_));
        note(rank_, state, text);
        wake(0);
    }
    // The caller of the following holds the lock.
    virtual void send(const Head& head, const void* content, size_t size, const Ranks& to) = 0;
    // Takes a whole message that has arrived.
    void arrive(const Message& message) {
        const Head& head = message.head();
        if (head.kind == Head::kVector)
            received_.push_back(message);
        else if (head.kind == Head::kDied)
            died_[message.from()] = head.process;
        else if (head.kind == Head::kWaits)
            waits_[message.from()] = {head.label, Ranks(message.ranks(), message.ranks() + message.size - kHead)};
        else
            note(message.from(), head.kind == Head::kFailed ? State::kFailed : State::kEnded,
                 {reinterpret_cast<const char*>(message.values()), head.length});
        ++arrivals_;
    }

    mutable Mutex mutex_;  // guards all but the states and the event count
    std::vector<std::atomic<State>> states_;
    std::atomic<uint32_t> arrivals_{0};

  private:
    int64_t own() const { return static_cast<int64_t>(rank_); }
    // The first report of a rank stays.
    void note(size_t rank, State state, std::string reason) {
        if (states_[rank] != State::kPresent) return;
        reasons_[rank] = std::move(reason);  // complete before the state changes
        states_[rank] = state;
        ++arrivals_;
    }

    std::vector<std::atomic<int64_t>> died_;
    std::vector<std::string> reasons_;
    std::vector<std::pair<Label, Ranks>> waits_;  // the last one of each rank
    std::list<Message> received_;
};

}  // namespace syncbn

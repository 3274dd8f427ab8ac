#include "exchange/mpi.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "clock.h"
#include "exchange/inbox.h"

namespace syncbn {
namespace {

constexpr double kEnd = 1;                   // seconds for the last messages
constexpr double kNap = 5e-5, kDoze = 1e-3;  // seconds between two looks at MPI, at first and after `kNaps`
constexpr int kParts = 50;
// Values in a frame. MPI copies as much at once (8 KB in UCX). A longer message waits until its receiver has asked for
// it, which took three to six times as long with more processes than cores.
constexpr size_t kFrame = 896;
constexpr uint32_t kNaps = 2000;  // without an arrival

// A frame begins with this. A message has one frame, or several in their order.
struct Head {
    enum Kind : int64_t { kVector, kFailed, kEnded };
    Label label;
    int64_t kind, from;
    uint64_t length;
    uint64_t count = 0, begin = 0;  // values of the message, and where this frame begins
};
static_assert(sizeof(Head) % sizeof(double) == 0, "what follows is aligned");

class MpiMailbox : public Inbox {
  public:
    MpiMailbox(const Mpi& mpi, size_t rank, size_t ranks) : Inbox(rank, ranks), mpi_(mpi) {}

    size_t most_values() const override { return std::numeric_limits<int>::max() / sizeof(double) - sizeof(Head); }

    void post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers) override {
        std::lock_guard<std::mutex> lock(mutex_);
        remember(label);
        send(Head{label, Head::kVector, static_cast<int64_t>(rank()), length}, values, count * sizeof(double), readers);
    }
    bool is_out(const Label& label) override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto at = outgoing_.begin(); at != outgoing_.end();)
            at = mpi_.has_ended(&at->request) ? outgoing_.erase(at) : std::next(at);
        return std::none_of(outgoing_.begin(), outgoing_.end(), [&](const Message& sent) {
            return sent.head().kind == Head::kVector && sent.head().label == label;
        });
    }

    // Whoever waits moves messages along.
    uint32_t heard(uint32_t) override {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        // A long message moves on in parts, and a poll that yields between two of them takes longer than all of them.
        for (int part = 0; lock && part < kParts; ++part) {
            progress();
            if (arriving_.empty() && outgoing_.empty()) break;
        }
        return heard_;
    }
    void sleep(uint32_t, uint32_t seen, double seconds) override {
        if (heard_ != seen) return;
        const double most = ++naps_ < kNaps ? kNap : kDoze;
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, most)));
    }
    void wake(uint32_t) override {}
    bool wakes() const override { return false; }

    void leave(State state, const std::string& reason) override {
        if (!is_own()) return;
        std::lock_guard<std::mutex> lock(mutex_);
        if (states_[rank()] != State::kPresent) return;
        const std::string text = reason.substr(0, 4000);
        const Head::Kind kind = state == State::kFailed ? Head::kFailed : Head::kEnded;
        send(Head{{}, kind, static_cast<int64_t>(rank()), text.size()}, text.data(), text.size(), others());
        report(rank(), state, text);
        const double until = seconds() + (state == State::kEnded ? kEnd : 0);
        do progress();
        while (!outgoing_.empty() && seconds() < until);
        closed_ = state == State::kEnded;
    }

  private:
    static constexpr size_t kHead = sizeof(Head) / sizeof(double);
    // A message that arrives or has arrived, or goes to a rank.
    struct Message {
        std::shared_ptr<double> memory;  // not initialised
        size_t size = 0;
        Mpi::Request request = {};
        explicit Message(size_t size = 0) : memory(new double[size], std::default_delete<double[]>()), size(size) {}
        const Head& head() const { return *reinterpret_cast<const Head*>(memory.get()); }
        double* values() const { return memory.get() + kHead; }
        size_t count() const { return size - kHead; }
        size_t from() const { return static_cast<size_t>(head().from); }
    };

    // The caller of the following holds the lock.
    void send(Head head, const void* content, size_t size, const Ranks& to) {
        if (to.empty()) return;
        head.count = (size + sizeof(double) - 1) / sizeof(double);
        const size_t frames = std::max<size_t>(1, (head.count + kFrame - 1) / kFrame);
        Message message(frames * kHead + head.count);
        // The order starts after this rank, so that not all ranks write to rank 0 first.
        const auto after = static_cast<size_t>(std::lower_bound(to.begin(), to.end(), rank()) - to.begin());
        double* at = message.memory.get();
        for (size_t frame = 0; frame < frames; ++frame) {
            head.begin = frame * kFrame;
            const size_t values = std::min(kFrame, head.count - head.begin), begin = head.begin * sizeof(double);
            std::memcpy(at, &head, sizeof head);
            if (size > 0)
                std::memcpy(at + kHead, static_cast<const char*>(content) + begin,
                            std::min(values * sizeof(double), size - begin));
            for (size_t i = 0; i < to.size(); ++i) {
                outgoing_.push_back(message);
                Mpi::check(mpi_.send(at, static_cast<int>((kHead + values) * sizeof(double)), mpi_.bytes,
                                     static_cast<int>(to[(after + i) % to.size()]), 0, mpi_.communicator,
                                     &outgoing_.back().request));
                if (mpi_.has_ended(&outgoing_.back().request)) outgoing_.pop_back();
            }
            at += kHead + values;
        }
    }
    void progress() {
        if (closed_) return;
        for (auto at = outgoing_.begin(); at != outgoing_.end();)
            at = mpi_.has_ended(&at->request) ? outgoing_.erase(at) : std::next(at);
        while (true) {
            int found = 0, count = 0;
            char message[16], status[256];
            Mpi::check(mpi_.probe(static_cast<int>(mpi_.any_rank), static_cast<int>(mpi_.any_tag), mpi_.communicator,
                                  &found, message, status));
            if (found == 0) break;
            Mpi::check(mpi_.count(status, mpi_.bytes, &count));
            arriving_.emplace_back(static_cast<size_t>(count) / sizeof(double));
            Message& next = arriving_.back();
            Mpi::check(mpi_.receive(next.memory.get(), count, mpi_.bytes, message, &next.request));
        }
        // In their order: what a rank has sent before its end comes before that.
        while (!arriving_.empty() && mpi_.has_ended(&arriving_.front().request)) {
            Message one = std::move(arriving_.front());
            arriving_.pop_front();
            if (completes(&one)) take(one);
        }
    }
    // Puts a message together, whose next frame is here. Returns whether it is whole.
    bool completes(Message* frame) {
        const Head& head = frame->head();
        if (frame->count() == head.count) return true;
        Message& whole = begun_[frame->from()];
        if (head.begin == 0) {
            whole = Message(kHead + head.count);
            std::memcpy(whole.memory.get(), &head, sizeof head);
        }
        std::memcpy(whole.values() + head.begin, frame->values(), frame->count() * sizeof(double));
        if (head.begin + frame->count() < head.count) return false;
        *frame = std::move(whole);
        return true;
    }
    void take(const Message& message) {
        const Head& head = message.head();
        if (head.kind == Head::kVector)
            keep({message.from(), head.label, head.length, message.count(), message.values(), message.memory});
        else
            report(message.from(), head.kind == Head::kFailed ? State::kFailed : State::kEnded,
                   {reinterpret_cast<const char*>(message.values()), head.length});
        naps_ = 0;
    }

    // The lock is also for MPI, which one thread calls at a time.
    const Mpi mpi_;
    std::list<Message> outgoing_, arriving_;
    std::map<size_t, Message> begun_;  // by the rank that sends it
    bool closed_ = false;
    std::atomic<uint32_t> naps_{0};
};

}  // namespace

bool Mpi::has_ended(Request* request) const {
    char status[256];
    int ended = 0;
    check(test(request->memory, &ended, status));
    return ended != 0;
}

void Mpi::check(int status) {
    if (status != 0) throw std::runtime_error("MPI reports error " + std::to_string(status));
}

std::unique_ptr<Mailbox> mailbox(const Mpi& mpi, size_t rank, size_t ranks) {
    return std::make_unique<MpiMailbox>(mpi, rank, ranks);
}

}  // namespace syncbn

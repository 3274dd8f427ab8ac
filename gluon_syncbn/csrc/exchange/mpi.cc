#include "exchange/mpi.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <list>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "exchange/inbox.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr double kEnd = 1;                   // seconds for the last messages
constexpr double kNap = 5e-5, kDoze = 1e-3;  // seconds between two looks at MPI, at first and after `kNaps`
constexpr int kParts = 50;
constexpr uint32_t kNaps = 2000;  // without an arrival

class MpiMailbox : public Inbox {
  public:
    MpiMailbox(const Mpi& mpi, size_t rank, size_t ranks) : Inbox(rank, ranks), mpi_(mpi) {}

    Ranks unsent(const Label& label) override {
        std::lock_guard<std::mutex> lock(mutex_);
        send_on();
        Ranks readers;
        for (const Transfer& sent : outgoing_)
            if (sent.head().kind == Head::kVector && sent.head().label == label) readers.push_back(sent.to);
        std::sort(readers.begin(), readers.end());
        return readers;
    }

    // Whoever waits moves messages along.
    uint32_t arrivals(uint32_t) override {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        // A long message moves on in parts, and a poll that yields between two of them takes longer than all of them.
        for (int part = 0; lock && part < kParts; ++part) {
            progress();
            if (arriving_.empty() && outgoing_.empty()) break;
        }
        return arrivals_;
    }
    void sleep(uint32_t, uint32_t seen, double seconds) override {
        if (++naps_ == 1 || arrivals_ != seen) return;  // a look takes one message, and there may be more
        const double most = naps_ < kNaps ? kNap : kDoze;
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, most)));
    }
    void wake(uint32_t) override {}
    void end() override {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
    }
    bool wakes() const override { return false; }

  private:
    // A message that arrives, or goes to a rank.
    struct Transfer : Message {
        Mpi::Request request = {};
        size_t to = 0;
        explicit Transfer(size_t size = 0)  // not initialised
            : Message{{new double[size], std::default_delete<double[]>()}, size} {}
    };

    void tell(State state, const std::string& reason) override {
        Inbox::tell(state, reason);
        std::lock_guard<std::mutex> lock(mutex_);
        const double until = seconds() + (state == State::kEnded ? kEnd : 0);
        do progress();
        while (!outgoing_.empty() && seconds() < until);
    }
    // The caller of the following holds the lock. A count of MPI's is an int: in bytes, a message would end at 2 GB.
    void send(const Head& head, const void* content, size_t size, const Ranks& to) override {
        Transfer message(kHead + (size + sizeof(double) - 1) / sizeof(double));
        if (message.size > INT_MAX) throw std::runtime_error("MPI takes no message of more than 16 GB");
        std::memcpy(message.memory.get(), &head, sizeof head);
        if (size > 0) std::memcpy(message.values(), content, size);
        // The order starts after this rank, so that not all ranks write to rank 0 first.
        const auto after = static_cast<size_t>(std::lower_bound(to.begin(), to.end(), rank()) - to.begin());
        for (size_t i = 0; i < to.size(); ++i) {
            outgoing_.push_back(message);
            outgoing_.back().to = to[(after + i) % to.size()];
            Mpi::check(mpi_.send(message.memory.get(), static_cast<int>(message.size), mpi_.float64,
                                 static_cast<int>(outgoing_.back().to), 0, mpi_.communicator,
                                 &outgoing_.back().request));
            if (mpi_.has_ended(&outgoing_.back().request)) outgoing_.pop_back();
        }
    }
    void send_on() {
        outgoing_.remove_if([&](Transfer& sent) { return mpi_.has_ended(&sent.request); });
    }
    void progress() {
        if (closed_) return;
        send_on();
        int found = 0, count = 0;
        alignas(std::max_align_t) char message[16], status[256];
        Mpi::check(mpi_.probe(static_cast<int>(mpi_.any_rank), static_cast<int>(mpi_.any_tag), mpi_.communicator,
                              &found, message, status));
        if (found != 0) {
            Mpi::check(mpi_.count(status, mpi_.float64, &count));
            arriving_.emplace_back(static_cast<size_t>(count));
            Transfer& next = arriving_.back();
            Mpi::check(mpi_.receive(next.memory.get(), count, mpi_.float64, message, &next.request));
        }
        // In their order: what a rank has sent before its end comes before that.
        while (!arriving_.empty() && mpi_.has_ended(&arriving_.front().request)) {
            arrive(arriving_.front());
            arriving_.pop_front();
            naps_ = 0;
        }
    }

    const Mpi mpi_;  // also called by `Machines`, without this lock
    std::list<Transfer> outgoing_, arriving_;
    bool closed_ = false;
    std::atomic<uint32_t> naps_{0};
};

}  // namespace

bool Mpi::has_ended(Request* request) const {
    alignas(std::max_align_t) char status[256];
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

#include "exchange/python.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>

#include "exchange/inbox.h"
#include "failure.h"
#include "lock.h"
#include "point.h"

namespace syncbn {
namespace {

class MxnetKvstore : public Exchange {
  public:
    explicit MxnetKvstore(int64_t number) : number_(number) {}

    // It takes as long as the interpreter and MXNet's engine like, so a thread that waits without a limit makes the total.
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override {
        return [=](double seconds) -> std::optional<Total> {
            if (seconds != kForEver) return std::nullopt;
            const size_t replicas = own.rows.size(), length = own.length;
            if (replicas == 1 || length == 0) return Total{combined(combine, own), 0, id.layer};
            // A store can only add. So rows that are to be merged stay apart, each in a place of its own in the sum.
            const size_t places = combine == Combine::kAdd ? 1 : replicas;
            Vector rows(replicas * places * length), sums(places * length);
            Contribution apart{{}, length};
            for (size_t i = 0; i < replicas; ++i)
                std::copy_n(own.rows[i], length, &rows[(i * places + i % places) * length]);
            for (size_t i = 0; i < places; ++i) apart.rows.push_back(&sums[i * length]);
            SYNCBN_POINT("before_exchange");
            if (!python_add(number_, join_names(id.contexts).c_str(), static_cast<int64_t>(replicas),
                            static_cast<int64_t>(sums.size()), rows.data(), sums.data()))
                throw std::runtime_error("the KVStore could not add the statistics: " + python_problem);
            SYNCBN_POINT("after_exchange");
            return Total{combined(combine, apart), 0, id.layer};
        };
    }

  private:
    const int64_t number_;
};

// Python takes what leaves, in a thread of its own. A thread that exchanges never runs Python, where Ctrl-C would come.
class PythonMailbox : public Inbox {
  public:
    using Inbox::Inbox;

    uint32_t arrivals(uint32_t) override { return arrivals_; }
    void sleep(uint32_t, uint32_t seen, double seconds) override {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_->wait_for(lock, std::chrono::duration<double>(seconds), [&] { return arrivals_ != seen; });
    }
    void wake(uint32_t) override { changed_->notify_all(); }

    std::optional<std::string> next(double seconds) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto has_left = [&] { return states_[rank()] != State::kPresent; };
        leaves_->wait_for(lock, std::chrono::duration<double>(seconds),
                          [&] { return !outgoing_.empty() || has_left(); });
        if (outgoing_.empty()) return has_left() ? std::nullopt : std::optional<std::string>("");
        std::string message = std::move(outgoing_.front());
        outgoing_.pop_front();
        return message;
    }
    void deliver(const char* message, size_t size) {
        int64_t readers;
        std::memcpy(&readers, message, sizeof readers);
        const size_t begin = (1 + static_cast<size_t>(readers)) * sizeof readers,
                     count = (size - begin) / sizeof(double);
        const std::shared_ptr<double> memory(new double[count], std::default_delete<double[]>());
        std::memcpy(memory.get(), message + begin, count * sizeof(double));
        {
            std::lock_guard<std::mutex> lock(mutex_);
            arrive({memory, count});
        }
        changed_->notify_all();
    }

  private:
    void send(Head head, const void* content, size_t size, const Ranks& to) override {
        std::string message;
        const auto append = [&](const void* from, size_t bytes) {
            message.append(static_cast<const char*>(from), bytes);
        };
        const size_t readers = to.size();
        append(&readers, sizeof readers);
        append(to.data(), readers * sizeof to[0]);
        append(&head, sizeof head);
        append(content, size);
        message.resize((message.size() + sizeof(double) - 1) / sizeof(double) * sizeof(double));
        outgoing_.push_back(std::move(message));
        leaves_->notify_one();
    }

    Condition changed_, leaves_;
    std::deque<std::string> outgoing_;
};

}  // namespace

std::shared_ptr<Exchange> kvstore_exchange(int64_t number) { return std::make_shared<MxnetKvstore>(number); }

std::unique_ptr<Mailbox> mailbox(size_t rank, size_t ranks) { return std::make_unique<PythonMailbox>(rank, ranks); }

std::optional<std::string> next_message(Mailbox& mailbox, double seconds) {
    return static_cast<PythonMailbox&>(mailbox).next(seconds);
}

void deliver(Mailbox& mailbox, const char* message, size_t size) {
    static_cast<PythonMailbox&>(mailbox).deliver(message, size);
}

}  // namespace syncbn

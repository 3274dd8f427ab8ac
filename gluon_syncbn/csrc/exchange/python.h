// The mailbox of a transport in Python, which carries messages between processes.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "exchange/inbox.h"
#include "lock.h"

namespace syncbn {

// A message is the number of its readers and their ranks, as int64, then a Head and what follows it. Python takes what
// leaves, in a thread of its own. A thread that exchanges never runs Python, where Ctrl-C would come.
class PythonMailbox : public Inbox {
  public:
    using Inbox::Inbox;

    uint32_t arrivals(uint32_t) override { return arrivals_; }
    void sleep(uint32_t, uint32_t seen, double seconds) override {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_->wait_for(lock, std::chrono::duration<double>(seconds), [&] { return arrivals_ != seen; });
    }
    void wake(uint32_t) override { changed_->notify_all(); }

    // Waits at most so long for something to send; empty: there was nothing. Returns nothing after the last message.
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
    // Takes a message that has arrived.
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
    void send(const Head& head, const void* content, size_t size, const Ranks& to) override {
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

}  // namespace syncbn

#include "exchange/python.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "exchange/inbox.h"
#include "point.h"

namespace syncbn {
namespace {

constexpr const char *kAdd = "could not add the statistics", *kAsk = "could not agree on the net";
constexpr size_t kLine = 16;  // bytes to which what follows a line is aligned

PythonFunctions functions;

template <typename Function, typename... Arguments>
void call(const char* what, int64_t exchange, Function* function, Arguments... arguments) {
    SYNCBN_POINT("before_exchange");
    Problem problem{};
    if (function(exchange, arguments..., &problem) != 0)
        throw std::runtime_error(std::string("the KVStore ") + what + ": " + problem.text);
    SYNCBN_POINT("after_exchange");
}

// Python takes what leaves, in a thread of its own. A thread that exchanges never runs Python, where Ctrl-C would come.
class Carried : public Inbox {
  public:
    Carried(size_t rank, size_t ranks) : Inbox(rank, ranks), died_(ranks) {}

    size_t most_values() const override { return std::numeric_limits<int>::max(); }
    void post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers) override {
        const int64_t numbers[] = {label.key, label.node, label.call, label.phase, label.piece};
        std::ostringstream head;
        head << "[\"message\", " << rank() << ", " << listed(numbers) << ", " << length << ", " << listed(readers);
        std::lock_guard<std::mutex> lock(mutex_);
        remember(label);
        if (!readers.empty()) send(head.str(), {reinterpret_cast<const char*>(values), count * sizeof(double)});
    }
    uint32_t heard(uint32_t) override { return heard_; }
    void sleep(uint32_t, uint32_t seen, double seconds) override {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return heard_ != seen; });
    }
    void wake(uint32_t) override { changed_.notify_all(); }
    int64_t died(size_t rank) const override { return died_[rank]; }
    void leave(State state, const std::string& reason) override {
        if (!is_own()) return;
        std::lock_guard<std::mutex> lock(mutex_);
        if (states_[rank()] != State::kPresent) return;
        report(rank(), state, reason);
        changed_.notify_all();
        send("[\"left\", " + std::to_string(rank()) + (state == State::kFailed ? ", true" : ", false"), reason);
    }

    std::string next(double seconds) {
        std::unique_lock<std::mutex> lock(mutex_);
        leaves_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !outgoing_.empty(); });
        if (outgoing_.empty()) return "";
        std::string message = std::move(outgoing_.front());
        outgoing_.pop_front();
        return message;
    }
    void deliver(size_t from, const Label& label, size_t length, const void* values, size_t count) {
        const std::shared_ptr<double> memory(new double[count], std::default_delete<double[]>());
        if (count > 0) std::memcpy(memory.get(), values, count * sizeof(double));  // of none, it may be null
        {
            std::lock_guard<std::mutex> lock(mutex_);
            keep({from, label, length, count, memory.get(), memory});
        }
        changed_.notify_all();
    }
    void hear(size_t rank, State state, const char* reason, int64_t process) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (states_[rank] == State::kPresent && state != State::kPresent) report(rank, state, reason);
            if (process != 0) died_[rank] = process, ++heard_;
        }
        changed_.notify_all();
    }

  private:
    template <typename Numbers>
    static std::string listed(const Numbers& numbers) {
        std::string text;
        for (const auto number : numbers) text += (text.empty() ? "[" : ", ") + std::to_string(number);
        return text + "]";
    }
    // The caller holds the lock.
    void send(std::string head, const std::string& body) {
        head += "]";
        head.append(kLine - 1 - head.size() % kLine, ' ');
        outgoing_.push_back(head + "\n" + body);
        leaves_.notify_one();
    }

    std::vector<std::atomic<int64_t>> died_;
    std::condition_variable changed_, leaves_;
    std::deque<std::string> outgoing_;
};

}  // namespace

std::unique_ptr<Mailbox> mailbox(size_t rank, size_t ranks) { return std::make_unique<Carried>(rank, ranks); }

std::string next_message(Mailbox& mailbox, double seconds) { return static_cast<Carried&>(mailbox).next(seconds); }

void deliver(Mailbox& mailbox, size_t from, const Label& label, size_t length, const void* values, size_t count) {
    static_cast<Carried&>(mailbox).deliver(from, label, length, values, count);
}

void report(Mailbox& mailbox, size_t rank, Mailbox::State state, const char* reason, int64_t process) {
    static_cast<Carried&>(mailbox).hear(rank, state, reason, process);
}

void set_python_functions(const PythonFunctions& given) { functions = given; }

Vector add_in_python(int64_t exchange, const Ticket& ticket, const Vector& rows, size_t length) {
    Vector total(length);
    call(kAdd, exchange, functions.add, &ticket, static_cast<int64_t>(rows.size() / length),
         static_cast<int64_t>(length), rows.data(), total.data());
    return total;
}

Agreed agreed_in_python(int64_t exchange, const Ticket& ticket, int64_t replicas) {
    Agreed agreed;
    call(kAsk, exchange, functions.agreed, &ticket, replicas, &agreed);
    return agreed;
}

}  // namespace syncbn

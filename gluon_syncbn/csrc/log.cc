#include "log.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

namespace syncbn {
namespace {

constexpr size_t kMost = 100000;  // unfetched records; later ones are lost, and counted

struct Queue {
    std::mutex mutex;  // guards everything here
    std::condition_variable changed;
    std::deque<std::string> records;
    size_t lost = 0;
};
Queue& queue = *new Queue;  // outlives the threads that write at exit

std::atomic<bool> wants_debug{false};

}  // namespace

void log(Level level, std::string text) noexcept {
    std::lock_guard<std::mutex> lock(queue.mutex);
    try {
        if (queue.records.size() >= kMost) throw std::bad_alloc();
        if (queue.lost > 0) text += " (" + std::to_string(queue.lost) + " records before this one are lost)";
        queue.records.push_back(std::to_string(static_cast<int>(level)) + " " + text);
    } catch (const std::bad_alloc&) {
        ++queue.lost;
        return;
    }
    queue.lost = 0;
    queue.changed.notify_one();
}

bool debugging() { return wants_debug.load(std::memory_order_relaxed); }

void set_debugging(bool enabled) { wants_debug = enabled; }

std::string next_record(double seconds) {
    std::unique_lock<std::mutex> lock(queue.mutex);
    queue.changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !queue.records.empty(); });
    if (queue.records.empty()) return "";
    std::string record = std::move(queue.records.front());
    queue.records.pop_front();
    return record;
}

void forget_records() { new (&queue) Queue; }  // a thread that the child does not have may have held its lock

}  // namespace syncbn

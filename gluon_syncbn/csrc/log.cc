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
    std::deque<Record> records;
    size_t lost = 0;
};

Queue& queue() {
    static Queue* instance = new Queue;  // outlives the threads that write at exit
    return *instance;
}

std::atomic<bool> wants_debug{false};

}  // namespace

void log(Level level, std::string text) noexcept {
    Queue& q = queue();
    std::lock_guard<std::mutex> lock(q.mutex);
    try {
        if (q.records.size() >= kMost) throw std::bad_alloc();
        if (q.lost > 0) text += " (" + std::to_string(q.lost) + " records before this one are lost)";
        q.records.push_back({level, std::move(text)});
    } catch (const std::bad_alloc&) {
        ++q.lost;
        return;
    }
    q.lost = 0;
    q.changed.notify_one();
}

bool debugging() { return wants_debug.load(std::memory_order_relaxed); }

void set_debugging(bool so) { wants_debug = so; }

bool next_record(double seconds, Record* record) {
    Queue& q = queue();
    std::unique_lock<std::mutex> lock(q.mutex);
    q.changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !q.records.empty(); });
    if (q.records.empty()) return false;
    *record = std::move(q.records.front());
    q.records.pop_front();
    return true;
}

void forget_records() { new (&queue()) Queue; }  // a thread that the child does not have may have held its lock

}  // namespace syncbn

// Passes the native core's records to the logger `gluon_syncbn`. A thread of Python's fetches them. A thread of MXNet's
// must not call Python itself: it would wait for the interpreter lock, and when the interpreter ends, for ever.
#pragma once

#include <deque>
#include <mutex>
#include <new>
#include <string>

#include "lock.h"

namespace syncbn {

// Python's numbers. A record of doubt has no text: a replica whose call was issued is late, perhaps for a failure.
enum class Level : int { kDoubt = 1, kWarning = 30 };

struct Records {
    static constexpr size_t kMost = 100000;  // unfetched records; later ones are lost, and counted
    Mutex mutex;                             // guards the rest
    Condition changed;
    std::deque<std::string> waiting;
    size_t lost = 0;
    bool asks = false;  // for callers: see meeting/diagnosis.h
};
inline Renewed<Records>& records = *new Renewed<Records>;  // outlives the threads that write at exit

// Without memory for a record, it is lost, and counted.
inline void log(Level level, std::string text) noexcept {
    std::lock_guard<std::mutex> lock(records->mutex);
    try {
        if (records->waiting.size() >= Records::kMost) throw std::bad_alloc();
        if (records->lost > 0) text += " (" + std::to_string(records->lost) + " records before this one are lost)";
        records->waiting.push_back(std::to_string(static_cast<int>(level)) + " " + text);
    } catch (const std::bad_alloc&) {
        ++records->lost;
        return;
    }
    records->lost = 0;
    records->changed->notify_one();
}

}  // namespace syncbn

// Locks that the child of a fork finds open. A thread that the child does not have may have held one, or slept in it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>

namespace syncbn {

// How many forks lie between this process and the one that loaded the core.
inline std::atomic<int64_t> forks{0};
inline const int counts_forks = pthread_atfork(nullptr, nullptr, [] { ++forks; });

// An object that is made anew at its first use after a fork. A lock alone keeps what it guards. Where that is of threads
// that a child does not have, the whole of it is renewed.
template <typename T>
class Renewed {
  public:
    Renewed() = default;
    Renewed(const Renewed&) = delete;
    Renewed& operator=(const Renewed&) = delete;
    ~Renewed() { get(); }  // glibc's destructor of a condition variable would wait for the parent's threads

    T& get() {
        const int64_t now = forks;
        int64_t made = made_;
        if (made == now) return object_;
        // One thread makes it, and marks that with -now.
        if (made != -now && made_.compare_exchange_strong(made, -now)) {
            new (&object_) T;
            made_ = now;
        }
        while (made_ != now) std::this_thread::yield();
        return object_;
    }
    operator T&() { return get(); }
    T* operator->() { return &get(); }

  private:
    std::atomic<int64_t> made_{forks.load()};
    T object_;
};

using Mutex = Renewed<std::mutex>;
using Condition = Renewed<std::condition_variable>;

}  // namespace syncbn

// Forks while other threads hold a lock, and wait on a condition. The child takes the lock, wakes, waits and destroys.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "lock.h"

using syncbn::Condition;
using syncbn::Mutex;
using Lock = std::unique_lock<std::mutex>;

struct Guarded {
    Mutex held, waited_in;
    Condition changed;
    bool change = false;
};

// Threads that end with the process.
void hold(Guarded* of) {
    std::thread([of] {
        const Lock lock(of->held);
        std::this_thread::sleep_for(std::chrono::hours(1));
    }).detach();
    std::thread([of] {
        Lock lock(of->waited_in);
        of->changed->wait(lock, [of] { return of->change; });
    }).detach();
    while (Lock(of->held, std::try_to_lock)) std::this_thread::yield();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(100));  // the other one waits by then, or it comes to the same
}

// Several threads at once are the first to take a lock.
void use(Guarded* of) {
    int count = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            const Lock lock(of->held);
            ++count;
        });
    for (std::thread& one : threads) one.join();
    std::thread waiter([&] {
        Lock lock(of->waited_in);
        of->changed->wait(lock, [&] { return of->change; });
    });
    {
        const Lock lock(of->waited_in);
        of->change = true;
    }
    of->changed->notify_all();
    waiter.join();
    if (count != 4) _exit(2);
    delete of;
}

// Forks so many times, one process from the other, and uses in the last one what threads of the first ones hold.
int fork_and_use(int times) {
    auto *used = new Guarded, *again = new Guarded;
    hold(used);
    hold(again);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        use(used);
        if (times > 1) {
            const int status = fork_and_use(times - 1);
            if (status != 0) _exit(status);
        }
        use(again);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main() { _exit(fork_and_use(2)); }

// What stands in for libraries: OpenMP on plain threads, and memory that runs out.
#include <omp.h>

#include "driver.h"

// ---- memory ----------------------------------------------------------------------------------------------------

namespace driver {
namespace {

std::atomic<long> left{0};
thread_local bool in_core = false;

void* allocate(size_t size) {
    if (in_core && left > 0 && --left == 0) throw std::bad_alloc();
    void* const made = std::malloc(size == 0 ? 1 : size);
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

}  // namespace

Within::Within(bool core) : before_(in_core) { in_core = core; }
Within::~Within() { in_core = before_; }

void fail_allocation(long n) { left = n; }
bool allocation_has_failed() { return left <= 0; }

}  // namespace driver

// Those of arrays call these. Where the second were inlined, g++ would warn that it frees what `new` has made.
void* operator new(size_t size) { return driver::allocate(size); }
// Who asks for this one goes on without, as std::stable_sort does.
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
__attribute__((noinline)) void operator delete(void* made) noexcept { std::free(made); }
__attribute__((noinline)) void operator delete(void* made, size_t) noexcept { std::free(made); }

// ---- OpenMP, of which the core needs no more than `parallel for` with a static schedule ------------------------
// ThreadSanitizer does not know the barriers of libgomp, which would all be findings.

namespace {

constexpr int kProcessors = 16;  // enough for several threads to each of a few replicas, whatever this machine has
thread_local int number = 0, team = 1;

void run_as(int own_number, int own_team, void (*body)(void*), void* data) {
    const int outer_number = std::exchange(number, own_number), outer_team = std::exchange(team, own_team);
    body(data);
    number = outer_number;
    team = outer_team;
}

}  // namespace

extern "C" {

int omp_get_num_procs() { return kProcessors; }
int omp_get_max_threads() { return kProcessors; }
int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return team; }

// libgomp's own name: what g++ makes of `#pragma omp parallel`.
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    {
        const driver::Within program(false);  // no allocation of a library counts as one of the core
        for (unsigned i = 1; i < threads; ++i)
            others.emplace_back(run_as, static_cast<int>(i), static_cast<int>(threads), body, data);
    }
    run_as(0, static_cast<int>(threads), body, data);
    for (auto& other : others) other.join();
}
}

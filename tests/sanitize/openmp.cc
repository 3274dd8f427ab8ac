// OpenMP on plain threads. ThreadSanitizer does not know the barriers of libgomp, which would all be findings.
// Only what the core's `parallel for` with a static schedule needs.
#include <omp.h>

#include <thread>
#include <vector>

#include "memory.h"

namespace {

constexpr int kProcessors = 16;  // enough for several threads to each of a few replicas, whatever this machine has
thread_local int number = 0, team = 1;

void run_as(int own_number, int own_team, void (*body)(void*), void* data) {
    const int outer_number = number, outer_team = team;
    number = own_number;
    team = own_team;
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

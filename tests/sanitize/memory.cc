#include "memory.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "core.h"
#include "figures.h"
#include "log.h"
#include "runs.h"

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

void starving(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        const Spec spec = any_spec(run.random, run.random.whole(2, 3));
        Layer layer(run.random, spec, "starving");
        for (int round = 0; round < 4; ++round) {
            Step step(run, {&layer}, Manner(run.random, threads));
            layer.set_timeout(0.3);  // a call that could not be made is missing
            const size_t lost = syncbn::records->lost;
            fail_allocation(run.random.whole(1, 60 * spec.contexts));
            step.issue();
            run.engine.wait_for_all();
            const bool failed = allocation_has_failed();
            fail_allocation(0);
            bool told = syncbn::records->lost > lost;  // a warning may be lost for lack of memory, and fails no step
            std::string otherwise;                     // than by a replica that was late, as on a busy machine
            const auto hear = [&](const std::string& error) {
                told = told || !error.empty();
                if (!contains(error, " arrived")) otherwise += error;
            };
            step.each([&](Replica& replica) {
                hear(replica.forward.error);
                for (const Backward& backward : replica.backwards) hear(backward.outcome.error);
            });
            expect(failed ? told : otherwise.empty(),
                   "a step fails where an allocation fails, and nowhere else: " + std::to_string(failed) + otherwise);
            syncbn_reset();
            layer.restore();
            right_step(run, layer);
        }
    }
}

}  // namespace driver

void* operator new(size_t size) { return driver::allocate(size); }
void* operator new[](size_t size) { return driver::allocate(size); }
// Who asks for this one goes on without, as std::stable_sort does.
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void operator delete(void* made) noexcept { std::free(made); }
void operator delete[](void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }
void operator delete[](void* made, size_t) noexcept { std::free(made); }

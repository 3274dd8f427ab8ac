// Marks points at which a test interrupts a thread or a process. Only the core of tests/support/points.py has them.
#pragma once

#include <atomic>
#include <cstdint>

// Counts for tests, which find the variable by its name.
#define SYNCBN_COUNTS __attribute__((visibility("default"))) std::atomic<int64_t>

#ifdef SYNCBN_FAULT_POINTS
namespace syncbn {
void reach_point(const char* name);  // tests/support/points.cc; may throw
}
#define SYNCBN_POINT(name) ::syncbn::reach_point(name)
#else
#define SYNCBN_POINT(name) static_cast<void>(0)
#endif

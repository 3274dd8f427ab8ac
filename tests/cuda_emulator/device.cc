#include "emulator.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace emulator {
namespace {

std::atomic<long long> counts[kDevices][kCounted];

}  // namespace

int capability() {
    const char* const text = std::getenv("CUDA_EMULATOR_CAPABILITY");
    int major = 8, minor = 0;
    if (text) std::sscanf(text, "%d.%d", &major, &minor);
    return 10 * major + minor;
}
int attribute(int which) { return which == 75 ? capability() / 10 : which == 76 ? capability() % 10 : 0; }

std::string name(int device) { return format("CUDA emulator %d", device); }

thread_local int current_device = 0;
thread_local bool bound = false;

void count(int device, Counted what) {
    if (device >= 0) ++counts[device][what];
}

}  // namespace emulator

// `out` has room for all of them, in the order of `Counted`, of one device since the last reset.
extern "C" void cuda_emulator_counts(int device, long long* out) {
    for (int what = 0; what < emulator::kCounted; ++what) out[what] = emulator::counts[device][what];
}

extern "C" void cuda_emulator_reset_counts() {
    for (auto& device : emulator::counts)
        for (auto& one : device) one = 0;
}

#include "device.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace emulator {
namespace {

std::atomic<long long> counts[kMaxDevices][kCounted];

int capability() {  // ten times the number: 80 for 8.0
    static const int value = [] {
        const char* text = std::getenv("CUDA_EMULATOR_CAPABILITY");
        int major = 8, minor = 0;
        if (text && *text && std::sscanf(text, "%d.%d", &major, &minor) != 2) {
            std::fprintf(stderr, "cuda emulator: CUDA_EMULATOR_CAPABILITY is '%s', not like 8.0\n", text);
            std::abort();
        }
        return 10 * major + minor;
    }();
    return value;
}

}  // namespace

int capability_major() { return capability() / 10; }
int capability_minor() { return capability() % 10; }
int attribute(int which) {
    switch (which) {
        case 1:
        case 2:
        case 3:
            return kMaxThreadsPerBlock;  // also in x and in y
        case 75:
            return capability_major();
        case 76:
            return capability_minor();
        default:
            return 0;
    }
}

std::string name(int device) { return format("CUDA emulator %d", device); }

thread_local int current_device = 0;
thread_local bool bound = false;

void count(int device, Counted what) {
    if (device >= 0) ++counts[device][what];
}

}  // namespace emulator

extern "C" void cuda_emulator_counts(int device, long long* out) {
    for (int what = 0; what < emulator::kCounted; ++what) out[what] = emulator::counts[device][what];
}

extern "C" void cuda_emulator_reset_counts() {
    for (auto& device : emulator::counts)
        for (auto& one : device) one = 0;
}

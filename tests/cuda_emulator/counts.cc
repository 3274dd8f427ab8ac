#include "counts.h"

#include <atomic>

#include "device.h"

namespace emulator {
namespace {

std::atomic<long long> counts[kMaxDevices][kCounted];

}  // namespace

void count(int device, Counted what) {
    if (device >= 0) ++counts[device][what];
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void cuda_emulator_counts(int device, long long* out) {
    for (int what = 0; what < kCounted; ++what) out[what] = counts[device][what];
}

void cuda_emulator_reset_counts() {
    for (auto& device : counts)
        for (auto& one : device) one = 0;
}
}

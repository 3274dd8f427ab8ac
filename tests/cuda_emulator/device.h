// The devices: how many there are, what they claim to be, which one the calling thread has chosen, and what each was
// asked to do, so that a test can say how much a step costs where nothing can be timed.
#pragma once

#include <cstddef>
#include <string>

#include "errors.h"

namespace emulator {

constexpr int kMaxDevices = 16;
constexpr int kMaxThreadsPerBlock = 1024;

constexpr int device_count() { return 4; }
inline Status good_device(int device) { return device >= 0 && device < device_count() ? kSuccess : kInvalidDevice; }
constexpr size_t memory_per_device() { return size_t(4) << 30; }

int capability();  // ten times CUDA_EMULATOR_CAPABILITY: 80 for 8.0
constexpr int kDriverVersion = 11080;

int attribute(int which);  // cudaDeviceAttr, CUdevice_attribute: the same numbers
std::string name(int device);

// As cudaSetDevice: each thread has its own, device 0 at first. The driver API's current context is that of the same
// device, but only once it is bound: until CUDA 12, cudaSetDevice leaves that to the thread's next call that needs one.
extern thread_local int current_device;
extern thread_local bool bound;

enum Counted { kLaunches, kToDevice, kToHost, kWithin, kWaits, kCollectives, kAllocations, kCounted };

void count(int device, Counted what);  // a device below 0 is none

}  // namespace emulator

extern "C" {
// `out` has room for all of them, in the order above, of one device since the last reset.
void cuda_emulator_counts(int device, long long* out);
void cuda_emulator_reset_counts();
}

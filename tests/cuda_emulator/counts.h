// What a device was asked to do, so that a test can say how much a step costs where nothing can be timed.
#pragma once

namespace emulator {

enum Counted { kLaunches, kToDevice, kToHost, kWithin, kWaits, kCollectives, kAllocations, kCounted };

void count(int device, Counted what);  // a device below 0 is none

}  // namespace emulator

extern "C" {
// `out` has room for all of them, in the order above, of one device since the last reset.
void cuda_emulator_counts(int device, long long* out);
void cuda_emulator_reset_counts();
}

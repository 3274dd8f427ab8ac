// The list of errors. Every one is printed at once, kept until it is read, and stays with its device as CUDA's
// own "sticky" errors do: whatever is asked of the device afterwards answers with it.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

// The numbers that the runtime API and the driver API share since CUDA 10.1.
enum Status : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kNoKernelImage = 209,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kMisalignedAddress = 716,
    kLaunchFailure = 719,
};

const char* status_text(Status status);

// Prints and keeps `text`, makes `status` the sticky answer of `device` (none where it is negative), returns it.
Status report(int device, Status status, const std::string& text);

Status sticky(int device);  // the first error of the device since the last reset
int resets();               // how many there were: what a thread remembers from before one counts no longer

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
long setting(const char* name, long otherwise);  // an environment variable as a number

}  // namespace emulator

extern "C" {
// The number of errors since the last reset; their text, one per line, into `text`. They count as read.
int cuda_emulator_errors(char* text, size_t size);
void cuda_emulator_reset();
}

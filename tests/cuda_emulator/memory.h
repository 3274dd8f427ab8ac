// Device memory: pages of this process at addresses that are never handed out twice, so that a pointer tells
// its device, its allocation and whether that was freed, for as long as the process lives.
#pragma once

#include <cstddef>
#include <string>

#include "errors.h"

namespace emulator {

constexpr int kPinnedHost = -1;    // memory from cudaHostAlloc: any device may use it
constexpr int kPageableHost = -2;  // any other address

enum Access { kRead, kWrite };

Status allocate(int device, size_t size, void** out);  // device may be kPinnedHost
Status release(void* pointer, bool host);
int device_of(const void* pointer);  // a device, kPinnedHost or kPageableHost
size_t bytes_in_use(int device);

// May `device` read or write these bytes? A write marks them as written. Host memory that this file did not
// hand out is not known here: false.
bool accessible(const void* pointer, size_t size, int device, Access access);

// The same question for copies and collectives; the answer is empty or says what is wrong. Pageable host memory is
// trusted; `device` is kPinnedHost where any device will do.
std::string problem(const void* pointer, size_t size, int device, Access access);

// What is wrong with an access that is not accessible().
std::string describe(const void* pointer, size_t size, int device, Access access);

}  // namespace emulator

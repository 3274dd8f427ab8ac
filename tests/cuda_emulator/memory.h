// Device memory: pages of this process at addresses that are never handed out twice. The end of an allocation is that of
// its page, and the page behind is not accessible: nor is freed memory.
#pragma once

#include <cstddef>
#include <string>

#include "errors.h"

namespace emulator {

constexpr int kPinnedHost = -1;    // memory from cudaHostAlloc: any device may use it
constexpr int kPageableHost = -2;  // any other address

Status allocate(int device, size_t size, void** out);  // device may be kPinnedHost
Status release(void* pointer, bool host);
int device_of(const void* pointer);  // a device, kPinnedHost or kPageableHost
size_t bytes_in_use(int device);

// Why `device` may not read or write these bytes; empty if it may. Pageable host memory is trusted.
std::string problem(const void* pointer, size_t size, int device);

}  // namespace emulator

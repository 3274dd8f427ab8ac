// Copies, fills and sums, on streams and without; both APIs are names for these.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "streams.h"

namespace emulator {

struct Copy {
    void* to;
    const void* from;
    size_t size;
    // Which device must own each end, where it is device memory.
    int to_device, from_device;
};

// Pageable host memory is read before this returns, or written: CUDA promises the one and does the other.
Status copy(const Copy& what, const StreamPointer& stream);
Status copy_and_wait(void* to, const void* from, size_t size);  // as cudaMemcpy
struct Bytes {
    const void* begin;
    size_t size;
};
// Puts `work` on the stream, where its device may read and write these; else the error has this name.
Status compute(const StreamPointer& stream, const std::string& name, const std::vector<Bytes>& reads, Bytes written,
               std::function<void()> work);
Status fill(void* to, int value, size_t size, const StreamPointer& stream);
// The sum of these, from the first to the last, each of `size` numbers; `to` may be one of them.
Status add(double* to, const std::vector<const double*>& from, size_t size, const StreamPointer& stream);

}  // namespace emulator

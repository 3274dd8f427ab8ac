#include "emulator.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

constexpr size_t kPage = 4096, kAlignment = 16;
constexpr size_t kSpan = size_t(1) << 40;  // of addresses per device; address space costs nothing
constexpr int kSpans = kDevices + 1;       // the last one is pinned host memory

// A NaN in float16, float32 and float64, a huge index as an integer: a result made from it is seen.
constexpr unsigned char kPoison = 0xff;

struct Allocation {
    size_t size;
    int device;
    bool live;
};

struct Arena {
    char* const data = [] {
        constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* const where = mmap(nullptr, kSpans * kSpan, PROT_NONE, kFlags, -1, 0);
        if (where == MAP_FAILED) {
            std::fputs("cuda emulator: cannot reserve addresses; is `ulimit -v` set?\n", stderr);
            std::abort();
        }
        madvise(where, kSpans * kSpan, MADV_DONTDUMP);
        return static_cast<char*>(where);
    }();
    std::mutex mutex;  // guards the rest
    std::map<const char*, Allocation> all;
    size_t next[kSpans] = {}, in_use[kSpans] = {};
};
Arena& arena = *new Arena;  // never destroyed: the threads of streams outlive main()

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }
int span_of(int device) { return device == kPinnedHost ? kDevices : device; }

}  // namespace

Status allocate(int device, size_t size, void** out) {
    const int span = span_of(device);
    const size_t length = rounded(size + 1, kPage);  // at least one byte, for an address of its own
    std::lock_guard<std::mutex> lock(arena.mutex);
    *out = nullptr;
    if (device != kPinnedHost && arena.in_use[span] + size > kMemoryOfDevice) return kOutOfMemory;
    if (arena.next[span] + length + kPage > kSpan)
        return report(-1, kOutOfMemory, "the emulator has used up its addresses: it hands out none twice");
    char* const pages = arena.data + span * kSpan + arena.next[span];
    if (mprotect(pages, length, PROT_READ | PROT_WRITE) != 0) return kOutOfMemory;
    std::memset(pages, kPoison, length);
    char* const begin = pages + length - rounded(size, kAlignment);
    arena.all[begin] = {size, device, true};
    arena.next[span] += length + kPage;
    arena.in_use[span] += size;
    *out = begin;
    return kSuccess;
}

Status release(void* pointer, bool host) {
    if (pointer == nullptr) return kSuccess;
    const char* const what = host ? "cudaFreeHost" : "cudaFree";
    std::lock_guard<std::mutex> lock(arena.mutex);
    const auto found = arena.all.find(static_cast<char*>(pointer));
    if (found == arena.all.end() || (found->second.device == kPinnedHost) != host)
        return report(-1, kInvalidValue, format("%s(%p): not an address that was allocated", what, pointer));
    Allocation& it = found->second;
    if (!it.live) return report(it.device, kInvalidValue, format("%s(%p): freed twice", what, pointer));
    it.live = false;
    arena.in_use[span_of(it.device)] -= it.size;
    char* const pages = static_cast<char*>(pointer) + rounded(it.size, kAlignment) - rounded(it.size + 1, kPage);
    madvise(pages, rounded(it.size + 1, kPage), MADV_DONTNEED);
    mprotect(pages, rounded(it.size + 1, kPage), PROT_NONE);
    return kSuccess;
}

int device_of(const void* pointer) {
    const size_t offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(arena.data);
    if (offset >= kSpans * kSpan) return kPageableHost;
    const int span = static_cast<int>(offset / kSpan);
    return span == kDevices ? kPinnedHost : span;
}

size_t bytes_in_use(int device) {
    std::lock_guard<std::mutex> lock(arena.mutex);
    return arena.in_use[span_of(device)];
}

std::string problem(const void* pointer, size_t size, int device) {
    if (size == 0) return "";
    const std::string what = format("%zu bytes at %p: ", size, pointer);
    if (pointer == nullptr) return what + "null pointer";
    if (device_of(pointer) == kPageableHost) return "";
    std::lock_guard<std::mutex> lock(arena.mutex);
    auto found = arena.all.upper_bound(static_cast<const char*>(pointer));
    if (found == arena.all.begin()) return what + "device memory that was never allocated";
    const auto& [begin, it] = *--found;
    const size_t start = static_cast<const char*>(pointer) - begin;
    const std::string whose = format("byte %zu of %zu bytes of %s", start, it.size,
                                     it.device == kPinnedHost ? "the host" : format("device %d", it.device).c_str());
    if (it.device != device && it.device != kPinnedHost) return what + format("from device %d, ", device) + whose;
    if (!it.live) return what + "freed memory, " + whose;
    return start + size > it.size ? what + "out of bounds, " + whose : "";
}

}  // namespace emulator

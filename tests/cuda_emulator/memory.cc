#include "memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "device.h"

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSpan = size_t(1) << 40;  // of addresses per device; address space costs nothing
constexpr int kSpans = kMaxDevices + 1;    // the last one is pinned host memory

// A NaN in float16, float32 and float64, a huge index as an integer: a result made from it is seen.
constexpr unsigned char kPoison = 0xff;
constexpr unsigned char kFence = 0xfd;  // behind the last byte of an allocation, up to the end of its page

struct Allocation {
    char* base;
    size_t size;
    int device;
    uint64_t number;  // counts the allocations of the process, as a name in messages
    std::atomic<bool> live{true};
};

template <typename T>
T* reserve(size_t bytes, int protection) {
    void* const where = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (where == MAP_FAILED) {
        std::fprintf(stderr, "cuda emulator: cannot reserve %zu GiB of addresses; is `ulimit -v` set?\n", bytes >> 30);
        std::abort();
    }
    madvise(where, bytes, MADV_DONTDUMP);
    return static_cast<T*>(where);
}

struct Arena {
    char* const data = reserve<char>(kSpans * kSpan, PROT_NONE);
    char* const written = reserve<char>(kSpans * kSpan, PROT_READ | PROT_WRITE);  // one for each byte of data: 0 or 1
    Allocation** const owner =
        reserve<Allocation*>(kSpans * kSpan / kPage * sizeof(Allocation*), PROT_READ | PROT_WRITE);
    std::mutex mutex;
    size_t next[kSpans] = {};
    size_t in_use[kSpans] = {};
    uint64_t allocations = 0;
};
Arena& arena = *new Arena;  // never destroyed: the threads of streams outlive main()

size_t offset_of(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(arena.data);
}
size_t pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }
int span_of(int device) { return device == kPinnedHost ? kMaxDevices : device; }

// Is every one of these bytes equal to `value`?
bool all_equal(const char* bytes, size_t size, char value) {
    return size == 0 || (bytes[0] == value && std::memcmp(bytes, bytes + 1, size - 1) == 0);
}

std::string name(const Allocation& it) {
    return format("allocation #%llu, %zu bytes on %s", static_cast<unsigned long long>(it.number), it.size,
                  it.device == kPinnedHost ? "the host" : format("device %d", it.device).c_str());
}

// Were all of them written? Kernels ask it of each value that they read.
bool all_written(const char* marks, size_t size) {
    uint64_t bits = 0x0101010101010101;
    if (size == 8)
        std::memcpy(&bits, marks, 8);
    else if (size == 4)
        std::memcpy(&bits, marks, 4);
    else
        return all_equal(marks, size, 1);
    return bits == 0x0101010101010101;
}

// The allocation that owns the page of this address, or the one shortly before it.
Allocation* neighbour(const void* pointer) {
    size_t page = offset_of(pointer) / kPage;
    for (int back = 0; back < 64; ++back, --page) {
        if (Allocation* const it = arena.owner[page]) return it;
        if (page == 0) break;
    }
    return nullptr;
}

}  // namespace

Status allocate(int device, size_t size, void** out) {
    Arena& all = arena;
    const int span = span_of(device);
    const size_t length = pages(size + 1);  // at least one byte of fence
    std::lock_guard<std::mutex> lock(all.mutex);
    *out = nullptr;
    if (device != kPinnedHost && all.in_use[span] + size > memory_per_device()) return kOutOfMemory;
    if (all.next[span] + length + kPage > kSpan)
        return report(-1, kOutOfMemory, "the emulator has used up its addresses: it hands out none twice");
    const size_t offset = span * kSpan + all.next[span];
    // The page after it stays without access: code that is not checked, such as a custom operator's, faults there.
    if (mprotect(all.data + offset, length, PROT_READ | PROT_WRITE) != 0) return kOutOfMemory;
    Allocation* const it = new Allocation;
    it->base = all.data + offset;
    it->size = size;
    it->device = device;
    it->number = ++all.allocations;
    std::memset(it->base, kPoison, size);
    std::memset(it->base + size, kFence, length - size);
    // The host writes into pinned memory without telling anybody.
    if (device == kPinnedHost) std::memset(all.written + offset, 1, size);
    for (size_t page = offset / kPage; page < (offset + length) / kPage; ++page) all.owner[page] = it;
    all.next[span] += length + kPage;
    all.in_use[span] += size;
    *out = it->base;
    return kSuccess;
}

Status release(void* pointer, bool host) {
    if (pointer == nullptr) return kSuccess;
    Arena& all = arena;
    const char* const what = host ? "cudaFreeHost" : "cudaFree";
    std::lock_guard<std::mutex> lock(all.mutex);
    const size_t offset = offset_of(pointer);
    Allocation* const it = device_of(pointer) == kPageableHost ? nullptr : all.owner[offset / kPage];
    if (!it || it->base != pointer || (it->device == kPinnedHost) != host)
        return report(-1, kInvalidValue, format("%s(%p): not an address that was allocated", what, pointer));
    if (!it->live.exchange(false))
        return report(it->device, kInvalidValue, format("%s(%p): freed twice: %s", what, pointer, name(*it).c_str()));
    const size_t length = pages(it->size + 1);
    if (!all_equal(it->base + it->size, length - it->size, static_cast<char>(kFence)))
        report(it->device, kIllegalAddress, format("code on the host wrote behind the end of %s", name(*it).c_str()));
    all.in_use[span_of(it->device)] -= it->size;
    std::memset(it->base, kPoison, it->size);
    madvise(it->base, length, MADV_DONTNEED);
    mprotect(it->base, length, PROT_NONE);
    madvise(all.written + offset, length, MADV_DONTNEED);
    return kSuccess;
}

int device_of(const void* pointer) {
    const size_t offset = offset_of(pointer);
    if (offset >= kSpans * kSpan) return kPageableHost;
    const int span = static_cast<int>(offset / kSpan);
    return span == kMaxDevices ? kPinnedHost : span;
}

size_t bytes_in_use(int device) {
    std::lock_guard<std::mutex> lock(arena.mutex);
    return arena.in_use[span_of(device)];
}

bool accessible(const void* pointer, size_t size, int device, Access access) {
    const Arena& all = arena;
    const size_t offset = offset_of(pointer);
    if (offset >= kSpans * kSpan) return false;
    const Allocation* const it = all.owner[offset / kPage];
    if (!it) return false;
    const size_t start = static_cast<const char*>(pointer) - it->base;
    if (start + size > it->size) return false;
    if (it->device != device && it->device != kPinnedHost && device != kPinnedHost) return false;
    if (!it->live.load(std::memory_order_relaxed)) return false;
    char* const written = all.written + offset;
    if (access == kWrite) {
        const uint64_t marks = 0x0101010101010101;
        if (size == 4)
            std::memcpy(written, &marks, 4);
        else
            std::memset(written, 1, size);
    } else if (!all_written(written, size)) {
        return false;
    }
    return true;
}

std::string problem(const void* pointer, size_t size, int device, Access access) {
    if (size == 0) return "";
    if (device_of(pointer) == kPageableHost && pointer != nullptr) return "";
    return accessible(pointer, size, device, access) ? "" : describe(pointer, size, device, access);
}

std::string describe(const void* pointer, size_t size, int device, Access access) {
    const std::string what = format("%s of %zu bytes at %p", access == kRead ? "read" : "write", size, pointer);
    if (pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) < kPage) return what + ": null pointer";
    if (device_of(pointer) == kPageableHost) return what + ": host memory, or no memory at all";
    const Allocation* const it = neighbour(pointer);
    if (!it) return what + ": device memory that was never allocated";
    const ptrdiff_t start = static_cast<const char*>(pointer) - it->base;
    const std::string whose = format(", byte %td of %s", start, name(*it).c_str());
    if (it->device != device && it->device != kPinnedHost) return what + format(": from device %d", device) + whose;
    if (!it->live) return what + ": freed memory" + whose;
    if (start + size > it->size) return what + ": out of bounds" + whose;
    size_t first = 0;
    while (first < size && arena.written[offset_of(pointer) + first]) ++first;
    return what + format(": memory never written (its byte %zu)", first) + whose;
}

}  // namespace emulator

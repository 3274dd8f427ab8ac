// The functions that g++ -fsanitize=thread puts before every access to memory, and some of those of
// -fsanitize=undefined. Kernels are compiled with these options and linked with this file instead of the sanitisers'
// libraries.
#include <cstring>

#include "block.h"
#include "memory.h"

namespace emulator {
namespace {

// Was it before a barrier or __syncwarp that both threads have passed since?
bool ordered(const Block& block, uint32_t time, unsigned other_warp) {
    if (time < block.barrier_at) return true;
    const unsigned warp = block.running / kWarpSize;
    return other_warp == warp && time < block.warps[warp].synchronised_at;
}

// An atomic operation is checked as a write whose author is all atomic operations.
void check_shared(Block* block, SharedBytes* shared, const char* pointer, size_t size, Access access, bool atomic,
                  void* pc) {
    const uint16_t thread = static_cast<uint16_t>(block->running), self = atomic ? kAtomicWriter : thread;
    const size_t start = pointer - shared->begin;
    if (start + size > shared->size)
        fail(kIllegalAddress,
             format("access of %zu bytes at byte %zu of %zu bytes of shared memory", size, start, shared->size), pc);
    for (size_t i = start; i < start + size; ++i) {
        SharedBytes::Record& record = shared->records[i];
        const bool written = record.write_time >= block->started_at;
        if ((access == kRead || atomic) && !written)
            fail(kIllegalAddress, "read of shared memory that no thread of the block has written", pc);
        if (written && record.writer != self && !ordered(*block, record.write_time, record.writer / kWarpSize))
            fail(kLaunchFailure,
                 format("race: %s shared memory that %s wrote, no __syncthreads between",
                        access == kRead ? "reads" : "writes",
                        record.writer == kAtomicWriter ? "an atomic operation"
                                                       : thread_name(*block, record.writer).c_str()),
                 pc);
        const bool read = record.read_time >= block->started_at;
        if (access == kWrite) {
            const unsigned warp = record.reader == kManyReaders   ? ~0u
                                  : record.reader >= kWarpReaders ? record.reader - kWarpReaders
                                                                  : record.reader / kWarpSize;
            if (read && record.reader != thread && !ordered(*block, record.read_time, warp))
                fail(kLaunchFailure, "race: writes shared memory that another thread read, no __syncthreads between",
                     pc);
            record.write_time = block->time;
            record.writer = self;
        } else {
            // Several readers since the last barrier: it is enough to know whether one warp holds them all.
            uint16_t reader = self;
            if (read && record.read_time >= block->barrier_at && record.reader != self) {
                const unsigned warp = self / kWarpSize;
                const bool together =
                    record.reader != kManyReaders &&
                    (record.reader >= kWarpReaders ? record.reader - kWarpReaders : record.reader / kWarpSize) ==
                        static_cast<int>(warp);
                reader = together ? static_cast<uint16_t>(kWarpReaders + warp) : kManyReaders;
            }
            record.read_time = block->time;
            record.reader = reader;
        }
    }
}

bool inside(const SharedBytes& shared, const char* pointer, size_t slack = 0) {
    return pointer >= shared.begin && pointer < shared.begin + shared.size + slack;
}

bool in_library(const Block& block, const char* pointer) {
    for (const Block::Segment& segment : block.library)
        if (pointer >= segment.begin && pointer < segment.begin + segment.size) return true;
    return false;
}

}  // namespace

void check(const void* address, size_t size, Access access, void* pc, bool atomic = false) {
    Block* const block = running_block;
    if (!block || size == 0) return;
    const int device = block->launch->device;
    if (atomic && accessible(address, size, device, kRead) && accessible(address, size, device, kWrite)) return;
    if (!atomic && accessible(address, size, device, access)) return;
    const char* const pointer = static_cast<const char*>(address);
    if (block->current().fiber->owns(pointer)) return;
    if (inside(block->shared_static, pointer))
        return check_shared(block, &block->shared_static, pointer, size, access, atomic, pc);
    if (inside(block->shared_dynamic, pointer, kSharedSlack))
        return check_shared(block, &block->shared_dynamic, pointer, size, access, atomic, pc);
    if (in_library(*block, pointer)) return;
    for (unsigned i = 0; i < block->size; ++i)
        if (block->threads[i].fiber->owns(pointer))
            fail(kIllegalAddress, "access to a local variable of " + thread_name(*block, i), pc);
    fail(kIllegalAddress, describe(address, size, device, access), pc);
}

}  // namespace emulator

#define PC __builtin_return_address(0)
#define ACCESSORS(SIZE)                                                                                      \
    extern "C" void __tsan_read##SIZE(void* p) { emulator::check(p, SIZE, emulator::kRead, PC); }            \
    extern "C" void __tsan_write##SIZE(void* p) { emulator::check(p, SIZE, emulator::kWrite, PC); }          \
    extern "C" void __tsan_volatile_read##SIZE(void* p) { emulator::check(p, SIZE, emulator::kRead, PC); }   \
    extern "C" void __tsan_volatile_write##SIZE(void* p) { emulator::check(p, SIZE, emulator::kWrite, PC); } \
    extern "C" void __tsan_unaligned_read##SIZE(void* p) { emulator::check(p, SIZE, emulator::kRead, PC); }  \
    extern "C" void __tsan_unaligned_write##SIZE(void* p) { emulator::check(p, SIZE, emulator::kWrite, PC); }
ACCESSORS(1)
ACCESSORS(2)
ACCESSORS(4)
ACCESSORS(8)
ACCESSORS(16)

extern "C" {
void __ubsan_handle_type_mismatch_v1(void* data, void* pointer);
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, size_t size) { emulator::check(p, size, emulator::kRead, PC); }
void __tsan_write_range(void* p, size_t size) { emulator::check(p, size, emulator::kWrite, PC); }

void emulated_atomic(void* where, size_t size) {
    if (reinterpret_cast<size_t>(where) % size) __ubsan_handle_type_mismatch_v1(nullptr, where);
    emulator::check(where, size, emulator::kWrite, PC, true);
}

// shim.h makes calls of memcpy and memset these.
void* emulated_memcpy(void* to, const void* from, size_t size) {
    emulator::check(from, size, emulator::kRead, PC);
    emulator::check(to, size, emulator::kWrite, PC);
    return std::memmove(to, from, size);
}
void* emulated_memset(void* to, int value, size_t size) {
    emulator::check(to, size, emulator::kWrite, PC);
    return std::memset(to, value, size);
}

// A pointer that its type's alignment forbids, or one behind an array. The first members are all that is needed
// here of what the compiler passes.
struct SourceLocation {
    const char* file;
    unsigned line, column;
};
void __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
    if (!emulator::running_block) return;
    const SourceLocation* const where = static_cast<SourceLocation*>(data);
    const std::string line = where ? emulator::format("line %u: ", where->line) : "atomic operation: ";
    emulator::fail(emulator::kMisalignedAddress, line + emulator::format("misaligned access at %p", pointer), nullptr);
}
void __ubsan_handle_out_of_bounds(void* data, void* index) {
    if (!emulator::running_block) return;
    const SourceLocation* const where = static_cast<SourceLocation*>(data);
    emulator::fail(
        emulator::kIllegalAddress,
        emulator::format("line %u: index %td is outside of the array", where->line, reinterpret_cast<ptrdiff_t>(index)),
        nullptr);
}
void __ubsan_handle_divrem_overflow(void* data, void*, void*) {
    if (!emulator::running_block) return;
    const SourceLocation* const where = static_cast<SourceLocation*>(data);
    emulator::fail(emulator::kLaunchFailure, emulator::format("line %u: integer division by zero", where->line),
                   nullptr);
}
}

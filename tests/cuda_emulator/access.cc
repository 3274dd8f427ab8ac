// The functions that g++ -fsanitize=thread puts before every access to memory, and some of those of
// -fsanitize=undefined. Kernels are compiled with these options and linked with this file instead of the sanitisers'
// libraries.
#include "block.h"
#include "memory.h"

namespace emulator {
namespace {

// Was it before a barrier that both threads have passed since?
bool ordered(const Block& block, uint32_t time) { return time < block.barrier_at; }

void check_shared(Block* block, SharedBytes* shared, const char* pointer, size_t size, Access access, void* pc) {
    const uint16_t self = static_cast<uint16_t>(block->running);
    const size_t start = pointer - shared->begin;
    if (start + size > shared->size)
        fail(kIllegalAddress,
             format("access of %zu bytes at byte %zu of %zu bytes of shared memory", size, start, shared->size), pc);
    for (size_t i = start; i < start + size; ++i) {
        SharedBytes::Record& record = shared->records[i];
        const bool written = record.write_time >= block->started_at;
        if (access == kRead && !written)
            fail(kIllegalAddress, "read of shared memory that no thread of the block has written", pc);
        if (written && record.writer != self && !ordered(*block, record.write_time))
            fail(kLaunchFailure,
                 format("race: %s shared memory that %s wrote, no __syncthreads between",
                        access == kRead ? "reads" : "writes", thread_name(*block, record.writer).c_str()),
                 pc);
        const bool read = record.read_time >= block->started_at;
        if (access == kWrite) {
            if (read && record.reader != self && !ordered(*block, record.read_time))
                fail(kLaunchFailure, "race: writes shared memory that another thread read, no __syncthreads between",
                     pc);
            record.write_time = block->time;
            record.writer = self;
        } else {
            const bool others = read && !ordered(*block, record.read_time) && record.reader != self;
            record.read_time = block->time;
            record.reader = others ? kManyReaders : self;
        }
    }
}

bool inside(const SharedBytes& shared, const char* pointer) {
    return pointer >= shared.begin && pointer < shared.begin + shared.size;
}

bool in_library(const Block& block, const char* pointer) {
    for (const Block::Segment& segment : block.library)
        if (pointer >= segment.begin && pointer < segment.begin + segment.size) return true;
    return false;
}

}  // namespace

void check(const void* address, size_t size, Access access, void* pc) {
    Block* const block = running_block;
    if (!block || size == 0) return;
    const int device = block->launch->device;
    if (accessible(address, size, device, access)) return;
    const char* const pointer = static_cast<const char*>(address);
    if (block->current().fiber->owns(pointer)) return;
    if (inside(block->shared, pointer)) return check_shared(block, &block->shared, pointer, size, access, pc);
    if (in_library(*block, pointer)) return;
    for (unsigned i = 0; i < block->size; ++i)
        if (block->threads[i].fiber->owns(pointer))
            fail(kIllegalAddress, "access to a local variable of " + thread_name(*block, i), pc);
    fail(kIllegalAddress, describe(address, size, device, access), pc);
}

}  // namespace emulator

#define PC __builtin_return_address(0)
#define ACCESSORS(SIZE)                                                                                     \
    extern "C" void __tsan_read##SIZE(void* p) { emulator::check(p, SIZE, emulator::kRead, PC); }           \
    extern "C" void __tsan_write##SIZE(void* p) { emulator::check(p, SIZE, emulator::kWrite, PC); }         \
    extern "C" void __tsan_unaligned_read##SIZE(void* p) { emulator::check(p, SIZE, emulator::kRead, PC); } \
    extern "C" void __tsan_unaligned_write##SIZE(void* p) { emulator::check(p, SIZE, emulator::kWrite, PC); }
ACCESSORS(1)
ACCESSORS(2)
ACCESSORS(4)
ACCESSORS(8)
ACCESSORS(16)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, size_t size) { emulator::check(p, size, emulator::kRead, PC); }
void __tsan_write_range(void* p, size_t size) { emulator::check(p, size, emulator::kWrite, PC); }

// A pointer that its type's alignment forbids, or one behind an array. The first members are all that is needed
// here of what the compiler passes.
struct SourceLocation {
    const char* file;
    unsigned line, column;
};
static void fail_at(const void* location, emulator::Status status, const std::string& text) {
    if (!emulator::running_block) return;
    const unsigned line = static_cast<const SourceLocation*>(location)->line;
    emulator::fail(status, emulator::format("line %u: ", line) + text, nullptr);
}
void __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
    fail_at(data, emulator::kMisalignedAddress, emulator::format("misaligned access at %p", pointer));
}
void __ubsan_handle_out_of_bounds(void* data, void* index) {
    fail_at(data, emulator::kIllegalAddress,
            emulator::format("index %td is outside of the array", reinterpret_cast<ptrdiff_t>(index)));
}
void __ubsan_handle_divrem_overflow(void* data, void*, void*) {
    fail_at(data, emulator::kLaunchFailure, "integer division by zero");
}
}

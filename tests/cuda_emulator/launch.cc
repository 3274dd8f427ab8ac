#include "launch.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "block.h"

namespace emulator {

thread_local Block* running_block __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr unsigned char kSharedPoison = 0xff;  // NaN, as in memory.cc

std::string triple(const Dimensions& it) { return format("(%u,%u,%u)", it.x, it.y, it.z); }

Dimensions position(const Dimensions& size, unsigned index) {
    return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

// file:line of an address in the library, by the program that comes with the linker.
std::string line_of(const Launch& launch, void* pc) {
    Dl_info info;
    if (!pc || !dladdr(pc, &info)) return "";
    const size_t offset = static_cast<char*>(pc) - static_cast<char*>(info.dli_fbase) - 1;
    FILE* const answer = popen(format("addr2line -e '%s' 0x%zx 2>/dev/null", launch.library, offset).c_str(), "r");
    if (!answer) return "";
    char line[256] = "";
    if (!std::fgets(line, sizeof line, answer)) line[0] = 0;
    pclose(answer);
    std::string text(line);
    text.erase(std::min(text.find_last_not_of('\n') + 1, text.find(' ')));
    return text.empty() || text[0] == '?' ? "" : ", at " + text.substr(text.rfind('/') + 1);
}

void to_scheduler(Block* block) { emulator_switch(&block->current().fiber->stack_pointer, block->scheduler); }

void thread_main() {
    Block* const block = running_block;
    block->launch->kernel->run(block->launch->arguments);
    block->current().state = kEnded;
    ++block->ended;
    to_scheduler(block);
    __builtin_unreachable();
}

// Where the library is, and its thread-local variables, which is what static __shared__ arrays are.
void find_library(Block* block) {
    const Launch& launch = *block->launch;
    SharedBytes* const out = &block->shared;
    void* (*const touch)() = reinterpret_cast<void* (*)()>(dlsym(launch.handle, "emulated_shared_anchor"));
    touch();  // they exist once the thread has asked for one
    void* where = nullptr;
    dlinfo(launch.handle, RTLD_DI_TLS_DATA, &where);
    struct Search {
        const char* name;
        Block* block;
        size_t size;
    } search{launch.library, block, 0};
    block->library.clear();
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            Search* const wanted = static_cast<Search*>(data);
            if (std::strcmp(info->dlpi_name, wanted->name) != 0) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const ElfW(Phdr)& segment = info->dlpi_phdr[i];
                if (segment.p_type == PT_TLS) wanted->size = segment.p_memsz;
                if (segment.p_type == PT_LOAD)
                    wanted->block->library.push_back(
                        {reinterpret_cast<char*>(info->dlpi_addr + segment.p_vaddr), segment.p_memsz});
            }
            return 1;
        },
        &search);
    out->begin = static_cast<char*>(where);
    out->size = where ? search.size : 0;
    out->records.assign(out->size, SharedBytes::Record{});
}

// Nobody can go on: says who waits for whom.
std::string deadlock(const Block& block) {
    unsigned waiting = 0, ended = 0;
    while (block.threads[waiting].state != kAtBarrier) ++waiting;
    while (block.threads[ended].state != kEnded) ++ended;
    return format("%u of %u threads wait at __syncthreads, line %d, which thread %s never reached: it has ended",
                  block.at_barrier, block.size, block.threads[waiting].line,
                  triple(position(block.launch->block, ended)).c_str());
}

void run_block(Block* block) {
    const Launch& launch = *block->launch;
    block->at_barrier = block->ended = 0;
    block->started_at = block->barrier_at = ++block->time;
    std::memset(block->shared.begin, kSharedPoison, block->shared.size);
    for (unsigned i = 0; i < block->size; ++i) {
        Thread& thread = block->threads[i];
        thread.state = kReady;
        thread.fiber->prepare(thread_main);
        *static_cast<ThreadIndex*>(thread.fiber->private_values()) = {position(launch.block, i), block->index,
                                                                      launch.block, launch.grid};
    }
    while (block->ended < block->size) {
        for (unsigned i = 0; i < block->size; ++i) {
            if (block->threads[i].state != kReady) continue;
            block->running = i;
            emulator_switch(&block->scheduler, block->threads[i].fiber->stack_pointer);
            if (block->failed) return;
        }
        // Hardware lets a barrier go when the other threads have ended; CUDA's manual forbids to rely on it.
        if (block->at_barrier == block->size) {
            block->at_barrier = 0;
            block->barrier_at = ++block->time;
            for (unsigned i = 0; i < block->size; ++i)
                if (block->threads[i].state == kAtBarrier) block->threads[i].state = kReady;
        } else if (block->at_barrier > 0) {
            block->running = 0;
            report(launch.device, kLaunchFailure,
                   "kernel " + launch.name + ", block " + triple(block->index) + ": " + deadlock(*block));
            block->failed = true;
            return;
        }
    }
}

}  // namespace

std::string thread_name(const Block& block, unsigned thread) {
    return "thread " + triple(position(block.launch->block, thread));
}

void fail(Status status, const std::string& text, void* pc) {
    Block* const block = running_block;
    const Launch& launch = *block->launch;
    report(launch.device, status,
           "kernel " + launch.name + ", block " + triple(block->index) + ", " + thread_name(*block, block->running) +
               line_of(launch, pc) + ": " + text);
    block->failed = true;
    to_scheduler(block);
    __builtin_unreachable();
}

void run(const Launch& launch) {
    // Stacks and records are kept for the thread's next launch.
    static thread_local Block& block = *new Block;
    block.launch = &launch;
    block.failed = false;
    block.size = launch.block.x * launch.block.y * launch.block.z;
    while (block.threads.size() < block.size) {
        block.threads.emplace_back();
        block.threads.back().fiber = new_fiber();
    }
    find_library(&block);

    running_block = &block;
    const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    for (unsigned i = 0; i < blocks && !block.failed; ++i) {
        block.index = position(launch.grid, i);
        run_block(&block);
    }
    running_block = nullptr;
}

}  // namespace emulator

// ---- what shim.h calls --------------------------------------------------------------------------------------

using emulator::Block;
using emulator::Thread;

extern "C" const void* emulated_index() {
    Block* const block = emulator::running_block;
    return block->current().fiber->private_values();
}

extern "C" void emulated_barrier(int line) {
    Block* const block = emulator::running_block;
    Thread& thread = block->current();
    thread.line = line;
    if (block->at_barrier) {
        unsigned other = 0;
        while (block->threads[other].state != emulator::kAtBarrier) ++other;
        if (block->threads[other].line != line)
            emulator::fail(emulator::kLaunchFailure,
                           emulator::format("reached __syncthreads, line %d, while %s waits at another, line %d", line,
                                            thread_name(*block, other).c_str(), block->threads[other].line),
                           nullptr);
    }
    thread.state = emulator::kAtBarrier;
    ++block->at_barrier;
    emulator::to_scheduler(block);
}

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
    block->current_warp().ended |= 1u << block->running % kWarpSize;
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
    for (unsigned i = 0; i < block.size; ++i) {
        const Thread& waiting = block.threads[i];
        if (waiting.state != kAtExchange) continue;
        std::string text = format("thread %s waits at __shfl_down_sync, line %d, for lanes that its mask 0x%08x names:",
                                  triple(position(block.launch->block, i)).c_str(), waiting.line, waiting.mask);
        const unsigned first = i / kWarpSize * kWarpSize;
        for (unsigned lane = 0; lane < kWarpSize; ++lane) {
            if (!(waiting.mask >> lane & 1)) continue;
            const Thread& other = block.threads[first + lane];
            if (other.state == kAtExchange && other.mask == waiting.mask) continue;
            if (other.state == kEnded) return text + format(" lane %u has ended", lane);
            const char* const at = other.state == kAtBarrier ? "__syncthreads" : "another shuffle";
            return text + format(" lane %u is at %s, line %d", lane, at, other.line);
        }
    }
    unsigned waiting = 0, ended = 0;
    while (block.threads[waiting].state != kAtBarrier) ++waiting;
    while (block.threads[ended].state != kEnded) ++ended;
    return format("%u of %u threads wait at __syncthreads, line %d, which thread %s never reached: it has ended",
                  block.at_barrier, block.size, block.threads[waiting].line,
                  triple(position(block.launch->block, ended)).c_str());
}

// Runs the threads of a warp until none can go on. Returns whether any did.
bool run_warp(Block* block, unsigned first) {
    const unsigned last = std::min(first + kWarpSize, block->size);
    bool any = false;
    for (bool again = true; again;) {
        again = false;
        for (unsigned i = first; i < last; ++i) {
            if (block->threads[i].state != kReady) continue;
            block->running = i;
            emulator_switch(&block->scheduler, block->threads[i].fiber->stack_pointer);
            if (block->failed) return true;
            any = again = true;
        }
    }
    return any;
}

void run_block(Block* block) {
    const Launch& launch = *block->launch;
    block->at_barrier = block->ended = 0;
    block->started_at = block->barrier_at = ++block->time;
    std::memset(block->shared.begin, kSharedPoison, block->shared.size);
    for (unsigned w = 0; w < block->warps.size(); ++w) {
        Warp& warp = block->warps[w];
        const unsigned lanes = std::min<unsigned>(kWarpSize, block->size - w * kWarpSize);
        warp.exchanges.clear();
        warp.present = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
        warp.ended = 0;
    }
    for (unsigned i = 0; i < block->size; ++i) {
        Thread& thread = block->threads[i];
        thread.state = kReady;
        thread.fiber->prepare(thread_main);
        *static_cast<ThreadIndex*>(thread.fiber->private_values()) = {position(launch.block, i), block->index,
                                                                      launch.block, launch.grid};
    }
    while (block->ended < block->size) {
        bool any = false;
        for (unsigned first = 0; first < block->size; first += kWarpSize) {
            any |= run_warp(block, first);
            if (block->failed) return;
        }
        // Hardware lets a barrier go when the other threads have ended; CUDA's manual forbids to rely on it.
        if (block->at_barrier == block->size) {
            block->at_barrier = 0;
            block->barrier_at = ++block->time;
            for (unsigned i = 0; i < block->size; ++i)
                if (block->threads[i].state == kAtBarrier) block->threads[i].state = kReady;
        } else if (!any) {
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
    block.warps.resize((block.size + kWarpSize - 1) / kWarpSize);
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
using emulator::Exchange;
using emulator::Thread;
using emulator::Warp;

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

// All lanes of `mask` give a value; afterwards each reads what the others gave by emulated_given.
extern "C" void emulated_exchange(int line, unsigned mask, unsigned long long value) {
    Block* const block = emulator::running_block;
    Warp& warp = block->current_warp();
    Thread& thread = block->current();
    const uint32_t self = 1u << block->running % emulator::kWarpSize;
    const auto wrong = [&](const std::string& text) {
        emulator::fail(emulator::kLaunchFailure,
                       emulator::format("__shfl_down_sync, line %d, mask 0x%08x: ", line, mask) + text, nullptr);
    };
    if (!(mask & self)) wrong("the mask does not name the calling lane");
    if (mask & ~warp.present)
        wrong(emulator::format("the mask names lane %d, which the block does not have",
                               __builtin_ctz(mask & ~warp.present)));
    if (mask & warp.ended)
        wrong(emulator::format("the mask names lane %d, which has ended", __builtin_ctz(mask & warp.ended)));
    Exchange* mine = nullptr;
    for (Exchange& other : warp.exchanges) {
        if (!(other.mask & mask)) continue;
        if (other.mask != mask || other.line != line)
            wrong(emulator::format("other lanes wait at line %d, mask 0x%08x", other.line, other.mask));
        mine = &other;
    }
    if (!mine) {
        warp.exchanges.push_back({mask, 0, line});
        mine = &warp.exchanges.back();
    }
    mine->arrived |= self;
    thread.value = value;
    thread.line = line;
    thread.mask = mask;
    if (mine->arrived != mask) {
        thread.state = emulator::kAtExchange;
        emulator::to_scheduler(block);
        return;
    }
    const unsigned first = block->running / emulator::kWarpSize * emulator::kWarpSize;
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const unsigned lane = __builtin_ctz(rest);
        warp.given[lane] = block->threads[first + lane].value;
        block->threads[first + lane].state = emulator::kReady;
    }
    warp.exchanges.erase(warp.exchanges.begin() + (mine - warp.exchanges.data()));
}

// A lane that took no part gave nothing: its value is NaN or a huge number.
extern "C" unsigned long long emulated_given(unsigned mask, unsigned lane) {
    Warp& warp = emulator::running_block->current_warp();
    return mask >> lane & 1 ? warp.given[lane] : ~0ull;
}

extern "C" unsigned emulated_lane() { return emulator::running_block->running % emulator::kWarpSize; }

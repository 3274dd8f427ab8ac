// What the threads of a block know of each other: the state that launch.cc schedules by and access.cc checks by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"
#include "fiber.h"
#include "launch.h"

namespace emulator {

// Where shim.h finds threadIdx and its kin: `struct EmulatedIndex` there has the same members.
struct ThreadIndex {
    Dimensions thread, block, block_size, grid_size;
};

enum ThreadState { kReady, kAtBarrier, kEnded };

struct Thread {
    Fiber* fiber;
    ThreadState state;
    int line;  // of the barrier that it waits at
};

// Shared memory and what happened to each of its bytes.
struct SharedBytes {
    struct Record {
        uint32_t write_time, read_time;
        uint16_t writer, reader;  // threads
    };
    char* begin = nullptr;
    size_t size = 0;
    std::vector<Record> records;
};
constexpr uint16_t kManyReaders = 0xffff;

struct Block {
    const Launch* launch;
    Dimensions index;
    unsigned size;  // threads
    std::vector<Thread> threads;
    unsigned running;  // the thread that runs now
    unsigned at_barrier, ended;
    bool failed;

    // Counts barriers, so that an access can be told to be before or after one.
    uint32_t time = 1, started_at = 1, barrier_at = 1;
    SharedBytes shared;

    struct Segment {
        const char* begin;
        size_t size;
    };
    std::vector<Segment> library;  // the kernel's constants and __device__ variables

    void* scheduler;  // its stack pointer

    Thread& current() { return threads[running]; }
};

extern thread_local Block* running_block;  // null outside of a launch

std::string thread_name(const Block& block, unsigned thread);
// Reports, and gives up the launch; does not return. `pc`: an address in the kernel, or null.
[[noreturn]] void fail(Status status, const std::string& text, void* pc);

}  // namespace emulator

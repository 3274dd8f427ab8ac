#include "emulator.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace emulator {
namespace {

constexpr size_t kStack = 64 << 10, kPage = 4096;

// Where shim.h finds threadIdx and its kin: `struct EmulatedIndex` there has the same members.
struct ThreadIndex {
    Dimensions thread, block, grid_size;
};

enum ThreadState { kReady, kAtBarrier, kEnded };

struct Thread {
    ucontext_t entry;
    jmp_buf here;  // where it goes on after a barrier
    bool entered;
    ThreadIndex index;
    ThreadState state;
};

struct Block {
    const Launch* launch;
    std::vector<Thread*> threads;  // kept for the next launch of this thread of the system
    Thread* running;
    unsigned size, at_barrier, ended;
    int line;  // of the barrier that threads wait at
    bool failed;
    jmp_buf scheduler;
};
thread_local Block* running_block = nullptr;

std::string triple(const Dimensions& it) { return format("(%u,%u,%u)", it.x, it.y, it.z); }

Dimensions position(const Dimensions& size, unsigned index) {
    return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

// Reports, and gives up the launch; does not return.
[[noreturn]] void fail(Status status, const std::string& text) {
    Block* const block = running_block;
    const ThreadIndex& at = block->running->index;
    report(block->launch->device, status,
           "kernel " + std::string(block->launch->kernel->name) + ", block " + triple(at.block) + ", thread " +
               triple(at.thread) + ": " + text);
    block->failed = true;
    _longjmp(block->scheduler, 1);
}

std::map<int, struct sigaction>& before = *new std::map<int, struct sigaction>;

void on_signal(int number, siginfo_t* info, void*) {
    static const std::map<int, std::pair<Status, const char*>> kinds = {
        {SIGSEGV, {kIllegalAddress, "access that is out of bounds, or misaligned, at %p"}},
        {SIGBUS, {kIllegalAddress, "access that is out of bounds, at %p"}},
        {SIGILL, {kMisalignedAddress, "misaligned access, or an index outside of its array, at %p"}}};
    if (running_block != nullptr) fail(kinds.at(number).first, format(kinds.at(number).second, info->si_addr));
    sigaction(number, &before[number], nullptr);  // the instruction is tried again
}

// What others have set before the first launch gets the signals of all other code.
const bool take_signals() {
    struct sigaction ours = {};
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    for (const int number : {SIGSEGV, SIGBUS, SIGILL}) sigaction(number, &ours, &before[number]);
    return true;
}

Thread* new_thread() {
    void* const stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, kPage, PROT_NONE) != 0) {
        std::fputs("cuda emulator: no memory for the stack of a thread\n", stderr);
        std::abort();
    }
    Thread* const thread = new Thread;
    getcontext(&thread->entry);
    thread->entry.uc_stack.ss_sp = stack;
    thread->entry.uc_stack.ss_size = kStack;
    return thread;
}

void thread_main() {
    Block* const block = running_block;
    block->launch->kernel->run(block->launch->arguments);
    block->running->state = kEnded;
    ++block->ended;
    _longjmp(block->scheduler, 1);
}

// Runs the thread up to a barrier, its end or a fault. Unlike swapcontext, a jump makes no call of the system.
void go_on(Block* block) {
    if (_setjmp(block->scheduler) != 0) return;
    if (std::exchange(block->running->entered, true)) _longjmp(block->running->here, 1);
    setcontext(&block->running->entry);
}

// Its threads take turns from the first to the last, or in every other block from the last to the first: what needs a
// barrier that is not there goes wrong in one of them.
void run_block(Block* block, unsigned number) {
    const Launch& launch = *block->launch;
    block->at_barrier = block->ended = 0;
    for (unsigned i = 0; i < block->size; ++i) {
        Thread& thread = *block->threads[i];
        thread.state = kReady;
        thread.index = {position(launch.block, i), position(launch.grid, number), launch.grid};
        thread.entered = false;
        makecontext(&thread.entry, thread_main, 0);
    }
    while (block->ended < block->size) {
        for (unsigned i = 0; i < block->size; ++i) {
            block->running = block->threads[number % 2 == 0 ? i : block->size - 1 - i];
            if (block->running->state == kReady) go_on(block);
            if (block->failed) return;
        }
        // Hardware lets a barrier go when the other threads have ended; CUDA's manual forbids to rely on it.
        if (block->at_barrier == block->size) {
            block->at_barrier = 0;
            for (unsigned i = 0; i < block->size; ++i) block->threads[i]->state = kReady;
        } else if (block->at_barrier > 0) {
            report(
                launch.device, kLaunchFailure,
                format(
                    "kernel %s, block %s: %u of %u threads wait at __syncthreads, line %d, and the others have ended",
                    launch.kernel->name, triple(block->running->index.block).c_str(), block->at_barrier, block->size,
                    block->line));
            block->failed = true;
        }
    }
}

}  // namespace

void run(const Launch& launch) {
    static const bool taken = take_signals();
    static thread_local Block& block = *new Block;
    static_cast<void>(taken);
    block.launch = &launch;
    block.failed = false;
    block.size = launch.block.x * launch.block.y * launch.block.z;
    while (block.threads.size() < block.size) block.threads.push_back(new_thread());
    running_block = &block;
    const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    for (unsigned i = 0; i < blocks && !block.failed; ++i) run_block(&block, i);
    running_block = nullptr;
}

}  // namespace emulator

// ---- what shim.h calls --------------------------------------------------------------------------------------

extern "C" const void* emulated_index() { return &emulator::running_block->running->index; }

extern "C" void emulated_barrier(int line) {
    emulator::Block* const block = emulator::running_block;
    if (block->at_barrier++ == 0) block->line = line;
    if (block->line != line)
        emulator::fail(
            emulator::kLaunchFailure,
            emulator::format("reached __syncthreads, line %d, while another waits at line %d", line, block->line));
    block->running->state = emulator::kAtBarrier;
    if (_setjmp(block->running->here) == 0) _longjmp(block->scheduler, 1);
}

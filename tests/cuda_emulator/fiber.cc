#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// What a called function must preserve, and nothing else: setjmp and swapcontext also hide pointers or save the
// signal mask, and a launch switches some hundred thousand times.
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

namespace emulator {

void Fiber::prepare(void (*entry)()) {
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack + kFiberStack - kFiberPrivate);
    *--top = 0;  // where a return address would be: gives the alignment that a called function expects
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    stack_pointer = top;
}

Fiber* new_fiber() {
    void* const stack = mmap(nullptr, kFiberStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE) != 0) {
        std::fprintf(stderr, "cuda emulator: no memory for the stack of a thread\n");
        std::abort();
    }
    Fiber* const fiber = new Fiber;
    fiber->stack = static_cast<char*>(stack);
    return fiber;
}

}  // namespace emulator

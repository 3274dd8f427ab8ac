// Stacks that a thread of the operating system can switch between. x86-64 only, as MXNet's wheel is.
#pragma once

#include <cstddef>
#include <vector>

namespace emulator {

constexpr size_t kFiberStack = 64 << 10;
constexpr size_t kFiberPrivate = 64;  // of it, at its top: for values that belong to the fiber

struct Fiber {
    char* stack = nullptr;  // its lowest address; the page there is not accessible
    void* stack_pointer = nullptr;

    void* private_values() const { return stack + kFiberStack - kFiberPrivate; }
    void prepare(void (*entry)());  // the next switch_to starts `entry`, which must not return
    bool owns(const void* pointer) const {
        const char* const address = static_cast<const char*>(pointer);
        return address >= stack && address < stack + kFiberStack;
    }
};

Fiber* new_fiber();

// Saves where the caller is in *save and goes on at `load`.
extern "C" void emulator_switch(void** save, void* load);

}  // namespace emulator

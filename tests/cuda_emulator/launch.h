// Runs the blocks of one launch, the threads of a block in turn, each on a stack of its own.
#pragma once

#include <string>

#include "errors.h"

// What a compiled source exports, an array that ends with a null name; shim.h makes the entries.
struct EmulatedKernel {
    const char* name;
    unsigned parameters;
    const unsigned* sizes;       // of each parameter, in bytes
    void (*run)(void** values);  // calls the kernel
};

namespace emulator {

struct Dimensions {
    unsigned x, y, z;
};

struct Launch {
    const EmulatedKernel* kernel;
    std::string name;  // for messages
    Dimensions grid, block;
    int device;
    void** arguments;
};

void run(const Launch& launch);

}  // namespace emulator

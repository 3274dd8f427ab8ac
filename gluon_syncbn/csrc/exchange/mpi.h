// MPI's library, called without the interpreter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace syncbn {

// Its functions and handles, as mpi4py knows them. A handle is a number or a pointer. A function gets either in the
// register of a pointer, and reads the part that it needs.
struct Mpi {
    using Handle = intptr_t;
    // Memory for an operation, of any MPI. Stays where it is as long as MPI uses it.
    struct alignas(std::max_align_t) Request {
        char memory[16] = {};
    };
    // The order is that of exchange/mpi.py.
    int (*send)(const void* from, int count, Handle type, int to, int tag, Handle communicator, Request* request);
    int (*probe)(int from, int tag, Handle communicator, int* found, void* message, void* status);
    int (*receive)(void* to, int count, Handle type, void* message, Request* request);
    int (*count)(const void* status, Handle type, int* count);
    int (*test)(Request* request, int* done, void* status);
    int (*all_reduce)(const void* from, void* to, int count, Handle type, Handle add, Handle communicator,
                      Request* request);
    int (*duplicate)(Handle communicator, Handle* made, Request* request);
    void* in_place;
    int64_t any_rank, any_tag;
    Handle float32, float64, add;
    Handle communicator;  // of all ranks; the package's own

    bool has_ended(Request* request) const {
        alignas(std::max_align_t) char status[256];
        int ended = 0;
        check(test(request, &ended, status));
        return ended != 0;
    }
    static void check(int status) {
        if (status != 0) throw std::runtime_error("MPI reports error " + std::to_string(status));
    }
};

}  // namespace syncbn

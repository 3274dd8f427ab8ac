// Carries vectors between machines by MPI's library, without the interpreter. Each vector is a message with its label,
// because collectives of MPI need one order in all processes, and layers have none. See "Between processes" in
// docs/architecture.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exchange/mailbox.h"

namespace syncbn {

// MPI's library: its functions and handles, as mpi4py knows them. A handle is a number or a pointer. A function gets
// either in the register of a pointer, and reads the part that it needs.
struct Mpi {
    using Handle = intptr_t;
    // The order is that of exchange/mpi.py.
    int (*send)(const void* from, int count, Handle type, int to, int tag, Handle communicator, void* request);
    int (*probe)(int from, int tag, Handle communicator, int* found, void* message, void* status);
    int (*receive)(void* to, int count, Handle type, void* message, void* request);
    int (*count)(const void* status, Handle type, int* count);
    int (*test)(void* request, int* done, void* status);
    int (*all_reduce)(const void* from, void* to, int count, Handle type, Handle add, Handle communicator,
                      void* request);
    void* in_place;
    int64_t any_rank, any_tag;
    Handle float32, float64, add;
    Handle communicator;  // of all
    Handle leaders;       // of the leaders of machines; 0 in others

    // Memory for an operation, of any MPI. Stays where it is as long as MPI uses it.
    struct alignas(std::max_align_t) Request {
        char memory[16] = {};
    };
    bool has_ended(Request* request) const;
    static void check(int status);
};

// For the processes of the job. The communicator must carry nothing else.
std::unique_ptr<Mailbox> mailbox(const Mpi& mpi, size_t rank, size_t ranks);

}  // namespace syncbn

// What becomes of what replicas hand in: inside the process, or through the hook that reaches further.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "types.h"

namespace syncbn {

// Moments are merged into those of all their values, gradients are added, or each replica's vector is put beside those
// of the others.
enum class Reduction : int { kMerge = 0, kAdd = 1, kGather = 2 };

// Where sums are made, and how far they reach: memory of the process, where GPUs have NCCL if they can; a KVStore over the
// contexts of the process, which adds the arrays of GPUs where they are; one over processes; NCCL and nothing else; memory of
// the host and nothing else.
enum class Reach : int { kMemory = 0, kContexts = 1, kProcesses = 2, kNccl = 3, kHost = 4 };

// What replicas handed in, put together.
struct Total {
    Vector values;
    size_t first = 0;  // of `values` that are of this process
    int64_t key = 0;   // of the layer, the same in every process
};

// Which handing-in this is, the same in every process but for the layer.
struct Ticket {
    int64_t layer, node, call, phase;
};

// What leaves shared memory: a reduction over the rows of all processes; to merge and to add there is a row for each
// context, to gather one for the process. Or what processes ask each other, see meeting/turn.h. Called by one thread per
// phase, of which there may be several at once. Returns 0 and leaves the total in `out`, or writes the reason into `error`.
using Hook = int (*)(const Ticket* ticket, int reduction, int64_t rows, int64_t length,
                     const double* values,  // [rows][length]
                     Total* out, char* error, int64_t error_size);

// What one replica handed in.
struct Part {
    size_t context;  // its number in the order of the contexts
    size_t rank;     // in the order of the replicas
    const Vector* values;
};

// What a replica on a GPU hands in where it is: `length` numbers, which are on their way in `stream`, and where those of all
// replicas shall come, side by side in their order. A KVStore can only add: for it the numbers are those of all replicas, zero
// but for the replica's own, and there already; what shall come is their sum.
struct OnDevice {
    int device;
    void* stream;
    const double* own;
    double* gathered;
    int64_t length;
};

// Makes that happen, called once per phase by the last to arrive, with the parts in the order of the replicas and what they
// say of their slots, side by side. Returns what those of all processes say, and where those of this one begin.
using Collective = std::function<Total(const std::vector<OnDevice>& parts, Vector counts, const Ticket& ticket)>;

// What the hook says. Throws std::runtime_error with its reason.
Total through(Hook hook, const Ticket& ticket, int reduction, const Vector& rows, size_t count);

// The sum of what the parts hand in, to each of them, by the hook. Throws std::runtime_error with its reason.
void add_on_devices(const std::vector<OnDevice>& parts, const Ticket& ticket, Hook hook);

// All parts put together, in the order of the replicas, never in the order of arrival: so the bits of the result do not
// depend on who came first. Throws std::runtime_error with the hook's reason.
Total reduce(Reduction reduction, std::vector<Part> parts, size_t contexts, int64_t channels, const Ticket& ticket,
             Reach reach, Hook hook);

}  // namespace syncbn

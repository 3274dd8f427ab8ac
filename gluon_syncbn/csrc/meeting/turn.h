// What processes agree on before their GPUs hand each other anything: that they can, and the order of their collectives.
// Statistics stay on the devices; what goes from host to host is who takes part, with how much, and when it is their turn.
//
//     process 0            rank 0            process 1        NCCL needs all processes to post their collectives in one
//      ready ───────────►  counts  ◄──────────── ready        order, and branches of a graph that run side by side come in
//        ◄── number 7 ──── all here ─── number 7 ──►          any. So a collective gets a number when all have said that
//      posts 7 after 6                    posts 7 after 6     they are ready, and is posted in the order of the numbers.
#pragma once

#include <string>
#include <vector>

#include "meeting/reduction.h"

namespace syncbn {

struct Turn {
    int64_t channel = 0;  // the agreements of a KVStore, which are numbered for themselves
    int64_t number = -1;  // of the collective, from 0, the same everywhere; -1 where it stays within the process
    int64_t clique = 0;   // which set of GPUs it is, the same everywhere
    size_t world = 0;     // how many they are
    size_t first = 0;     // of this process
    std::string id;       // that of the new communicator, where this is its first collective
    Vector counts;        // [world][slots]: what each replica says of its slots
    int64_t key = 0;      // of the layer, the same in every process
};

// How many replicas of all processes hand each other their statistics on GPUs; 0 where they do so over the host. The
// first question for a layer waits for the other processes. All three throw std::runtime_error with the hook's reason.
int64_t spread_of(const Ticket& ticket, Hook hook);

// This process is ready: `parts` are those of its replicas, `counts` [parts][slots]. Waits until all are.
Turn turn_of(const Ticket& ticket, const std::vector<OnDevice>& parts, const Vector& counts, Hook hook);

// Throws where another process has said that it has failed.
void look_out(const Ticket& ticket, Hook hook);

}  // namespace syncbn

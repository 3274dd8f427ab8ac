// Runs collectives of NCCL: every replica's contribution reaches every device, without the host. A set of devices has
// one communicator, made at its first use. Only this file posts to it, so a Trainer's KVStore or Horovod cannot come in
// between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace syncbn {
namespace cuda {

// The result on each device, with the same bits: the vectors of all devices, side by side in their order, or their sum.
// The last one also places parts side by side, in bytes; the parts may differ in length.
enum class Collective { kAllGather, kAllReduce, kAllGatherBytes };

struct Operation {
    Collective what;
    std::vector<size_t> bytes = {};  // of each device of the clique, for `kAllGatherBytes`
};

// The contribution of a replica on its GPU: `length` numbers, which `stream` computes. The collective writes its result
// to `gathered`.
struct OnDevice {
    int device;
    void* stream;
    const double* own;
    double* gathered;
    int64_t length;
};

// A set of GPUs of several processes.
struct Clique {
    int64_t channel = -1, number = 0;  // the same in every process; -1: the devices of this process alone
    size_t world = 0, first = 0;       // its size, and the rank of this process's first device
    std::string id;                    // of its communicator, if this is its first collective
};

// Why the libraries of this process cannot run collectives; empty if they can.
std::string why_no_collective();

// Runs a collective over these devices and the other processes' devices in the clique, in this order. Posts it on all
// streams in one group under one lock, so that all devices have the same order of collectives. Returns when all devices
// of this process have posted. The layer of this name waits at most `timeout` seconds, and
// ends earlier if there are more interrupts than before. Throws Failure.
void post_collective(const Operation& operation, const std::vector<OnDevice>& parts, const Clique& clique,
                     const std::string& layer, double timeout, int64_t interrupts_before);

// Returns the id for the first collective of a new clique. Throws Failure.
std::string new_unique_id();

// Ends hanging collectives on these devices. The next collective on any of them makes new communicators.
void abort_collectives(int device);

void close_collectives();

}  // namespace cuda
}  // namespace syncbn

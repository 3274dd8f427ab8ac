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
    std::vector<size_t> bytes = {};  // of each device, for `kAllGatherBytes`
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

// Why the libraries of this process cannot run collectives; empty if they can.
std::string why_no_collective();

// Runs a collective over these devices, in this order. Posts it on all streams in one group under one lock, so that all
// devices have the same order of collectives. Returns when all have posted. The layer of this name waits at most
// `timeout` seconds, and ends earlier if there are more interrupts than before. Throws Failure.
void post_collective(const Operation& operation, const std::vector<OnDevice>& parts, const std::string& layer,
                     double timeout, int64_t interrupts_before);

// Ends hanging collectives on these devices. The next collective on any of them makes new communicators.
void abort_collectives(int device);

void close_collectives();

}  // namespace cuda
}  // namespace syncbn

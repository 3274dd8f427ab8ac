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

// The contribution of a replica on its GPU: `length` numbers, which `stream` computes. The collective writes those of
// all devices to `gathered`, side by side in their order.
struct OnDevice {
    int device;
    void* stream;
    const double* own;
    double* gathered;
    int64_t length;
};

// Why the libraries of this process cannot run collectives; empty if they can.
std::string why_no_collective();

// Runs an all-gather over these devices, in this order. Posts it on all streams in one group under one lock, so that all
// devices have the same order of collectives. Returns when all have posted. The layer of this name waits at most
// `timeout` seconds, and ends earlier if there are more interrupts than before. Throws Failure.
void post_allgather(const std::vector<OnDevice>& parts, const std::string& layer, double timeout,
                    int64_t interrupts_before);

// Ends hanging collectives on these devices. The next collective on any of them makes new communicators.
void abort_collectives(int device);

void close_collectives();

}  // namespace cuda
}  // namespace syncbn

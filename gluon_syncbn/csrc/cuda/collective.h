// Runs collectives of NCCL: every replica's contribution reaches every device, without the host. The devices of a meeting
// have one communicator, made at its first use. Only this file posts to it, so a Trainer's KVStore or Horovod cannot come in
// between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace syncbn::cuda {

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
// devices have the same order of collectives. Returns whether all have posted: that may take NCCL long, at first, and only
// who `waits` stays, at most `timeout` seconds, for the layer of this name. Throws Failure.
bool post_allgather(const std::vector<OnDevice>& parts, const std::string& layer, double timeout, bool waits);

// Ends hanging collectives on the device, and the next collective makes new communicators; or logs that NCCL does not let
// it within a second.
void abort_collectives(int device);

void close_collectives();

}  // namespace syncbn::cuda

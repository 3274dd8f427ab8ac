// NCCL: what every replica hands in reaches every device, without the host. A set of devices has one communicator, made at
// its first use, that nobody else posts to: a Trainer's KVStore or Horovod cannot come in between.
#pragma once

#include <string>
#include <vector>

#include "meeting/reduction.h"

namespace syncbn {
namespace cuda {

// Why the libraries of this process cannot do it; empty where they can.
std::string why_no_collective();

// One all-gather over these devices, in this order: posted on their streams in one group under one lock, so that no two
// devices have two of them in another order. Returns when all are posted. Throws Failure.
void all_gather(const std::vector<OnDevice>& parts, double timeout);

// Ends what hangs on these devices. The next collective among any of them makes communicators anew.
void abort_collectives(int device);

void close_collectives();

}  // namespace cuda
}  // namespace syncbn

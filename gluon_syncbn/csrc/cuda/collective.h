// NCCL: what every replica hands in reaches every device, without the host. A set of devices has one communicator, made at
// its first use, that nobody else posts to: a Trainer's KVStore or Horovod cannot come in between.
#pragma once

#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "meeting/meeting.h"

namespace syncbn {
namespace cuda {

// Why the libraries of this process cannot do it; empty where they can.
std::string why_no_collective();

// One all-gather over these devices and, where it is their turn, over those of the other processes, in this order: posted on
// their streams in one group under one lock, so that no two devices have two of them in another order. Waits until the turns
// before it are posted. Returns when all of this process are posted. Throws Failure.
void all_gather(const std::vector<OnDevice>& parts, const Turn& turn, const Terms& terms);

// With which the first collective of a new set of processes is numbered. Throws Failure.
std::string new_unique_id();

// Ends what hangs on these devices. The next collective among any of them makes communicators anew.
void abort_collectives(int device);

void close_collectives();

}  // namespace cuda
}  // namespace syncbn

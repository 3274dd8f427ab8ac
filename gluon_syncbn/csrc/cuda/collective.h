// NCCL: what every replica contributes reaches every device, without the host. A set of devices has one communicator, made at
// its first use, that nobody else posts to: a Trainer's KVStore or Horovod cannot come in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace syncbn {
namespace cuda {

// What the devices of a collective get: the vectors of all, side by side in their order, or the sum of these, with the same
// bits on each device.
enum class Collective { kAllGather, kAllReduce };

// What a replica on a GPU contributes where it is: `length` numbers, which are on their way in `stream`. `gathered` is where
// what the collective gives comes to lie.
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
    size_t world = 0, first = 0;       // how many they are, and which of them is the first one of this process
    std::string id;                    // of its communicator, where this is its first collective
};

// Why the libraries of this process cannot do it; empty where they can.
std::string why_no_collective();

// A collective over these devices and those that other processes have in the clique, in this order: posted on their streams
// in one group under one lock, so that no two devices have two of them in another order. Returns when all of this process are
// posted. For the layer of this name, which waits so many seconds. Throws Failure.
void post_collective(Collective what, const std::vector<OnDevice>& parts, const Clique& clique,
                     const std::string& layer, double timeout);

// With which the first collective of a new clique begins. Throws Failure.
std::string new_unique_id();

// Ends what hangs on these devices. The next collective among any of them makes communicators anew.
void abort_collectives(int device);

void close_collectives();

}  // namespace cuda
}  // namespace syncbn

// Runs collectives of NCCL: every replica's contribution reaches every device, without the host. The devices of a meeting
// have one communicator, made at its first use, and so have the gradients of a Trainer. Only this file posts to them, so a
// Trainer's KVStore or Horovod cannot come in between.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "lock.h"
#include "types.h"

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
// devices have the same order of collectives. Returns whether all have posted: that may take NCCL long, at first, and only
// who `waits` stays, at most `timeout` seconds, for the layer of this name. Throws Failure.
bool post_allgather(const std::vector<OnDevice>& parts, const std::string& layer, double timeout, bool waits);

// Ends hanging collectives on these devices. The next collective on any of them makes new communicators.
void abort_collectives(int device);

void close_collectives();

// What NCCL calls a unique id: it names a communicator in all processes that create it.
std::string new_id();

// Sums arrays over the GPUs of several processes, in buckets, so that many small arrays need few collectives. NCCL adds
// in an order of its own, which depends on the GPUs alone: all of them have the same bits in every run. Belongs to one
// thread, which never blocks in it.
//
// No order of statistics and gradients can deadlock:
//   - A process begins a sum only if the arrays of all processes are on their GPUs (see exchange/sums.h). So no GPU waits
//     in a collective for a backward that may itself wait for statistics, nor for memory.
//   - All processes begin the same sums in the same order, from one thread each. The next one begins when the last one has
//     been posted on all GPUs of the process.
//   - Statistics of these processes go over the host. Those of a layer that stays in one process go over NCCL, on another
//     communicator and in streams of their own. They need only their own process, and what runs there besides ends: a
//     layer's kernels, and a sum, which all processes have begun. NCCL's kernels take few multiprocessors, so both run.
class AllReduce {
  public:
    // The values from `begin` of an array, on each device, and their place in a bucket: `offset`, in bytes.
    struct Part {
        Type type;
        std::vector<void*> values;
        size_t begin, count, offset;
    };

    // Over these devices, the first of which has the place `first` among all `ranks`; `bucket`: bytes. It has to last as
    // long as the process. GPUs connect in the first sum.
    AllReduce(std::vector<int> devices, std::string id, int first, int ranks, size_t bucket);
    size_t bucket() const { return bucket_; }
    // Whether the next sum can begin. Throws Failure if NCCL has failed.
    bool ready();
    // Begins a sum in place, of `bytes` in a bucket, in float64 or float32.
    void begin(Type wide, size_t bytes, std::vector<Part> parts);
    // Whether all sums have ended. Throws Failure if NCCL or a GPU has failed.
    bool idle();
    // Ends what hangs. No sum may begin any more.
    void abort() noexcept;
    void close();

  private:
    struct Member;
    void connect();
    void post(Type wide, size_t bytes, const std::vector<Part>& parts);

    const std::vector<int> devices_;
    const std::string id_;
    const int first_, ranks_;
    const size_t bucket_;
    std::vector<std::unique_ptr<Member>> members_;
    std::atomic<bool> connected_{false}, aborted_{false};
    Mutex mutex_;                // guards the next one: the process may come to its end meanwhile
    std::future<void> posting_;  // of the last sum
};

}  // namespace cuda
}  // namespace syncbn

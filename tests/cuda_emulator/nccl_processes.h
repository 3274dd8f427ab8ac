// NCCL between processes: communicators that are made of a unique id. Their ranks meet in memory that they share, in a file
// of the system's own; a rank is alone with its device's memory, so that what it gives passes through there. As within a
// process a collective waits until all ranks have come, and an error is one at all of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace emulator {

using Add = void (*)(int type, void* total, const void* more, size_t count);

// What a rank brings to a collective: ncclAllGather, ncclAllReduce where there is an `add`, or ncclBroadcast where there
// is a root.
struct Share {
    const char* what;
    const void* from;
    void* to;
    size_t count, bytes;  // numbers, and what they take
    int type;
    Add add;
    int root;  // or -1
};

class Member {
  public:
    // Waits for all others, no longer than CUDA_EMULATOR_TIMEOUT. `problem` says why there is none; a rank or a device that
    // is there twice is one.
    static std::shared_ptr<Member> join(const std::string& id, int ranks, int rank, int device, std::string* problem);
    ~Member();

    const int ranks, rank, device;

    // On the thread of a stream: the collective with this number, in their order. Errors go to the device.
    void come(uint64_t number, const Share& share);
    // This rank waits no longer, and comes no more.
    void abort() { aborted_ = true; }

  private:
    struct Place;
    Member(int ranks, int rank, int device, Place* place) : ranks(ranks), rank(rank), device(device), place_(place) {}
    void break_off(const std::string& text);
    bool wait(const char* call, const std::atomic<uint64_t>& what, uint64_t least, int other);

    Place* const place_;
    std::atomic<bool> aborted_{false};
};

std::string new_unique_id();

// Set by cuda_emulator_lose: a device whose ranks do not come.
extern std::atomic<int> lost;

}  // namespace emulator

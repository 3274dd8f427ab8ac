// NCCL's all-reduce between processes: communicators that are made of a unique id. Their ranks meet in memory that they
// share. An error is one at all of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace emulator {

using Add = void (*)(int type, void* total, const void* more, size_t count);

class Member {
  public:
    // Waits for all others, no longer than CUDA_EMULATOR_TIMEOUT. Null, with a report, if they do not come, or if a rank or
    // a device is there twice.
    static std::shared_ptr<Member> join(const std::string& id, int ranks, int rank, int device);
    ~Member();

    const int ranks, rank, device;

    // On the thread of a stream: the sum with this number, in the order of the ranks.
    void sum(uint64_t number, const void* from, void* to, size_t count, size_t bytes, int type, Add add);
    // This rank waits no longer, and comes no more.
    void abort() { aborted_ = true; }

  private:
    struct Place;
    Member(int ranks, int rank, int device, Place* place) : ranks(ranks), rank(rank), device(device), place_(place) {}
    void break_off(const std::string& text);
    bool wait(const std::atomic<uint64_t>& what, uint64_t least, int other);

    Place* const place_;
    std::atomic<bool> aborted_{false};
};

std::string new_unique_id();

// Set by cuda_emulator_lose: a device whose ranks do not come.
extern std::atomic<int> lost;

}  // namespace emulator

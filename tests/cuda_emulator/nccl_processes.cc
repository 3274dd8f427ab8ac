#include "nccl_processes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "device.h"
#include "memory.h"

namespace emulator {

std::atomic<int> lost{-1};

namespace {

constexpr size_t kRanks = 16;
constexpr size_t kMost = size_t(8) << 20;  // bytes that a rank gives; pages that nobody touches take no memory

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
std::string path_of(const std::string& id) { return "/dev/shm/cuda_emulator_nccl_" + id; }

}  // namespace

// What the ranks share; all zero at first.
struct Member::Place {
    struct Rank {
        std::atomic<uint64_t> joined, arrived, done;  // collectives: those that it has come to, and those it has left
        int64_t process;
        int device;
        uint64_t count;
        int type;
        bool adds;
        int root;
        char data[kMost];
    };
    std::atomic<int> ranks, joined;
    std::atomic<bool> twice, broken;
    Rank all[kRanks];
};

std::string new_unique_id() {
    std::random_device random;
    return format("%08x%08x", random(), random());
}

std::shared_ptr<Member> Member::join(const std::string& id, int ranks, int rank, int device, std::string* problem) {
    const auto fail = [&](const std::string& why) {
        *problem = why;
        return nullptr;
    };
    if (ranks < 1 || ranks > static_cast<int>(kRanks) || rank < 0 || rank >= ranks)
        return fail(format("rank %d of %d", rank, ranks));
    const int file = open(path_of(id).c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Place)) != 0) return fail("no memory to share");
    void* const memory = mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return fail("no memory to share");
    Place* const place = static_cast<Place*>(memory);
    std::shared_ptr<Member> member(new Member(ranks, rank, device, place));

    int expected = 0;
    if (!place->ranks.compare_exchange_strong(expected, ranks) && expected != ranks)
        return fail(format("%d ranks here, %d elsewhere", ranks, expected));
    Place::Rank& own = place->all[rank];
    own.process = getpid();
    own.device = device;
    if (own.joined.exchange(1) != 0) place->twice = true;
    ++place->joined;
    const double end = now() + static_cast<double>(setting("CUDA_EMULATOR_TIMEOUT", 30));
    while (place->joined < ranks && !place->twice) {
        if (now() > end) {
            unlink(path_of(id).c_str());
            return fail(format("rank %d has waited in vain for the others", rank));
        }
        pause();
    }
    unlink(path_of(id).c_str());  // all have it open
    for (int i = 0; i < ranks; ++i)
        for (int j = 0; j < i; ++j)
            if (place->all[i].process == place->all[j].process && place->all[i].device == place->all[j].device)
                place->twice = true;
    if (place->twice) return fail("a rank or a device is there twice");
    return member;
}

Member::~Member() { munmap(place_, sizeof(Place)); }

void Member::break_off(const std::string& text) {
    place_->broken = true;
    report(device, kLaunchFailure, text);
}

// Whether another rank has come so far; not where this one shall wait no longer.
bool Member::wait(const char* call, const std::atomic<uint64_t>& what, uint64_t least, int other) {
    const long seconds = setting("CUDA_EMULATOR_TIMEOUT", 30);
    const double end = now() + static_cast<double>(seconds);
    while (what < least) {
        if (aborted_) return false;
        if (place_->broken) {
            report(device, kLaunchFailure, "NCCL: a collective of a communicator that has failed");
            return false;
        }
        if (now() > end) {
            break_off(format("NCCL: %s between processes, rank %d: after %ld s, rank %d has not come", call, rank,
                             seconds, other));
            return false;
        }
        pause();
    }
    return true;
}

void Member::come(uint64_t number, const Share& share) {
    Place::Rank* const all = place_->all;
    const bool gathers = share.add == nullptr && share.root < 0, gives = share.root < 0 || share.root == rank;
    const size_t written = gathers ? static_cast<size_t>(ranks) * share.bytes : share.bytes;
    // A kernel that is aborted leaves anything in its memory: nobody is told that it was never written.
    const auto end = [&] {
        if (aborted_) problem(share.to, written, device, kWrite);
    };
    while (lost == device && !aborted_) pause();
    if (aborted_) return end();
    if (share.bytes > kMost) return break_off(format("NCCL: the emulator passes on at most %zu bytes", kMost));
    const auto wrong = [&](const void* pointer, size_t bytes, Access access) {
        if (device_of(pointer) < 0) return format("%p is not device memory", pointer);
        return problem(pointer, bytes, device, access);
    };
    std::string found = gives ? wrong(share.from, share.bytes, kRead) : "";
    if (found.empty()) found = wrong(share.to, written, kWrite);
    if (!found.empty()) return break_off(format("NCCL: %s, rank %d: %s", share.what, rank, found.c_str()));
    for (int i = 0; i < ranks;
         ++i)  // this rank's own: its streams take turns; the others: they have read what was there
        if (!wait(share.what, all[i].done, number, i)) return end();
    Place::Rank& own = all[rank];
    own.count = share.count;
    own.type = share.type;
    own.adds = share.add != nullptr;
    own.root = share.root;
    if (gives) std::memcpy(own.data, share.from, share.bytes);
    own.arrived = number + 1;
    const auto text = [](const Place::Rank& one) {
        const std::string what = one.root >= 0 ? format("ncclBroadcast from rank %d", one.root)
                                 : one.adds    ? "ncclAllReduce"
                                               : "ncclAllGather";
        return format("%s of %zu of type %d", what.c_str(), static_cast<size_t>(one.count), one.type);
    };
    for (int i = 0; i < ranks; ++i) {
        if (!wait(share.what, all[i].arrived, number + 1, i)) return end();
        if (all[i].count != own.count || all[i].type != own.type || all[i].adds != own.adds || all[i].root != own.root)
            return break_off(
                format("NCCL: rank %d calls %s, rank %d %s", rank, text(own).c_str(), i, text(all[i]).c_str()));
    }
    // Sums are added in the order of the ranks, so that all ranks have the same bits.
    char* const to = static_cast<char*>(share.to);
    for (int i = 0; i < ranks; ++i) {
        if (share.root >= 0) {
            if (i == share.root) std::memcpy(to, all[i].data, share.bytes);
        } else if (share.add != nullptr && i > 0)
            share.add(share.type, to, all[i].data, share.count);
        else
            std::memcpy(to + static_cast<size_t>(i) * share.bytes, all[i].data, share.bytes);
    }
    own.done = number + 1;
}

}  // namespace emulator

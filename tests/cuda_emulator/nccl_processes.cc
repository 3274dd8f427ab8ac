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
        std::atomic<uint64_t> joined, arrived, done;  // sums: those that it has come to, and those it has left
        int64_t process;
        int device, type;
        uint64_t count;
        char data[kMost];
    };
    std::atomic<int> joined;
    std::atomic<bool> twice, broken;
    Rank all[kRanks];
};

std::string new_unique_id() {
    std::random_device random;
    return format("%08x%08x", random(), random());
}

std::shared_ptr<Member> Member::join(const std::string& id, int ranks, int rank, int device) {
    const auto fail = [&](const std::string& why) {
        report(device, kLaunchFailure, "ncclCommInitRank: " + why);
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
    report(device, kLaunchFailure, "NCCL: ncclAllReduce between processes, " + text);
}

// Whether another rank has come so far; not where this one shall wait no longer.
bool Member::wait(const std::atomic<uint64_t>& what, uint64_t least, int other) {
    const long seconds = setting("CUDA_EMULATOR_TIMEOUT", 30);
    const double end = now() + static_cast<double>(seconds);
    while (what < least) {
        if (aborted_) return false;
        if (place_->broken) {
            report(device, kLaunchFailure, "NCCL: a collective of a communicator that has failed");
            return false;
        }
        if (now() > end) {
            break_off(format("rank %d: after %ld s, rank %d has not come", rank, seconds, other));
            return false;
        }
        pause();
    }
    return true;
}

void Member::sum(uint64_t number, const void* from, void* to, size_t count, size_t bytes, int type, Add add) {
    Place::Rank* const all = place_->all;
    // A kernel that is aborted leaves anything in its memory: nobody is told that it was never written.
    const auto end = [&] {
        if (aborted_) problem(to, bytes, device, kWrite);
    };
    while (lost == device && !aborted_) pause();
    if (aborted_) return end();
    if (bytes > kMost) return break_off(format("of %zu bytes: the emulator passes on at most %zu", bytes, kMost));
    const auto wrong = [&](const void* pointer, Access access) {
        if (device_of(pointer) < 0) return format("%p is not device memory", pointer);
        return problem(pointer, bytes, device, access);
    };
    std::string found = wrong(from, kRead);
    if (found.empty()) found = wrong(to, kWrite);
    if (!found.empty()) return break_off(format("rank %d: %s", rank, found.c_str()));
    for (int i = 0; i < ranks;
         ++i)  // this rank's own: its streams take turns; the others: they have read what was there
        if (!wait(all[i].done, number, i)) return end();
    Place::Rank& own = all[rank];
    own.count = count;
    own.type = type;
    std::memcpy(own.data, from, bytes);
    own.arrived = number + 1;
    for (int i = 0; i < ranks; ++i) {
        if (!wait(all[i].arrived, number + 1, i)) return end();
        if (all[i].count != count || all[i].type != type)
            return break_off(format("rank %d brings %zu values of type %d, rank %d %zu of %d", rank, count, type, i,
                                    static_cast<size_t>(all[i].count), all[i].type));
    }
    std::memcpy(to, all[0].data, bytes);
    for (int i = 1; i < ranks; ++i) add(type, to, all[i].data, count);
    own.done = number + 1;
}

}  // namespace emulator

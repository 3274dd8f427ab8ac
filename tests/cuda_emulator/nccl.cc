// NCCL for the devices of one process. A collective runs on the streams' threads, where each waits until all of its
// communicator have come, so that what would hang on GPUs waits here too (and is reported after CUDA_EMULATOR_TIMEOUT
// seconds, 30).
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "memory.h"
#include "streams.h"

using namespace emulator;

namespace {

std::atomic<bool> held{false};  // whoever makes a communicator
std::atomic<int> lost{-1};      // a device whose ranks do not come

enum Result : int { kGood = 0, kInvalidArgument = 4, kInvalidUsage = 5 };
constexpr int kFloat32 = 7, kFloat64 = 8;  // of ncclDataType_t; the package asks for no other

// An all-gather: what the ranks have to agree on.
struct Call {
    size_t count;
    int type;

    size_t bytes() const { return count * (type == kFloat64 ? sizeof(double) : sizeof(float)); }
    std::string text() const {
        return format("ncclAllGather of %zu %s", count, type == kFloat64 ? "float64" : "float32");
    }
    bool operator==(const Call& other) const { return count == other.count && type == other.type; }
};

// ---- meetings --------------------------------------------------------------------------------------------------

constexpr size_t kRanks = 16;
constexpr size_t kMost = size_t(8) << 20;  // bytes that a rank gives; pages that nobody touches take no memory

struct Rank {
    std::atomic<uint64_t> arrived, done;  // collectives that it has come to, and that it has left
    Call call;
    char data[kMost];
};
// What the ranks share; all zero at first.
struct Place {
    std::atomic<bool> broken;  // after a failure the ranks no longer agree on which call is which
    Rank all[kRanks];
};

// Null where there is no memory.
std::shared_ptr<Place> new_place() {
    constexpr int kFlags = MAP_NORESERVE | MAP_PRIVATE | MAP_ANONYMOUS;
    void* const memory = mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    return {static_cast<Place*>(memory), [](Place* place) { munmap(place, sizeof(Place)); }};
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

// A rank of it.
class Communicator {
  public:
    Communicator(std::shared_ptr<Place> place, int ranks, int rank, int device)
        : ranks(ranks), rank(rank), device(device), place_(std::move(place)) {}

    // On the thread of a stream: the collective with this number.
    void perform(uint64_t number, const Call& call, const void* from, void* to);

    const int ranks, rank, device;
    uint64_t calls = 0;
    std::atomic<bool> aborted{false};  // this rank waits no longer, and comes no more

  private:
    void break_off(const std::string& text) {
        place_->broken = true;
        report(device, kLaunchFailure, "NCCL: " + text);
    }
    bool wait(std::atomic<uint64_t> Rank::* what, uint64_t least, int other, uint64_t number, const Call& call);

    const std::shared_ptr<Place> place_;
};
using Handle = std::shared_ptr<Communicator>;

// Whether another rank has come so far; not where this one shall wait no longer.
bool Communicator::wait(std::atomic<uint64_t> Rank::* what, uint64_t least, int other, uint64_t number,
                        const Call& call) {
    const long seconds = setting("CUDA_EMULATOR_TIMEOUT", 30);
    const double end = now() + static_cast<double>(seconds);
    for (; place_->all[other].*what < least; pause()) {
        if (aborted) return false;
        if (place_->broken) {
            report(device, kLaunchFailure, "NCCL: a collective of a communicator that has failed");
            return false;
        }
        if (now() < end) continue;
        break_off(format("%s, collective %llu of its communicator: after %ld s, ranks %d have not come",
                         call.text().c_str(), static_cast<unsigned long long>(number), seconds, other));
        return false;
    }
    return true;
}

void Communicator::perform(uint64_t number, const Call& call, const void* from, void* to) {
    const size_t bytes = call.bytes();
    const size_t writes = ranks * bytes;
    const auto is_wrong = [&](const void* pointer, size_t size) {
        const bool of_a_device = size == 0 || device_of(pointer) >= 0;
        const std::string found = of_a_device ? problem(pointer, size, device) : "not device memory";
        if (!found.empty()) break_off(format("ncclAllGather, rank %d: ", rank) + found);
        return !found.empty();
    };
    while (lost == device && !aborted) pause();
    if (aborted) return;
    if (bytes > kMost) return break_off(format("%zu bytes: the emulator passes on at most %zu", bytes, kMost));
    if (is_wrong(from, bytes)) return;
    for (int i = 0; i < ranks; ++i)  // the others have read what was there; the streams of this rank take turns
        if (!wait(&Rank::done, number, i, number, call)) return;
    Rank* const all = place_->all;
    all[rank].call = call;
    std::memcpy(all[rank].data, from, bytes);
    all[rank].arrived = number + 1;
    for (int i = 0; i < ranks; ++i) {
        if (!wait(&Rank::arrived, number + 1, i, number, call)) return;
        if (!(all[i].call == call))
            return break_off(
                format("rank %d calls %s, rank %d calls %s", rank, call.text().c_str(), i, all[i].call.text().c_str()));
    }
    if (is_wrong(to, writes)) return;
    for (int i = 0; i < ranks; ++i) std::memcpy(static_cast<char*>(to) + i * bytes, all[i].data, bytes);
    all[rank].done = number + 1;
}

// ---- groups: what is called between start and end is enqueued at the end ----------------------------------------

struct Pending {
    Handle communicator;
    Call call;
    const void* from;
    void* to;
    StreamPointer stream;
};
thread_local int depth = 0;
thread_local std::vector<Pending> pending;

void flush() {
    for (const Pending& one : pending) {
        const auto work = [one, number = one.communicator->calls++] {
            one.communicator->perform(number, one.call, one.from, one.to);
        };
        enqueue(one.stream, work, true);
    }
    pending.clear();
}

// MXNet looks at no result of NCCL's: errors go to the device as well.
Result post(const Handle& communicator, const Call& call, const void* from, void* to, void* handle) {
    const StreamPointer stream = find_stream(handle);
    std::string wrong;
    if (!stream)
        wrong = "no such stream";
    else if (device_of(*stream) != communicator->device)
        wrong = format("the stream is of device %d, the communicator of device %d", device_of(*stream),
                       communicator->device);
    else if (call.type != kFloat32 && call.type != kFloat64)
        wrong = format("data type %d is not emulated", call.type);
    if (!wrong.empty()) {
        report(communicator->device, kInvalidValue, "ncclAllGather: " + wrong);
        return kInvalidArgument;
    }
    count(communicator->device, kCollectives);
    pending.push_back({communicator, call, from, to, stream});
    if (depth == 0) flush();
    return kGood;
}

}  // namespace

extern "C" {

// From now on no rank on this device comes to a collective, until its communicator is aborted; -1: all come.
void cuda_emulator_lose(int device) { lost = device; }

// From now on whoever makes a communicator waits, and spins as NCCL's sockets do; 0: until now.
void cuda_emulator_hold_connections(int so) { held = so; }

Result ncclCommInitAll(Handle** out, int count, const int* devices) {
    while (held) std::this_thread::yield();
    const std::shared_ptr<Place> place = new_place();
    std::vector<int> chosen;
    for (int rank = 0; rank < count; ++rank) {
        const int device = devices ? devices[rank] : rank;
        for (const int other : chosen)
            if (other == device) return kInvalidUsage;
        if (device < 0 || device >= device_count() || !place) return kInvalidArgument;
        chosen.push_back(device);
    }
    for (int rank = 0; rank < count; ++rank)
        out[rank] = new Handle(std::make_shared<Communicator>(place, count, rank, chosen[rank]));
    return kGood;
}
Result ncclCommDestroy(Handle* communicator) {
    delete communicator;
    return kGood;
}
// What waits for ranks ends, with whatever is in its memory.
Result ncclCommAbort(Handle* communicator) {
    (*communicator)->aborted = true;
    return ncclCommDestroy(communicator);
}
const char* ncclGetErrorString(Result result) {
    return result == kGood              ? "no error"
           : result == kInvalidArgument ? "invalid argument (run with NCCL_DEBUG=WARN for details)"
           : result == kInvalidUsage    ? "invalid usage (run with NCCL_DEBUG=WARN for details)"
                                        : "unknown result code";
}
Result ncclAllGather(const void* from, void* to, size_t count, int type, Handle* communicator, void* stream) {
    return post(*communicator, {count, type}, from, to, stream);
}
Result ncclGroupStart() {
    ++depth;
    return kGood;
}
Result ncclGroupEnd() {
    if (depth == 0) return kInvalidUsage;
    if (--depth == 0) flush();
    return kGood;
}
}

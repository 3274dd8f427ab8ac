// NCCL's all-gather between the devices of one process. It runs on the streams' threads, where each waits until all of its
// communicator have come, so that what would hang on GPUs hangs here too.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <thread>

#include "emulator.h"

using namespace emulator;

namespace {

std::atomic<bool> held{false};  // whoever makes a communicator, or posts a collective
std::atomic<int> lost{-1};      // a device whose ranks do not come

enum Result : int { kGood = 0, kInvalidArgument = 4 };
constexpr int kFloat64 = 8;  // of ncclDataType_t; the package asks for no other

struct Meeting {
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::map<uint64_t, std::map<int, std::vector<char>>> parts;  // of each collective, by its number and the rank
};
struct Rank {
    const std::shared_ptr<Meeting> meeting;
    const int ranks, rank, device;
    uint64_t calls = 0;
    std::atomic<bool> aborted{false};  // waits no longer, and comes no more
};
using Communicator = std::shared_ptr<Rank>;

// On the thread of a stream: the collective with this number.
void gather(Rank& self, uint64_t number, const void* from, void* to, size_t bytes) {
    std::string wrong = problem(from, bytes, self.device);
    if (wrong.empty()) wrong = problem(to, self.ranks * bytes, self.device);
    if (!wrong.empty()) return static_cast<void>(report(self.device, kIllegalAddress, "ncclAllGather: " + wrong));
    Meeting& meeting = *self.meeting;
    std::unique_lock<std::mutex> lock(meeting.mutex);
    const auto pause = [&] { meeting.changed.wait_for(lock, std::chrono::milliseconds(1)); };
    while (lost == self.device && !self.aborted) pause();
    if (self.aborted) return;
    auto& parts = meeting.parts[number];  // for good: there are few, and small ones
    parts[self.rank].assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    meeting.changed.notify_all();
    while (parts.size() < static_cast<size_t>(self.ranks)) {
        pause();
        if (self.aborted) return;
    }
    for (const auto& [rank, part] : parts) {
        if (part.size() != bytes) report(self.device, kLaunchFailure, "ncclAllGather: sizes differ");
        std::memcpy(static_cast<char*>(to) + rank * bytes, part.data(), std::min(bytes, part.size()));
    }
}

}  // namespace

extern "C" {

// From now on no rank on this device comes to a collective, until its communicator is aborted; -1: all come.
void cuda_emulator_lose(int device) { lost = device; }

// From now on whoever makes a communicator, or has posted a collective, waits, and spins as NCCL's sockets do; 0: until
// now.
void cuda_emulator_hold(int so) { held = so; }

Result ncclCommInitAll(Communicator** out, int count, const int* devices) {
    while (held) std::this_thread::yield();
    const auto meeting = std::make_shared<Meeting>();
    for (int i = 0; i < count; ++i) out[i] = new Communicator(new Rank{meeting, count, i, devices[i]});
    return kGood;
}
Result ncclCommDestroy(Communicator* communicator) {
    delete communicator;
    return kGood;
}
// What waits for ranks ends, with whatever is in its memory.
Result ncclCommAbort(Communicator* communicator) {
    (*communicator)->aborted = true;
    return ncclCommDestroy(communicator);
}
const char* ncclGetErrorString(Result) { return "invalid argument (run with NCCL_DEBUG=WARN for details)"; }
Result ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* communicator, void* handle) {
    const StreamPointer stream = find_stream(handle);
    const Communicator rank = *communicator;
    if (type != kFloat64 || !stream || device_of(*stream) != rank->device) return kInvalidArgument;
    emulator::count(rank->device, kCollectives);
    enqueue(stream, [=, number = rank->calls++] { gather(*rank, number, from, to, count * sizeof(double)); }, true);
    return kGood;
}
Result ncclGroupStart() { return kGood; }
Result ncclGroupEnd() {
    while (held) std::this_thread::yield();
    return kGood;
}
}

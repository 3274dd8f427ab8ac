// NCCL's all-gather between the devices of one process. It runs on the streams' threads, where each waits until all of its
// communicator have come, so that what would hang on GPUs waits here too (and is reported after CUDA_EMULATOR_TIMEOUT
// seconds, 30).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <thread>

#include "emulator.h"

using namespace emulator;

namespace {

std::atomic<bool> held{false};  // whoever makes a communicator
std::atomic<int> lost{-1};      // a device whose ranks do not come

enum Result : int { kGood = 0, kInvalidArgument = 4 };
constexpr int kFloat64 = 8;  // of ncclDataType_t; the package asks for no other

// What the ranks of a communicator have brought to one collective.
struct Gather {
    std::vector<std::vector<char>> parts;
    size_t come = 0, gone = 0;
};
struct Meeting {
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::map<uint64_t, Gather> gathers;  // by number
    bool broken = false;                 // after a failure the ranks no longer agree on which call is which
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
    const char* const limit = std::getenv("CUDA_EMULATOR_TIMEOUT");
    const long seconds = limit ? std::atol(limit) : 30;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    Meeting& meeting = *self.meeting;
    std::unique_lock<std::mutex> lock(meeting.mutex);
    const auto pause = [&] { meeting.changed.wait_for(lock, std::chrono::milliseconds(1)); };
    const auto is_wrong = [&](const std::string& text) {
        if (text.empty()) return false;
        meeting.broken = true;
        report(self.device, kLaunchFailure, format("NCCL: rank %d, ncclAllGather: ", self.rank) + text);
        return true;
    };
    while (lost == self.device && !self.aborted) pause();
    if (self.aborted || is_wrong(problem(from, bytes, self.device))) return;
    Gather& all = meeting.gathers[number];
    all.parts.resize(self.ranks);
    all.parts[self.rank].assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    ++all.come;
    meeting.changed.notify_all();
    for (; all.come < all.parts.size(); pause()) {
        if (self.aborted || (meeting.broken && is_wrong("the communicator has failed"))) return;
        if (std::chrono::steady_clock::now() < end) continue;
        is_wrong(format("after %ld s, %zu of %d ranks have come to collective %llu of the communicator", seconds,
                        all.come, self.ranks, static_cast<unsigned long long>(number)));
        return;
    }
    for (const std::vector<char>& part : all.parts)
        if (part.size() != bytes && is_wrong(format("of %zu bytes, and another rank's %zu", bytes, part.size())))
            return;
    if (is_wrong(problem(to, self.ranks * bytes, self.device))) return;
    for (int i = 0; i < self.ranks; ++i) std::memcpy(static_cast<char*>(to) + i * bytes, all.parts[i].data(), bytes);
    if (++all.gone == all.parts.size()) meeting.gathers.erase(number);
}

}  // namespace

extern "C" {

// From now on no rank on this device comes to a collective, until its communicator is aborted; -1: all come.
void cuda_emulator_lose(int device) { lost = device; }

// From now on whoever makes a communicator waits, and spins as NCCL's sockets do; 0: until now.
void cuda_emulator_hold_connections(int so) { held = so; }

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
    if (type != kFloat64 || !stream || device_of(*stream) != rank->device) {
        report(rank->device, kInvalidValue, "ncclAllGather: of another type, or on a stream of another device");
        return kInvalidArgument;
    }
    emulator::count(rank->device, kCollectives);
    enqueue(stream, [=, number = rank->calls++] { gather(*rank, number, from, to, count * sizeof(double)); }, true);
    return kGood;
}
Result ncclGroupStart() { return kGood; }
Result ncclGroupEnd() { return kGood; }
}

// NCCL for the devices of one process; between processes: nccl_processes.h. A collective is a meeting: it runs on the
// streams' threads, where each rank waits until all of its communicator have come, so that what would hang on GPUs waits
// here too (and is reported after CUDA_EMULATOR_TIMEOUT seconds, 30).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "counts.h"
#include "device.h"
#include "float16.h"
#include "memory.h"
#include "nccl_processes.h"
#include "streams.h"

using namespace emulator;

namespace {

std::atomic<bool> held{false};  // whoever makes a communicator

enum Result : int { kGood = 0, kInvalidArgument = 4, kInvalidUsage = 5 };
constexpr int kSum = 0;
constexpr size_t kSizes[] = {1, 1, 4, 4, 8,
                             8, 2, 4, 8};  // of ncclInt8, Uint8, Int32, Uint32, Int64, Uint64, Float16 ...
constexpr int kTypes = sizeof kSizes / sizeof *kSizes;
const char* const kTypeNames[] = {"int8",   "uint8",   "int32",   "uint32", "int64",
                                  "uint64", "float16", "float32", "float64"};

struct Call {
    const char* what;
    const void* from;
    void* to;
    size_t count;
    int type, operation, root;
};
bool same(const Call& a, const Call& b) {
    return !std::strcmp(a.what, b.what) && a.count == b.count && a.type == b.type && a.operation == b.operation &&
           a.root == b.root;
}
std::string text_of(const Call& it) {
    return format("%s of %zu %s, root %d", it.what, it.count, kTypeNames[it.type], it.root);
}

// The n-th collective of a communicator: the n-th call of each rank.
struct Meeting {
    std::vector<Call> calls;
    std::vector<bool> arrived;
    size_t arrivals = 0;
    bool over = false, failed = false;
};

struct Clique {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<int> devices;
    std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
    bool broken = false;  // after a failure the ranks no longer agree on which call is which
    bool aborted = false;
};

struct Communicator {
    std::shared_ptr<Clique> clique;
    int rank, device;
    uint64_t calls = 0;
    std::shared_ptr<Member> member = nullptr;  // in place of a clique: it reaches other processes

    int ranks() const { return member ? member->ranks : static_cast<int>(clique->devices.size()); }
};

// ---- sums, in the order of the ranks ---------------------------------------------------------------------------

template <typename T>
void add(void* total, const void* more, size_t count) {
    for (size_t i = 0; i < count; ++i) static_cast<T*>(total)[i] += static_cast<const T*>(more)[i];
}
void add_halves(void* total, const void* more, size_t count) {
    uint16_t* const sums = static_cast<uint16_t*>(total);
    for (size_t i = 0; i < count; ++i)
        sums[i] = emulated_float_to_half(emulated_half_to_float(sums[i]) +
                                         emulated_half_to_float(static_cast<const uint16_t*>(more)[i]));
}
void add(int type, void* total, const void* more, size_t count) {
    switch (type) {
        case 0:
        case 1:
            return add<uint8_t>(total, more, count);  // the bits are those of int8
        case 2:
        case 3:
            return add<uint32_t>(total, more, count);
        case 4:
        case 5:
            return add<uint64_t>(total, more, count);
        case 6:
            return add_halves(total, more, count);
        case 7:
            return add<float>(total, more, count);
        default:
            return add<double>(total, more, count);
    }
}

// ---- meetings --------------------------------------------------------------------------------------------------

std::string wrong_range(const Clique& clique, size_t rank, const void* pointer, size_t bytes, Access access) {
    if (device_of(pointer) < 0) return format("rank %zu: %p is not device memory", rank, pointer);
    const std::string found = problem(pointer, bytes, clique.devices[rank], access);
    return found.empty() ? found : format("rank %zu: ", rank) + found;
}

// Every rank's part to every rank, in their order. A rank may give its part from where it is to come.
std::string gather(const Clique& clique, const Meeting& meeting) {
    const size_t ranks = meeting.calls.size(), bytes = meeting.calls[0].count * kSizes[meeting.calls[0].type];
    std::vector<char> all;
    for (size_t rank = 0; rank < ranks; ++rank) {
        const std::string found = wrong_range(clique, rank, meeting.calls[rank].from, bytes, kRead);
        if (!found.empty()) return found;
        const char* const from = static_cast<const char*>(meeting.calls[rank].from);
        all.insert(all.end(), from, from + bytes);
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
        const std::string found = wrong_range(clique, rank, meeting.calls[rank].to, ranks * bytes, kWrite);
        if (!found.empty()) return found;
        std::memcpy(meeting.calls[rank].to, all.data(), all.size());
    }
    return "";
}

// All ranks are there: moves the data. Returns what is wrong.
std::string perform(const Clique& clique, const Meeting& meeting) {
    if (!std::strcmp(meeting.calls[0].what, "ncclAllGather")) return gather(clique, meeting);
    const Call& root = meeting.calls[meeting.calls[0].root];
    const size_t bytes = root.count * kSizes[root.type];
    const bool reduce = !std::strcmp(root.what, "ncclReduce");
    std::vector<char> result;
    for (size_t rank = 0; rank < meeting.calls.size(); ++rank) {
        const Call& call = meeting.calls[rank];
        const auto wrong = [&](const void* pointer, Access access) {
            return wrong_range(clique, rank, pointer, bytes, access);
        };
        const bool reads = reduce || &call == &root;
        std::string found = reads ? wrong(call.from, kRead) : "";
        if (found.empty() && reduce == (&call == &root)) found = wrong(call.to, kWrite);
        if (!found.empty()) return found;
        if (!reads) continue;
        const char* const from = static_cast<const char*>(call.from);
        if (result.empty())
            result.assign(from, from + bytes);
        else
            add(root.type, result.data(), from, root.count);
    }
    for (const Call& call : meeting.calls)
        if (!reduce || &call == &root) std::memmove(call.to, result.data(), bytes);
    return "";
}

void attend(const std::shared_ptr<Clique>& clique, size_t rank, uint64_t number, const Call& call) {
    std::unique_lock<std::mutex> lock(clique->mutex);
    while (lost == clique->devices[rank] && !clique->aborted)
        clique->changed.wait_for(lock, std::chrono::milliseconds(1));
    std::shared_ptr<Meeting>& slot = clique->meetings[number];
    if (!slot) {
        slot = std::make_shared<Meeting>();
        slot->calls.resize(clique->devices.size());
        slot->arrived.resize(clique->devices.size());
    }
    const std::shared_ptr<Meeting> meeting = slot;
    const auto break_off = [&](const std::string& text) {
        meeting->over = meeting->failed = clique->broken = true;
        for (const int device : clique->devices) report(device, kLaunchFailure, text);
        clique->changed.notify_all();
    };
    // A kernel that is aborted leaves anything in its memory: nobody is told that it was never written.
    const auto end = [&] {
        const size_t parts = std::strcmp(call.what, "ncclAllGather") ? 1 : clique->devices.size();
        problem(call.to, parts * call.count * kSizes[call.type], clique->devices[rank], kWrite);
    };
    if (clique->aborted) return end();
    if (clique->broken) {
        report(clique->devices[rank], kLaunchFailure, "NCCL: a collective of a communicator that has failed");
        return;
    }
    for (size_t other = 0; other < meeting->calls.size(); ++other)
        if (meeting->arrived[other] && !same(meeting->calls[other], call))
            return break_off(format("NCCL: rank %zu calls %s, rank %zu calls %s", rank, text_of(call).c_str(), other,
                                    text_of(meeting->calls[other]).c_str()));
    meeting->calls[rank] = call;
    meeting->arrived[rank] = true;
    if (++meeting->arrivals == meeting->calls.size()) {
        const std::string wrong = perform(*clique, *meeting);
        clique->meetings.erase(number);
        meeting->over = true;
        if (!wrong.empty()) break_off(std::string("NCCL: ") + call.what + ", " + wrong);
        clique->changed.notify_all();
        return;
    }
    const long seconds = setting("CUDA_EMULATOR_TIMEOUT", 30);
    const auto over = [&] { return meeting->over || clique->broken || clique->aborted; };
    if (clique->changed.wait_for(lock, std::chrono::seconds(seconds), over)) {
        if (!meeting->over && clique->aborted) end();
        return;
    }
    std::string missing;
    for (size_t other = 0; other < meeting->arrived.size(); ++other)
        if (!meeting->arrived[other]) missing += format(" %zu", other);
    break_off(format("NCCL: %s, collective %llu of its communicator: after %ld s, ranks%s have not come",
                     text_of(call).c_str(), static_cast<unsigned long long>(number), seconds, missing.c_str()));
}

// ---- groups: what is called between start and end is enqueued at the end ----------------------------------------

struct Pending {
    Communicator* communicator;
    Call call;
    StreamPointer stream;
};
thread_local int depth = 0;
thread_local std::vector<Pending> pending;

// Ranks of this thread that join a communicator: together, at the end of the group.
struct Joining {
    Communicator** out;
    std::string id;
    int ranks, rank, device;
};
thread_local std::vector<Joining> joining;

Result join() {
    std::vector<std::thread> threads;
    std::atomic<bool> good{true};
    for (const Joining& one : joining)
        threads.emplace_back([&good, one] {
            const auto member = Member::join(one.id, one.ranks, one.rank, one.device);
            *one.out = member ? new Communicator{nullptr, one.rank, one.device, 0, member} : nullptr;
            if (!member) good = false;
        });
    for (std::thread& thread : threads) thread.join();
    joining.clear();
    return good ? kGood : kInvalidUsage;
}

void flush() {
    for (const Pending& one : pending) {
        if (const std::shared_ptr<Member> member = one.communicator->member) {
            const Call call = one.call;
            const uint64_t number = one.communicator->calls++;
            const size_t bytes = call.count * kSizes[call.type];
            enqueue(
                one.stream, [=] { member->sum(number, call.from, call.to, call.count, bytes, call.type, add); }, true);
            continue;
        }
        const std::shared_ptr<Clique> clique = one.communicator->clique;
        const size_t rank = one.communicator->rank;
        const uint64_t number = one.communicator->calls++;
        const Call call = one.call;
        enqueue(one.stream, [=] { attend(clique, rank, number, call); }, true);
    }
    pending.clear();
}

// MXNet looks at no result of NCCL's: errors go to the device as well.
Result post(Communicator* communicator, const Call& call, void* handle) {
    const StreamPointer stream = find_stream(handle);
    const int ranks = communicator->ranks();
    std::string wrong;
    if (!stream)
        wrong = "no such stream";
    else if (device_of(*stream) != communicator->device)
        wrong = format("the stream is of device %d, the communicator of device %d", device_of(*stream),
                       communicator->device);
    else if (call.type < 0 || call.type >= kTypes)
        wrong = format("data type %d", call.type);
    else if (call.root < 0 || call.root >= ranks)
        wrong = format("root %d of %d ranks", call.root, ranks);
    else if (!communicator->member != !!std::strcmp(call.what, "ncclAllReduce"))
        wrong = "the emulator has ncclAllReduce between processes, and nothing else";
    else if (call.operation != kSum)
        wrong = format("operation %d: the emulator has ncclSum only", call.operation);
    if (!wrong.empty()) {
        report(communicator->device, kInvalidValue, std::string(call.what) + ": " + wrong);
        return kInvalidArgument;
    }
    count(communicator->device, kCollectives);
    pending.push_back({communicator, call, stream});
    if (depth == 0) flush();
    return kGood;
}

}  // namespace

extern "C" {

// From now on no rank on this device comes to a collective, until its communicator is aborted; -1: all come.
void cuda_emulator_lose(int device) { lost = device; }

// From now on whoever makes a communicator waits, and spins as NCCL's sockets do; 0: until now.
void cuda_emulator_hold_connections(int so) { held = so; }

Result ncclCommInitAll(Communicator** out, int count, const int* devices) {
    while (held) std::this_thread::yield();
    const auto clique = std::make_shared<Clique>();
    for (int rank = 0; rank < count; ++rank) {
        const int device = devices ? devices[rank] : rank;
        for (const int other : clique->devices)
            if (other == device) return kInvalidUsage;
        if (device < 0 || device >= device_count()) return kInvalidArgument;
        clique->devices.push_back(device);
    }
    for (int rank = 0; rank < count; ++rank) out[rank] = new Communicator{clique, rank, clique->devices[rank], 0};
    return kGood;
}
// 128 bytes.
Result ncclGetUniqueId(char* out) {
    std::memset(out, 0, 128);
    const std::string id = new_unique_id();
    std::memcpy(out, id.data(), id.size());
    return kGood;
}
struct UniqueId {
    char bytes[128];
};
Result ncclCommInitRank(Communicator** out, int ranks, UniqueId id, int rank) {
    while (held) std::this_thread::yield();
    joining.push_back({out, std::string(id.bytes), ranks, rank, current_device});
    return depth == 0 ? join() : kGood;
}
Result ncclCommDestroy(Communicator* communicator) {
    delete communicator;
    return kGood;
}
// What waits for ranks ends, with whatever is in its memory.
Result ncclCommAbort(Communicator* communicator) {
    if (communicator->member) {
        communicator->member->abort();
    } else {
        std::lock_guard<std::mutex> lock(communicator->clique->mutex);
        communicator->clique->aborted = true;
        communicator->clique->changed.notify_all();
    }
    return ncclCommDestroy(communicator);
}
const char* ncclGetErrorString(Result result) {
    return result == kGood              ? "no error"
           : result == kInvalidArgument ? "invalid argument (run with NCCL_DEBUG=WARN for details)"
           : result == kInvalidUsage    ? "invalid usage (run with NCCL_DEBUG=WARN for details)"
                                        : "unknown result code";
}
Result ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* communicator, void* stream) {
    return post(communicator, {"ncclAllGather", from, to, count, type, kSum, 0}, stream);
}
Result ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Communicator* communicator,
                     void* stream) {
    return post(communicator, {"ncclAllReduce", from, to, count, type, operation, 0}, stream);
}
Result ncclGroupStart() {
    ++depth;
    return kGood;
}
Result ncclGroupEnd() {
    if (depth == 0) return kInvalidUsage;
    if (--depth > 0) return kGood;
    const Result result = joining.empty() ? kGood : join();
    flush();
    return result;
}
Result ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root,
                  Communicator* communicator, void* stream) {
    return post(communicator, {"ncclReduce", from, to, count, type, operation, root}, stream);
}
Result ncclBcast(void* buffer, size_t count, int type, int root, Communicator* communicator, void* stream) {
    return post(communicator, {"ncclBcast", buffer, buffer, count, type, kSum, root}, stream);
}
}

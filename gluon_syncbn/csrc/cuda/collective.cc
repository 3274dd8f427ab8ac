#include "cuda/collective.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "cuda/plan.h"
#include "failure.h"
#include "lock.h"
#include "point.h"
#include "waiting/wait.h"

namespace syncbn {
namespace cuda {
namespace {

using Communicator = void*;
constexpr int kFloat32 = 7, kFloat64 = 8;  // of ncclDataType_t
constexpr int kSum = 0;                    // of ncclRedOp_t
struct UniqueId {
    char bytes[128];
};

#define NCCL(NAME, ...) SYNCBN_CALL("NCCL", #NAME, ##__VA_ARGS__)

void check_nccl(int status, const char* function) {
    if (status == 0) return;
    const char* (*const text)(int) = need("ncclGetErrorString", "NCCL");
    throw Failure(std::string(function) + " of NCCL: " + text(status));
}

// Guards the next two; every collective of a meeting is posted under it. NCCL may keep it, so whoever needs it waits with a
// limit, and a thread of the engine's does not wait.
using Lock = std::unique_lock<std::mutex>;
auto& mutex = *new Renewed<std::mutex>;
// The communicators of the devices of a meeting, in their order, and those that another thread makes.
auto& connected = *new std::map<std::vector<int>, std::vector<Communicator>>;
auto& connecting = *new std::map<std::vector<int>, std::shared_future<void>>;
constexpr auto kNcclKeeps = std::chrono::seconds(1);  // the lock, where nobody can be told

// `timed_mutex` waits by a function that ThreadSanitizer of GCC 12 does not know (pthread_mutex_clocklock).
bool lock_within(Lock& lock, std::chrono::milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!lock.try_lock()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

Mutex sums_mutex;  // guards the next one
std::vector<AllReduce*>& sums = *new std::vector<AllReduce*>;

// NCCL blocks its caller, without a limit, while it makes communicators and prepares their first collective. So another
// thread calls it.
template <typename Work>
auto elsewhere(Work work) -> std::future<decltype(work())> {
    auto task = std::make_shared<std::packaged_task<decltype(work())()>>(std::move(work));
    auto made = task->get_future();
    std::thread([task] { (*task)(); }).detach();
    return made;
}

// Calls a function of NCCL for each of these devices, as one operation.
template <typename Call>
void on_each(const std::vector<int>& devices, const char* function, const Call& call) {
    check_nccl(NCCL(ncclGroupStart), "ncclGroupStart");
    int status = 0;
    for (size_t i = 0; i < devices.size() && status == 0; ++i) {
        const Current current(Device::get(devices[i]));
        status = call(i);
    }
    const int end = NCCL(ncclGroupEnd);
    check_nccl(status, function);
    check_nccl(end, "ncclGroupEnd");
}

void post(const std::vector<int>& devices, const std::vector<OnDevice>& parts,
          const std::vector<Communicator>& communicators) {
    on_each(devices, "ncclAllGather", [&](size_t i) {
        const auto count = static_cast<size_t>(parts[i].length);
        return NCCL(ncclAllGather, parts[i].own, parts[i].gathered, count, kFloat64, communicators[i], parts[i].stream);
    });
}

// Makes communicators, and posts their first collective.
void connect(const std::vector<int>& devices, const std::vector<OnDevice>& parts) {
    std::vector<Communicator> made(devices.size());
    const int status = NCCL(ncclCommInitAll, made.data(), static_cast<int>(devices.size()), devices.data());
    const Lock lock(mutex);
    connecting.erase(devices);
    check_nccl(status, "ncclCommInitAll");
    post(devices, parts, made);
    connected[devices] = std::move(made);
}

}  // namespace

std::string why_no_collective() {
    static const Function newest = find("ncclCommAbort");
    return newest.address != nullptr ? "" : "this build of MXNet is not linked against NCCL 2.4 or later";
}

bool post_allgather(const std::vector<OnDevice>& parts, const std::string& layer, double timeout, bool waits) {
    SYNCBN_POINT("before_collective");
    std::vector<int> devices;
    for (const OnDevice& part : parts) devices.push_back(part.device);
    Lock lock(mutex, std::try_to_lock);
    if (!lock && !waits) return false;
    Wait wait(timeout, layer, "NCCL has not connected the GPUs",
              "NCCL_DEBUG=INFO shows what NCCL does. kvstore='host' avoids NCCL.");
    while (true) {
        while (!lock && !lock_within(lock, kSlice)) wait.look();
        const auto known = connected.find(devices);
        if (known != connected.end()) return post(devices, parts, known->second), true;
        if (!waits) return false;
        std::shared_future<void>& made = connecting[devices];
        const bool is_first = !made.valid();
        if (is_first) made = elsewhere([parts, devices] { connect(devices, parts); }).share();
        const std::shared_future<void> ours = made;
        lock.unlock();
        while (ours.wait_for(kSlice) != std::future_status::ready) wait.look();
        ours.get();
        if (is_first) return true;
    }
}

void abort_collectives(int device) {
    Lock lock(mutex, std::defer_lock);
    if (!lock_within(lock, kNcclKeeps)) return;
    for (auto it = connected.begin(); it != connected.end();) {
        const auto one = it++;
        if (std::find(one->first.begin(), one->first.end(), device) == one->first.end()) continue;
        for (Communicator communicator : one->second) NCCL(ncclCommAbort, communicator);
        connected.erase(one);
    }
}

std::string new_id() {
    UniqueId id{};
    check_nccl(NCCL(ncclGetUniqueId, &id), "ncclGetUniqueId");
    return {id.bytes, sizeof id.bytes};
}

// ---- sums over processes -----------------------------------------------------------------------------------------

struct AllReduce::Member {
    // The device has to be current.
    Member(Device& device, size_t bucket) : lease(device), memory(device, static_cast<int64_t>(bucket)) {}

    const Lease lease;
    const Memory memory;
    Communicator communicator = nullptr;
};

AllReduce::AllReduce(std::vector<int> devices, std::string id, int first, int ranks, size_t bucket)
    : devices_(std::move(devices)), id_(std::move(id)), first_(first), ranks_(ranks), bucket_(bucket) {
    std::lock_guard<std::mutex> lock(sums_mutex);
    sums.push_back(this);
}

bool AllReduce::ready() {
    if (aborted_) throw Failure("the sums of GPUs have been given up. Read the error before this one.");
    std::lock_guard<std::mutex> lock(mutex_);
    if (!posting_.valid()) return true;
    if (posting_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
    posting_.get();
    return true;
}

void AllReduce::begin(Type wide, size_t bytes, std::vector<Part> parts) {
    std::lock_guard<std::mutex> lock(mutex_);
    posting_ = elsewhere([this, wide, bytes, parts = std::move(parts)] {
        if (!connected_) connect();
        if (!aborted_) post(wide, bytes, parts);
    });
}

void AllReduce::connect() {
    for (int device : devices_) {
        const Current current(Device::get(device));
        members_.push_back(std::make_unique<Member>(Device::get(device), bucket_));
    }
    UniqueId id{};
    id_.copy(id.bytes, sizeof id.bytes);
    on_each(devices_, "ncclCommInitRank", [&](size_t i) {
        return NCCL(ncclCommInitRank, &members_[i]->communicator, ranks_, id, first_ + static_cast<int>(i));
    });
    connected_ = true;
}

void AllReduce::post(Type wide, size_t bytes, const std::vector<Part>& parts) {
    SYNCBN_POINT("before_collective");
    // Converts values of the parts into the bucket, or the reverse.
    const auto convert = [&](bool into_bucket) {
        for (size_t i = 0; i < members_.size(); ++i) {
            const Member& member = *members_[i];
            const Current current(member.lease.device);
            for (const Part& part : parts) {
                char* const values = static_cast<char*>(part.values[i]) + part.begin * size_of(part.type);
                char* const place = member.memory.as<char>() + part.offset;
                const auto n = static_cast<Index>(part.count);
                const CopyArguments with{n, into_bucket ? values : place, into_bucket ? place : values, 0, 0};
                launch(member.lease, {into_bucket ? "widen" : "narrow", name_of(part.type)}, {ceil_div(n, kBlock)},
                       &with);
            }
        }
    };
    convert(true);
    on_each(devices_, "ncclAllReduce", [&](size_t i) {
        const Member& member = *members_[i];
        return NCCL(ncclAllReduce, member.memory.as<char>(), member.memory.as<char>(),
                    bytes / static_cast<size_t>(size_of(wide)), wide == Type::kFloat64 ? kFloat64 : kFloat32, kSum,
                    member.communicator, member.lease.stream());
    });
    convert(false);
}

bool AllReduce::idle() {
    if (!ready()) return false;
    return std::all_of(members_.begin(), members_.end(), [](const auto& member) {
        const Current current(member->lease.device);
        return member->lease.idle();
    });
}

void AllReduce::abort() noexcept {
    if (aborted_.exchange(true) || !connected_) return;
    for (const auto& member : members_) NCCL(ncclCommAbort, member->communicator);
    // What is behind the collectives still writes to arrays that their owners may free. It ends soon, if it ends at all.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (const auto& member : members_) try {
            const Current current(member->lease.device);
            while (!member->lease.idle() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(kSlice);
        } catch (const std::exception&) {  // the GPU has failed, and so nothing runs on it
        }
}

void AllReduce::close() {
    if (aborted_ || !idle() || aborted_.exchange(true) || !connected_) return;  // a later sum fails
    for (const auto& member : members_) NCCL(ncclCommDestroy, member->communicator);
}

void close_collectives() {
    if (Lock lock(mutex, std::defer_lock); lock_within(lock, kNcclKeeps)) {
        for (const auto& one : connected)
            for (Communicator communicator : one.second) NCCL(ncclCommDestroy, communicator);
        connected.clear();
    }
    std::lock_guard<std::mutex> lock(sums_mutex);
    for (AllReduce* one : sums) one->close();
}

}  // namespace cuda
}  // namespace syncbn

#include "cuda/collective.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "cuda/driver.h"
#include "failure.h"
#include "lock.h"
#include "log.h"
#include "waiting/wait.h"

namespace syncbn::cuda {
namespace {

using Communicator = void*;
constexpr int kFloat64 = 8;  // of ncclDataType_t

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

// Calls NCCL for each of these parts, as one operation.
void post(const std::vector<OnDevice>& parts, const std::vector<Communicator>& communicators) {
    check_nccl(NCCL(ncclGroupStart), "ncclGroupStart");
    int status = 0;
    for (size_t i = 0; i < parts.size() && status == 0; ++i) {
        const Current current(Device::get(parts[i].device));
        const auto count = static_cast<size_t>(parts[i].length);
        status =
            NCCL(ncclAllGather, parts[i].own, parts[i].gathered, count, kFloat64, communicators[i], parts[i].stream);
    }
    const int end = NCCL(ncclGroupEnd);
    check_nccl(status, "ncclAllGather");
    check_nccl(end, "ncclGroupEnd");
}

// Makes communicators, and posts their first collective.
void connect(const std::vector<int>& devices, const std::vector<OnDevice>& parts) {
    std::vector<Communicator> made(devices.size());
    const int status = NCCL(ncclCommInitAll, made.data(), static_cast<int>(devices.size()), devices.data());
    const Lock lock(mutex);
    connecting.erase(devices);
    check_nccl(status, "ncclCommInitAll");
    post(parts, made);
    connected[devices] = std::move(made);
}

}  // namespace

std::string why_no_collective() {
    static const Function newest = find("ncclCommAbort");
    return newest.address != nullptr ? "" : "this build of MXNet is not linked against NCCL 2.4 or later";
}

bool post_allgather(const std::vector<OnDevice>& parts, const std::string& layer, double timeout, bool waits) {
    std::vector<int> devices;
    for (const OnDevice& part : parts) devices.push_back(part.device);
    Lock lock(mutex, std::try_to_lock);
    if (!lock && !waits) return false;
    Wait wait(timeout, layer, "NCCL has not connected the GPUs",
              "NCCL_DEBUG=INFO shows what NCCL does. kvstore='host' avoids NCCL.");
    while (true) {
        while (!lock && !lock_within(lock, kSlice)) wait.look();
        const auto known = connected.find(devices);
        if (known != connected.end()) return post(parts, known->second), true;
        if (!waits) return false;
        std::shared_future<void>& made = connecting[devices];
        const bool is_first = !made.valid();
        if (is_first) {  // NCCL blocks its caller meanwhile, without a limit
            std::packaged_task<void()> task([parts, devices] { connect(devices, parts); });
            auto posted = task.get_future();
            std::thread(std::move(task)).detach();
            made = posted.share();
        }
        const std::shared_future<void> ours = made;
        lock.unlock();
        while (ours.wait_for(kSlice) != std::future_status::ready) wait.look();
        ours.get();
        if (is_first) return true;
    }
}

void abort_collectives(int device) {
    Lock lock(mutex, std::defer_lock);
    if (!lock_within(lock, kNcclKeeps))
        return log(Level::kWarning, "gpu(" + std::to_string(device) +
                                        "): a collective that hangs cannot be ended, because NCCL is busy with another "
                                        "one. The memory that it may write to stays with it.");
    for (auto it = connected.begin(); it != connected.end();) {
        const auto one = it++;
        if (std::find(one->first.begin(), one->first.end(), device) == one->first.end()) continue;
        for (Communicator communicator : one->second) NCCL(ncclCommAbort, communicator);
        connected.erase(one);
    }
}

void close_collectives() {
    Lock lock(mutex, std::defer_lock);
    if (!lock_within(lock, kNcclKeeps)) return;
    for (const auto& one : connected)
        for (Communicator communicator : one.second) NCCL(ncclCommDestroy, communicator);
    connected.clear();
}

}  // namespace syncbn::cuda

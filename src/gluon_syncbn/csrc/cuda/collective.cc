#include "cuda/collective.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda/driver.h"
#include "failure.h"

namespace syncbn {
namespace cuda {
namespace {

using Communicator = void*;
constexpr int kFloat64 = 8;  // of ncclDataType_t

struct Nccl {
    template <typename F>
    static F* get(const char* name) {
        return reinterpret_cast<F*>(find(name));
    }
    const char* (*error_string)(int) = get<const char*(int)>("ncclGetErrorString");
    int (*init_all)(Communicator*, int, const int*) = get<int(Communicator*, int, const int*)>("ncclCommInitAll");
    int (*destroy)(Communicator) = get<int(Communicator)>("ncclCommDestroy");
    int (*abort)(Communicator) = get<int(Communicator)>("ncclCommAbort");
    int (*group_start)() = get<int()>("ncclGroupStart");
    int (*group_end)() = get<int()>("ncclGroupEnd");
    int (*all_gather)(const void*, void*, size_t, int, Communicator,
                      Stream) = get<int(const void*, void*, size_t, int, Communicator, Stream)>("ncclAllGather");

    bool complete() const {
        return error_string && init_all && destroy && abort && group_start && group_end && all_gather;
    }
};

const Nccl& nccl() {
    static const Nccl instance;
    return instance;
}

void check_nccl(int status, const char* function) {
    if (status != 0) throw Failure(std::string(function) + " of NCCL: " + nccl().error_string(status));
}

struct Clique {
    std::vector<int> devices;
    std::vector<Communicator> communicators;  // as the devices
};

std::mutex mutex;  // guards the cliques; every collective is posted under it
std::vector<std::unique_ptr<Clique>>& cliques = *new std::vector<std::unique_ptr<Clique>>;

// NCCL makes communicators while its caller waits, however long: so somebody else calls it.
std::vector<Communicator> connect(const std::vector<int>& devices, double timeout) {
    auto task = std::make_shared<std::packaged_task<std::vector<Communicator>()>>([devices] {
        std::vector<Communicator> out(devices.size());
        check_nccl(nccl().init_all(out.data(), static_cast<int>(devices.size()), devices.data()), "ncclCommInitAll");
        return out;
    });
    auto made = task->get_future();
    std::thread([task] { (*task)(); }).detach();
    if (made.wait_for(std::chrono::duration<double>(timeout)) != std::future_status::ready)
        throw Failure("NCCL has not connected the GPUs for " + std::to_string(static_cast<int>(timeout)) +
                      " s. NCCL_DEBUG=INFO shows what it does; kvstore='host' does without it.");
    return made.get();
}

Clique& clique_of(const std::vector<int>& devices, double timeout) {
    for (const auto& one : cliques)
        if (one->devices == devices) return *one;
    auto made = std::make_unique<Clique>();
    made->devices = devices;
    made->communicators = connect(devices, timeout);
    cliques.push_back(std::move(made));
    return *cliques.back();
}

}  // namespace

std::string why_no_collective() {
    return nccl().complete() ? "" : "this build of MXNet is not linked against NCCL 2.4 or later";
}

void all_gather(const std::vector<OnDevice>& parts, double timeout) {
    const std::string missing = why_no_collective();
    if (!missing.empty()) throw Failure(missing);
    std::vector<int> devices;
    for (const OnDevice& part : parts) devices.push_back(part.device);
    std::lock_guard<std::mutex> lock(mutex);
    const Clique& clique = clique_of(devices, timeout);
    check_nccl(nccl().group_start(), "ncclGroupStart");
    int status = 0;
    for (size_t i = 0; i < parts.size() && status == 0; ++i) {
        const Current current(Device::of(devices[i]));
        const auto count = static_cast<size_t>(parts[i].length);
        status = nccl().all_gather(parts[i].own, parts[i].gathered, count, kFloat64, clique.communicators[i],
                                   parts[i].stream);
    }
    const int end = nccl().group_end();
    check_nccl(status, "ncclAllGather");
    check_nccl(end, "ncclGroupEnd");
}

void abort_collectives(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = cliques.begin(); it != cliques.end();) {
        const std::vector<int>& devices = (*it)->devices;
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
            ++it;
            continue;
        }
        for (Communicator communicator : (*it)->communicators) nccl().abort(communicator);
        it = cliques.erase(it);
    }
}

void close_collectives() {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& one : cliques)
        for (Communicator communicator : one->communicators) nccl().destroy(communicator);
    cliques.clear();
}

}  // namespace cuda
}  // namespace syncbn

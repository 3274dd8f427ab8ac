#include "cuda/collective.h"

#include <algorithm>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda/driver.h"
#include "failure.h"
#include "point.h"
#include "waiting/wait.h"

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

struct Connected {
    std::vector<int> devices;
    std::vector<Communicator> communicators;  // in the order of the devices
};

std::mutex mutex;  // guards the next one; every collective is posted under it
std::vector<std::unique_ptr<Connected>>& cliques = *new std::vector<std::unique_ptr<Connected>>;

// NCCL blocks its caller, without a limit, while it makes communicators and prepares their first collective. So another
// thread calls it.
template <typename Work>
auto elsewhere(Work work) -> std::future<decltype(work())> {
    auto task = std::make_shared<std::packaged_task<decltype(work())()>>(std::move(work));
    auto made = task->get_future();
    std::thread([task] { (*task)(); }).detach();
    return made;
}

class WaitToConnect : public WaitFor {
  public:
    using WaitFor::WaitFor;
    bool spins() const override { return true; }
};

std::vector<Communicator> connect(const std::vector<int>& devices) {
    std::vector<Communicator> out(devices.size());
    check_nccl(nccl().init_all(out.data(), static_cast<int>(devices.size()), devices.data()), "ncclCommInitAll");
    return out;
}

void post(const std::vector<OnDevice>& parts, const std::vector<Communicator>& communicators) {
    check_nccl(nccl().group_start(), "ncclGroupStart");
    int status = 0;
    for (size_t i = 0; i < parts.size() && status == 0; ++i) {
        const Current current(Device::of(parts[i].device));
        const auto count = static_cast<size_t>(parts[i].length);
        status = nccl().all_gather(parts[i].own, parts[i].gathered, count, kFloat64, communicators[i], parts[i].stream);
    }
    const int end = nccl().group_end();
    check_nccl(status, "ncclAllGather");
    check_nccl(end, "ncclGroupEnd");
}

}  // namespace

std::string why_no_collective() {
    return nccl().complete() ? "" : "this build of MXNet is not linked against NCCL 2.4 or later";
}

void post_allgather(const std::vector<OnDevice>& parts, const std::string& layer, double timeout,
                    int64_t interrupts_before) {
    const std::string missing = why_no_collective();
    if (!missing.empty()) throw Failure(missing);
    SYNCBN_POINT("before_collective");
    std::vector<int> devices;
    for (const OnDevice& part : parts) devices.push_back(part.device);
    std::lock_guard<std::mutex> lock(mutex);
    const auto known =
        std::find_if(cliques.begin(), cliques.end(), [&](const auto& one) { return one->devices == devices; });
    if (known != cliques.end()) return post(parts, (*known)->communicators);
    auto communicators = elsewhere([parts, devices] {
        const auto made = connect(devices);
        post(parts, made);
        return made;
    });
    WaitToConnect wait(layer, "NCCL has not connected the GPUs", timeout,
                       "NCCL_DEBUG=INFO shows what NCCL does. kvstore='host' avoids NCCL.", interrupts_before);
    while (communicators.wait_for(kSlice) != std::future_status::ready) wait.look();
    cliques.push_back(std::make_unique<Connected>(Connected{devices, communicators.get()}));
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

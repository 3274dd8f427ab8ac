// Gives each CPU context temporary space and random states of its own, as MXNet gives them to each GPU.
//
// MXNet's operators on all CPU contexts share a few copies of temporary space and one random state. An operator takes
// its copy when it is issued. So a later operator of the first replica can hold the copy that the second replica needs.
// If the first replica waits for the second, this is a deadlock.
//
// MXNet keeps these resources in one object for each thread (`ResourceManager` in src/resource.cc). Here a
// thread has one such object more for each replica that it issues. The thread's own object remains for all operators
// that no replica issues, so that these take space and draw numbers as without this package.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/scope.h"
#include "mxnet_api.h"
#include "native/abi.h"
#include "operator/op.h"
#include "point.h"
#include "to_python.h"

SYNCBN_COUNTS syncbn_resources{0};  // MXNet's objects that were made for replicas

namespace syncbn {
namespace native {
namespace {

// The virtual functions of `ResourceManager`, in the order of its table.
struct Functions {
    Resource (*request)(ResourceManager* self, Context context, const int& kind);
    void (*seed)(ResourceManager* self, uint32_t seed);
    void (*seed_context)(ResourceManager* self, Context context, uint32_t seed);
};

Functions mxnets;           // before they were replaced
ResourceManager* (*get)();  // the object of the calling thread
Engine* (*get_engine)();
void* (*new_variable)(Engine* engine);  // null for the naive engine, which runs an operator at once

// A copy of temporary space for one operator at a time. It takes no memory until an operator asks for some.
struct Copy {
    Space space;
    Resource resource{kTempSpace, nullptr, 0, &space};
    std::atomic<bool> taken{false};  // by an operator that has not run yet
};
constexpr size_t kMostCopies = 256;  // with so many, operators take them in turn, as in MXNet

// What a thread has for the operators of one replica or, at -1, of none.
struct Kept {
    ResourceManager* manager = nullptr;  // of a replica
    std::vector<Copy*> copies;           // of none
    size_t last = 0;                     // the copy that was taken last
};

// What belonged to threads that have ended. MXNet keeps its objects until the process ends.
struct Idle {
    Mutex mutex;
    std::map<int, std::vector<Kept>> kept;  // by context
};
Idle* idle = new Idle;  // never destroyed: threads may end after it

struct OfThread {
    int context = -1;          // of the replica that it issues
    bool spare_space = false;  // its operators take free copies, whatever the replica
    std::map<int, Kept> kept;  // by context
    ~OfThread() {
        const std::lock_guard<std::mutex> lock(idle->mutex);
        for (auto& [context, own] : kept) idle->kept[context].push_back(std::move(own));
    }
};
thread_local OfThread of_thread;

Kept& kept_for(int context) {
    const auto [found, is_new] = of_thread.kept.try_emplace(context);
    if (!is_new) return found->second;
    const std::lock_guard<std::mutex> lock(idle->mutex);
    auto& others = idle->kept[context];
    if (!others.empty()) {
        found->second = std::move(others.back());
        others.pop_back();
    }
    return found->second;
}

// The seed of a context. Replicas draw other numbers than each other, and than operators of no replica.
uint32_t seed_of(uint32_t seed, int context) { return seed + 0x9E3779B9u * static_cast<uint32_t>(context + 1); }

ResourceManager* manager_of(ResourceManager* own, int context) {
    ResourceManager*& manager = kept_for(context).manager;
    if (manager == nullptr) {
        manager = std::async(std::launch::async, get).get();  // MXNet makes an object where a thread asks for its own
        ++syncbn_resources;
        mxnets.seed(manager, seed_of(own->seed, context));
    }
    return manager;
}

// Sets a copy free when the operator that took it, which has been issued, has run.
void free_later(Copy* copy) {
    const auto run = [](void*, void* copy) { static_cast<Copy*>(copy)->taken = false; };
    check(mx.MXEnginePushSync(run, copy, nullptr, &kCpu, &copy->resource.variable, 1, nullptr, 0, &kNoSkip, 0,
                              "gluon_syncbn_copy"));
}

// Takes a copy that no operator waits for. An operator of no replica may itself wait for one, such as a loss. The next
// operator may be needed by another replica, such as noise for its data.
Resource free_copy() {
    auto& [manager, copies, last] = kept_for(-1);
    if (!copies.empty()) free_later(copies[last]);
    // Not the last one, because an operator may take two. The first ones are in use most, so that few need memory.
    size_t copy = 0;
    while (copy < copies.size() && (copy == last || copies[copy]->taken)) ++copy;
    if (copy == copies.size() && copy < kMostCopies) {
        copies.push_back(new Copy);  // for good, as in MXNet
        copies[copy]->resource.variable = new_variable(get_engine());
    }
    last = copy < copies.size() ? copy : (last + 1) % copies.size();
    copies[last]->taken = true;
    return copies[last]->resource;
}

// The context of the replica whose resources an operator takes; -1: the thread's own.
int replica_of(const Context& context, int kind) {
    if (context.type == Context::kGpu) return -1;
    bool training = false, recording = false;
    mx.MXAutogradIsTraining(&training);
    // Initial values are drawn within the first call of a net, outside of training.
    if (kind != kTempSpace && !training) return -1;
    if (kind == kTempSpace && of_thread.spare_space) return -1;
    if (of_thread.context >= 0) return of_thread.context;
    if (context.type != Context::kCpu) return -1;
    mx.MXAutogradIsRecording(&recording);  // a backward does not
    if (kind == kTempSpace && recording) return -1;
    return context.number > 0 || (training && !recording) ? context.number : -1;
}

Resource request(ResourceManager* self, Context context, const int& kind) {
    const int replica = replica_of(context, kind);
    // Operators that MXNet keeps would not give it back. Their graphs take no context that replicas share.
    if (kind == kTempSpace && context.type != Context::kGpu && new_variable != nullptr && !within_graph && replica < 0)
        return free_copy();
    return mxnets.request(replica < 0 ? self : manager_of(self, replica), context, kind);
}

void seed_all(ResourceManager* self, uint32_t seed) {
    mxnets.seed(self, seed);
    const auto seed_one = [&](int context, const Kept& kept) {
        if (kept.manager != nullptr) mxnets.seed(kept.manager, seed_of(seed, context));
    };
    for (const auto& [context, kept] : of_thread.kept) seed_one(context, kept);
    const std::lock_guard<std::mutex> lock(idle->mutex);
    for (const auto& [context, others] : idle->kept)
        for (const Kept& kept : others) seed_one(context, kept);
}

void seed_context(ResourceManager* self, Context context, uint32_t seed) {
    mxnets.seed_context(self, context, seed);
    if (context.type == Context::kCpu) mxnets.seed_context(manager_of(self, context.number), context, seed);
}

// Replaces the functions in the table of the class, which is read-only memory.
bool replace(void** table) {
    const Functions ours{Guarded<request>::call, Guarded<seed_all>::call, Guarded<seed_context>::call};
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = reinterpret_cast<uintptr_t>(table) / page * page;
    const size_t size = reinterpret_cast<uintptr_t>(table) + sizeof ours - begin;
    void* const pages = reinterpret_cast<void*>(begin);  // NOLINT(performance-no-int-to-ptr)
    if (mprotect(pages, size, PROT_READ | PROT_WRITE) != 0) return false;
    std::memcpy(table, &ours, sizeof ours);
    mprotect(pages, size, PROT_READ);
    return true;
}

}  // namespace

// Gives each CPU context resources of its own from now on. Returns the reason if it cannot; otherwise empty.
SYNCBN_API(std::string, separate_resources) {
    static Mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (get != nullptr) return "";
    const Functions found{find("_ZN5mxnet8resource19ResourceManagerImpl7RequestENS_7ContextERKNS_15ResourceRequestE"),
                          find("_ZN5mxnet8resource19ResourceManagerImpl10SeedRandomEj"),
                          find("_ZN5mxnet8resource19ResourceManagerImpl10SeedRandomENS_7ContextEj")};
    ResourceManager* (*const get_own)() = find("_ZN5mxnet15ResourceManager3GetEv");
    get_engine = find("_ZN5mxnet6Engine3GetEv");
    if (get_own == nullptr || get_engine == nullptr) return "this MXNet hides its ResourceManager or its engine";
    void** const table = get_own()->table;
    if (std::memcmp(&found, table, sizeof found) != 0) return "the ResourceManager is not that of MXNet 1.9.1";
    if (!is_naive_engine) new_variable = find("_ZN5mxnet6engine14ThreadedEngine11NewVariableEv");
    mxnets = found;
    get = get_own;
    if (replace(table)) return "";
    get = nullptr;
    return "the memory of MXNet's ResourceManager cannot be changed";
}

// Both return what this thread has said before: the CPU context of the replica whose operators it issues, on whatever
// context they run, or -1; whether they take temporary space that is free, also those of a replica.
SYNCBN_API(int, issue_on, int context) { return std::exchange(of_thread.context, context); }
SYNCBN_API(bool, use_spare_space, bool uses) { return std::exchange(of_thread.spare_space, uses); }

}  // namespace native
}  // namespace syncbn

// Gives each CPU context random states of its own, as MXNet gives them to each GPU, and operators the temporary space of
// native/space.cc.
//
// MXNet's operators on all CPU contexts share one random state. An operator takes it when it is issued. So a later
// operator of the first replica can hold the state that the second replica needs. If the first replica waits for the
// second, this is a deadlock.
//
// MXNet keeps these resources in one object for each thread (`ResourceManager` in src/resource.cc). Here a
// thread has one such object more for each replica that it issues. The thread's own object remains for all operators
// that no replica issues, so that these draw numbers as without this package.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <future>
#include <mutex>
#include <utility>

#include "lock.h"
#include "mxnet_api.h"
#include "native/abi.h"
#include "native/kept.h"
#include "native/space.h"
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

thread_local int replica = -1;  // the context of the replica that this thread issues

// The seed of a context. Replicas draw other numbers than each other, and than operators of no replica.
uint32_t seed_of(uint32_t seed, int context) { return seed + 0x9E3779B9u * static_cast<uint32_t>(context + 1); }

ResourceManager* manager_of(ResourceManager* own, int context) {
    return Kept<ResourceManager*>::get(context, [&] {
        auto* const made =
            std::async(std::launch::async, get).get();  // MXNet makes one where a thread asks for its own
        ++syncbn_resources;
        mxnets.seed(made, seed_of(own->seed, context));
        return made;
    });
}

// The context of the replica whose random states an operator draws from; -1: the thread's own.
int replica_of(const Context& context) {
    if (context.type == Context::kGpu) return -1;
    bool training = false, recording = false;
    mx.MXAutogradIsTraining(&training);
    if (!training) return -1;  // initial values are drawn within the first call of a net, outside of training
    if (replica >= 0) return replica;
    if (context.type != Context::kCpu) return -1;
    mx.MXAutogradIsRecording(&recording);  // a backward does not
    return context.number > 0 || !recording ? context.number : -1;
}

Resource request(ResourceManager* self, Context context, const int& kind) {
    if (kind == kTempSpace && has_space()) return space_resource(context);
    const int drawing = kind == kTempSpace ? -1 : replica_of(context);
    return mxnets.request(drawing < 0 ? self : manager_of(self, drawing), context, kind);
}

void seed_all(ResourceManager* self, uint32_t seed) {
    mxnets.seed(self, seed);
    Kept<ResourceManager*>::visit([&](int context, ResourceManager* one) { mxnets.seed(one, seed_of(seed, context)); });
}

void seed_context(ResourceManager* self, Context context, uint32_t seed) {
    mxnets.seed_context(self, context, seed);
    if (context.type == Context::kCpu) mxnets.seed_context(manager_of(self, context.number), context, seed);
}

// Replaces the functions in the table of the class, which is read-only memory.
bool replace(void** table) {
    const Functions ours{Guarded<request>::call, Guarded<seed_all>::call, Guarded<seed_context>::call};
    if (!protect(table, sizeof ours, PROT_READ | PROT_WRITE)) return false;
    std::memcpy(table, &ours, sizeof ours);
    protect(table, sizeof ours, PROT_READ);
    return true;
}

}  // namespace

// Separates the resources of replicas from now on. Returns the reason if it cannot; otherwise empty.
SYNCBN_API(std::string, separate_resources) {
    static Mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (get != nullptr) return "";
    const Functions found{find("_ZN5mxnet8resource19ResourceManagerImpl7RequestENS_7ContextERKNS_15ResourceRequestE"),
                          find("_ZN5mxnet8resource19ResourceManagerImpl10SeedRandomEj"),
                          find("_ZN5mxnet8resource19ResourceManagerImpl10SeedRandomENS_7ContextEj")};
    ResourceManager* (*const get_own)() = find("_ZN5mxnet15ResourceManager3GetEv");
    if (get_own == nullptr) return "this MXNet hides its ResourceManager";
    void** const table = get_own()->table;
    if (std::memcmp(&found, table, sizeof found) != 0) return "the ResourceManager is not that of MXNet 1.9.1";
    std::string problem = has_space() ? "" : take_space();
    if (!problem.empty()) return problem;
    mxnets = found;
    get = get_own;
    if (replace(table)) return "";
    get = nullptr;
    return "the memory of MXNet's ResourceManager cannot be changed";
}

// Returns what this thread has said before: the CPU context of the replica whose operators it issues, on whatever context
// they run, or -1.
SYNCBN_API(int, issue_on, int context) { return std::exchange(replica, context); }

}  // namespace native
}  // namespace syncbn

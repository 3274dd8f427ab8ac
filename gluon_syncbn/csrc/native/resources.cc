// Gives operators resources that no other replica holds: temporary space of the thread that runs them, and random states
// of the CPU context of their replica, as MXNet gives these to each GPU.
//
// An operator takes MXNet's resources when it is issued: one of a few copies of temporary space, and the one random state
// of all CPU contexts. So an operator that waits for another replica can hold what this replica needs first, which is a
// deadlock.
//
// Operators ask for the memory of temporary space when they run, through libmxnet's table of jumps, in which functions of
// this file take the place of MXNet's. One space for each thread and device is enough, because MXNet gives an operator no
// second one (`SetDependency` in src/imperative/imperative_utils.h). An operator that asks for more than before loses what
// it had, as in MXNet. On a GPU, MXNet frees that with `cudaFree`, which waits for kernels, and a thread has one stream.
//
// MXNet keeps resources in one object for each thread (`ResourceManager` in src/resource.cc). Here a thread has one such
// object more for each replica that it issues. The thread's own object remains for all operators that no replica issues,
// so that these draw numbers as without this package.
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "lock.h"
#include "mxnet_api.h"
#include "native/abi.h"
#include "operator/op.h"
#include "to_python.h"

SYNCBN_COUNTS syncbn_resources{0};  // MXNet's objects that were made for replicas

namespace syncbn::native {
namespace {

// What each thread has of a type, by number. What it leaves when it ends is taken by the next thread that needs one.
template <typename T>
class OfThreads {
  public:
    template <typename Make>
    static T& get(int number, const Make& make) {
        auto& own = own_.all;
        if (const auto found = own.find(number); found != own.end()) return found->second;
        {
            const std::lock_guard<std::mutex> lock(left_->mutex);
            if (auto taken = left_->all.extract(number)) return own.insert(std::move(taken)).position->second;
        }
        return own.emplace(number, make()).first->second;
    }

    // Visits those of this thread, and those that were left.
    template <typename Visit>
    static void visit(const Visit& visit) {
        for (auto& [number, one] : own_.all) visit(number, one);
        const std::lock_guard<std::mutex> lock(left_->mutex);
        for (auto& [number, one] : left_->all) visit(number, one);
    }

  private:
    struct Left {
        Mutex mutex;
        std::multimap<int, T> all;
    };
    struct Own {
        std::map<int, T> all;
        ~Own() {
            const std::lock_guard<std::mutex> lock(left_->mutex);
            left_->all.merge(all);
        }
    };
    static inline Left* const left_ = new Left;  // never destroyed: threads may end after it
    static inline thread_local Own own_;
};

// ---- temporary space -------------------------------------------------------------------------------------------

using GetSpace = void*(const Resource* self, size_t size);
GetSpace *mxnets_space, *mxnets_host_space;
using Attach = void(const void* graph, const void* executors, size_t begin, size_t end);
Attach* mxnets_attach;
Engine* (*get_engine)();
Variable* (*new_variable)(Engine* engine);  // null with the naive engine, where no operator waits

constexpr int32_t kOurs = 0x73796e63;  // the id of a resource from here; MXNet's own are small
constexpr size_t kMostTickets = 1 << 14;

// A resource from here, which an operator holds from when it is issued until it has run.
struct Ticket {
    Resource resource;
    size_t version;  // of the variable when the operator has run
};
struct Tickets {
    Mutex mutex;
    std::map<int, std::vector<Ticket>> of;  // by device
    size_t last = 0;
};
Renewed<Tickets>& tickets = *new Renewed<Tickets>;  // never destroyed: threads may end after it

// Whether this thread makes operators that MXNet keeps, of an executor or with `static_shape`, forward or backward.
thread_local bool makes_kept = false;

void attach(const void* graph, const void* executors, size_t begin, size_t end) {
    struct Making {
        Making() { makes_kept = true; }
        ~Making() { makes_kept = false; }
    } making;
    mxnets_attach(graph, executors, begin, end);
}

int device_of(const Context& context) { return context.type == Context::kGpu ? context.number : -1; }

template <GetSpace** original>
void* get_space(const Resource* self, size_t size) {
    if (self->id != kOurs) return (*original)(self, size);
    const Context& context = static_cast<const Space*>(self->memory)->context;
    Space& space = OfThreads<Space>::get(device_of(context), [&] { return Space{context, {}, {}}; });
    const Resource own{kTempSpace, nullptr, 0, &space};
    return (*original)(&own, size);
}

// Returns a resource with a variable that no other operator holds.
Resource space_resource(const Context& of) {
    const Context context = of.type == Context::kGpu ? of : Context{Context::kCpu, 0};  // not in shared memory
    const auto make = [&] {
        // Its own space is for callers that do not come through the table of jumps.
        return Resource{kTempSpace, new_variable(get_engine()), kOurs, new Space{context, {}, {}}};
    };
    if (makes_kept) return make();  // for good
    const std::lock_guard<std::mutex> lock(tickets->mutex);
    auto& all = tickets->of[device_of(context)];
    // Two tries, because one that no operator was issued with is never free.
    for (int i = 0; i < 2 && !all.empty(); ++i) {
        auto& [resource, version] = all[++tickets->last % all.size()];
        const size_t now = resource.variable->table->version(resource.variable);
        if (now != version && all.size() < kMostTickets) continue;
        version = now + 1;
        return resource;
    }
    all.push_back({make(), 1});
    return all.back().resource;
}

// ---- random states ---------------------------------------------------------------------------------------------

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
    return OfThreads<ResourceManager*>::get(context, [&] {
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
    if (kind == kTempSpace && new_variable != nullptr) return space_resource(context);
    const int drawing = kind == kTempSpace ? -1 : replica_of(context);
    return mxnets.request(drawing < 0 ? self : manager_of(self, drawing), context, kind);
}

void seed_all(ResourceManager* self, uint32_t seed) {
    mxnets.seed(self, seed);
    OfThreads<ResourceManager*>::visit(
        [&](int context, ResourceManager* one) { mxnets.seed(one, seed_of(seed, context)); });
}

void seed_context(ResourceManager* self, Context context, uint32_t seed) {
    mxnets.seed_context(self, context, seed);
    if (context.type == Context::kCpu) mxnets.seed_context(manager_of(self, context.number), context, seed);
}

// ---- how functions of MXNet's are replaced ---------------------------------------------------------------------

// Changes what may be done with the memory of MXNet's library; false if the system refuses.
bool protect(void* begin, size_t size, int as) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
    void* const pages = reinterpret_cast<void*>(first);  // NOLINT(performance-no-int-to-ptr)
    return mprotect(pages, reinterpret_cast<uintptr_t>(begin) + size - first, as) == 0;
}

// Returns the entry of a function in the table of jumps of MXNet's library; null if it is not there.
void** entry_of(const char* name) {
    link_map* library = nullptr;
    if (dlinfo(mxnet_library, RTLD_DI_LINKMAP, &library) != 0) return nullptr;
    std::map<int64_t, uintptr_t> parts;
    for (const ElfW(Dyn)* part = library->l_ld; part->d_tag != DT_NULL; ++part) parts[part->d_tag] = part->d_un.d_ptr;
    if (parts[DT_PLTREL] != DT_RELA) return nullptr;
    const auto at = [&](int64_t tag) { return reinterpret_cast<const void*>(parts[tag]); };
    const auto* const jumps = static_cast<const ElfW(Rela)*>(at(DT_JMPREL));
    const auto* const symbols = static_cast<const ElfW(Sym)*>(at(DT_SYMTAB));
    const auto* const names = static_cast<const char*>(at(DT_STRTAB));
    for (size_t i = 0; i < parts[DT_PLTRELSZ] / sizeof *jumps; ++i)
        if (std::strcmp(names + symbols[ELF64_R_SYM(jumps[i].r_info)].st_name, name) == 0)
            return reinterpret_cast<void**>(library->l_addr + jumps[i].r_offset);
    return nullptr;
}

std::string take_space() {
    const struct {
        const char* name;
        void* ours;
        void* found = find(name);
        void** entry = found == nullptr ? nullptr : entry_of(name);
    } all[] = {
        {"_ZNK5mxnet8Resource18get_space_internalEm", reinterpret_cast<void*>(get_space<&mxnets_space>)},
        {"_ZNK5mxnet8Resource23get_host_space_internalEm", reinterpret_cast<void*>(get_space<&mxnets_host_space>)},
        {"_ZN5mxnet4exec17AttachOpResourcesERKN4nnvm5GraphERKSt6vectorISt10shared_ptrINS0_10OpExecutorEESaIS8_EEmm",
         reinterpret_cast<void*>(attach)}};
    for (const auto& one : all) {
        if (one.entry == nullptr || *one.entry != one.found)
            return "this MXNet asks for temporary space in another way";
        if (!protect(one.entry, sizeof(void*), PROT_READ | PROT_WRITE))
            return "the table of jumps of MXNet's library cannot be changed";
    }
    Engine* (*const engine)() = find("_ZN5mxnet6Engine3GetEv");
    Variable* (*const make)(Engine*) = find("_ZN5mxnet6engine14ThreadedEngine11NewVariableEv");
    if (engine == nullptr || make == nullptr) return "this MXNet hides its engine";
    mxnets_space = reinterpret_cast<GetSpace*>(all[0].found);
    mxnets_host_space = reinterpret_cast<GetSpace*>(all[1].found);
    mxnets_attach = reinterpret_cast<Attach*>(all[2].found);
    for (const auto& one : all) __atomic_store_n(one.entry, one.ours, __ATOMIC_RELEASE);
    get_engine = engine;
    new_variable = make;
    return "";
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
    std::string problem = is_naive_engine || new_variable != nullptr ? "" : take_space();
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

}  // namespace syncbn::native

// Gives operators temporary space that belongs to the thread that runs them.
//
// In MXNet, an operator takes one of a few copies of temporary space when it is issued. So an operator that waits for
// another replica can hold the copy that this replica needs first, which is a deadlock. Operators ask for the memory
// when they run, through libmxnet's table of jumps, in which functions of this file take the place of MXNet's.
//
// One space for each thread and device is enough, because MXNet gives an operator no second one (`SetDependency` in
// src/imperative/imperative_utils.h). An operator that asks for more than before loses what it had, as in MXNet. On a
// GPU, MXNet frees that with `cudaFree`, which waits for kernels, and a thread has one stream.
#include "native/space.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "lock.h"
#include "native/kept.h"

namespace syncbn {
namespace native {
namespace {

using GetSpace = void*(const Resource* self, size_t size);
GetSpace *mxnets, *mxnets_host;
using Attach = void(const void* graph, const void* executors, size_t begin, size_t end);
Attach* mxnets_attach;
Engine* (*get_engine)();
Variable* (*new_variable)(Engine* engine);

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
    Space& space = Kept<Space>::get(device_of(context), [&] { return Space{context, {}, {}}; });
    const Resource own{kTempSpace, nullptr, 0, &space};
    return (*original)(&own, size);
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

}  // namespace

bool protect(void* begin, size_t size, int as) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
    void* const pages = reinterpret_cast<void*>(first);  // NOLINT(performance-no-int-to-ptr)
    return mprotect(pages, reinterpret_cast<uintptr_t>(begin) + size - first, as) == 0;
}

std::string take_space() {
    if (is_naive_engine) return "";
    const struct {
        const char* name;
        void* ours;
        void* found = find(name);
        void** entry = found == nullptr ? nullptr : entry_of(name);
    } all[] = {
        {"_ZNK5mxnet8Resource18get_space_internalEm", reinterpret_cast<void*>(get_space<&mxnets>)},
        {"_ZNK5mxnet8Resource23get_host_space_internalEm", reinterpret_cast<void*>(get_space<&mxnets_host>)},
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
    mxnets = reinterpret_cast<GetSpace*>(all[0].found);
    mxnets_host = reinterpret_cast<GetSpace*>(all[1].found);
    mxnets_attach = reinterpret_cast<Attach*>(all[2].found);
    for (const auto& one : all) __atomic_store_n(one.entry, one.ours, __ATOMIC_RELEASE);
    get_engine = engine;
    new_variable = make;
    return "";
}

bool has_space() { return new_variable != nullptr; }

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

}  // namespace native
}  // namespace syncbn

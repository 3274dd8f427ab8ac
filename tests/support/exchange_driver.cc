// Calls an exchange of the core, for one row of this process, and finds who has the members of groups.
#include "exchange/processes.h"

#include <algorithm>
#include <exception>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns why there is no result; null if there is one, with the seconds that it took. All processes know the layer by
// this number.
EXPORTED const char* allreduce(syncbn::Asked* exchange, bool merges, int64_t layer, int64_t node, int64_t call,
                               int64_t phase, const char* name, double timeout, size_t length, const double* row,
                               double* out, double* taken) {
    static thread_local std::string problem;
    static const std::vector<std::string> contexts{"cpu(0)"};
    const auto combine = merges ? syncbn::Combine::kMerge : syncbn::Combine::kAdd;
    const auto agreed = std::make_shared<const syncbn::Agreed>(syncbn::Agreed{{}, layer, 1});
    const syncbn::CallId id{layer, node, call, phase, name, timeout, agreed, contexts};
    try {
        const double start = syncbn::seconds();
        const auto total = exchange->host->begin(combine, id, {{row}, length})(syncbn::kForEver);
        std::copy(total->values.begin(), total->values.end(), out);
        *taken = syncbn::seconds() - start;
        return nullptr;
    } catch (const std::exception& error) {
        problem = error.what();
        return problem.c_str();
    }
}

// The number of messages.
EXPORTED int64_t sent(syncbn::Asked* processes) {
    return static_cast<syncbn::Processes&>(*processes->host).mail().sent;
}

// Writes the ranks, the members, their groups and the first member of this process, each list behind its length.
EXPORTED void reach(int64_t group, size_t named, const int* groups, size_t ranks, const size_t* replicas, size_t rank,
                    int64_t* out) {
    const syncbn::Pooling pooling{syncbn::Mode::kSync, 1, group, {groups, groups + named}};
    const syncbn::Reach found = syncbn::reach_of(pooling, {replicas, replicas + ranks}, rank);
    const auto write = [&](const auto& list) {
        *out++ = static_cast<int64_t>(list.size());
        out = std::copy(list.begin(), list.end(), out);
    };
    write(found.ranks);
    write(found.members);
    write(found.groups);
    write(std::vector<size_t>{found.first});
}

// Calls an exchange of the core, for one row of this process.
#include "exchange/processes.h"

#include <algorithm>
#include <exception>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns why there is no result; null if there is one.
EXPORTED const char* allreduce(syncbn::Asked* exchange, bool merges, int64_t layer, int64_t node, int64_t call,
                               int64_t phase, const char* name, double timeout, size_t length, const double* row,
                               double* out) {
    static thread_local std::string problem;
    const auto combine = merges ? syncbn::Combine::kMerge : syncbn::Combine::kAdd;
    const syncbn::CallId id{layer, node, call, phase, name, timeout};
    try {
        const auto total = exchange->host->begin(combine, id, {{row}, length})(syncbn::kForEver);
        std::copy(total->values.begin(), total->values.end(), out);
        return nullptr;
    } catch (const std::exception& error) {
        problem = error.what();
        return problem.c_str();
    }
}

// The number of messages.
EXPORTED int64_t sent(syncbn::Asked* processes) { return static_cast<syncbn::Processes&>(*processes->host).job().sent; }

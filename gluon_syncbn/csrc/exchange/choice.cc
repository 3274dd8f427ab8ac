#include "exchange/choice.h"

#include <algorithm>
#include <mutex>

#include "cuda/collective.h"
#include "failure.h"
#include "log.h"

namespace syncbn {

std::shared_ptr<Exchange> chosen(const Asked& asked, const std::vector<std::string>& contexts, size_t per_context) {
    // Several replicas on a GPU would be several members of a collective, but a GPU can only be one.
    const bool one_gpu_each =
        per_context == 1 && std::all_of(contexts.begin(), contexts.end(),
                                        [](const auto& context) { return context.compare(0, 4, "gpu(") == 0; });
    if (!one_gpu_each && asked.nccl == Nccl::kRequired) {
        std::string where;
        for (const std::string& context : contexts) where += (where.empty() ? "" : ", ") + context;
        throw Failure("kvstore 'nccl' needs GPUs with one replica on each, but the layer is on " + where);
    }
    // Between processes, the order of collectives would have to be agreed on over the host: see docs/architecture.md.
    if (!one_gpu_each || asked.host->spans_processes()) return asked.host;
    if (contexts.size() == 1) return nccl_exchange(1);  // exchanges nothing
    if (asked.nccl == Nccl::kNever) return asked.host;
    const std::string missing = cuda::why_no_collective();
    if (missing.empty()) return nccl_exchange(contexts.size());
    if (asked.nccl == Nccl::kRequired) throw Failure("kvstore 'nccl' was asked for, but " + missing);
    static std::once_flag said;
    std::call_once(said, [&] { log(Level::kWarning, "the statistics of GPUs go through host memory: " + missing); });
    return asked.host;
}

}  // namespace syncbn

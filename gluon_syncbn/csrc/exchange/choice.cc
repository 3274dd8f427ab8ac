#include "exchange/choice.h"

#include <algorithm>

#include "cuda/collective.h"
#include "exchange/nccl.h"
#include "failure.h"
#include "log.h"

namespace syncbn {

Choice::Choice(Asked asked, std::vector<std::string> contexts, size_t per_context, Sharing sharing)
    : asked_(std::move(asked)), contexts_(std::move(contexts)), per_context_(per_context), sharing_(sharing) {}

Exchange& Choice::exchange(const Ticket& ticket) {
    if (!known_) {
        std::lock_guard<std::mutex> lock(choosing_);
        if (!known_) chosen_ = choose(ticket);
        known_ = true;
    }
    return *chosen_;
}

std::shared_ptr<Exchange> Choice::choose(const Ticket& ticket) const {
    // Several replicas on a GPU would be several members of a collective, but a GPU can only be one.
    const bool one_gpu_each =
        per_context_ == 1 && std::all_of(contexts_.begin(), contexts_.end(),
                                         [](const auto& context) { return context.compare(0, 4, "gpu(") == 0; });
    if (!one_gpu_each && asked_.nccl == Nccl::kRequired) {
        std::string where;
        for (const std::string& context : contexts_) where += (where.empty() ? "" : ", ") + context;
        throw Failure("kvstore 'nccl' needs GPUs with one replica on each, but the layer is on " + where);
    }
    if (!one_gpu_each) return asked_.host;
    if (asked_.host->spans_processes()) {
        const int64_t replicas = asked_.host->gpus_of_all_processes(ticket);
        return replicas > 0 ? nccl_exchange(static_cast<size_t>(replicas), asked_.host, sharing_) : asked_.host;
    }
    if (contexts_.size() == 1) return nccl_exchange(1, nullptr, sharing_);  // exchanges nothing
    if (asked_.nccl == Nccl::kNever) return asked_.host;
    const std::string missing = cuda::why_no_collective();
    if (missing.empty()) return nccl_exchange(contexts_.size(), nullptr, sharing_);
    if (asked_.nccl == Nccl::kRequired) throw Failure("kvstore 'nccl' was asked for, but " + missing);
    static std::once_flag said;
    std::call_once(said, [&] { log(Level::kWarning, "the statistics of GPUs go through host memory: " + missing); });
    return asked_.host;
}

}  // namespace syncbn

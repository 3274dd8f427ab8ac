// Chooses the exchange of a meeting, from the user's settings and the replicas' contexts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Whether GPUs exchange their statistics by NCCL. If NCCL is missing, `kIfThere` takes the host, with a warning, and
// `kRequired` is an error.
enum class Nccl { kIfThere, kRequired, kNever };

// The user's settings.
struct Asked {
    std::shared_ptr<Exchange> host;  // for vectors in memory of the host
    Nccl nccl = Nccl::kIfThere;      // for replicas of one process with a GPU each
};

// For replicas on these contexts, `per_context` on each. Throws Failure if there is no such exchange.
std::shared_ptr<Exchange> chosen(const Asked& asked, const std::vector<std::string>& contexts, size_t per_context);

}  // namespace syncbn

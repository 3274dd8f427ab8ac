// Chooses the exchange of a layer's meetings once, from the user's settings and the replicas' contexts.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "pooling/pooling.h"

namespace syncbn {

// Whether GPUs exchange their statistics by NCCL. If NCCL is missing, `kIfThere` takes the host, with a warning, and
// `kRequired` is an error.
enum class Nccl { kIfThere, kRequired, kNever };

// The user's settings.
struct Asked {
    std::shared_ptr<Exchange> host;  // for vectors in memory of the host
    Nccl nccl = Nccl::kIfThere;      // for replicas with a GPU each; without NCCL they go over the host
};

class Choice {
  public:
    // For replicas on these contexts, `per_context` on each.
    Choice(Asked asked, std::vector<std::string> contexts, size_t per_context, Sharing sharing);

    // The answer is the same for all exchanges to choose from.
    bool spans_processes() const { return asked_.host->spans_processes(); }
    // Whether `exchange` returns without a wait.
    bool known() const { return known_ || !spans_processes(); }
    // Returns the exchange of all meetings. GPUs may first wait here for other processes. Throws Failure if there is
    // none.
    Exchange& exchange(const Ticket& ticket);

  private:
    std::shared_ptr<Exchange> choose(const Ticket& ticket) const;

    const Asked asked_;
    const std::vector<std::string> contexts_;
    const size_t per_context_;
    const Sharing sharing_;
    std::mutex choosing_;  // guards the next two, and is held while other processes are asked
    std::shared_ptr<Exchange> chosen_;
    std::atomic<bool> known_{false};
};

}  // namespace syncbn

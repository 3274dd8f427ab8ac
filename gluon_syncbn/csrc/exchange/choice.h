// Which exchange the meetings of a layer have: chosen once, of what was asked for and where its replicas are.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Whether GPUs exchange their statistics by NCCL: if it is there, else over the host, with a warning; or it is an error where
// it is not; or never.
enum class Nccl { kIfThere, kRequired, kNever };

// What the user asks for.
struct Asked {
    std::shared_ptr<Exchange> host;            // of vectors in memory of the host
    Nccl nccl = Nccl::kIfThere;                // of replicas with a GPU each; they go over the host without it
    std::shared_ptr<Exchange> gpus = nullptr;  // in the place of NCCL
};

class Choice {
  public:
    // For the replicas on these contexts, so many on each. They need `total` alone of all vectors, or each.
    Choice(Asked asked, std::vector<std::string> contexts, size_t lanes, bool total);

    // This holds for all that may be chosen.
    bool spans_processes() const { return asked_.host->spans_processes(); }
    // Whether `exchange` does not wait.
    bool known() const { return known_ || !spans_processes(); }
    // The one of all meetings. GPUs may wait here for other processes at first. Throws Failure where there is none.
    Exchange& exchange(const Ticket& ticket);

  private:
    std::shared_ptr<Exchange> choose(const Ticket& ticket) const;

    const Asked asked_;
    const std::vector<std::string> contexts_;
    const size_t lanes_;
    const bool total_;
    std::mutex choosing_;  // guards the next two, and is held while other processes are asked
    std::shared_ptr<Exchange> chosen_;
    std::atomic<bool> known_{false};
};

}  // namespace syncbn

// Orders the collectives of GPUs, which all processes have to post alike.
//
//     process 0        process 1        process 2      1. each process brings all calls that are ready there
//       a, b             b                b, a         2. a call that is ready in all of them gets the next number;
//         └────────── one ballot ─────────┘               where there are several, in the order of rank 0
//       number 7: b    number 7: b      number 7: b    3. the rest comes again in the next ballot
//
// A ballot is one allgather, and every process makes the same ballots. A net without branches takes one ballot for each
// call. A ballot waits for a process that has no call ready: nothing could get a number before.
//
// A call never gets its number before it is ready everywhere. A process that posts the collective it expects next may
// wait for ever. Another process may read the result of one branch before it calls the branch that was expected. NCCL
// cannot withdraw a collective, and completes collectives in the order of posting.
//
// A call gets no number when it is issued, although that would be earlier. MXNet does not tell which calls of a backward
// it has issued. The forward of the next step is often issued while they still wait, and it depends on them. If it had
// its numbers before they have theirs, each would wait for the other.
#pragma once

#include <array>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Calls come from several threads; one of them is in a ballot for all.
class Turns {
  public:
    // `processes` holds the ballots. `new_id` makes the id of a communicator.
    explicit Turns(Exchange& processes, std::function<std::string()> new_id);

    // Waits until the call is ready in all processes. Throws Failure.
    Turn next(const Ticket& ticket, const DeviceContribution& own);

  private:
    using Call = std::array<int64_t, 4>;  // key, node, call, phase
    struct Part {
        std::vector<int> devices;
        Vector counts;
    };
    using Parts = std::map<Call, Part>;
    using Lock = std::unique_lock<std::mutex>;
    class WaitForTurn;

    Agreed agreed(const Ticket& ticket, size_t here);
    // Holds one ballot, with these calls. `waited` as in `refuse_a_skipped_step`.
    void ask(const Ticket& ticket, const Agreed& agreed, const Call& call, const Parts& brought, double waited);
    Turn turn_of(const Ticket& ticket, const Agreed& agreed, const std::vector<Part>& parts);
    // Throws if another process is in another call of this layer, after some seconds.
    void refuse_a_skipped_step(const Ticket& ticket, const Agreed& agreed, const Call& call,
                               const std::vector<std::vector<std::pair<Call, Part>>>& everyone, double waited) const;

    Exchange& processes_;
    const std::function<std::string()> new_id_;
    const int64_t channel_;
    std::mutex mutex_;  // guards the rest; not held in a ballot
    std::condition_variable changed_;
    std::map<std::pair<int64_t, size_t>, Agreed> agreed_;  // by layer and replicas
    Parts ready_;
    std::map<Call, Turn> numbered_;
    std::map<Call, std::vector<int64_t>> missing_;  // ranks that were not ready in the last ballot
    bool asks_ = false;                             // a thread is in a ballot
    int64_t ballots_ = 0, numbers_ = 0, in_vain_ = 0;
    std::map<std::vector<std::vector<int>>, int64_t> cliques_;  // by the devices of each rank
};

}  // namespace syncbn

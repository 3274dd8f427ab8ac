// Describes who is here, who is missing, and what the user can do about it. All of it is called under the layer's lock.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/meeting.h"

namespace syncbn {

// The contexts of those that have arrived, or of those that have not.
std::vector<std::string> replicas_of(const Meeting& meeting, const Phase& phase, bool arrived);
// "1 of 2 replicas arrived (cpu(0)), missing cpu(1)"
std::string describe(const Meeting& meeting, const Phase& phase);
// What to do about a replica that has not been called.
constexpr const char* kCallAll =
    "Call the net on all its devices, and then wait for results (asnumpy, print, a metric, waitall, a new DataLoader). "
    "For a batch on fewer devices use gluon_syncbn.only_on(contexts).";
std::string likely_cause(const Meeting& meeting, const Phase& phase);
// Why a call on this context is not a replica of the layer.
std::string why_not_here(const LayerConfig& config, const std::string& context);

// What Python says of all its threads that could call a replica: only Python sees what they do.
struct Callers {
    std::string wait;     // the results that all of them wait for, and where; empty if one could call
    double patience = 0;  // seconds after which such a wait is one for the missing replica
    double at = 0;        // when Python said so, on the clock of `seconds`
};
// Returns the last answer, if it came lately, and since this time. Asks for the next one, which
// the thread of Python's that takes records gives within moments.
Callers callers(double since);

// Replicas that wait, if it takes long. The first one that waits for a replica which nobody has called knows the cause.
// Others may wait in what came before, for the same reason.
struct LongWait {
    double since;         // on the clock of `seconds`
    std::string replica;  // that waits
    std::vector<std::string> missing;
    std::string layer, call, state;
    bool called;  // all replicas have been
};
class LongWaits {
  public:
    void note(const void* waiter, LongWait wait) {
        const std::lock_guard<std::mutex> lock(mutex_);
        waits_[waiter] = std::move(wait);
    }
    void end(const void* waiter) {
        const std::lock_guard<std::mutex> lock(mutex_);
        waits_.erase(waiter);
    }
    // Returns the first one with a replica that nobody has called.
    std::optional<LongWait> first() const;
    // " Meanwhile cpu(0) waits in the forward of call 1 of SyncBatchNorm 'a'.", of the replicas that this one misses.
    std::string meanwhile(const LongWait& wait) const;

  private:
    mutable Mutex mutex_;  // guards the rest
    std::map<const void*, LongWait> waits_;
};
inline Renewed<LongWaits>& long_waits = *new Renewed<LongWaits>;  // outlives the threads that wait at exit

}  // namespace syncbn

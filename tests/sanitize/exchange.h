// The exchanges: in memory; one of Python's, played here; and one with another process, which a thread plays.
#pragma once

#include "exchange/exchange.h"
#include "random.h"
#include "waiting/wait.h"

namespace driver {

using syncbn::Asked;

// A wait for other processes, which looks around as those of the core do.
class WaitForOthers : public syncbn::Wait {
  public:
    WaitForOthers() : Wait(10, "", "rank 0 waits") {}
    // Returns whether it goes on.
    bool looks() noexcept {
        try {
            look();
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }
};

// Once, before the first layer.
void make_exchanges();
// A failure between processes is for good, since a job starts again then. This replaces that exchange.
void renew_exchanges();
// Each returns where the exchange stands.
Asked* const* any_exchange(Random& random);
Asked* const* exchange_in_memory();
Asked* const* exchange_of_processes();
// The vectors of this layer are put side by side: the other process has none.
void gathers(int64_t layer);
// So many of the next exchanges fail.
void fail_exchanges(int count);

}  // namespace driver

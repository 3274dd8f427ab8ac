// The exchanges: in memory; those that Python has, played here; and with another process, which a thread plays.
#pragma once

#include "random.h"

namespace driver {

// Once, before the first layer.
void make_exchanges();
void* any_exchange(Random& random);
void* exchange_in_memory();
void* exchange_of_processes();
// The vectors of this layer are put side by side: the other process has none.
void gathers(int64_t layer);
// So many of the next exchanges fail.
void fail_exchanges(int count);

}  // namespace driver

// Exchanges between processes of several machines, in levels. First the processes of each machine exchange in shared
// memory. Then one process of each machine, its leader, uses the transport.
//
//     machine 0                                          machine 1
//     rank 1 ─► post ──────┐                             ┌────── post ◄─ rank 3
//     rank 0 ─► reduce ◄───┘                             └───► reduce ◄─ rank 2
//             leaders' allreduce ◄─── transport ───► leaders' allreduce
//     rank 1 ◄─ total ◄─ rank 0                                rank 2 ─► total ─► rank 3
//
// The total of a machine is rounded before the machines' totals are combined. All ranks have the same bits. They may
// differ from the bits of a single level in the last digits.
#pragma once

#include "exchange/exchange.h"
#include "exchange/shared_memory.h"

namespace syncbn {

// `machine`: the processes of this machine, with the leader first. `leaders`: called only in the leaders. `transport`:
// all processes. An allgather needs the vector of every process, so it uses only the transport.
std::shared_ptr<Exchange> hierarchy(std::shared_ptr<SharedMemory> machine, std::shared_ptr<Exchange> leaders,
                                    std::shared_ptr<Exchange> transport);

}  // namespace syncbn

// The exchange between processes of several machines, in levels: the processes of each machine in the memory that they share,
// then one process of each machine by the transport.
//
//     machine 0                                          machine 1
//     rank 1 ─► post ──────┐                             ┌────── post ◄─ rank 3
//     rank 0 ─► reduce ◄───┘                             └───► reduce ◄─ rank 2
//             leaders' allreduce ◄─── transport ───► leaders' allreduce
//     rank 1 ◄─ total ◄─ rank 0                                rank 2 ─► total ─► rank 3
//
// The total of a machine is rounded before those of the machines come together. All ranks have the same bits. They may
// differ from those of one level in the last digits.
#pragma once

#include "exchange/exchange.h"
#include "exchange/shared_memory.h"

namespace syncbn {

// `machine`: the processes of this machine, the first of which speaks for it. `leaders`: those that speak, called in these
// alone. `transport`: all processes. An allgather needs the vector of every process, and goes by the transport as it is.
std::shared_ptr<Exchange> hierarchy(std::shared_ptr<SharedMemory> machine, std::shared_ptr<Exchange> leaders,
                                    std::shared_ptr<Exchange> transport);

}  // namespace syncbn

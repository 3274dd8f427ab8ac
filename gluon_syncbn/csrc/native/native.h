// Declares what goes past MXNet's C interface: calls, resources of CPU contexts, and sums of gradients.
#pragma once

#include <exception>
#include <string>

#include "exchange/sums.h"
#include "native/abi.h"

namespace syncbn {
namespace native {

// Takes over calls of our operator on "cpu" or "gpu" contexts; other custom operators are forwarded to MXNet's handler.
// The build of MXNet's library is known. Returns the reason if it cannot; otherwise empty.
std::string take_calls(const std::string& device);

void complete_with_error(const Completion& complete, const std::exception_ptr& reason) noexcept;

// Gives each CPU context resources of its own from now on. Returns the reason if it cannot; otherwise empty.
std::string separate_resources();

// Says that this thread begins to issue the operators of a replica on this CPU context, on whatever context they run;
// -1: of none. Returns the context before.
int issue_on(int context) noexcept;
// Says whether this thread's operators take temporary space that is free, also where it issues those of a replica.
// Returns what it has said before.
bool use_spare_space(bool uses) noexcept;

// Begins a round of sums, and does not wait. The arrays become the sums together, or all of them raise the failure.
// `arrays`: of each summand a handle for each context, one summand after the other. They are dense, and on CPUs or the
// devices of `gpus`. Throws Failure if MXNet refuses.
void sum_gradients(Sums& sums, Brought brought, size_t contexts, void** arrays);

}  // namespace native
}  // namespace syncbn

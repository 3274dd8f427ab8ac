// Gives each CPU context temporary space and random states of its own, as MXNet gives them to each GPU.
//
// MXNet's operators on all CPU contexts share a few copies of temporary space and one random state. An operator takes
// its copy when it is issued. So a later operator of the first replica can hold the copy that the second replica needs.
// If the first replica waits for the second, this is a deadlock.
//
// MXNet keeps these resources in one object for each thread (`ResourceManager` in src/resource.cc). Here a
// thread has one such object more for each replica that it issues. The thread's own object remains for all operators
// that no replica issues, so that these take space and draw numbers as without this package. Where several replicas
// share a context, nobody knows which of them an operator of the backward belongs to, so each operator takes a copy of
// temporary space that is free.
#pragma once

#include <cstdint>
#include <string>

namespace syncbn {
namespace native {

// Separates the resources from now on. Returns the reason if it cannot; otherwise empty.
std::string separate_resources();

// Lets the replicas of all threads take new resources. MXNet reads from the environment how many copies
// these have.
void renew_resources();

// Says that this thread begins to issue the operators of a replica on this CPU context, on whatever context they run;
// -1: of none. Returns the context before.
int issue_on(int context) noexcept;
// The same for the context of an array, if this thread trains there and issues for no replica yet. Returns whether it
// is so.
bool issue_for(void* array) noexcept;

// Called in the child of a fork.
void forget_resources();

}  // namespace native
}  // namespace syncbn

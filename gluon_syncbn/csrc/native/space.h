// Declares temporary space of the threads that run operators.
#pragma once

#include <cstddef>
#include <string>

#include "native/abi.h"

namespace syncbn {
namespace native {

// Gives operators that take a resource from `space_resource` the space of the thread that runs them. Returns the reason
// if it cannot; otherwise empty.
std::string take_space();

// Whether `take_space` has. With the naive engine it does not, because no operator waits there.
bool has_space();

// A resource with a variable that no other operator holds.
Resource space_resource(const Context& context);

// Changes what may be done with the memory of MXNet's library; false if the system refuses.
bool protect(void* begin, size_t size, int as);

}  // namespace native
}  // namespace syncbn

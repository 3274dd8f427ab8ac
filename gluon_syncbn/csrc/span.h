// Values side by side, as Python passes a list of them.
#pragma once

#include <cstdint>

namespace syncbn {

template <typename T>
struct Span {
    int64_t count;
    T* values;
    T* begin() const { return values; }
    T* end() const { return values + count; }
};

}  // namespace syncbn

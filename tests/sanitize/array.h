// MXNet's arrays, as far as the core sees them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "types.h"

namespace driver {

using syncbn::Type;

class Array {
  public:
    Array(Type type, int64_t size, double value);

    double get(int64_t i) const;
    void set(int64_t i, double value);

    const Type type;
    const int64_t size;
    std::atomic<bool> broken{false};  // MXNet has no memory for it
    char* memory() { return memory_.get(); }

  private:
    const std::unique_ptr<char[]> memory_;  // not a byte more than it needs: what lies beyond is an error
};

using ArrayP = std::shared_ptr<Array>;

inline ArrayP make_array(Type type, int64_t size, double value) { return std::make_shared<Array>(type, size, value); }

// What MXNet hands to a callback, which frees it. Of an array that the callback has not asked for (null) it is empty.
void* new_handle(const ArrayP& array);

}  // namespace driver

// The rows that replicas bring to a gather, and how they are put together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange/exchange.h"
#include "types.h"

namespace syncbn {

// What others need to know of a replica's rows. It travels as numbers.
struct RowsHead {
    static constexpr size_t kLength = 4;  // in numbers

    int64_t rows = 0, values = 0;  // values of a row
    Type type = Type::kFloat32;
    int64_t expected = 0;  // rows of all replicas

    int64_t bytes() const { return rows * values * size_of(type); }
    Vector packed() const;
};

// Returns the heads that lie side by side.
std::vector<RowsHead> heads_of(const Vector& packed);
// Returns the number of rows before those of replica `own`. Throws Failure if the replicas have rows of different
// shapes or types, or not as many as one of them expects.
int64_t first_row_of(const std::vector<RowsHead>& heads, size_t own);

// The number of float64 values that have space for so many bytes.
inline int64_t doubles_for(int64_t bytes) {
    return (bytes + static_cast<int64_t>(sizeof(double)) - 1) / static_cast<int64_t>(sizeof(double));
}

// The rows of all replicas, with space for whole float64 values, and the index of this replica's first row.
struct Rows {
    Vector all;
    int64_t first = 0;
};

// Returns a contribution to an allgather over the host: the head, and the bytes of the rows.
Vector contribution_of(const RowsHead& head, const void* rows);
// Returns what the contributions of all replicas hold. Throws Failure as `first_row_of` does.
Rows rows_of(const Total& total);

}  // namespace syncbn

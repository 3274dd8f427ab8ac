// Implements the CPU kernels for two layouts and all data types; blocked.cc handles channels in blocks.
//
// A tensor is [outer][channels][inner]. If rows of `inner` values are long (channels-first), a leaf runs along one row
// with the channel's constants in registers. If they are short (channels-last, a matrix), a leaf runs along the columns
// of [outer][channels * inner] with the constants in small arrays.
//
// Sums run in fixed lanes over fixed blocks, so the bits depend on neither alignment nor thread count.
#include "cpu/kernels.h"

#include <algorithm>
#include <vector>

#include "cpu/blocked.h"
#include "cpu/leaf.h"

namespace syncbn {
namespace cpu {
namespace {

constexpr int64_t kShortRow = 16;      // below this, a row does not fill the vectors
constexpr int64_t kTile = 512;         // columns at a time: their accumulators stay in the first-level cache
constexpr int64_t kRowsPerBlock = 64;  // rows that share one partial sum in the column pattern
constexpr int64_t kMaxBlocks = 16;
constexpr int64_t kWorthAThread = 1 << 15;  // values; another thread would take longer to wake up than less work takes

template <int Width>
SYNCBN_INLINE double total(const Lanes<Width>& lanes) {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes.parts[i / Width][i % Width];
    return sum;
}

// Adds all lanes, and the remaining values.
template <int Width>
SYNCBN_INLINE void store(Sums<Width, 2>& sums, double rest, double other_rest, double* first, double* second) {
    sums.template fold<1>();
    *first = total(sums.first[0]) + rest;
    *second = total(sums.second[0]) + other_rest;
}

// ---- one channel, long rows ------------------------------------------------------------------------------

// Sums (x - pivot) and its square over `rows` rows of `n` values, `stride` values apart. The rows of a mask are neighbours.
template <int Width, bool Masked, typename T>
SYNCBN_INLINE void row_moments(const T* x, const float* mask, int64_t rows, int64_t stride, int64_t n, double pivot,
                               double* sum, double* square) {
    Sums<Width, 2> sums;
    double t1 = 0, t2 = 0;
    for (int64_t r = 0; r < rows; ++r, x += stride, mask += Masked ? n : 0) {
        int64_t i = 0;
        for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
            __builtin_prefetch(x + i + kAhead);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                typename Value<T>::template Many<Width> values;
                load_lanes(x + i + half * kLanes, &values);
                Lanes<Width> v;
                widen(values, &v);
                v.subtract(pivot);
                if (Masked) {
                    FloatLanes marks;
                    Lanes<Width> wide;
                    load_lanes(mask + i + half * kLanes, &marks);
                    widen(marks, &wide);
                    v.keep(wide);
                }
                sums.add(half, v, v);
            }
        }
        for (; i < n; ++i) {
            if (Masked && mask[i] == 0) continue;
            const double v = static_cast<double>(Value<T>::load(x + i)) - pivot;
            t1 += v;
            t2 += v * v;
        }
    }
    store(sums, t1, t2, sum, square);
}

// z of one channel, and the activation.
template <typename C>
struct RowRectified {
    const Split<C> mean;
    const C scale, shift;
    const Activation activation;
    explicit RowRectified(const Rectified& z, int64_t c)
        : mean(z.mean[c]),
          scale(static_cast<C>(z.scale == nullptr ? 0 : z.scale[c])),
          shift(static_cast<C>(z.shift == nullptr ? 0 : z.shift[c])),
          activation(z.activation) {}
    SYNCBN_METHOD C of(C x) const { return ((x - mean.high) - mean.low) * scale + shift; }
    template <class A, typename V>
    SYNCBN_METHOD void through(V* grads, const V& x) const {
        if (!A::kChanges) return;
        const typename A::template On<V, C> epilogue(activation.slope, activation.ceiling);
        const V z = ((x - mean.high) - mean.low) * scale + shift;
        epilogue.through(grads, z);
    }
    template <class A, int Width>
    SYNCBN_METHOD void through(Lanes<Width>* grads, const Lanes<Width>& x) const {
#pragma GCC unroll 4
        for (int i = 0; i < Lanes<Width>::kParts; ++i) through<A>(&grads->parts[i], x.parts[i]);
    }
    template <class A, int Width>
    SYNCBN_METHOD void through(FloatLanes* grads, const FloatLanes& x) const {
        FloatParts<Width> all(*grads);
        const FloatParts<Width> values(x);
#pragma GCC unroll 2
        for (int i = 0; i < all.kParts; ++i) through<A>(&all.parts[i], values.parts[i]);
        all.store(grads);
    }
};

template <int Width, class A, typename T, typename C = typename Value<T>::Compute>
SYNCBN_INLINE void row_grad_sums(const T* dy, const T* x, int64_t rows, int64_t stride, int64_t n, double mean,
                                 const RowRectified<C>& z, double* sum_dz, double* sum_dz_xc) {
    Sums<Width, 2> sums;
    double t1 = 0, t2 = 0;
    for (int64_t r = 0; r < rows; ++r, x += stride, dy += stride) {
        int64_t i = 0;
        for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
            __builtin_prefetch(x + i + kAhead);
            __builtin_prefetch(dy + i + kAhead);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                typename Value<T>::template Many<Width> values, grads;
                load_lanes(x + i + half * kLanes, &values);
                load_lanes(dy + i + half * kLanes, &grads);
                z.template through<A, Width>(&grads, values);
                Lanes<Width> v, g;
                widen(values, &v);
                widen(grads, &g);
                v.subtract(mean);
                sums.add(half, g, v);
            }
        }
        for (; i < n; ++i) {
            const C value = Value<T>::load(x + i);
            C grad = Value<T>::load(dy + i);
            z.template through<A>(&grad, value);
            const double g = grad;
            t1 += g;
            t2 += g * (static_cast<double>(value) - mean);
        }
    }
    store(sums, t1, t2, sum_dz, sum_dz_xc);
}

// With `Add`, the old value is added.
template <bool Add, typename T>
SYNCBN_INLINE void put(T* to, typename Value<T>::Compute value) {
    Value<T>::store(to, Add ? Value<T>::load(to) + value : value);
}

// The constants of one channel.
struct RowGradInput {
    double mean, scale, mean_dz, slope;
};

template <bool Add, class A, bool Addend, typename T, typename C = typename Value<T>::Compute>
SYNCBN_INLINE void row_normalise(const T* __restrict__ x, const T* __restrict__ addend, T* __restrict__ y, int64_t n,
                                 const RowRectified<C>& z) {
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t i = 0; i < n; ++i) {
        C value = z.of(Value<T>::load(x + i));
        if (Addend) value += Value<T>::load(addend + i);
        epilogue.apply(&value);
        put<Add>(y + i, value);
    }
}

template <bool Add, class A, bool Masked, typename T, typename C = typename Value<T>::Compute>
SYNCBN_INLINE void row_grad_input(const T* dy, const T* x, const float* __restrict__ mask, T* dx, int64_t n,
                                  const RowGradInput& row, const RowRectified<C>& constants) {
    const RowRectified<C> z = constants;  // a copy, which cannot alias dx
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    const Split<C> m(row.mean);
    const C a = static_cast<C>(row.scale), g = static_cast<C>(row.mean_dz), k = static_cast<C>(row.slope);
#pragma GCC ivdep  // dx may be x: each value is read before it is written
    for (int64_t i = 0; i < n; ++i) {
        const C value = Value<T>::load(x + i);
        C dz = Value<T>::load(dy + i);
        epilogue.through(&dz, z.of(value));
        const C whole = (dz - g) - ((value - m.high) - m.low) * k;
        put<Add>(dx + i, a * (!Masked || mask[i] != 0 ? whole : dz));
    }
}

template <class A, typename T, typename C = typename Value<T>::Compute>
SYNCBN_INLINE void row_recover(const T* __restrict__ y, T* __restrict__ x, int64_t n, const RowRectified<C>& z) {
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t i = 0; i < n; ++i) {
        C value = Value<T>::load(y + i);
        epilogue.undo(&value);
        Value<T>::store(x + i, ((value - z.shift) / z.scale + z.mean.low) + z.mean.high);
    }
}

// Computes dz from y.
template <class A, typename T, typename C = typename Value<T>::Compute>
SYNCBN_INLINE void row_grad_by_output(const T* __restrict__ dy, const T* __restrict__ y, T* __restrict__ dz, int64_t n,
                                      const Activation& activation) {
    const typename A::template On<C> epilogue(activation.slope, activation.ceiling);
    for (int64_t i = 0; i < n; ++i) {
        C grad = Value<T>::load(dy + i);
        epilogue.through(&grad, Value<T>::load(y + i));
        Value<T>::store(dz + i, grad);
    }
}

// ---- short rows: along the columns -------------------------------------------------------------------------

// The mask of a row of columns: the value of column c is row[position[c]].
struct ColumnMask {
    const float* row;
    int64_t inner;  // from row to row
    const int32_t* position;
};

template <typename T>
SYNCBN_INLINE void column_moments(const T* __restrict__ x, int64_t rows, int64_t stride, int64_t columns,
                                  const double* __restrict__ pivot, double* __restrict__ sum,
                                  double* __restrict__ square) {
    for (int64_t r = 0; r < rows; ++r, x += stride)
        for (int64_t c = 0; c < columns; ++c) {
            const double v = static_cast<double>(Value<T>::load(x + c)) - pivot[c];
            sum[c] += v;
            square[c] += v * v;
        }
}

// At a single position, a mask leaves out whole rows.
template <typename T>
SYNCBN_INLINE void column_moments(const T* __restrict__ x, ColumnMask mask, int64_t rows, int64_t stride,
                                  int64_t columns, const double* __restrict__ pivot, double* __restrict__ sum,
                                  double* __restrict__ square) {
    for (int64_t r = 0; r < rows; ++r, x += stride, mask.row += mask.inner) {
        if (mask.inner == 1 && mask.row[0] == 0) continue;
        if (mask.inner == 1) {
            column_moments(x, 1, stride, columns, pivot, sum, square);
            continue;
        }
        for (int64_t c = 0; c < columns; ++c) {
            const double apart = static_cast<double>(Value<T>::load(x + c)) - pivot[c];
            const double v = mask.row[mask.position[c]] != 0 ? apart : 0;
            sum[c] += v;
            square[c] += v * v;
        }
    }
}

template <class A, typename T, typename C = typename Value<T>::Compute>
SYNCBN_INLINE void column_grad_sums(const T* __restrict__ dy, const T* __restrict__ x, int64_t rows, int64_t stride,
                                    int64_t columns, const double* __restrict__ mean, const ColumnRectified<C>& z,
                                    double* __restrict__ sum_dz, double* __restrict__ sum_dz_xc) {
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t r = 0; r < rows; ++r, x += stride, dy += stride)
        for (int64_t c = 0; c < columns; ++c) {
            const C value = Value<T>::load(x + c);
            C grad = Value<T>::load(dy + c);
            if (A::kChanges) {
                const C at = ((value - z.high[c]) - z.low[c]) * z.scale[c] + z.shift[c];
                epilogue.through(&grad, at);
            }
            const double g = grad;
            sum_dz[c] += g;
            sum_dz_xc[c] += g * (static_cast<double>(value) - mean[c]);
        }
}

template <bool Add, class A, bool Addend, typename T, typename C>
SYNCBN_INLINE void column_normalise(const T* __restrict__ x, const T* __restrict__ addend, T* __restrict__ y,
                                    int64_t rows, int64_t columns, const ColumnRectified<C>& z) {
    const C* __restrict__ high = z.high;
    const C* __restrict__ low = z.low;
    const C* __restrict__ a = z.scale;
    const C* __restrict__ b = z.shift;
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t r = 0; r < rows; ++r, x += columns, y += columns, addend += Addend ? columns : 0)
        for (int64_t c = 0; c < columns; ++c) {
            C value = ((Value<T>::load(x + c) - high[c]) - low[c]) * a[c] + b[c];
            if (Addend) value += Value<T>::load(addend + c);
            epilogue.apply(&value);
            put<Add>(y + c, value);
        }
}

template <bool Add, class A, typename T, typename C>
SYNCBN_INLINE void column_grad_input(const T* dy, const T* x, T* dx, int64_t rows, int64_t columns,
                                     const ColumnGradInput<C>& column, const ColumnRectified<C>& z) {
    const C *__restrict__ high = column.high, *__restrict__ low = column.low, *__restrict__ a = column.scale,
            *__restrict__ g = column.mean_dz, *__restrict__ k = column.slope;
    const C* __restrict__ z_high = z.high;
    const C* __restrict__ z_low = z.low;
    const C* __restrict__ z_scale = z.scale;
    const C* __restrict__ z_shift = z.shift;
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t r = 0; r < rows; ++r, x += columns, dy += columns, dx += columns)
#pragma GCC ivdep  // as in a row
        for (int64_t c = 0; c < columns; ++c) {
            const C value = Value<T>::load(x + c);
            C dz = Value<T>::load(dy + c);
            if (A::kChanges) {
                const C at = ((value - z_high[c]) - z_low[c]) * z_scale[c] + z_shift[c];
                epilogue.through(&dz, at);
            }
            put<Add>(dx + c, a[c] * ((dz - g[c]) - ((value - high[c]) - low[c]) * k[c]));
        }
}

template <bool Add, class A, typename T, typename C>
SYNCBN_INLINE void column_grad_input(const T* dy, const T* x, ColumnMask mask, T* dx, int64_t rows, int64_t columns,
                                     const ColumnGradInput<C>& column, const ColumnRectified<C>& z) {
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t r = 0; r < rows; ++r, x += columns, dy += columns, dx += columns, mask.row += mask.inner) {
        if (mask.inner == 1 && mask.row[0] != 0) {
            column_grad_input<Add, A>(dy, x, dx, 1, columns, column, z);
            continue;
        }
#pragma GCC ivdep  // as in a row
        for (int64_t c = 0; c < columns; ++c) {
            const C value = Value<T>::load(x + c);
            C dz = Value<T>::load(dy + c);
            if (A::kChanges) epilogue.through(&dz, ((value - z.high[c]) - z.low[c]) * z.scale[c] + z.shift[c]);
            const C whole = (dz - column.mean_dz[c]) - ((value - column.high[c]) - column.low[c]) * column.slope[c];
            put<Add>(dx + c, column.scale[c] * (mask.row[mask.position[c]] != 0 ? whole : dz));
        }
    }
}

template <class A, typename T, typename C>
SYNCBN_INLINE void column_recover(const T* __restrict__ y, T* __restrict__ x, int64_t rows, int64_t columns,
                                  const ColumnRectified<C>& z) {
    const C* __restrict__ high = z.high;
    const C* __restrict__ low = z.low;
    const C* __restrict__ a = z.scale;
    const C* __restrict__ b = z.shift;
    const typename A::template On<C> epilogue(z.activation.slope, z.activation.ceiling);
    for (int64_t r = 0; r < rows; ++r, x += columns, y += columns)
        for (int64_t c = 0; c < columns; ++c) {
            C value = Value<T>::load(y + c);
            epilogue.undo(&value);
            Value<T>::store(x + c, ((value - b[c]) / a[c] + low[c]) + high[c]);
        }
}

// ---- the leaves, one set per data type ----------------------------------------------------------------------
// Overloads of plain functions: instruction-set clones of template instances are not portable among g++ versions.

#define SYNCBN_ROW_SUMS_OF(TYPE, T, SET, WIDTH)                                                                     \
    SET void leaf_row_moments(const T* x, const float* mask, int64_t rows, int64_t stride, int64_t n, double pivot, \
                              double* sum, double* square) {                                                        \
        SYNCBN_IF(mask != nullptr, kMasked,                                                                         \
                  row_moments<WIDTH, kMasked>(x, mask, rows, stride, n, pivot, sum, square);)                       \
    }                                                                                                               \
    SET void leaf_row_grad_sums(const T* dy, const T* x, int64_t rows, int64_t stride, int64_t n, double mean,      \
                                const RowRectified<Compute<T>>& z, double* sum_dz, double* sum_dz_xc) {             \
        SYNCBN_ACTIVATION(z.activation, A,                                                                          \
                          row_grad_sums<WIDTH, A>(dy, x, rows, stride, n, mean, z, sum_dz, sum_dz_xc);)             \
    }
#define SYNCBN_ROW_SUMS(SET, WIDTH) SYNCBN_NUMBERS(SYNCBN_ROW_SUMS_OF, SET, WIDTH)

#define SYNCBN_LEAVES(TYPE, T)                                                                                         \
    SYNCBN_CLONES void leaf_row_normalise(const T* x, const T* addend, T* y, int64_t n,                                \
                                          const RowRectified<Compute<T>>& z, bool add) {                               \
        SYNCBN_ACTIVATION(                                                                                             \
            z.activation, A,                                                                                           \
            SYNCBN_IF(add, kAdd,                                                                                       \
                      SYNCBN_IF(addend != nullptr, kAddend, row_normalise<kAdd, A, kAddend>(x, addend, y, n, z);)))    \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_row_grad_input(const T* dy, const T* x, const float* mask, T* dx, int64_t n,               \
                                           const RowGradInput& row, const RowRectified<Compute<T>>& z, bool add) {     \
        SYNCBN_ACTIVATION(z.activation, A,                                                                             \
                          SYNCBN_IF(add, kAdd,                                                                         \
                                    SYNCBN_IF(mask != nullptr, kMasked,                                                \
                                              row_grad_input<kAdd, A, kMasked>(dy, x, mask, dx, n, row, z);)))         \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_row_recover(const T* y, T* x, int64_t n, const RowRectified<Compute<T>>& z) {              \
        SYNCBN_ACTIVATION(z.activation, A, row_recover<A>(y, x, n, z);)                                                \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_column_recover(const T* y, T* x, int64_t rows, int64_t columns,                            \
                                           const ColumnRectified<Compute<T>>& z) {                                     \
        SYNCBN_ACTIVATION(z.activation, A, column_recover<A>(y, x, rows, columns, z);)                                 \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_row_grad_by_output(const T* dy, const T* y, T* dz, int64_t n, const Activation& with) {    \
        SYNCBN_ACTIVATION(with, A, row_grad_by_output<A>(dy, y, dz, n, with);)                                         \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_column_moments(const T* x, const ColumnMask& mask, int64_t rows, int64_t stride,           \
                                           int64_t columns, const double* pivot, double* sum, double* square) {        \
        if (mask.row == nullptr) return column_moments(x, rows, stride, columns, pivot, sum, square);                  \
        column_moments(x, mask, rows, stride, columns, pivot, sum, square);                                            \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_column_grad_sums(const T* dy, const T* x, int64_t rows, int64_t stride, int64_t columns,   \
                                             const double* mean, const ColumnRectified<Compute<T>>& z, double* sum_dz, \
                                             double* sum_dz_xc) {                                                      \
        SYNCBN_ACTIVATION(z.activation, A,                                                                             \
                          column_grad_sums<A>(dy, x, rows, stride, columns, mean, z, sum_dz, sum_dz_xc);)              \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_column_normalise(const T* x, const T* addend, T* y, int64_t rows, int64_t columns,         \
                                             const ColumnRectified<Compute<T>>& z, bool add) {                         \
        SYNCBN_ACTIVATION(z.activation, A,                                                                             \
                          SYNCBN_IF(add, kAdd,                                                                         \
                                    SYNCBN_IF(addend != nullptr, kAddend,                                              \
                                              column_normalise<kAdd, A, kAddend>(x, addend, y, rows, columns, z);)))   \
    }                                                                                                                  \
    SYNCBN_CLONES void leaf_column_grad_input(const T* dy, const T* x, const ColumnMask& mask, T* dx, int64_t rows,    \
                                              int64_t columns, const ColumnGradInput<Compute<T>>& column,              \
                                              const ColumnRectified<Compute<T>>& z, bool add) {                        \
        SYNCBN_ACTIVATION(z.activation, A, SYNCBN_IF(add, kAdd, {                                                      \
                              if (mask.row == nullptr)                                                                 \
                                  return column_grad_input<kAdd, A>(dy, x, dx, rows, columns, column, z);              \
                              column_grad_input<kAdd, A>(dy, x, mask, dx, rows, columns, column, z);                   \
                          }))                                                                                          \
    }

template <typename T>
using Compute = typename Value<T>::Compute;

SYNCBN_FOR_EACH_SET(SYNCBN_ROW_SUMS)
SYNCBN_NUMBERS(SYNCBN_LEAVES)

// ---- the kernels: the work of each thread --------------------------------------------------------------------

// Calls leaf(first_row, rows, first_column, columns, block) for every tile of [outer][channels * inner]. Only the shape
// decides the blocks, so the order of a sum is the same for any number of threads.
template <typename Leaf>
void for_tiles(Shape shape, int threads, int64_t blocks, const Leaf& leaf) {
    const int64_t columns = shape.channels * shape.inner;
    const int64_t tiles = (columns + kTile - 1) / kTile;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t job = 0; job < tiles * blocks; ++job) {
        const int64_t block = job / tiles, column = (job % tiles) * kTile;
        const int64_t first = shape.outer * block / blocks, last = shape.outer * (block + 1) / blocks;
        leaf(first, last - first, column, std::min(kTile, columns - column), block);
    }
}

// Calls leaf(first_value, rows, columns) on each thread, for its share of the rows of [outer][channels * inner].
template <typename Leaf>
void for_rows(Shape shape, int threads, const Leaf& leaf) {
    const int64_t columns = shape.channels * shape.inner;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; ++part) {
        const int64_t first = shape.outer * part / threads, last = shape.outer * (part + 1) / threads;
        leaf(first * columns, last - first, columns);
    }
}

int64_t count_blocks(Shape shape) { return std::max<int64_t>(1, std::min(kMaxBlocks, shape.outer / kRowsPerBlock)); }

// The mask of each column of [outer][channels * inner].
class ColumnMasks {
  public:
    explicit ColumnMasks(const Work& work) : values_(work.mask), inner_(work.shape.inner) {
        if (values_ == nullptr) return;
        position_.resize(work.shape.channels * inner_);
        for (size_t c = 0; c < position_.size(); ++c) position_[c] = static_cast<int32_t>(c % inner_);
    }
    ColumnMask from(int64_t row, int64_t column) const {
        if (values_ == nullptr) return {};
        return {values_ + row * inner_, inner_, position_.data() + column};
    }

  private:
    const float* values_;
    int64_t inner_;
    std::vector<int32_t> position_;
};

template <typename T>
int64_t moments_of(const Work& work, const T* x, double* mean, double* m2) {
    const Shape& shape = work.shape;
    const int threads = work.useful_threads();
    const Counting counting(work);
    const int64_t n = counting.positions;
    if (n == 0) {
        std::fill_n(mean, shape.channels, 0.0);
        std::fill_n(m2, shape.channels, 0.0);
        return 0;
    }
    // With a sample of the channel as pivot, sums stay small: their cancellation is below n * 2^-53.
    const int64_t at = counting.first / shape.inner * shape.channels * shape.inner + counting.first % shape.inner;
    if (shape.inner >= kShortRow) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t c = 0; c < shape.channels; ++c) {
            const T* first = x + c * shape.inner;
            const double pivot = Value<T>::load(first + at);
            double sum, square;
            leaf_row_moments(first, work.mask, shape.outer, shape.channels * shape.inner, shape.inner, pivot, &sum,
                             &square);
            mean[c] = pivot + sum / n;
            m2[c] = at_least_zero(square - sum * sum / n);
        }
        return n;
    }
    const int64_t columns = shape.channels * shape.inner, blocks = count_blocks(shape);
    const ColumnMasks masks(work);
    std::vector<double> pivot(columns), sums(2 * blocks * columns);
    for (int64_t c = 0; c < columns; ++c) pivot[c] = Value<T>::load(x + at + c / shape.inner * shape.inner);
    for_tiles(shape, threads, blocks, [&](int64_t row, int64_t rows, int64_t column, int64_t width, int64_t block) {
        double* sum = sums.data() + 2 * block * columns + column;
        leaf_column_moments(x + row * columns + column, masks.from(row, column), rows, columns, width,
                            pivot.data() + column, sum, sum + columns);
    });
    for (int64_t c = 0; c < shape.channels; ++c) {
        double sum = 0, square = 0;
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t i = c * shape.inner; i < (c + 1) * shape.inner; ++i) {
                sum += sums[2 * block * columns + i];
                square += sums[(2 * block + 1) * columns + i];
            }
        mean[c] = pivot[c * shape.inner] + sum / n;
        m2[c] = at_least_zero(square - sum * sum / n);
    }
    return n;
}

// If y is given, dz is written first, one row at a time, which is in the cache then.
template <typename T, typename C = typename Value<T>::Compute>
void grad_sums_of(const Work& work, const T* dy, const T* x, const GradSums& with, double* sum_dz,
                  double* sum_dz_xhat) {
    const Shape& shape = work.shape;
    const int threads = work.useful_threads();
    const T* y = static_cast<const T*>(with.y);
    T* dz = static_cast<T*>(with.dz);
    const Activation& activation = with.with.activation;
    Rectified z = with.with;
    if (y != nullptr) z.activation = {};  // the activation has been applied by then
    if (shape.inner >= kShortRow) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t c = 0; c < shape.channels; ++c) {
            const int64_t first = c * shape.inner, stride = shape.channels * shape.inner;
            sum_dz[c] = sum_dz_xhat[c] = 0;
            const RowRectified<C> row(z, c);
            if (y == nullptr) {
                leaf_row_grad_sums(dy + first, x + first, shape.outer, stride, shape.inner, z.mean[c], row, sum_dz + c,
                                   sum_dz_xhat + c);
            } else {
                for (int64_t at = first; at < first + shape.outer * stride; at += stride) {
                    double sum, sum_xc;
                    leaf_row_grad_by_output(dy + at, y + at, dz + at, shape.inner, activation);
                    leaf_row_grad_sums(dz + at, x + at, 1, stride, shape.inner, z.mean[c], row, &sum, &sum_xc);
                    sum_dz[c] += sum;
                    sum_dz_xhat[c] += sum_xc;
                }
            }
            sum_dz_xhat[c] *= with.invstd[c];
        }
        return;
    }
    const int64_t columns = shape.channels * shape.inner, blocks = count_blocks(shape);
    const std::vector<double> means = broadcast<double>(shape, z.mean);
    const Columns<C> constants(shape, z, z.activation.any());
    std::vector<double> sums(2 * blocks * columns);
    for_tiles(shape, threads, blocks, [&](int64_t row, int64_t rows, int64_t column, int64_t width, int64_t block) {
        double* sum = sums.data() + 2 * block * columns + column;
        const auto of = [&](const T* grads, int64_t at, int64_t rows) {
            leaf_column_grad_sums(grads + at, x + at, rows, columns, width, means.data() + column,
                                  constants.from(column), sum, sum + columns);
        };
        const int64_t first = row * columns + column;
        if (y == nullptr) return of(dy, first, rows);
        for (int64_t at = first; at < first + rows * columns; at += columns) {
            leaf_row_grad_by_output(dy + at, y + at, dz + at, width, activation);
            of(dz, at, 1);
        }
    });
    for (int64_t c = 0; c < shape.channels; ++c) {
        sum_dz[c] = sum_dz_xhat[c] = 0;
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t i = c * shape.inner; i < (c + 1) * shape.inner; ++i) {
                sum_dz[c] += sums[2 * block * columns + i];
                sum_dz_xhat[c] += sums[(2 * block + 1) * columns + i];
            }
        sum_dz_xhat[c] *= with.invstd[c];
    }
}

template <typename T, typename C = typename Value<T>::Compute>
void normalise_of(const Work& work, const T* x, const Normalise& with, T* y) {
    const Shape& shape = work.shape;
    const int threads = work.useful_threads();
    const T* addend = static_cast<const T*>(with.addend);
    const auto addend_at = [addend](int64_t at) { return addend == nullptr ? nullptr : addend + at; };
    if (shape.inner >= kShortRow) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t row = 0; row < shape.outer * shape.channels; ++row) {
            const int64_t at = row * shape.inner;
            leaf_row_normalise(x + at, addend_at(at), y + at, shape.inner,
                               RowRectified<C>(with.with, row % shape.channels), with.add);
        }
        return;
    }
    const Columns<C> constants(shape, with.with, true);
    for_rows(shape, threads, [&](int64_t at, int64_t rows, int64_t columns) {
        leaf_column_normalise(x + at, addend_at(at), y + at, rows, columns, constants.from(0), with.add);
    });
}

template <typename T, typename C = typename Value<T>::Compute>
void grad_input_of(const Work& work, const T* dy, const T* x, const GradInput& with, T* dx) {
    const Shape& shape = work.shape;
    const int threads = work.useful_threads();
    if (shape.inner >= kShortRow) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t row = 0; row < shape.outer * shape.channels; ++row) {
            const int64_t c = row % shape.channels, at = row * shape.inner;
            const float* mask = work.mask == nullptr ? nullptr : work.mask + row / shape.channels * shape.inner;
            leaf_row_grad_input(dy + at, x + at, mask, dx + at, shape.inner,
                                {with.mean[c], with.with.scale[c], with.mean_dz[c], with.slope[c]},
                                RowRectified<C>(with.with, c), with.add);
        }
        return;
    }
    const std::vector<C> high = broadcast<C>(shape, with.mean), low = broadcast<C>(shape, with.mean, true),
                         scale = broadcast<C>(shape, with.with.scale), mean_dz = broadcast<C>(shape, with.mean_dz),
                         slope = broadcast<C>(shape, with.slope);
    const ColumnGradInput<C> column{high.data(), low.data(), scale.data(), mean_dz.data(), slope.data()};
    const Columns<C> constants(shape, with.with, with.with.activation.any());
    const ColumnMasks masks(work);
    for_rows(shape, threads, [&](int64_t at, int64_t rows, int64_t columns) {
        leaf_column_grad_input(dy + at, x + at, masks.from(at / columns, 0), dx + at, rows, columns, column,
                               constants.from(0), with.add);
    });
}

template <typename T, typename C = typename Value<T>::Compute>
void recover_of(const Work& work, const T* y, const Rectified& with, T* x) {
    const Shape& shape = work.shape;
    const int threads = work.useful_threads();
    if (shape.inner >= kShortRow) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t row = 0; row < shape.outer * shape.channels; ++row) {
            const int64_t at = row * shape.inner;
            leaf_row_recover(y + at, x + at, shape.inner, RowRectified<C>(with, row % shape.channels));
        }
        return;
    }
    const Columns<C> constants(shape, with, true);
    for_rows(shape, threads, [&](int64_t at, int64_t rows, int64_t columns) {
        leaf_column_recover(y + at, x + at, rows, columns, constants.from(0));
    });
}

// At a single position, channels are neighbours in any layout.
bool in_blocks(const Shape& shape) { return shape.block > 1 && shape.inner > 1; }

}  // namespace

int Work::useful_threads() const {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, shape.size() / kWorthAThread)));
}

int64_t moments(const Work& work, const void* x, double* mean, double* m2) {
    if (in_blocks(work.shape)) return blocked::moments(work, x, mean, m2);
    int64_t n = 0;
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        n = moments_of(work, static_cast<const T*>(x), mean, m2);
    });
    return n;
}

void normalise(const Work& work, const void* x, const Normalise& with, void* y) {
    if (in_blocks(work.shape)) return blocked::normalise(work, x, with, y);
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        normalise_of(work, static_cast<const T*>(x), with, static_cast<T*>(y));
    });
}

void grad_sums(const Work& work, const void* dy, const void* x, const GradSums& with, double* sum_dz,
               double* sum_dz_xhat) {
    if (in_blocks(work.shape)) return blocked::grad_sums(work, dy, x, with, sum_dz, sum_dz_xhat);
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        grad_sums_of(work, static_cast<const T*>(dy), static_cast<const T*>(x), with, sum_dz, sum_dz_xhat);
    });
}

void grad_input(const Work& work, const void* dy, const void* x, const GradInput& with, void* dx) {
    if (in_blocks(work.shape)) return blocked::grad_input(work, dy, x, with, dx);
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        grad_input_of(work, static_cast<const T*>(dy), static_cast<const T*>(x), with, static_cast<T*>(dx));
    });
}

void recover(const Work& work, const void* y, const Rectified& with, void* x) {
    if (in_blocks(work.shape)) return blocked::recover(work, y, with, x);
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        recover_of(work, static_cast<const T*>(y), with, static_cast<T*>(x));
    });
}

const char* instruction_set() {
#if defined(__x86_64__) && defined(__gnu_linux__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return "avx512f";
    if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
    return "baseline";
}

}  // namespace cpu
}  // namespace syncbn

// Implements the CPU kernels for all layouts and types of data: formulas, micro-kernels, and the work of each thread.
//
// Sums run in fixed lanes over fixed parts, so the bits depend on neither alignment nor thread count.
#include "cpu/kernels.h"

#include <memory>

#include "cpu/microkernel.h"

namespace syncbn::cpu {
namespace {

constexpr int64_t kTile = 512;              // columns at a time: their sums stay in the first-level cache
constexpr int64_t kWorthAThread = 1 << 15;  // values; another thread would take longer to wake up than less work takes

// ---- the formulas ----------------------------------------------------------------------------------------------

template <typename V, class K>
SYNCBN_INLINE void z_of(const K& k, const V& x, V* z) {
    *z = ((x - k[kHigh]) - k[kLow]) * k[kScale] + k[kShift];
}

// Of x - mean, and of its square. The mean need not be that of x.
template <bool Masked, typename T>
struct MomentsOf {
    using Data = T;
    static constexpr bool kMasked = Masked, kNeedsZ = false;
    const T* x;

    SYNCBN_METHOD void fetch(int64_t at) const { __builtin_prefetch(x + at); }
    template <typename V, typename W, class K, typename Counts>
    SYNCBN_METHOD void add(SumPair<W>* sums, int64_t at, const W& mean, const K&, Counts counts) const {
        V value;
        W wide;
        load(x + at, &value);
        widen(value, &wide);
        wide = wide - mean;
        keep(&wide, counts);
        sums->add(wide, wide);
    }
};

// Of dz and of dz * (x - mean). Here dz is dy, or is found from z. If it is found from y, it is written too; otherwise
// both are null.
template <class A, bool ByOutput, typename T>
struct GradSumsOf {
    using Data = T;
    static constexpr bool kMasked = false, kNeedsZ = A::kChanges && !ByOutput;
    const T *dy, *x, *y;
    T* dz;
    const Activation activation;

    SYNCBN_METHOD void fetch(int64_t at) const {
        __builtin_prefetch(x + at);
        __builtin_prefetch(dy + at);
        if (ByOutput) __builtin_prefetch(y + at);
    }
    template <typename V, typename W, class K>
    SYNCBN_METHOD void add(SumPair<W>* sums, int64_t at, const W& mean, const K& k, bool) const {
        const Behind<A, V> behind(activation);
        V value, grad, z;
        load(x + at, &value);
        load(dy + at, &grad);
        if (kNeedsZ) {
            z_of(k, value, &z);
            behind.through(&grad, z);
        }
        if (ByOutput) {
            load(y + at, &z);
            behind.through(&grad, z);
            store(grad, dz + at);
            load(dz + at, &grad);  // the sums are of what was written, which is rounded
        }
        W wide, wide_grad;
        widen(value, &wide);
        widen(grad, &wide_grad);
        sums->add(wide_grad, wide - mean);
    }
};

template <class A, bool Addend, typename T>
struct NormaliseOf {
    using Data = T;
    static constexpr int kConstants = 4;
    static constexpr bool kMasked = false;
    const T *x, *addend;
    T* y;
    const Activation activation;

    template <typename V, class K>
    SYNCBN_METHOD void apply(int64_t at, const K& k, bool) const {
        V value, other;
        load(x + at, &value);
        z_of(k, value, &value);
        if (Addend) {
            load(addend + at, &other);
            value = value + other;
        }
        Behind<A, V>(activation).apply(&value);
        store(value, y + at);
    }
};

template <class A, bool Add, bool Masked, typename T>
struct GradInputOf {
    using Data = T;
    static constexpr int kConstants = 8;
    static constexpr bool kMasked = Masked;
    const T *dy, *x;
    T* dx;
    const Activation activation;

    template <typename V, class K>
    SYNCBN_METHOD void apply(int64_t at, const K& k, bool counts) const {
        V value, dz, z;
        load(x + at, &value);
        load(dy + at, &dz);
        if (A::kChanges) {
            z_of(k, value, &z);
            Behind<A, V>(activation).through(&dz, z);
        }
        const V whole = (dz - k[kMeanDz]) - ((value - k[kFedHigh]) - k[kFedLow]) * k[kSlope];
        if (!Masked || counts) dz = whole;
        dz = k[kScale] * dz;
        if (Add) {
            load(dx + at, &value);
            dz = value + dz;
        }
        store(dz, dx + at);
    }
};

// ---- the micro-kernels, one set per data type and instruction set ------------------------------------------------
// Overloads of plain functions: instruction-set clones of template instances are not portable among g++ versions.

#define SYNCBN_MICROKERNELS_OF(TYPE, T, SET, WIDTH)                                                                    \
    SET void micro_moments(const Tile& tile, const T* x, double* sum, double* square) {                                \
        const Column<Compute<T>> none = {};                                                                            \
        SYNCBN_IF(tile.mask != nullptr, kMasked, add_up<WIDTH>(MomentsOf<kMasked, T>{x}, tile, none, sum, square);)    \
    }                                                                                                                  \
    SET void micro_grad_sums(const Tile& tile, const Column<Compute<T>>& z, const T* dy, const T* x, const T* y,       \
                             T* dz, const Activation& with, double* sum, double* sum_xc) {                             \
        SYNCBN_IF(with.any(), kAny,                                                                                    \
                  SYNCBN_IF(y != nullptr, kByOutput,                                                                   \
                            add_up<WIDTH>(GradSumsOf<Trait<kAny>, kByOutput, T>{dy, x, y, dz, with}, tile, z, sum,     \
                                          sum_xc);))                                                                   \
    }                                                                                                                  \
    SET void micro_normalise(const Run& run, const Column<Compute<T>>& k, const T* x, const T* addend, T* y,           \
                             const Activation& with) {                                                                 \
        SYNCBN_IF(with.any(), kAny,                                                                                    \
                  SYNCBN_IF(addend != nullptr, kAddend,                                                                \
                            for_each_value<WIDTH>(NormaliseOf<Trait<kAny>, kAddend, T>{x, addend, y, with}, run, k);)) \
    }                                                                                                                  \
    SET void micro_grad_input(const Run& run, const Column<Compute<T>>& k, const T* dy, const T* x, T* dx,             \
                              const Activation& with, bool add) {                                                      \
        SYNCBN_IF(with.any(), kAny,                                                                                    \
                  SYNCBN_IF(add, kAdd,                                                                                 \
                            SYNCBN_IF(run.mask != nullptr, kMasked,                                                    \
                                      for_each_value<WIDTH>(                                                           \
                                          GradInputOf<Trait<kAny>, kAdd, kMasked, T>{dy, x, dx, with}, run, k);)))     \
    }
#define SYNCBN_MICROKERNELS(SET, WIDTH)                                                                 \
    SET const char* name_of_set() { return WIDTH == 8 ? "avx512f" : WIDTH == 4 ? "avx2" : "baseline"; } \
    SYNCBN_NUMBERS(SYNCBN_MICROKERNELS_OF, SET, WIDTH)

SYNCBN_FOR_EACH_SET(SYNCBN_MICROKERNELS)

// ---- the kernels: the work of each thread ------------------------------------------------------------------------

int useful_threads(const Work& work) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(work.threads, work.shape.size() / kWorthAThread)));
}

// Memory that begins in a line of the cache.
template <typename C>
struct Lines {
    static constexpr int64_t kLine = 64 / sizeof(C);
    const std::unique_ptr<C[]> memory;
    C* const first;
    explicit Lines(int64_t n)
        : memory(new C[n + kLine]),
          first(memory.get() + kLine - reinterpret_cast<uintptr_t>(memory.get()) / sizeof(C) % kLine) {}
};

// A table of the constants of each column, from those of each channel. Each constant begins in a line of the cache, and
// far from the one before: neighbouring ones slow down what leaves the cache.
template <typename C>
class Table {
  public:
    Table(const View& view, int64_t channels, int constants)
        : channels_(channels),
          repeat_(view.columns() / channels),
          apart_(view.columns() / Lines<C>::kLine * Lines<C>::kLine + kFar),
          values_(apart_ * constants) {}
    template <typename F>
    void fill(int n, const F& value) {
        C* const to = values_.first + n * apart_;
        if (repeat_ == 1)  // a loop that becomes one over vectors
            for (int64_t c = 0; c < channels_; ++c) to[c] = static_cast<C>(value(c));
        else
            for (int64_t c = 0; c < channels_; ++c) std::fill_n(to + c * repeat_, repeat_, static_cast<C>(value(c)));
    }
    void put(int n, const double* values) {
        fill(n, [values](int64_t c) { return values[c]; });
    }
    void put_split(int high, const double* values) {
        put(high, values);
        fill(high + 1, [values](int64_t c) { return values[c] - static_cast<double>(static_cast<C>(values[c])); });
    }
    void put_z(const Rectified& z) {
        put_split(kHigh, z.mean);
        put(kScale, z.scale);
        put(kShift, z.shift);
    }
    Column<C> from(int64_t column) const { return {values_.first + column, apart_}; }

  private:
    static constexpr int64_t kFar = 130 * Lines<C>::kLine;
    const int64_t channels_, repeat_, apart_;
    const Lines<C> values_;
};

// Calls microkernel(run) on each thread, for its share of the memory. A row of one channel stays whole.
template <typename Microkernel>
void for_runs(const Work& work, const Microkernel& microkernel) {
    if (work.shape.size() == 0) return;
    const View view(work);
    const int threads = useful_threads(work);
    const bool in_rows = view.layout == View::Layout::kRows;
    const int64_t unit = in_rows ? view.positions : 1;
    const int64_t units = view.images * view.groups * view.positions / unit;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; ++part) {
        const int64_t last = units * (part + 1) / threads * unit;
        for (int64_t position = units * part / threads * unit, end; position < last; position = end) {
            const int64_t row = position / view.positions;
            end = in_rows ? last : std::min(last, (row + 1) * view.positions);
            const float* mask = work.mask;
            if (mask != nullptr) mask += position - (row - row / view.groups) * view.positions;
            microkernel(Run{view, position, end - position, row % view.groups * view.width, mask});
        }
    }
}

// Adds up the results of microkernel(tile, first, second) for each channel. They are [tile.columns] each, in memory that
// is 0. Only the shape decides the parts, so the order of a sum is the same for any number of threads.
template <typename Microkernel>
void sum_up(const Work& work, const View& view, const Table<double>& means, double* first, double* second,
            const Microkernel& microkernel) {
    constexpr int64_t kRowsPerPart = 64, kMaxParts = 16;            // of rows of columns
    constexpr int64_t kEnoughParts = 64, kValuesPerPart = 1 << 14;  // of blocks, over all groups
    const bool tiled = view.layout == View::Layout::kColumns;
    const int threads = useful_threads(work);
    const int64_t columns = view.columns(), positions = view.images * view.positions;
    const int64_t step = tiled ? kTile : view.width, tiles = (columns + step - 1) / step;
    int64_t parts = 1;
    if (tiled) parts = std::max(parts, std::min(kMaxParts, positions / kRowsPerPart));
    if (view.layout == View::Layout::kBlocks)
        parts = std::max(parts, std::min(kEnoughParts / view.groups, positions * view.width / kValuesPerPart));
    const int64_t share = (positions + parts - 1) / parts;
    const Lines<double> sums(2 * parts * columns);
    std::fill_n(sums.first, 2 * parts * columns, 0.0);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t part = 0; part < parts; ++part)
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t column = i * step;
            double* const to = sums.first + 2 * part * columns + column;
            const Tile tile{view,
                            tiled ? 0 : i,
                            column,
                            std::min(step, columns - column),
                            std::min(positions, part * share),
                            std::min(positions, (part + 1) * share),
                            work.mask,
                            means.from(column).first};
            microkernel(tile, to, to + columns);
        }
    const int64_t repeat = columns / work.shape.channels;
    for (int64_t c = 0; c < work.shape.channels; ++c) {
        double one = 0, other = 0;
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t i = c * repeat; i < (c + 1) * repeat; ++i) {
                one += sums.first[2 * part * columns + i];
                other += sums.first[(2 * part + 1) * columns + i];
            }
        first[c] = one;
        second[c] = other;
    }
}

}  // namespace

int64_t moments(const Work& work, const void* data, double* mean, double* m2) {
    const Shape& shape = work.shape;
    int64_t n = shape.per_channel(), first = 0;  // positions that count, and the first of them
    if (work.mask != nullptr) {
        const auto counts = [](float value) { return value != 0; };
        const float* const end = work.mask + n;
        first = std::find_if(work.mask, end, counts) - work.mask;
        n = std::count_if(work.mask + first, end, counts);
    }
    if (n == 0) {
        std::fill_n(mean, shape.channels, 0.0);
        std::fill_n(m2, shape.channels, 0.0);
        return 0;
    }
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T* const x = static_cast<const T*>(data);
        // With a sample of the channel as pivot, sums stay small: their cancellation is below n * 2^-53.
        const View view(work);
        Table<double> pivots(view, shape.channels, 1);
        const T* const sample =
            x + first / shape.inner * shape.channels * shape.inner + first % shape.inner * shape.block;
        pivots.fill(0, [&](int64_t c) {
            const int64_t of_block = c & (shape.block - 1);  // of a power of 2
            return Value<T>::load(sample + (c - of_block) * shape.inner + of_block);
        });
        sum_up(work, view, pivots, mean, m2,
               [x](const Tile& tile, double* sum, double* square) { micro_moments(tile, x, sum, square); });
        for (int64_t c = 0; c < shape.channels; ++c) {
            const double rest = m2[c] - mean[c] * mean[c] / n;
            m2[c] = rest < 0 ? 0 : rest;  // below 0 by rounding; a NaN stays a NaN, which std::max would hide
            mean[c] = pivots.from(c * view.columns() / shape.channels)[0] + mean[c] / n;
        }
    });
    return n;
}

void normalise(const Work& work, const void* x, const Rectified& with, const void* addend, void* y) {
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        Table<Compute<T>> table(View(work), work.shape.channels, 4);
        table.put_z(with);
        for_runs(work, [&](const Run& run) {
            micro_normalise(run, table.from(0), static_cast<const T*>(x), static_cast<const T*>(addend),
                            static_cast<T*>(y), with.activation);
        });
    });
}

void grad_sums(const Work& work, const void* dy, const void* x, const GradSumsArguments& with, double* sum_dz,
               double* sum_dz_xhat) {
    const View view(work);
    const Activation& activation = with.with.activation;
    Table<double> means(view, work.shape.channels, 1);
    means.put(0, with.with.mean);
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const bool needs_z = activation.any() && with.with.scale != nullptr;
        Table<Compute<T>> z(view, work.shape.channels, needs_z ? 4 : 0);
        if (needs_z) z.put_z(with.with);
        sum_up(work, view, means, sum_dz, sum_dz_xhat, [&](const Tile& tile, double* sum, double* sum_xc) {
            micro_grad_sums(tile, z.from(tile.column), static_cast<const T*>(dy), static_cast<const T*>(x),
                            static_cast<const T*>(with.y), static_cast<T*>(with.dz), activation, sum, sum_xc);
        });
    });
    for (int64_t c = 0; c < work.shape.channels; ++c) sum_dz_xhat[c] *= with.invstd[c];
}

void grad_input(const Work& work, const void* dy, const void* x, const GradInputArguments& with, void* dx) {
    const Activation& activation = with.with.activation;
    with_type(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        Table<Compute<T>> table(View(work), work.shape.channels, 8);
        if (activation.any()) table.put_z(with.with);
        table.put(kScale, with.with.scale);
        table.put_split(kFedHigh, with.mean);
        table.put(kMeanDz, with.mean_dz);
        table.put(kSlope, with.slope);
        for_runs(work, [&](const Run& run) {
            micro_grad_input(run, table.from(0), static_cast<const T*>(dy), static_cast<const T*>(x),
                             static_cast<T*>(dx), activation, with.add);
        });
    });
}

const char* instruction_set() { return name_of_set(); }

}  // namespace syncbn::cpu

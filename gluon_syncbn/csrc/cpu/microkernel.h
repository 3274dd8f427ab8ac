// Provides the inner loops of the kernels, for every layout, and compiles what contains them for each instruction set.
//
// A micro-kernel is the inner loop of a kernel. These are compiled for several instruction sets and chosen at load time.
// They contain no OpenMP and no lambda, because an outlined function would lose the clone's instruction set.
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lanes.h"

// SYNCBN_FOR_EACH_SET(define) compiles functions for each instruction set, as define(attribute, number of float64 in a
// register). A test compiles one set alone: it defines SYNCBN_CLONES, the attribute, and SYNCBN_WIDTH.
#if defined(SYNCBN_CLONES)
#define SYNCBN_FOR_EACH_SET(define) define(SYNCBN_CLONES, SYNCBN_WIDTH)
#elif defined(__x86_64__) && defined(__gnu_linux__)
#if defined(__clang__)  // with AVX-512F alone, clang cannot choose between 8 floats
#define SYNCBN_AVX512 __attribute__((target("avx512f,avx512vl")))
#else  // older g++ versions do not distinguish processors by VL
#define SYNCBN_AVX512 __attribute__((target("avx512f")))
#endif
#define SYNCBN_FOR_EACH_SET(define)                                         \
    define(SYNCBN_AVX512, 8) define(__attribute__((target("avx2,fma"))), 4) \
        define(__attribute__((target("default"))), 2)
#else
#define SYNCBN_FOR_EACH_SET(define) define(, 2)
#endif

// Selects an instance of a template: in the statements, the compiler knows NAME.
#define SYNCBN_IF(condition, NAME, ...) \
    if (condition) {                    \
        constexpr bool NAME = true;     \
        __VA_ARGS__                     \
    } else {                            \
        constexpr bool NAME = false;    \
        __VA_ARGS__                     \
    }

namespace syncbn::cpu {

constexpr int64_t kAhead = 512;  // values to prefetch for the sums, which otherwise wait for memory

// A tensor as [images][groups][positions][width]. The columns of a group are neighbours, and each has its own constants.
struct View {
    enum class Layout {
        kRows,     // long rows of one channel: a loop runs along the positions
        kBlocks,   // blocks of 8 or 16 channels, as oneDNN has them: a loop runs along the positions, in lanes
        kColumns,  // short rows, channels-last, a matrix: a loop runs along the columns of [positions][width]
    } layout;
    int64_t images, groups, positions, width;

    // At a single position, channels are neighbours in any layout. A mask that differs within short rows makes them
    // long ones.
    explicit View(const Work& work)
        : images(work.shape.outer), groups(work.shape.channels), positions(work.shape.inner), width(1) {
        constexpr int64_t kShortRow = 16;  // below this, a row does not fill the vectors
        const int64_t block = work.shape.block, inner = work.shape.inner;
        if (block > 1 && inner > 1) {
            layout = Layout::kBlocks;
            groups /= block;
            width = block;
        } else if (inner >= kShortRow || (work.mask != nullptr && inner > 1)) {
            layout = Layout::kRows;
        } else {
            layout = Layout::kColumns;
            positions = images;
            images = groups = 1;
            width = work.shape.channels * inner;
        }
    }
    int64_t columns() const { return groups * width; }
};

// The constants of a table, for each column. A mean is split into two values of the compute type: near the mean,
// x - high is exact, so an offset of 1e5 in float32 data costs no digits.
enum : int { kHigh, kLow, kScale, kShift, kFedHigh, kFedLow, kMeanDz, kSlope };

// A column of a table, and those behind it.
template <typename C>
struct Column {
    const C* first;
    int64_t apart;  // from constant to constant
    SYNCBN_METHOD C operator[](int n) const { return first[n * apart]; }
    SYNCBN_METHOD Column from(int64_t c) const { return {first + c, apart}; }
};

// N constants in registers: of one column, or of the columns of lanes.
template <typename V, int N>
struct Constants {
    V values[N];
    template <typename C>
    SYNCBN_METHOD void read(const Column<C>& of) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) load(of.first + n * of.apart, &values[n]);
    }
    // Those of one column, for all lanes.
    template <typename C>
    SYNCBN_METHOD void repeat(const Column<C>& of) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) put_all(of[n], &values[n]);
    }
    SYNCBN_METHOD const V& operator[](int n) const { return values[n]; }
};

// ---- value by value --------------------------------------------------------------------------------------------

// Neighbours in [images][groups][positions]: whole rows of channels, a part of a row of blocks, or rows of columns.
struct Run {
    const View& view;
    int64_t first, n;
    int64_t column;     // the first
    const float* mask;  // of the first position
};

template <int Width, int Vectors, class Formula, typename C>
SYNCBN_INLINE void for_each_in_blocks(const Formula& formula, const Run& run, const Column<C>& table) {
    using V = Lanes<C, Width>;
    Constants<V, Formula::kConstants> constants[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) constants[v].read(table.from(run.column + v * kLanes));
    for (int64_t i = 0, at = run.first * Vectors * kLanes; i < run.n; ++i, at += Vectors * kLanes) {
        const bool counts = !Formula::kMasked || run.mask[i] != 0;
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) formula.template apply<V>(at + v * kLanes, constants[v], counts);
    }
}

// Calls formula.apply<V>(at, constants, counts) for each value, V, or for lanes of them.
template <int Width, class Formula, typename C>
SYNCBN_INLINE void for_each_value(const Formula formula, const Run run, const Column<C> table) {
    const int64_t positions = run.view.positions, groups = run.view.groups, width = run.view.width;
    const float* mask = run.mask;
    if (run.view.layout == View::Layout::kRows) {
        for (int64_t at = run.first, column = run.column; at < run.first + run.n; at += positions) {
            Constants<C, Formula::kConstants> constants;
            constants.read(table.from(column));
#pragma GCC ivdep  // dx may be dy: each value is read before it is written
            for (int64_t i = 0; i < positions; ++i)
                formula.template apply<C>(at + i, constants, !Formula::kMasked || mask[i] != 0);
            if (++column < groups) continue;
            column = 0;
            if (Formula::kMasked) mask += positions;
        }
    } else if (run.view.layout == View::Layout::kColumns) {
        for (int64_t row = 0; row < run.n; ++row) {
            const int64_t at = (run.first + row) * width;
            const bool counts = !Formula::kMasked || mask[row] != 0;
#pragma GCC ivdep  // as in a row
            for (int64_t c = 0; c < width; ++c) formula.template apply<C>(at + c, table.from(c), counts);
        }
    } else if constexpr (kInBlocks<typename Formula::Data>) {
        if (width == kLanes)
            for_each_in_blocks<Width, 1>(formula, run, table);
        else
            for_each_in_blocks<Width, 2>(formula, run, table);
    }
}

// ---- sums ------------------------------------------------------------------------------------------------------

// A sum of values and one of products.
template <typename W>
struct SumPair {
    W first, second;
    SYNCBN_METHOD void add(const W& value, const W& other) {
        first = first + value;
        second = second + value * other;
    }
};

// Some columns, from the first of a group or from `column` of it, and positions of [images][positions].
struct Tile {
    const View& view;
    int64_t group, column, columns, first, last;
    const float* mask;   // of the whole tensor
    const double* mean;  // a value near that of each column
};

// Adds along positions: in lanes of channels, `Vectors` for a position, or of one channel, if that is 0. Several sets
// of sums in turn do not wait for each other.
template <int Width, int Vectors, class Formula, typename C>
SYNCBN_INLINE void add_along(const Formula& formula, const Tile& tile, const Column<C>& table, double* first,
                             double* second) {
    using V = Lanes<C, Width>;
    using W = Lanes<double, Width>;
    constexpr bool kRow = Vectors == 0, kLeavesOut = Formula::kMasked && !kRow;
    constexpr int kVectors = kRow ? 1 : Vectors, kSets = !kRow && Width == 8 ? 4 : 2;
    constexpr int64_t kWidth = kRow ? 1 : Vectors * kLanes, kStep = kSets * kLanes;
    W mean[kVectors];
    Constants<V, 4> z[kVectors];
    SumPair<W> sums[kSets] = {};
    SumPair<double> rest = {};
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
        if (kRow)
            put_all(*tile.mean, &mean[v]);
        else
            load(tile.mean + v * kLanes, &mean[v]);
        if (!Formula::kNeedsZ) continue;
        if (kRow)
            z[v].repeat(table);
        else
            z[v].read(table.from(v * kLanes));
    }
    const int64_t positions = tile.view.positions;
    int64_t image = kRow ? 0 : tile.first / positions;  // a row has one part
    for (int64_t position = tile.first; position < tile.last; ++image) {
        const int64_t end = std::min(tile.last, (image + 1) * positions), n = (end - position) * kWidth;
        const int64_t at = (position + (image * (tile.view.groups - 1) + tile.group) * positions) * kWidth;
        const float* const mask = Formula::kMasked ? tile.mask + position : nullptr;
        int64_t i = 0;
        for (; !kLeavesOut && i + kStep <= n; i += kStep) {
            formula.fetch(at + i + kAhead);
            if (kStep > 2 * kLanes) formula.fetch(at + i + kAhead + 2 * kLanes);
#pragma GCC unroll 4
            for (int s = 0; s < kSets; ++s) {
                const int64_t here = i + s * kLanes;
                if constexpr (Formula::kMasked)
                    formula.template add<V>(&sums[s], at + here, mean[s % kVectors], z[s % kVectors], mask + here);
                else
                    formula.template add<V>(&sums[s], at + here, mean[s % kVectors], z[s % kVectors], true);
            }
        }
        for (; i < n; i += kWidth) {
            if (Formula::kMasked && mask[i / kWidth] == 0) continue;
            if constexpr (kRow) {
                formula.template add<C>(&rest, at + i, *tile.mean, table, true);
            } else {
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; ++v)
                    formula.template add<V>(&sums[v], at + i + v * kLanes, mean[v], z[v], true);
            }
        }
        position = end;
    }
#pragma GCC unroll 4
    for (int s = kVectors; s < kSets; ++s) {
        sums[s % kVectors].first = sums[s % kVectors].first + sums[s].first;
        sums[s % kVectors].second = sums[s % kVectors].second + sums[s].second;
    }
    if constexpr (kRow) {
        *first = total(sums[0].first) + rest.first;
        *second = total(sums[0].second) + rest.second;
    } else {
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
            store(sums[v].first, first + v * kLanes);
            store(sums[v].second, second + v * kLanes);
        }
    }
}

// Calls formula.add<V>(sums, at, mean, constants, counts) for each value, V, or for lanes of them. The results,
// [columns], are 0 before.
template <int Width, class Formula, typename C>
SYNCBN_INLINE void add_up(const Formula formula, const Tile tile, const Column<C> table, double* first,
                          double* second) {
    if (tile.view.layout == View::Layout::kRows) {
        add_along<Width, 0>(formula, tile, table, first, second);
    } else if (tile.view.layout == View::Layout::kColumns) {
        // One row at a time: several would mislead the processor, which fetches memory in its order.
        const int64_t width = tile.view.width;
        for (int64_t row = tile.first; row < tile.last; ++row) {
            if (Formula::kMasked && tile.mask[row] == 0) continue;
#pragma GCC ivdep
            for (int64_t c = 0; c < tile.columns; ++c) {
                SumPair<double> sums = {first[c], second[c]};
                const Column<C> column = Formula::kNeedsZ ? table.from(c) : table;  // which may be null
                formula.template add<C>(&sums, row * width + tile.column + c, tile.mean[c], column, true);
                first[c] = sums.first;
                second[c] = sums.second;
            }
        }
    } else if constexpr (kInBlocks<typename Formula::Data>) {
        if (tile.view.width == kLanes)
            add_along<Width, 1>(formula, tile, table, first, second);
        else
            add_along<Width, 2>(formula, tile, table, first, second);
    }
}

}  // namespace syncbn::cpu

// Implements the kernels for channels in blocks of float32 or bfloat16, oneDNN's layout:
// [outer][channels / block][inner][block].
//
// A group is a block of neighbouring channels; a position is their values at one place of one image. All constants and
// sums of a group are in registers, one lane for each channel. A leaf runs along positions and never adds lanes up.
// Only the shape decides how the sums of a group are split, so the bits do not depend on the number of threads.
#include "cpu/blocked.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/leaf.h"

namespace syncbn {
namespace cpu {
namespace blocked {
namespace {

constexpr int64_t kEnoughParts = 64;      // of the sums, over all groups
constexpr int64_t kWorthAPart = 1 << 14;  // values

// Positions [first, last), of the whole tensor as it lies in memory or of one group.
struct Part {
    int64_t first, last;
};

// Computes z of kLanes channels.
struct LanesOfZ {
    FloatLanes high, low, scale, shift;
    SYNCBN_METHOD void take(const ColumnRectified<float>& z, int64_t channel) {
        load_lanes(z.high + channel, &high);
        load_lanes(z.low + channel, &low);
        load_lanes(z.scale + channel, &scale);
        load_lanes(z.shift + channel, &shift);
    }
    SYNCBN_METHOD void of(const FloatLanes& x, FloatLanes* z) const { *z = ((x - high) - low) * scale + shift; }
    SYNCBN_METHOD void back(const FloatLanes& z, FloatLanes* x) const { *x = ((z - shift) / scale + low) + high; }
};

// ---- the sums of a group -------------------------------------------------------------------------------------

// As many sets as there are registers: set i is for vector i % K of a position.
template <int Width>
constexpr int kSets = Width == 8 ? 4 : 2;

template <int K, int Width>
SYNCBN_INLINE void store(Sums<Width, kSets<Width>>& sums, double* first, double* second) {
    sums.template fold<K>();
    std::memcpy(first, sums.first, K * sizeof sums.first[0]);
    std::memcpy(second, sums.second, K * sizeof sums.second[0]);
}

// Calls of.add(i, at) for every vector of the part. `at` is its first value, and i as in `kSets`.
template <int Width, int K, typename Of>
SYNCBN_INLINE void over_part(const Shape& shape, int64_t group, const Part& part, Of& of) {
    constexpr int64_t kBlock = K * kLanes, kStep = kSets<Width> / K;
    const int64_t groups = shape.channels / kBlock;
    for (int64_t position = part.first; position < part.last;) {
        const int64_t image = position / shape.inner, last = std::min(part.last, (image + 1) * shape.inner);
        int64_t at = (position + (image * (groups - 1) + group) * shape.inner) * kBlock;
        for (; position + kStep <= last; position += kStep, at += kStep * kBlock) {
            of.fetch(at + kAhead);
            of.fetch(at + kAhead + 2 * kLanes);
#pragma GCC unroll 4
            for (int i = 0; i < kSets<Width>; ++i) of.add(i, at + i * kLanes);
        }
        for (; position < last; ++position, at += kBlock)
#pragma GCC unroll 2
            for (int i = 0; i < K; ++i) of.add(i, at + i * kLanes);
    }
}

// Sums x - pivot, and its square.
template <int Width, int K, typename T>
struct Moments {
    const T* x;
    Lanes<Width> pivot[K];
    Sums<Width, kSets<Width>> sums;
    SYNCBN_METHOD Moments(const T* x, const double* pivot) : x(x) {
        std::memcpy(this->pivot, pivot, sizeof this->pivot);
    }
    SYNCBN_METHOD void fetch(int64_t at) const { __builtin_prefetch(x + at); }
    SYNCBN_METHOD void add(int i, int64_t at) {
        FloatLanes values;
        Lanes<Width> wide;
        load_lanes(x + at, &values);
        widen(values, &wide);
        wide.subtract(pivot[i % K]);
        sums.add(i, wide, wide);
    }
};

// y and dz are null unless dz is found from y.
template <typename T>
struct Gradients {
    const T *dy, *x, *y;
    T* dz;
};

// Sums dz and dz * (x - mean).
// Here dz is dy, or is found from z. If it is found from y, it is written too.
template <int Width, int K, class A, bool ByOutput, typename T>
struct GradSumsOf {
    static constexpr bool kByInput = A::kChanges && !ByOutput;
    const Gradients<T> from;
    const OnLanes<A, Width> epilogue;
    Lanes<Width> mean[K];
    LanesOfZ z[K];
    Sums<Width, kSets<Width>> sums;
    SYNCBN_METHOD GradSumsOf(const Gradients<T>& from, const double* mean, const ColumnRectified<float>& z,
                             int64_t channel)
        : from(from), epilogue(z.activation) {
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) {
            load_lanes(mean + channel + k * kLanes, &this->mean[k]);
            if (kByInput) this->z[k].take(z, channel + k * kLanes);
        }
    }
    SYNCBN_METHOD void fetch(int64_t at) const {
        __builtin_prefetch(from.x + at);
        __builtin_prefetch(from.dy + at);
        if (ByOutput) __builtin_prefetch(from.y + at);
    }
    SYNCBN_METHOD void add(int i, int64_t at) {
        FloatLanes values, grads;
        load_lanes(from.x + at, &values);
        load_lanes(from.dy + at, &grads);
        if (kByInput) {
            FloatLanes at_z;
            z[i % K].of(values, &at_z);
            epilogue.through(&grads, at_z);
        }
        if (ByOutput) {
            FloatLanes outs;
            load_lanes(from.y + at, &outs);
            epilogue.through(&grads, outs);
            store_lanes(grads, from.dz + at);
            load_lanes(from.dz + at, &grads);  // the sums are of what was written, which is rounded
        }
        Lanes<Width> wide, grad;
        widen(values, &wide);
        widen(grads, &grad);
        wide.subtract(mean[i % K]);
        sums.add(i, grad, wide);
    }
};

// The same for the vectors of positions where the mask is not 0.
template <int Width, int K, typename Of>
SYNCBN_INLINE void over_masked_part(const Shape& shape, const float* mask, int64_t group, const Part& part, Of& of) {
    constexpr int64_t kBlock = K * kLanes;
    const int64_t groups = shape.channels / kBlock;
    for (int64_t position = part.first; position < part.last; ++position) {
        if (mask[position] == 0) continue;
        const int64_t image = position / shape.inner;
        const int64_t at = (position + (image * (groups - 1) + group) * shape.inner) * kBlock;
#pragma GCC unroll 2
        for (int i = 0; i < K; ++i) of.add(i, at + i * kLanes);
    }
}

template <int Width, int K, typename T>
SYNCBN_INLINE void part_moments(const T* x, const float* mask, const Shape& shape, int64_t group, const Part& part,
                                const double* pivot, double* sum, double* square) {
    Moments<Width, K, T> moments(x, pivot);
    if (mask == nullptr)
        over_part<Width, K>(shape, group, part, moments);
    else
        over_masked_part<Width, K>(shape, mask, group, part, moments);
    store<K>(moments.sums, sum, square);
}

template <int Width, int K, class A, bool ByOutput, typename T>
SYNCBN_INLINE void part_grad_sums(const Gradients<T>& from, const Shape& shape, int64_t group, const Part& part,
                                  const double* mean, const ColumnRectified<float>& z, double* sum_dz,
                                  double* sum_dz_xc) {
    GradSumsOf<Width, K, A, ByOutput, T> gradients(from, mean, z, group * K * kLanes);
    over_part<Width, K>(shape, group, part, gradients);
    store<K>(gradients.sums, sum_dz, sum_dz_xc);
}

// ---- value by value ------------------------------------------------------------------------------------------

// With `Add`, the old value is added.
template <bool Add, typename T>
SYNCBN_INLINE void put(T* to, const FloatLanes& value) {
    FloatLanes before = {};
    if (Add) load_lanes(to, &before);
    store_lanes(Add ? before + value : value, to);
}

template <int Width, int K, bool Add, class A, bool Addend, typename T>
SYNCBN_INLINE void part_normalise(const T* __restrict__ x, const T* __restrict__ addend, T* __restrict__ y,
                                  const Shape& shape, const Part& part, const ColumnRectified<float>& constants) {
    constexpr int64_t kBlock = K * kLanes;
    const OnLanes<A, Width> epilogue(constants.activation);
    for (int64_t position = part.first; position < part.last;) {
        const int64_t image = position / shape.inner, last = std::min(part.last, (image + 1) * shape.inner);
        const int64_t channel = image * kBlock % shape.channels;
        LanesOfZ z[K];
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) z[k].take(constants, channel + k * kLanes);
        for (; position < last; ++position)
#pragma GCC unroll 2
            for (int k = 0; k < K; ++k) {
                const int64_t at = position * kBlock + k * kLanes;
                FloatLanes values, out;
                load_lanes(x + at, &values);
                z[k].of(values, &out);
                if (Addend) {
                    load_lanes(addend + at, &values);
                    out += values;
                }
                epilogue.apply(&out);
                put<Add>(y + at, out);
            }
    }
}

template <int Width, int K, bool Add, class A, bool Masked, typename T>
SYNCBN_INLINE void part_grad_input(const T* dy, const T* x, const float* mask, T* dx, const Shape& shape,
                                   const Part& part, const ColumnGradInput<float>& constants,
                                   const ColumnRectified<float>& rectified) {
    constexpr int64_t kBlock = K * kLanes;
    const int64_t groups = shape.channels / kBlock;
    const OnLanes<A, Width> epilogue(rectified.activation);
    for (int64_t position = part.first; position < part.last;) {
        const int64_t image = position / shape.inner, last = std::min(part.last, (image + 1) * shape.inner);
        const int64_t channel = image * kBlock % shape.channels;
        LanesOfZ z[K];
        FloatLanes high[K], low[K], scale[K], mean_dz[K], slopes[K];
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) {
            const int64_t c = channel + k * kLanes;
            if (A::kChanges) z[k].take(rectified, c);
            load_lanes(constants.high + c, &high[k]);
            load_lanes(constants.low + c, &low[k]);
            load_lanes(constants.scale + c, &scale[k]);
            load_lanes(constants.mean_dz + c, &mean_dz[k]);
            load_lanes(constants.slope + c, &slopes[k]);
        }
        const int64_t before = (image - image / groups) * shape.inner;  // positions of other groups
        for (; position < last; ++position)
#pragma GCC unroll 2
            for (int k = 0; k < K; ++k) {
                const int64_t at = position * kBlock + k * kLanes;
                FloatLanes values, grads, at_z;
                load_lanes(x + at, &values);
                load_lanes(dy + at, &grads);
                if (A::kChanges) {
                    z[k].of(values, &at_z);
                    epilogue.through(&grads, at_z);
                }
                if (Masked && mask[position - before] == 0) {
                    put<Add>(dx + at, scale[k] * grads);
                    continue;
                }
                put<Add>(dx + at, scale[k] * ((grads - mean_dz[k]) - ((values - high[k]) - low[k]) * slopes[k]));
            }
    }
}

template <int Width, int K, class A, typename T>
SYNCBN_INLINE void part_recover(const T* __restrict__ y, T* __restrict__ x, const Shape& shape, const Part& part,
                                const ColumnRectified<float>& constants) {
    constexpr int64_t kBlock = K * kLanes;
    const OnLanes<A, Width> epilogue(constants.activation);
    for (int64_t position = part.first; position < part.last;) {
        const int64_t image = position / shape.inner, last = std::min(part.last, (image + 1) * shape.inner);
        const int64_t channel = image * kBlock % shape.channels;
        LanesOfZ z[K];
#pragma GCC unroll 2
        for (int k = 0; k < K; ++k) z[k].take(constants, channel + k * kLanes);
        for (; position < last; ++position)
#pragma GCC unroll 2
            for (int k = 0; k < K; ++k) {
                const int64_t at = position * kBlock + k * kLanes;
                FloatLanes value, out;
                load_lanes(y + at, &value);
                epilogue.undo(&value);
                z[k].back(value, &out);
                store_lanes(out, x + at);
            }
    }
}

// ---- the leaves ----------------------------------------------------------------------------------------------

// The number of vectors in a position.
#define SYNCBN_VECTORS(shape, K, ...) \
    SYNCBN_IF((shape).block == kLanes, kOne, constexpr int K = kOne ? 1 : 2; __VA_ARGS__)

#define SYNCBN_BLOCK_LEAVES_OF(TYPE, T, SET, WIDTH)                                                                    \
    SET void leaf_moments(const T* x, const float* mask, const Shape& shape, int64_t group, const Part& part,          \
                          const double* pivot, double* sum, double* square) {                                          \
        SYNCBN_VECTORS(shape, K, part_moments<WIDTH, K>(x, mask, shape, group, part, pivot, sum, square);)             \
    }                                                                                                                  \
    SET void leaf_grad_sums(const Gradients<T>& from, const Shape& shape, int64_t group, const Part& part,             \
                            const double* mean, const ColumnRectified<float>& z, double* sum_dz, double* sum_dz_xc) {  \
        SYNCBN_ACTIVATION(z.activation, A,                                                                             \
                          SYNCBN_IF(from.y != nullptr, kByOutput,                                                      \
                                    SYNCBN_VECTORS(shape, K,                                                           \
                                                   part_grad_sums<WIDTH, K, A, kByOutput>(                             \
                                                       from, shape, group, part, mean, z, sum_dz, sum_dz_xc);)))       \
    }                                                                                                                  \
    SET void leaf_normalise(const T* x, const T* addend, T* y, const Shape& shape, const Part& part,                   \
                            const ColumnRectified<float>& z, bool add) {                                               \
        SYNCBN_ACTIVATION(                                                                                             \
            z.activation, A,                                                                                           \
            SYNCBN_IF(                                                                                                 \
                add, kAdd,                                                                                             \
                SYNCBN_IF(addend != nullptr, kAddend,                                                                  \
                          SYNCBN_VECTORS(shape, K,                                                                     \
                                         part_normalise<WIDTH, K, kAdd, A, kAddend>(x, addend, y, shape, part, z);)))) \
    }                                                                                                                  \
    SET void leaf_grad_input(const T* dy, const T* x, const float* mask, T* dx, const Shape& shape, const Part& part,  \
                             const ColumnGradInput<float>& constants, const ColumnRectified<float>& z, bool add) {     \
        SYNCBN_ACTIVATION(z.activation, A,                                                                             \
                          SYNCBN_IF(add, kAdd,                                                                         \
                                    SYNCBN_IF(mask != nullptr, kMasked,                                                \
                                              SYNCBN_VECTORS(shape, K,                                                 \
                                                             part_grad_input<WIDTH, K, kAdd, A, kMasked>(              \
                                                                 dy, x, mask, dx, shape, part, constants, z);))))      \
    }                                                                                                                  \
    SET void leaf_recover(const T* y, T* x, const Shape& shape, const Part& part, const ColumnRectified<float>& z) {   \
        SYNCBN_ACTIVATION(z.activation, A, SYNCBN_VECTORS(shape, K, part_recover<WIDTH, K, A>(y, x, shape, part, z);)) \
    }
#define SYNCBN_BLOCK_LEAVES(SET, WIDTH) SYNCBN_NUMBERS_IN_BLOCKS(SYNCBN_BLOCK_LEAVES_OF, SET, WIDTH)

SYNCBN_FOR_EACH_SET(SYNCBN_BLOCK_LEAVES)

// ---- the work of each thread ---------------------------------------------------------------------------------

// Adds up the results of leaf(group, part, first, second) for the parts of each group, [channels] each.
template <typename Leaf>
void sum_up(const Work& work, double* first, double* second, const Leaf& leaf) {
    const Shape& shape = work.shape;
    const int threads = work.useful_threads();
    const int64_t groups = shape.channels / shape.block, positions = shape.per_channel();
    const int64_t parts = std::max<int64_t>(1, std::min(kEnoughParts / groups, positions * shape.block / kWorthAPart));
    std::vector<double> sums(2 * parts * shape.channels);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t job = 0; job < parts * groups; ++job) {
        const int64_t part = job / groups, group = job % groups;
        double* to = sums.data() + 2 * part * shape.channels + group * shape.block;
        leaf(group, Part{positions * part / parts, positions * (part + 1) / parts}, to, to + shape.channels);
    }
    for (int64_t c = 0; c < shape.channels; ++c) {
        first[c] = second[c] = 0;
        for (int64_t part = 0; part < parts; ++part) {
            first[c] += sums[2 * part * shape.channels + c];
            second[c] += sums[(2 * part + 1) * shape.channels + c];
        }
    }
}

// Calls leaf(part) on each thread, for its share of the memory.
template <typename Leaf>
void for_parts(const Work& work, const Leaf& leaf) {
    const int threads = work.useful_threads();
    const int64_t positions = work.shape.size() / work.shape.block;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; ++part) leaf(Part{positions * part / threads, positions * (part + 1) / threads});
}

// For `broadcast` and `Columns`: a column for each channel.
Shape columns_of(const Shape& shape) { return {1, shape.channels, 1}; }

template <typename T>
int64_t moments_of(const Work& work, const T* x, double* mean, double* m2) {
    const Shape& shape = work.shape;
    const Counting counting(work);
    const int64_t n = counting.positions;
    if (n == 0) {
        std::fill_n(mean, shape.channels, 0.0);
        std::fill_n(m2, shape.channels, 0.0);
        return 0;
    }
    // A sample of the channel, as in the other layouts.
    const int64_t image = counting.first / shape.inner, position = counting.first % shape.inner;
    std::vector<double> pivot(shape.channels);
    for (int64_t c = 0; c < shape.channels; ++c) {
        const int64_t row = (image * shape.channels + c / shape.block * shape.block) * shape.inner;
        pivot[c] = Value<T>::load(x + row + position * shape.block + c % shape.block);
    }
    sum_up(work, mean, m2, [&](int64_t group, const Part& part, double* sum, double* square) {
        leaf_moments(x, work.mask, shape, group, part, pivot.data() + group * shape.block, sum, square);
    });
    for (int64_t c = 0; c < shape.channels; ++c) {
        m2[c] = at_least_zero(m2[c] - mean[c] * mean[c] / n);
        mean[c] = pivot[c] + mean[c] / n;
    }
    return n;
}

template <typename T>
void grad_sums_of(const Work& work, const Gradients<T>& from, const GradSums& with, double* sum_dz,
                  double* sum_dz_xhat) {
    const Columns<float> constants(columns_of(work.shape), with.with, with.with.activation.any() && from.y == nullptr);
    sum_up(work, sum_dz, sum_dz_xhat, [&](int64_t group, const Part& part, double* sum, double* sum_xc) {
        leaf_grad_sums(from, work.shape, group, part, with.with.mean, constants.from(0), sum, sum_xc);
    });
    for (int64_t c = 0; c < work.shape.channels; ++c) sum_dz_xhat[c] *= with.invstd[c];
}

}  // namespace

int64_t moments(const Work& work, const void* x, double* mean, double* m2) {
    int64_t n = 0;
    with_type_in_blocks(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        n = moments_of(work, static_cast<const T*>(x), mean, m2);
    });
    return n;
}

void normalise(const Work& work, const void* x, const Normalise& with, void* y) {
    const Columns<float> constants(columns_of(work.shape), with.with, true);
    with_type_in_blocks(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_parts(work, [&](const Part& part) {
            leaf_normalise(static_cast<const T*>(x), static_cast<const T*>(with.addend), static_cast<T*>(y), work.shape,
                           part, constants.from(0), with.add);
        });
    });
}

void grad_sums(const Work& work, const void* dy, const void* x, const GradSums& with, double* sum_dz,
               double* sum_dz_xhat) {
    with_type_in_blocks(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const Gradients<T> from{static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(with.y),
                                static_cast<T*>(with.dz)};
        grad_sums_of(work, from, with, sum_dz, sum_dz_xhat);
    });
}

void grad_input(const Work& work, const void* dy, const void* x, const GradInput& with, void* dx) {
    const Shape columns = columns_of(work.shape);
    const std::vector<float> high = broadcast<float>(columns, with.mean),
                             low = broadcast<float>(columns, with.mean, true),
                             scale = broadcast<float>(columns, with.with.scale),
                             mean_dz = broadcast<float>(columns, with.mean_dz),
                             slope = broadcast<float>(columns, with.slope);
    const ColumnGradInput<float> column{high.data(), low.data(), scale.data(), mean_dz.data(), slope.data()};
    const Columns<float> constants(columns, with.with, with.with.activation.any());
    with_type_in_blocks(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_parts(work, [&](const Part& part) {
            leaf_grad_input(static_cast<const T*>(dy), static_cast<const T*>(x), work.mask, static_cast<T*>(dx),
                            work.shape, part, column, constants.from(0), with.add);
        });
    });
}

void recover(const Work& work, const void* y, const Rectified& with, void* x) {
    const Columns<float> constants(columns_of(work.shape), with, true);
    with_type_in_blocks(work.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_parts(work, [&](const Part& part) {
            leaf_recover(static_cast<const T*>(y), static_cast<T*>(x), work.shape, part, constants.from(0));
        });
    });
}

}  // namespace blocked
}  // namespace cpu
}  // namespace syncbn

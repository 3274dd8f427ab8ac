// What a CUDA device does for the layer: the functions of csrc/cpu/kernels.h, over all slots of a call in one launch.
//
// The source needs no header and compiles with nvcc, NVRTC (MXNet's run-time compiler, CuPy) and clang for compute
// capability 5.0 and later. A tensor is seen from its channel axis as [outer][channels][inner], row-major, with
// outer = samples * per_sample. Slot s holds samples / slots of the samples, and one more where s < samples % slots.
//
// Two ways through memory. Where inner > 1 a *row* is the `inner` values of one channel that lie side by side, and a
// block or a warp stays in one channel. Where inner = 1 neighbours are different channels: a block takes a tile of
// `width` channels, a power of two up to 32, and each of its threads stays in one channel and goes down the rows.
//
// Reductions are partial: gridDim.z chunks of a slot leave one result each, in an order that the launch alone decides,
// and the host puts them together in that order. There are no atomics, so the same launch gives the same bits.
// float16 and float32 are read into float32, in runs of values whose moments are taken about the run's own mean; what
// leaves a thread is float64. A mean of 1e5 beside a deviation of 1 costs no digit.
//
// A GPU is kept busy by loads that wait for no other: each thread issues several, then computes, then stores. A compiler
// does not move a load past a store that it cannot tell apart, nor out of a branch; so batches are written out, and
// where one is cut short the loads repeat the first address of the batch and what they bring is not used.

typedef long long Index;

namespace {

#ifndef SYNCBN_BLOCK
#error "compile with -DSYNCBN_BLOCK=N: the number of threads of a block, which csrc/cuda/module.h names"
#endif
constexpr int kThreads = SYNCBN_BLOCK;  // of every block
constexpr int kWarp = 32;
constexpr int kPack = 16;  // bytes of the widest load

struct Half {
    unsigned short bits;
};

// __CUDACC__ is everywhere but on the host, where the emulator of the tests brings its own conversion.
#ifdef __CUDACC__
__device__ inline float to_float(Half value) {
    float out;
    asm("{ cvt.f32.f16 %0, %1; }" : "=f"(out) : "h"(value.bits));
    return out;
}

__device__ inline Half to_half(float value) {
    Half out;
    asm("{ cvt.rn.f16.f32 %0, %1; }" : "=h"(out.bits) : "f"(value));
    return out;
}
#else
__device__ inline float to_float(Half value) { return emulated_half_to_float(value.bits); }
__device__ inline Half to_half(float value) { return Half{emulated_float_to_half(value)}; }
#endif

// How a type of data is computed with.
template <typename T>
struct Number {
    typedef T Wide;
    __device__ static T widen(T value) { return value; }
    __device__ static T narrow(T value) { return value; }
};
template <>
struct Number<Half> {
    typedef float Wide;
    __device__ static float widen(Half value) { return to_float(value); }
    __device__ static Half narrow(float value) { return to_half(value); }
};

template <typename T>
struct Lanes {
    static constexpr int kCount = kPack / static_cast<int>(sizeof(T));
};

// kUnit neighbours, moved with one load or store.
template <typename T, int kUnit>
struct alignas(kUnit * sizeof(T)) Pack {
    T values[kUnit];
};

template <typename T, int kUnit>
__device__ inline Pack<T, kUnit> load(const T* from) {
    return *reinterpret_cast<const Pack<T, kUnit>*>(from);
}

// n packs that are `stride` apart; where there are more than n, the rest repeat the first.
template <typename T, int kUnit, int kCount>
__device__ inline void load_batch(Pack<T, kUnit> (&packs)[kCount], const T* from, Index stride, int n) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) packs[j] = load<T, kUnit>(from + (j < n ? j * stride : 0));
}

template <typename T, int kUnit>
__device__ inline void store(T* to, const Pack<T, kUnit>& pack) {
    *reinterpret_cast<Pack<T, kUnit>*>(to) = pack;
}

__device__ inline bool aligned(const void* pointer) {
    return reinterpret_cast<unsigned long long>(pointer) % kPack == 0;
}

struct Layout {
    Index samples, per_sample, channels, inner, slots;

    __device__ Index outer() const { return samples * per_sample; }
    __device__ Index first_outer(Index slot) const {
        const Index rest = samples % slots;
        return (samples / slots * slot + (slot < rest ? slot : rest)) * per_sample;
    }
    __device__ Index outer_of(Index slot) const { return first_outer(slot + 1) - first_outer(slot); }
    __device__ Index slot_of(Index o) const {
        const Index sample = o / per_sample, small = samples / slots, rest = samples % slots;
        const Index in_large = rest * (small + 1);
        return sample < in_large ? sample / (small + 1) : rest + (sample - in_large) / small;
    }
};

// The part of `total` that belongs to this block's chunk.
struct Chunk {
    Index begin, end;

    __device__ explicit Chunk(Index total) {
        const Index each = (total + gridDim.z - 1) / gridDim.z;
        begin = each * blockIdx.z < total ? each * blockIdx.z : total;
        end = begin + each < total ? begin + each : total;
    }
};

// The number of values in a run that is not cut short, known to the compiler.
template <int kRun>
struct Full {
    __device__ constexpr operator int() const { return kRun; }
};

// A float64 value as two of the narrower type, so that x - mean keeps what the type can hold of it.
template <typename Wide>
struct Split {
    Wide high, low;

    __device__ explicit Split(double value)
        : high(static_cast<Wide>(value)), low(static_cast<Wide>(value - static_cast<double>(high))) {}
    __device__ Wide below(Wide x) const { return (x - high) - low; }
};

// ---- reductions ----------------------------------------------------------------------------------------------

template <class Reduction>
__device__ inline void add_run(Reduction& reduction, int n) {
    if (n == Reduction::kRun)
        reduction.add(Full<Reduction::kRun>());
    else
        reduction.add(n);
}

// Calls take<kUnit>(j, offset) for the values that this thread reads and add(n) after each run of n of them. What is
// counted within a channel fits into 32 bits, which a GPU adds in one instruction and 64 in two.
template <typename T, int kUnit, class Reduction>
__device__ void down_rows(Reduction& reduction, const Layout& layout) {
    const Index slot = blockIdx.y;
    const Chunk chunk(layout.outer_of(slot) * (layout.inner / kUnit));
    const unsigned per_row = static_cast<unsigned>(layout.inner / kUnit), end = static_cast<unsigned>(chunk.end);
    const unsigned rows = kThreads / per_row, columns = kThreads % per_row;  // from one pack of a thread to its next
    const Index row_length = layout.channels * layout.inner;
    const Index step = rows * row_length + columns * kUnit, next_row = row_length - layout.inner;
    unsigned at = static_cast<unsigned>(chunk.begin) + threadIdx.x, column = at % per_row;
    Index offset = (layout.first_outer(slot) + at / per_row) * row_length + blockIdx.x * layout.inner + column * kUnit;
    while (at < end) {
        const Index first = offset;
        int n = 0;
#pragma unroll
        for (int j = 0; j < Reduction::kRun; j += kUnit) {
            const bool there = at < end;
            reduction.template take<kUnit>(j, there ? offset : first);
            n += there ? kUnit : 0;
            at += kThreads;
            offset += step;
            column += columns;
            if (column >= per_row) {
                column -= per_row;
                offset += next_row;
            }
        }
        add_run(reduction, n);
    }
}

template <typename T, class Reduction>
__device__ void down_columns(Reduction& reduction, const Layout& layout, int width) {
    const Index slot = blockIdx.y, channel = Index(blockIdx.x) * width + threadIdx.x % width;
    const Chunk chunk(layout.outer_of(slot));
    if (channel >= layout.channels) return;
    const unsigned end = static_cast<unsigned>(chunk.end), step = kThreads / width;
    unsigned row = static_cast<unsigned>(chunk.begin) + threadIdx.x / width;
    Index offset = (layout.first_outer(slot) + row) * layout.channels + channel;
    while (row < end) {
        const Index first = offset;
        int n = 0;
#pragma unroll
        for (int j = 0; j < Reduction::kRun; ++j) {
            const bool there = row < end;
            reduction.template take<1>(j, there ? offset : first);
            n += there;
            row += step;
            offset += step * layout.channels;
        }
        add_run(reduction, n);
    }
}

// Walks, puts the threads' results together and leaves them in partial[chunk][slot][quantity][channel].
template <typename T, class Reduction>
__device__ void reduce(Reduction& reduction, const Layout& layout, int width, double* partial, bool packs) {
    typedef typename Reduction::Result Result;
    __shared__ Result shared[kThreads];
    const Index slot = blockIdx.y;
    double* out = partial + (blockIdx.z * layout.slots + slot) * Result::kQuantities * layout.channels;
    if (layout.inner == 1) {
        down_columns<T>(reduction, layout, width);
        shared[threadIdx.x] = reduction.result();
        __syncthreads();
        const Index channel = Index(blockIdx.x) * width + threadIdx.x;
        if (threadIdx.x < width && channel < layout.channels) {
            Result total = shared[threadIdx.x];
            for (int i = threadIdx.x + width; i < kThreads; i += width) total.merge(shared[i]);
            total.leave(out + channel, layout.channels);
        }
        return;
    }
    if (packs && layout.inner % Lanes<T>::kCount == 0)
        down_rows<T, Lanes<T>::kCount>(reduction, layout);
    else
        down_rows<T, 1>(reduction, layout);
    Result total = reduction.result();
    for (int distance = kWarp / 2; distance > 0; distance /= 2) total.merge(total.from_lane(distance));
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / kWarp; ++warp) total.merge(shared[warp]);
        total.leave(out + blockIdx.x, layout.channels);
    }
}

__device__ inline double shuffle_down(double value, int distance) {
    return __shfl_down_sync(0xffffffffu, value, distance);
}

// Count, mean and the sum of squares about it; merged as Chan, Golub and LeVeque do ("Updating formulae and a pairwise
// algorithm for computing sample variances", 1979).
struct Moments {
    static constexpr int kQuantities = 3;
    double count, mean, m2;

    __device__ void merge(const Moments& other) {
        if (other.count == 0) return;
        const double total = count + other.count, delta = other.mean - mean, share = other.count / total;
        mean += delta * share;
        m2 += other.m2 + delta * delta * count * share;
        count = total;
    }
    __device__ Moments from_lane(int distance) const {
        return {shuffle_down(count, distance), shuffle_down(mean, distance), shuffle_down(m2, distance)};
    }
    __device__ void leave(double* out, Index channels) const {
        out[0] = count;
        out[channels] = mean;
        out[2 * channels] = m2;
    }
};

template <typename T>
struct MomentsOf {
    typedef Moments Result;
    typedef typename Number<T>::Wide Wide;
    static constexpr int kRun = 16;  // values that a thread reads before it adds them up
    const T* x;
    Wide origin;  // near the values, so that they lose no digits on the way
    Wide count, mean, m2;
    Wide run[kRun];

    __device__ MomentsOf(const T* x, Index any) : x(x), origin(Number<T>::widen(x[any])), count(0), mean(0), m2(0) {}

    template <int kUnit>
    __device__ void take(int j, Index offset) {
        const Pack<T, kUnit> pack = load<T, kUnit>(x + offset);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) run[j + i] = Number<T>::widen(pack.values[i]) - origin;
    }
    template <class N>
    __device__ void add(N n) {
        Wide sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n) sum += run[i];
        const Wide here = sum / static_cast<Wide>(n);
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n) squares += (run[i] - here) * (run[i] - here);
        const Wide total = count + static_cast<Wide>(n), delta = here - mean, share = static_cast<Wide>(n) / total;
        mean += delta * share;
        m2 += squares + delta * delta * count * share;
        count = total;
    }
    __device__ Moments result() const {
        return {static_cast<double>(count), static_cast<double>(origin) + static_cast<double>(mean),
                static_cast<double>(m2)};
    }
};

struct Sums {
    static constexpr int kQuantities = 2;
    double dy, dy_xhat;

    __device__ void merge(const Sums& other) {
        dy += other.dy;
        dy_xhat += other.dy_xhat;
    }
    __device__ Sums from_lane(int distance) const {
        return {shuffle_down(dy, distance), shuffle_down(dy_xhat, distance)};
    }
    __device__ void leave(double* out, Index channels) const {
        out[0] = dy;
        out[channels] = dy_xhat;
    }
};

template <typename T>
struct SumsOf {
    typedef Sums Result;
    typedef typename Number<T>::Wide Wide;
    static constexpr int kRun = 8;  // of each of two tensors
    const T *dy, *x;
    Split<Wide> mean;
    double invstd;
    double sum_dy, sum_dy_centred;
    Wide heads[kRun], centred[kRun];

    __device__ SumsOf(const T* dy, const T* x, double mean, double invstd)
        : dy(dy), x(x), mean(mean), invstd(invstd), sum_dy(0), sum_dy_centred(0) {}

    template <int kUnit>
    __device__ void take(int j, Index offset) {
        const Pack<T, kUnit> head = load<T, kUnit>(dy + offset), value = load<T, kUnit>(x + offset);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            heads[j + i] = Number<T>::widen(head.values[i]);
            centred[j + i] = mean.below(Number<T>::widen(value.values[i]));
        }
    }
    template <class N>
    __device__ void add(N n) {
        Wide sum = 0, product = 0;
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n) {
                sum += heads[i];
                product += heads[i] * centred[i];
            }
        sum_dy += sum;
        sum_dy_centred += product;
    }
    __device__ Sums result() const { return {sum_dy, sum_dy_centred * invstd}; }
};

// ---- elementwise ---------------------------------------------------------------------------------------------

// How many packs a thread reads before it writes.
template <int kUnit>
struct Batch {
    static constexpr int kCount = kUnit > 1 ? 4 : 8;
};

// Calls use(slot, channel) whenever the statistics change, then apply<kUnit>(offset, stride, n) for each batch: n packs,
// `stride` apart. Rows are counted in 32 bits: dividing 64 would cost more than a short row.
template <int kUnit, class Map>
__device__ void over_rows(Map& map, const Layout& layout, Index segment) {
    const unsigned rows = static_cast<unsigned>(layout.outer() * layout.channels);
    const unsigned channels = static_cast<unsigned>(layout.channels);
    const unsigned segments = static_cast<unsigned>((layout.inner + segment - 1) / segment);
    const unsigned warps = gridDim.x * (kThreads / kWarp);
    for (unsigned task = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp; task < rows * segments; task += warps) {
        const unsigned row = segments == 1 ? task : task / segments, outer = row / channels;
        const Index begin = (task - row * segments) * segment;
        const Index end = begin + segment < layout.inner ? begin + segment : layout.inner;
        map.use(layout.slots == 1 ? 0 : layout.slot_of(outer), row - outer * channels);
        const Index base = row * layout.inner + begin;
        const int length = static_cast<int>(end - begin), stride = kWarp * kUnit;
        for (int i = threadIdx.x % kWarp * kUnit; i < length; i += Batch<kUnit>::kCount * stride)
            map.template apply<kUnit>(base + i, stride, (length - i + stride - 1) / stride);
    }
}

template <class Map>
__device__ void over_columns(Map& map, const Layout& layout, int width) {
    const Index slot = blockIdx.y, channel = Index(blockIdx.x) * width + threadIdx.x % width;
    if (channel >= layout.channels) return;
    const Chunk chunk(layout.outer_of(slot));
    map.use(slot, channel);
    const int step = kThreads / width, length = static_cast<int>(chunk.end - chunk.begin);
    const Index base = (layout.first_outer(slot) + chunk.begin) * layout.channels + channel;
    for (int row = threadIdx.x / width; row < length; row += Batch<1>::kCount * step)
        map.template apply<1>(base + row * layout.channels, step * layout.channels, (length - row + step - 1) / step);
}

// `segment` is a multiple of every pack.
template <typename T, class Map>
__device__ void each(Map& map, const Layout& layout, int width, Index segment, bool packs) {
    if (layout.inner == 1)
        over_columns(map, layout, width);
    else if (packs && layout.inner % Lanes<T>::kCount == 0)
        over_rows<Lanes<T>::kCount>(map, layout, segment);
    else
        over_rows<1>(map, layout, segment);
}

// y = (x - mean) * scale + shift
template <typename T, typename P>
struct Normalise {
    typedef typename Number<T>::Wide Wide;
    const T* x;
    T* y;
    bool add;
    const double *means, *invstds;
    const P *gamma, *beta;
    bool fix_gamma;
    Index channels;
    Split<Wide> mean = Split<Wide>(0);
    Wide scale = 0, shift = 0;

    __device__ void use(Index slot, Index channel) {
        mean = Split<Wide>(means[slot * 2 * channels + channel]);
        scale = static_cast<Wide>(invstds[slot * 2 * channels + channel] * (fix_gamma ? 1.0 : gamma[channel]));
        shift = static_cast<Wide>(beta[channel]);
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> in[kCount], out[kCount] = {};
        load_batch<T>(in, x + offset, stride, n);
        if (add) load_batch<T>(out, y + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const Wide value = mean.below(Number<T>::widen(in[j].values[i])) * scale + shift;
                out[j].values[i] = Number<T>::narrow(add ? Number<T>::widen(out[j].values[i]) + value : value);
            }
            if (j < n) store<T, kUnit>(y + offset + j * stride, out[j]);
        }
    }
};

// dx = scale * (dy - mean_dy - (x - mean) * slope)
template <typename T, typename P>
struct GradInput {
    typedef typename Number<T>::Wide Wide;
    const T *dy, *x;
    T* dx;
    bool add;
    const double *invstds, *through;
    const P* gamma;
    bool fix_gamma;
    Index channels;
    Split<Wide> mean = Split<Wide>(0);
    Wide scale = 0, mean_dy = 0, slope = 0;

    __device__ void use(Index slot, Index channel) {
        const double* mine = through + slot * 3 * channels + channel;
        mean = Split<Wide>(mine[0]);
        mean_dy = static_cast<Wide>(mine[channels]);
        slope = static_cast<Wide>(mine[2 * channels]);
        scale = static_cast<Wide>(invstds[slot * 2 * channels + channel] * (fix_gamma ? 1.0 : gamma[channel]));
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> head[kCount], in[kCount], out[kCount] = {};
        load_batch<T>(head, dy + offset, stride, n);
        load_batch<T>(in, x + offset, stride, n);
        if (add) load_batch<T>(out, dx + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const Wide centred = mean.below(Number<T>::widen(in[j].values[i]));
                const Wide value = scale * (Number<T>::widen(head[j].values[i]) - mean_dy - centred * slope);
                out[j].values[i] = Number<T>::narrow(add ? Number<T>::widen(out[j].values[i]) + value : value);
            }
            if (j < n) store<T, kUnit>(dx + offset + j * stride, out[j]);
        }
    }
};

__device__ inline Index thread() { return Index(blockIdx.x) * kThreads + threadIdx.x; }

}  // namespace

// Every kernel for one type of data T and the type P of its parameters and running statistics.
//
// moments     partial [chunks][slots][3][channels]: count, mean and sum of (x - mean)^2.
//             Grid: channels (inner > 1) or tiles of `width` channels; slots; chunks.
// normalise   y = (x - mean) * invstd * gamma + beta, added to y where `add`; statistics [slots][2][channels]: mean,
//             invstd. Grid: any number of blocks (inner > 1), or tiles; slots; chunks.
// grad_sums   partial [chunks][slots][2][channels]: sum of dy, and of dy * (x - mean) * invstd. Grid as for moments.
// grad_input  dx = gamma * invstd * (dy - mean_dy - (x - mean) * slope), added where `add`; through [slots][3][channels]:
//             mean, mean_dy, slope. Grid as for normalise.
// frozen      statistics [2][channels] of the running mean and variance.
// update_running  running <- momentum * running + (1 - momentum) * batch, for batch [2][channels]: mean, variance.
// copy        to = from, added where `add`.
// write       out = values, added where `add`.
// fill        out = value.
//
// A slot without a sample leaves a count and sums of 0, and is passed over by the others.
#define SYNCBN_KERNELS(TYPE, T, P)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        moments_##TYPE(const T* x, double* partial, Index samples, Index per_sample, Index channels, Index inner,      \
                       Index slots, int width) {                                                                       \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        const Index channel = inner > 1 ? blockIdx.x : Index(blockIdx.x) * width + threadIdx.x % width;                \
        const bool any = layout.outer_of(blockIdx.y) > 0 && channel < channels;                                        \
        const Index row = any ? layout.first_outer(blockIdx.y) * channels + channel : 0;                               \
        MomentsOf<T> reduction(x, row * inner);                                                                        \
        reduce<T>(reduction, layout, width, partial, aligned(x));                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        normalise_##TYPE(const T* x, const double* statistics, const P* gamma, const P* beta, int fix_gamma, T* y,     \
                         int add, Index samples, Index per_sample, Index channels, Index inner, Index slots,           \
                         int width, Index segment) {                                                                   \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        Normalise<T, P> map = {x, y, add != 0, statistics, statistics + channels, gamma, beta, fix_gamma != 0,         \
                               channels};                                                                              \
        each<T>(map, layout, width, segment, aligned(x) && aligned(y));                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        grad_sums_##TYPE(const T* dy, const T* x, const double* statistics, double* partial, Index samples,            \
                         Index per_sample, Index channels, Index inner, Index slots, int width) {                      \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        const Index channel = inner > 1 ? blockIdx.x : Index(blockIdx.x) * width + threadIdx.x % width;                \
        const bool any = channel < channels;                                                                           \
        const double* mine = statistics + blockIdx.y * 2 * channels + channel;                                         \
        SumsOf<T> reduction(dy, x, any ? mine[0] : 0.0, any ? mine[channels] : 0.0);                                   \
        reduce<T>(reduction, layout, width, partial, aligned(x) && aligned(dy));                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        grad_input_##TYPE(const T* dy, const T* x, const double* statistics, const double* through, const P* gamma,      \
                          int fix_gamma, T* dx, int add, Index samples, Index per_sample, Index channels,              \
                          Index inner, Index slots, int width, Index segment) {                                        \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        GradInput<T, P> map = {dy, x, dx, add != 0, statistics + channels, through, gamma, fix_gamma != 0, channels};    \
        each<T>(map, layout, width, segment, aligned(x) && aligned(dy) && aligned(dx));                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        copy_##TYPE(const T* from, T* to, int add, Index n) {                                                          \
        const Index i = thread();                                                                                      \
        if (i < n) to[i] = add ? Number<T>::narrow(Number<T>::widen(to[i]) + Number<T>::widen(from[i])) : from[i];     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        fill_##TYPE(T* out, double value, Index n) {                                                                   \
        if (thread() < n) out[thread()] = Number<T>::narrow(static_cast<typename Number<T>::Wide>(value));             \
    }

#define SYNCBN_PARAMETER_KERNELS(TYPE, P)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        frozen_##TYPE(const P* running_mean, const P* running_var, double epsilon, double* statistics,                 \
                      Index channels) {                                                                                \
        const Index c = thread();                                                                                      \
        if (c >= channels) return;                                                                                     \
        statistics[c] = running_mean[c];                                                                               \
        statistics[channels + c] = 1 / sqrt(static_cast<double>(running_var[c]) + epsilon);                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        update_running_##TYPE(const double* batch, double momentum, P* running_mean, P* running_var, Index channels) { \
        const Index c = thread();                                                                                      \
        if (c >= channels) return;                                                                                     \
        running_mean[c] = static_cast<P>(momentum * running_mean[c] + (1 - momentum) * batch[c]);                      \
        running_var[c] = static_cast<P>(momentum * running_var[c] + (1 - momentum) * batch[channels + c]);             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        write_##TYPE(const double* values, P* out, int add, Index n) {                                                 \
        const Index c = thread();                                                                                      \
        if (c < n) out[c] = static_cast<P>(values[c] + (add ? static_cast<double>(out[c]) : 0.0));                     \
    }

SYNCBN_KERNELS(float16, Half, float)
SYNCBN_KERNELS(float32, float, float)
SYNCBN_KERNELS(float64, double, double)
SYNCBN_PARAMETER_KERNELS(float32, float)
SYNCBN_PARAMETER_KERNELS(float64, double)

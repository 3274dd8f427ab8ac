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
// What replicas hand in are packed vectors of float64, as csrc/pooling/statistics.h has them, one for each of their slots:
//
//     moments    [count, mean[C], m2[C]]       gradients  [sum dy[C], sum dy*xhat[C]], of dz where z is rectified
//
// *Gathered* are those of all replicas, side by side in their order. Every device holds them and puts a pool together from
// them in that order, whatever the order in which they came: all devices have the same bits.
//
// Reductions are partial: gridDim.z chunks of a slot leave one result each, in an order that the launch alone decides,
// and `merge_moments` and `merge_sums` put them together. There are no atomics, so the same launch gives the same bits.
// float16 and float32 are read into float32, in runs of values whose moments are taken about the run's own mean; what
// leaves a thread is float64. A mean of 1e5 beside a deviation of 1 costs no digit.
//
// A GPU is kept busy by loads that wait for no other: each thread issues several, then computes, then stores. A compiler
// does not move a load past a store that it cannot tell apart, nor out of a branch; so batches are written out, and
// where one is cut short the loads repeat the first address of the batch and what they bring is not used.

typedef long long Index;

namespace {

#if !defined(SYNCBN_BLOCK) || !defined(SYNCBN_SLOTS)
#error "compile with -DSYNCBN_BLOCK=N -DSYNCBN_SLOTS=N: see kBlock and kMostSlots in csrc/cuda"
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

// z of one channel. The kernels that need its sign compute it by the same expression as the one that writes it.
template <typename Wide>
struct Normal {
    Split<Wide> mean = Split<Wide>(0);
    Wide scale = 0, shift = 0;

    __device__ Wide of(Wide x) const { return mean.below(x) * scale + shift; }
    __device__ Wide back(Wide z) const { return ((z - shift) / scale + mean.low) + mean.high; }
};

// `Activation` of csrc/types.h; slope 0 gives 0 for minus infinity too. A NaN stays one.
template <typename Wide>
struct Activation {
    Wide slope, ceiling;

    __device__ Activation(double slope, double ceiling)
        : slope(static_cast<Wide>(slope)), ceiling(static_cast<Wide>(ceiling)) {}
    __device__ Wide of(Wide z) const {
        return z <= 0 ? (slope == 0 ? 0 : slope * z) : z > ceiling ? ceiling : z;
    }
    // z from y, where the slope is above 0 and there is no ceiling.
    __device__ Wide back(Wide y) const { return y > 0 ? y : y / slope; }
    // The gradient with respect to z, in whose place y will do.
    __device__ Wide through(Wide grad, Wide z) const { return (z > 0) & (z < ceiling) ? grad : grad * slope; }
};

// ---- reductions ----------------------------------------------------------------------------------------------

template <int kUnit, class Reduction>
__device__ inline void add_run(Reduction& reduction, int n) {
    if (n == Reduction::kRun)
        reduction.add(Full<Reduction::kRun>());
    else
        reduction.add(n);
    reduction.template put<kUnit>(n);
}

// Calls take<kUnit>(j, offset) for the values that this thread reads, then add(n) and put<kUnit>(n) for each run of n of
// them: what is written waits until all of a run has been read. What is counted within a channel fits into 32 bits, which
// a GPU adds in one instruction and 64 in two.
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
        add_run<kUnit>(reduction, n);
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
        add_run<1>(reduction, n);
    }
}

// Walks, puts the threads' results together and leaves the packed vector of each chunk and slot in partial[chunk][slot].
template <typename T, class Reduction>
__device__ void reduce(Reduction& reduction, const Layout& layout, int width, double* partial, bool packs) {
    typedef typename Reduction::Result Result;
    __shared__ Result shared[kThreads];
    const Index slot = blockIdx.y;
    double* out = partial + (blockIdx.z * layout.slots + slot) * Result::length(layout.channels);
    if (layout.inner == 1) {
        down_columns<T>(reduction, layout, width);
        shared[threadIdx.x] = reduction.result();
        __syncthreads();
        const Index channel = Index(blockIdx.x) * width + threadIdx.x;
        if (threadIdx.x < width && channel < layout.channels) {
            Result total = shared[threadIdx.x];
            for (int i = threadIdx.x + width; i < kThreads; i += width) total.merge(shared[i]);
            total.leave(out, channel, layout.channels);
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
        total.leave(out, blockIdx.x, layout.channels);
    }
}

__device__ inline double shuffle_down(double value, int distance) {
    return __shfl_down_sync(0xffffffffu, value, distance);
}

// Count, mean and the sum of squares about it; merged as Chan, Golub and LeVeque do ("Updating formulae and a pairwise
// algorithm for computing sample variances", 1979).
struct Moments {
    double count, mean, m2;

    __device__ static Index length(Index channels) { return 1 + 2 * channels; }

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
    __device__ static Moments at(const double* packed, Index channel, Index channels) {
        return {packed[0], packed[1 + channel], packed[1 + channels + channel]};
    }
    // An empty slot leaves zeros.
    __device__ void leave(double* out, Index channel, Index channels) const {
        if (channel == 0) out[0] = count;
        out[1 + channel] = count == 0 ? 0 : mean;
        out[1 + channels + channel] = m2;
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
    template <int kUnit>
    __device__ void put(int) const {}
    __device__ Moments result() const {
        return {static_cast<double>(count), static_cast<double>(origin) + static_cast<double>(mean),
                static_cast<double>(m2)};
    }
};

struct Sums {
    double dy, dy_xhat;

    __device__ static Index length(Index channels) { return 2 * channels; }

    __device__ void merge(const Sums& other) {
        dy += other.dy;
        dy_xhat += other.dy_xhat;
    }
    __device__ Sums from_lane(int distance) const {
        return {shuffle_down(dy, distance), shuffle_down(dy_xhat, distance)};
    }
    __device__ static Sums at(const double* packed, Index channel, Index channels) {
        return {packed[channel], packed[channels + channel]};
    }
    __device__ void leave(double* out, Index channel, Index channels) const {
        out[channel] = dy;
        out[channels + channel] = dy_xhat;
    }
};

// Of dz, which is dy or, where kActivated, what the activation lets through. Its z is what `normal` makes of `marks`: of x, or
// of y where that is at hand, with the identity; one expression for both, and a second load of x comes from the cache. dz is
// written where it is not null.
template <typename T, bool kActivated>
struct SumsOf {
    typedef Sums Result;
    typedef typename Number<T>::Wide Wide;
    static constexpr int kRun = 8;  // of each of two tensors
    const T *dy, *x;
    Split<Wide> mean;
    double invstd;
    const T* marks;
    T* dz;
    Normal<Wide> normal;
    Activation<Wide> activation;
    double sum_dy = 0, sum_dy_centred = 0;
    Wide heads[kRun], centred[kRun];
    Index places[kRun];

    __device__ SumsOf(const T* dy, const T* x, double mean, double invstd, const T* marks, T* dz,
                      const Normal<Wide>& normal, const Activation<Wide>& activation)
        : dy(dy), x(x), mean(mean), invstd(invstd), marks(marks), dz(dz), normal(normal), activation(activation) {}

    template <int kUnit>
    __device__ void take(int j, Index offset) {
        const Pack<T, kUnit> head = load<T, kUnit>(dy + offset), value = load<T, kUnit>(x + offset);
        const Pack<T, kUnit> mark = kActivated ? load<T, kUnit>(marks + offset) : value;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            heads[j + i] = Number<T>::widen(head.values[i]);
            centred[j + i] = mean.below(Number<T>::widen(value.values[i]));
            if (!kActivated) continue;
            heads[j + i] = activation.through(heads[j + i], normal.of(Number<T>::widen(mark.values[i])));
            if (dz != nullptr) heads[j + i] = Number<T>::widen(Number<T>::narrow(heads[j + i]));  // what others read
        }
        if (kActivated) places[j] = offset;
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
    template <int kUnit>
    __device__ void put(int n) const {
#pragma unroll
        for (int j = 0; j < kRun; j += kUnit) {
            Pack<T, kUnit> out;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) out.values[i] = Number<T>::narrow(heads[j + i]);
            if (kActivated && dz != nullptr && j < n) store<T, kUnit>(dz + places[j], out);
        }
    }
    __device__ Sums result() const { return {sum_dy, sum_dy_centred * invstd}; }
};

// Puts the results of `chunks` chunks, [chunks][slots][length], together: a warp for each slot and channel.
template <class Result>
__device__ void merge(const double* partial, double* out, int chunks, Index slots, Index channels) {
    const Index warp = (Index(blockIdx.x) * kThreads + threadIdx.x) / kWarp, length = Result::length(channels);
    if (warp >= slots * channels) return;
    const Index slot = warp / channels, channel = warp % channels;
    const int lane = threadIdx.x % kWarp;
    Result total = {};
    for (int chunk = lane; chunk < chunks; chunk += kWarp)
        total.merge(Result::at(partial + (chunk * slots + slot) * length, channel, channels));
    for (int distance = kWarp / 2; distance > 0; distance /= 2) total.merge(total.from_lane(distance));
    if (lane == 0) total.leave(out + slot * length, channel, channels);
}

// ---- pools -----------------------------------------------------------------------------------------------------

// Which of the gathered slots feed the pool that a slot of this replica uses; in the backward, which use the pool that it
// feeds. The layout is that of `Pools` in csrc/cuda/call.cc.
struct Pools {
    enum Kind { kShared, kOwn, kTable };  // one for all: begin ... end; of each slot that of itself; table[slot]
    int kind, own, begin, end;            // `own`: the first of this replica's slots
    int table[SYNCBN_SLOTS];
};

struct Range {
    int begin, end;
};

__device__ inline Range fed(const Pools& pools, Index slot) {
    if (pools.kind == Pools::kShared) return {pools.begin, pools.end};
    const int own = pools.own + static_cast<int>(slot);
    return {own, own + 1};
}

__device__ inline Range used(const Pools& pools, Index slot) {
    if (pools.kind != Pools::kTable) return fed(pools, slot);
    return {pools.table[slot], pools.table[slot] + 1};
}

// share: 1 / count, or 0 where nobody has a value.
struct Statistic {
    double share, mean, variance;
};

// About the first slot's mean, which is near to all: a large offset costs no digit. No division but one, which a device
// for games takes 32 times as long for as for one of float32.
__device__ inline Statistic statistic(const double* gathered, Range range, Index channel, Index channels) {
    const Index length = Moments::length(channels);
    double count = 0, apart = 0, m2 = 0;
    for (int slot = range.begin; slot < range.end; ++slot) count += gathered[slot * length];
    if (count == 0) return {0, 0, 0};
    const double share = 1 / count;
    double origin = 0;
    bool found = false;
    for (int slot = range.begin; slot < range.end; ++slot) {
        const Moments part = Moments::at(gathered + slot * length, channel, channels);
        if (!found && part.count > 0) origin = part.mean;
        found = found || part.count > 0;
        if (part.count > 0) apart += part.count * (part.mean - origin);
    }
    apart *= share;
    for (int slot = range.begin; slot < range.end; ++slot) {
        const Moments part = Moments::at(gathered + slot * length, channel, channels);
        const double delta = part.mean - origin - apart;
        if (part.count > 0) m2 += part.m2 + part.count * delta * delta;
    }
    return {share, origin + apart, m2 * share};
}

// What the backward needs of a slot: [share, used mean[C], used invstd[C], fed mean[C], fed invstd[C]].
__device__ inline Index kept_length(Index channels) { return 1 + 4 * channels; }

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

// What an operator normalises with: the statistics of a batch, or the running ones where they are `frozen`.
template <typename P>
struct Source {
    const double* gathered;
    const P *running_mean, *running_var;
    bool frozen;
    double epsilon;
    Index channels;

    __device__ Statistic of(Range range, Index channel) const {
        if (frozen) return {0, static_cast<double>(running_mean[channel]), static_cast<double>(running_var[channel])};
        return statistic(gathered, range, channel, channels);
    }
    __device__ double invstd(const Statistic& of) const { return rsqrt(of.variance + epsilon); }
};

// y = (x - mean) * scale + shift; where kActivated, [+ addend] and then the activation.
template <typename T, typename P, bool kActivated>
struct Normalise {
    typedef typename Number<T>::Wide Wide;
    const T* x;
    T* y;
    bool add;
    const Source<P>& source;
    const Pools& pools;
    const P *gamma, *beta;
    bool fix_gamma;
    const T* addend;  // or null
    Activation<Wide> activation;
    Normal<Wide> normal = Normal<Wide>();

    __device__ void use(Index slot, Index channel) {
        const Statistic with = source.of(used(pools, slot), channel);
        normal.mean = Split<Wide>(with.mean);
        normal.scale = static_cast<Wide>(source.invstd(with) * (fix_gamma ? 1.0 : gamma[channel]));
        normal.shift = static_cast<Wide>(beta[channel]);
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> in[kCount], out[kCount] = {};
        load_batch<T>(in, x + offset, stride, n);
        if (kActivated && addend != nullptr) load_batch<T>(out, addend + offset, stride, n);
        if (!kActivated && add) load_batch<T>(out, y + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            Pack<T, kUnit> before = out[j];
            // Seldom asked for: it may wait, and takes no registers from the rest.
            if (kActivated && add) before = load<T, kUnit>(y + offset + (j < n ? j * stride : 0));
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                Wide value = normal.of(Number<T>::widen(in[j].values[i]));
                if (kActivated) value = activation.of(value + Number<T>::widen(out[j].values[i]));
                out[j].values[i] = Number<T>::narrow(add ? Number<T>::widen(before.values[i]) + value : value);
            }
            if (j < n) store<T, kUnit>(y + offset + j * stride, out[j]);
        }
    }
};

// dx = scale * dz - (shift + (x - mean) * slope): what comes back directly, and what through the statistics,
//     gamma * invstd_u * dz - gamma * invstd_f / n_f * (S1 + (x - mean_f) * invstd_f * S2)
// for a slot that uses the pool u and feeds the pool f, S1 = sum dz and S2 = sum dz*xhat over the slots that use f. dz is dy
// or, where kActivated, what the activation lets through.
template <typename T, typename P, bool kActivated>
struct GradInput {
    typedef typename Number<T>::Wide Wide;
    const T *dy, *x;
    T* dx;
    bool add;
    const double *kept, *gathered;
    const Pools& users;
    const P* gamma;
    bool fix_gamma;
    Index channels;
    const P* beta;
    Activation<Wide> activation;
    Split<Wide> mean = Split<Wide>(0);
    Wide scale = 0, shift = 0, slope = 0;
    Normal<Wide> normal = Normal<Wide>();

    __device__ void use(Index slot, Index channel) {
        const double* mine = kept + slot * kept_length(channels);
        const double weight = fix_gamma ? 1.0 : gamma[channel], invstd = mine[1 + 3 * channels + channel];
        scale = static_cast<Wide>(weight * mine[1 + channels + channel]);
        mean = Split<Wide>(mine[1 + 2 * channels + channel]);
        if (kActivated) normal = {Split<Wide>(mine[1 + channel]), scale, static_cast<Wide>(beta[channel])};
        shift = slope = 0;
        if (mine[0] == 0) return;  // running statistics: nothing flows through them
        Sums sums = {};
        const Range range = used(users, slot);
        for (int other = range.begin; other < range.end; ++other)
            sums.merge(Sums::at(gathered + other * Sums::length(channels), channel, channels));
        const double share = weight * invstd * mine[0];
        shift = static_cast<Wide>(share * sums.dy);
        slope = static_cast<Wide>(share * invstd * sums.dy_xhat);
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
                const Wide at = Number<T>::widen(in[j].values[i]), through = shift + mean.below(at) * slope;
                Wide dz = Number<T>::widen(head[j].values[i]);
                if (kActivated) dz = activation.through(dz, normal.of(at));
                const Wide value = scale * dz - through;
                out[j].values[i] = Number<T>::narrow(add ? Number<T>::widen(out[j].values[i]) + value : value);
            }
            if (j < n) store<T, kUnit>(dx + offset + j * stride, out[j]);
        }
    }
};

// What is kept of a slot and a channel: see `kept_length`.
struct Kept {
    double share, used_mean, used_invstd, mean, invstd;

    __device__ Kept(const double* kept, Index slot, Index channel, Index channels) {
        const double* mine = kept + slot * kept_length(channels);
        share = mine[0];
        used_mean = mine[1 + channel];
        used_invstd = mine[1 + channels + channel];
        mean = mine[1 + 2 * channels + channel];
        invstd = mine[1 + 3 * channels + channel];
    }
    // It holds values, and is normalised with another statistic than the one that they feed.
    __device__ bool by_another() const { return share != 0 && (mean != used_mean || invstd != used_invstd); }
    __device__ double variance(double epsilon) const { return 1 / (invstd * invstd) - epsilon; }
    __device__ bool constant(double epsilon, double part) const {
        return variance(epsilon) * invstd * invstd <= part;
    }
};

// x from the y that `Normalise` made of it.
template <typename T, typename P>
struct Recover {
    typedef typename Number<T>::Wide Wide;
    const T* y;
    T* x;
    const double* kept;
    const P *gamma, *beta;
    bool fix_gamma;
    Index channels;
    Activation<Wide> activation;
    double epsilon, constant;
    Normal<Wide> normal = Normal<Wide>();

    __device__ void use(Index slot, Index channel) {
        const Kept mine(kept, slot, channel, channels);
        normal = {Split<Wide>(mine.used_mean),
                  static_cast<Wide>(mine.used_invstd * (fix_gamma ? 1.0 : gamma[channel])),
                  static_cast<Wide>(beta[channel])};
        if (mine.by_another() && mine.constant(epsilon, constant))  // x is the mean, whatever y is
            normal = {Split<Wide>(mine.mean), static_cast<Wide>(rsqrt(0.0)), static_cast<Wide>(beta[channel])};
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> packs[kCount];
        load_batch<T>(packs, y + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                packs[j].values[i] =
                    Number<T>::narrow(normal.back(activation.back(Number<T>::widen(packs[j].values[i]))));
            if (j < n) store<T, kUnit>(x + offset + j * stride, packs[j]);
        }
    }
};

__device__ inline Index thread() { return Index(blockIdx.x) * kThreads + threadIdx.x; }

// Threads of a launch, and the number of this one, whatever the grid: for what is done once for each channel by the way.
__device__ inline Index all_threads() { return Index(gridDim.x) * gridDim.y * gridDim.z * kThreads; }
__device__ inline Index any_thread() {
    return ((Index(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
}

// What the host says to a launch that is on its way, and hears of it.
struct Told {
    int given_up;  // the step has failed
    Index at;      // of the replica's packed moments, the first that is not finite; of `recover`, see there
    double value;  // which it is; of `recover`, whether another slot's statistic hides x
};

enum Watch { kPropagate, kLeaveOut, kLeaveOutAndTell };

// The first of some packed moments that is not finite; -1 where all are.
__device__ inline Index not_finite(const double* moments, Index begin, Index end) {
    for (Index i = begin; i < end; ++i)
        if (!isfinite(moments[i])) return i;
    return -1;
}

// Where the running statistics go on from, or the batch's are left for an operator that moves them.
template <typename P>
struct Tracked {
    double momentum;
    P *mean, *var;              // null: nothing is tracked
    double* batch;  // [1, mean[C], variance[C]], or [0 ...] where there is nothing; null: `mean` and `var`
    bool hand_on;   // into `batch`: this replica's, not zeros
    bool unbiased;  // the variance
    Watch watch;    // for batches that are not finite
    volatile Told* told;

    __device__ void move(Index channel, double to_mean, double to_var) const {
        mean[channel] = static_cast<P>(momentum * mean[channel] + (1 - momentum) * to_mean);
        var[channel] = static_cast<P>(momentum * var[channel] + (1 - momentum) * to_var);
    }
};

// The mean over the pools that the replica's slots feed.
template <typename P>
__device__ void track(const Tracked<P>& tracked, const Source<P>& source, const Pools& pools, Index slots) {
    const Index channels = source.channels, length = Moments::length(channels);
    const Index own = Index(pools.own) * length, end = own + slots * length;
    if (tracked.watch == kLeaveOutAndTell && any_thread() == 0) {
        const Index at = not_finite(source.gathered, own, end);
        if (at >= 0) {
            tracked.told->value = source.gathered[at];
            tracked.told->at = at - own;
        }
    }
    for (Index channel = any_thread(); channel < channels; channel += all_threads()) {
        double mean = 0, variance = 0, parts = 0;
        for (Index slot = 0; slot < (pools.kind == Pools::kShared ? 1 : slots); ++slot) {
            const Statistic part = source.of(fed(pools, slot), channel);
            if (part.share == 0) continue;
            mean += part.mean;
            variance += tracked.unbiased && part.share < 1 ? part.variance / (1 - part.share) : part.variance;
            parts += 1;
        }
        if (parts > 1) {
            mean /= parts;
            variance /= parts;
        }
        bool any = parts > 0;
        if (any && tracked.watch != kPropagate) {  // each thread for itself: seldom asked for, and in the cache
            const bool shared = pools.kind == Pools::kShared;
            any = not_finite(source.gathered, shared ? pools.begin * length : own, shared ? pools.end * length : end) < 0;
        }
        if (tracked.batch != nullptr) {
            if (channel == 0) tracked.batch[0] = any && tracked.hand_on;
            tracked.batch[1 + channel] = tracked.hand_on ? mean : 0;
            tracked.batch[1 + channels + channel] = tracked.hand_on ? variance : 0;
        } else if (tracked.mean != nullptr && any && !tracked.told->given_up) {
            tracked.move(channel, mean, variance);
        }
    }
}

template <typename P>
__device__ void keep(const Source<P>& source, const Pools& pools, Index slots, double* kept) {
    const Index channels = source.channels;
    for (Index i = any_thread(); i < slots * channels; i += all_threads()) {
        const Index slot = i / channels, channel = i % channels;
        double* mine = kept + slot * kept_length(channels);
        const Statistic with = source.of(used(pools, slot), channel);
        const Statistic own = pools.kind == Pools::kTable ? source.of(fed(pools, slot), channel) : with;
        if (channel == 0) mine[0] = own.share;
        mine[1 + channel] = with.mean;
        mine[1 + channels + channel] = source.invstd(with);
        mine[1 + 2 * channels + channel] = own.mean;
        mine[1 + 3 * channels + channel] = source.invstd(own);
    }
}

// `Invertible` of csrc/types.h.
template <typename P>
struct Invertible {
    const double* kept;
    const P *gamma, *beta;
    bool fix_gamma;
    Index slots, channels;
    double per_beta, least, epsilon, constant;

    __device__ double weight(Index channel) const {
        return fix_gamma ? 1.0 : fabs(static_cast<double>(gamma[channel]));
    }
    __device__ double lost(Index channel) const {
        return per_beta * fabs(static_cast<double>(beta[channel])) + least;
    }
    __device__ bool by_gamma(Index channel) const { return weight(channel) > lost(channel); }
    __device__ bool hidden_by_another(Index channel) const {
        for (Index slot = 0; slot < slots; ++slot) {
            const Kept mine(kept, slot, channel, channels);
            if (!mine.by_another() || mine.constant(epsilon, constant)) continue;
            const double apart = fabs(mine.mean - mine.used_mean);
            if (weight(channel) * sqrt(mine.variance(epsilon)) <=
                lost(channel) / mine.used_invstd + per_beta * weight(channel) * apart)
                return true;
        }
        return false;
    }
};

// The first channel whose x is hidden, and by what, found by the first block.
template <typename P>
__device__ void tell_hidden(const Invertible<P>& invertible, volatile Told* told) {
    if (blockIdx.x + blockIdx.y + blockIdx.z > 0) return;
    const Index channels = invertible.channels;
    __shared__ Index first[kThreads];
    first[threadIdx.x] = channels;
    for (Index channel = threadIdx.x; channel < channels && first[threadIdx.x] == channels; channel += kThreads)
        if (!invertible.by_gamma(channel) || invertible.hidden_by_another(channel)) first[threadIdx.x] = channel;
    __syncthreads();
    if (threadIdx.x > 0) return;
    Index found = channels;
    for (int i = 0; i < kThreads; ++i) found = first[i] < found ? first[i] : found;
    if (found == channels) return;
    told->value = invertible.by_gamma(found) ? 1 : 0;
    told->at = found;
}

// Of this replica's own slots, each [2][channels].
template <typename P>
__device__ void parameter_gradients(const double* own, Index slots, Index channels, bool fix_gamma, P* dgamma,
                                    bool add_dgamma, P* dbeta, bool add_dbeta) {
    for (Index channel = any_thread(); channel < channels; channel += all_threads()) {
        Sums sums = {};
        for (Index slot = 0; slot < slots; ++slot)
            sums.merge(Sums::at(own + slot * Sums::length(channels), channel, channels));
        if (dgamma != nullptr)
            dgamma[channel] = static_cast<P>((add_dgamma ? static_cast<double>(dgamma[channel]) : 0.0) +
                                             (fix_gamma ? 0.0 : sums.dy_xhat));
        if (dbeta != nullptr)
            dbeta[channel] = static_cast<P>((add_dbeta ? static_cast<double>(dbeta[channel]) : 0.0) + sums.dy);
    }
}

}  // namespace

// Every kernel for one type of data T and the type P of its parameters and running statistics.
//
// moments     partial [chunks][slots] of packed moments. Grid: channels (inner > 1) or tiles of `width` channels; slots;
//             chunks.
// normalise   y = (x - mean) * invstd * gamma + beta, added to y where `add`, with the gathered moments of the pools or, where
//             `frozen`, the running statistics; y may be null. What the backward needs is left in `kept`; then the running
//             statistics, see `Tracked`. Grid: any number of blocks (inner > 1), or tiles; slots; chunks.
// grad_sums   partial [chunks][slots] of packed gradients. Grid as for moments.
// grad_input  dx, added where `add`, from the gathered gradients; may be null. And this replica's part of dgamma and dbeta
//             from those of its `own` slots. Grid as for normalise.
// *_activated  the same three for z with something behind it; the others leave those arguments alone, and their registers are
//             fewer. normalise adds `addend`, where not null, and rectifies. grad_sums takes dz, the gradient with respect to
//             z, by a z that it computes again or, where y is not null, by y; and leaves it in `dz` where that is not null.
//             grad_input computes z again; whoever has dz gives that to the other.
// recover     x from the y of normalise without an addend, by what that has `kept`; grid as for it. In told->at the first channel
//             where that cannot be, and in told->value whether another slot's statistic is why.
// update_running  running <- momentum * running + (1 - momentum) * batch, for batch [1 or 0, mean[C], variance[C]].
// merge_moments, merge_sums  chunks of a slot put together. Grid: a warp for each slot and channel.
// copy        to = from, added where `add`.
// fill        out = value.
//
// A slot without a sample leaves zeros, and is passed over by the others.
#define SYNCBN_KERNELS(TYPE, T)                                                                                        \
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
        copy_##TYPE(const T* from, T* to, int add, Index n) {                                                          \
        const Index i = thread();                                                                                      \
        if (i < n) to[i] = add ? Number<T>::narrow(Number<T>::widen(to[i]) + Number<T>::widen(from[i])) : from[i];     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        fill_##TYPE(T* out, double value, Index n) {                                                                   \
        if (thread() < n) out[thread()] = Number<T>::narrow(static_cast<typename Number<T>::Wide>(value));             \
    }

#define SYNCBN_ACTIVATED_KERNELS(NAME, kActivated, T, P)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        normalise_##NAME(const T* x, const double* gathered, const Pools pools, int frozen, double epsilon,            \
                         const P* gamma, const P* beta, int fix_gamma, T* y, int add, double* kept, double momentum,   \
                         P* running_mean, P* running_var, double* batch, int hand_on, int unbiased, int watch,         \
                         Told* told, Index samples, Index per_sample, Index channels, Index inner, Index slots,        \
                         int width, Index segment, const T* addend, double slope, double ceiling) {                    \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        const Source<P> source = {gathered, running_mean, running_var, frozen != 0, epsilon, channels};                \
        Normalise<T, P, kActivated> map = {                                                                            \
            x, y, add != 0, source, pools, gamma, beta, fix_gamma != 0, addend, {slope, ceiling}};                     \
        if (y != nullptr && samples > 0)                                                                               \
            each<T>(map, layout, width, segment, aligned(x) && aligned(y) && (!kActivated || aligned(addend)));        \
        keep(source, pools, slots, kept);                                                                              \
        const Tracked<P> tracked = {momentum, running_mean, running_var, batch, hand_on != 0, unbiased != 0,           \
                                    static_cast<Watch>(watch), told};                                                  \
        if (frozen == 0) track(tracked, source, pools, slots);                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        grad_sums_##NAME(const T* dy, const T* x, const double* kept, double* partial, Index samples,                  \
                         Index per_sample, Index channels, Index inner, Index slots, int width, const P* gamma,        \
                         const P* beta, int fix_gamma, double slope, double ceiling, const T* y, T* dz) {              \
        typedef typename Number<T>::Wide Wide;                                                                         \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        const Index channel = inner > 1 ? blockIdx.x : Index(blockIdx.x) * width + threadIdx.x % width;                \
        const bool any = channel < channels;                                                                           \
        const double* mine = kept + blockIdx.y * kept_length(channels) + 1 + channel;                                  \
        const double mean = any ? mine[0] : 0.0, invstd = any ? mine[channels] : 0.0;                                  \
        Normal<Wide> normal;                                                                                           \
        normal.scale = 1;                                                                                              \
        if (kActivated && y == nullptr && any)                                                                         \
            normal = {Split<Wide>(mean), static_cast<Wide>(invstd * (fix_gamma ? 1.0 : gamma[channel])),               \
                      static_cast<Wide>(beta[channel])};                                                               \
        const T* marks = y != nullptr ? y : x;                                                                         \
        SumsOf<T, kActivated> reduction(dy, x, mean, invstd, marks, dz, normal, {slope, ceiling});                     \
        const bool packs = aligned(x) && aligned(dy) && (!kActivated || (aligned(y) && aligned(dz)));                  \
        reduce<T>(reduction, layout, width, partial, packs);                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        grad_input_##NAME(const T* dy, const T* x, const double* kept, const double* gathered, const Pools users,      \
                          const double* own, const P* gamma, int fix_gamma, T* dx, int add, P* dgamma, int add_dgamma, \
                          P* dbeta, int add_dbeta, Index samples, Index per_sample, Index channels, Index inner,       \
                          Index slots, int width, Index segment, const P* beta, double slope, double ceiling) {        \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        GradInput<T, P, kActivated> map = {                                                                            \
            dy, x, dx, add != 0, kept, gathered, users, gamma, fix_gamma != 0, channels, beta,                         \
            {slope, ceiling}};                                                                                         \
        if (dx != nullptr && samples > 0)                                                                              \
            each<T>(map, layout, width, segment, aligned(x) && aligned(dy) && aligned(dx));                            \
        parameter_gradients(own, slots, channels, fix_gamma != 0, dgamma, add_dgamma != 0, dbeta, add_dbeta != 0);     \
    }

#define SYNCBN_RECOVERING_KERNELS(TYPE, T, P)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        recover_##TYPE(const T* y, T* x, const double* kept, const P* gamma, const P* beta, int fix_gamma,             \
                       double slope, double per_beta, double least, double epsilon, double constant, Told* told,       \
                       Index samples, Index per_sample, Index channels, Index inner, Index slots, int width,           \
                       Index segment) {                                                                                \
        const Layout layout = {samples, per_sample, channels, inner, slots};                                           \
        Recover<T, P> map = {y, x, kept, gamma, beta, fix_gamma != 0, channels, {slope, 0}, epsilon, constant};        \
        each<T>(map, layout, width, segment, aligned(x) && aligned(y));                                                \
        const Invertible<P> invertible = {kept,     gamma,    beta,  fix_gamma != 0, slots,                            \
                                          channels, per_beta, least, epsilon,        constant};                        \
        tell_hidden(invertible, told);                                                                                 \
    }

#define SYNCBN_PARAMETER_KERNELS(TYPE, P)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        update_running_##TYPE(const double* batch, double momentum, P* running_mean, P* running_var, Index channels) { \
        const Tracked<P> tracked = {momentum, running_mean, running_var, nullptr, false, false, kPropagate, nullptr};  \
        const Index c = thread();                                                                                      \
        if (c < channels && batch[0] != 0) tracked.move(c, batch[1 + c], batch[1 + channels + c]);                     \
    }

// To compile all of them takes longer than a first step should: `SYNCBN_ONLY` asks for those of one end of a name, and for
// what has no type.
#if !defined(SYNCBN_ONLY) || defined(SYNCBN_float16)
SYNCBN_KERNELS(float16, Half)
SYNCBN_ACTIVATED_KERNELS(float16, false, Half, float)
SYNCBN_RECOVERING_KERNELS(float16, Half, float)
#endif
#if !defined(SYNCBN_ONLY) || defined(SYNCBN_float32)
SYNCBN_KERNELS(float32, float)
SYNCBN_ACTIVATED_KERNELS(float32, false, float, float)
SYNCBN_RECOVERING_KERNELS(float32, float, float)
SYNCBN_PARAMETER_KERNELS(float32, float)
#endif
#if !defined(SYNCBN_ONLY) || defined(SYNCBN_float64)
SYNCBN_KERNELS(float64, double)
SYNCBN_ACTIVATED_KERNELS(float64, false, double, double)
SYNCBN_RECOVERING_KERNELS(float64, double, double)
SYNCBN_PARAMETER_KERNELS(float64, double)
#endif
#if !defined(SYNCBN_ONLY) || defined(SYNCBN_activated_float16)
SYNCBN_ACTIVATED_KERNELS(activated_float16, true, Half, float)
#endif
#if !defined(SYNCBN_ONLY) || defined(SYNCBN_activated_float32)
SYNCBN_ACTIVATED_KERNELS(activated_float32, true, float, float)
#endif
#if !defined(SYNCBN_ONLY) || defined(SYNCBN_activated_float64)
SYNCBN_ACTIVATED_KERNELS(activated_float64, true, double, double)
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_moments(const double* partial, double* out, int chunks, Index slots, Index channels) {
    merge<Moments>(partial, out, chunks, slots, channels);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_sums(const double* partial, double* out, int chunks, Index slots, Index channels) {
    merge<Sums>(partial, out, chunks, slots, channels);
}

// Computes the layer on a CUDA device: the functions of csrc/cpu/kernels.h, over all slots of a call in one launch.
//
// The source includes only headers of csrc, whose text csrc/cuda/compiler.cc inserts. It compiles with nvcc, NVRTC
// (MXNet's run-time compiler, CuPy) and clang for compute capability 5.0 and later. A tensor is seen from its channel
// axis as [outer][channels][inner], row-major, with outer = samples * per_sample. Slot s holds samples / slots of the
// samples, and one more if s < samples % slots.
//
// There are two patterns of memory access. If inner > 1, a *row* is the `inner` consecutive values of one channel, and
// a block or a warp stays in one channel. If inner = 1, neighbours are different channels. A block then takes a tile of
// `width` channels, a power of two up to 32. Each of its threads stays in one channel and goes down the rows.
//
// Replicas contribute packed vectors of float64, as in csrc/pooling/statistics.h, one for each of their slots:
//
//     moments    [count, mean[C], m2[C]]       gradients  [sum dy[C], sum dy*xhat[C]], of dz where z is rectified
//
// *Gathered* vectors are those of all replicas, side by side in their order. Every device holds them and combines them
// into pools in that order, and not in the order of arrival. So all devices have the same bits.
//
// Reductions are partial: gridDim.z chunks of a slot leave one result each, in an order that only the launch decides.
// Then `merge_moments` and `merge_sums` combine them. There are no atomics, so the same launch gives the same bits.
// Values of float16 and float32 are read into float32, in runs. The moments of a run are taken about the run's own
// mean, and a thread's results are float64. A mean of 1e5 beside a deviation of 1 costs no digit.
//
// Independent loads keep a GPU busy: each thread issues several, then computes, then stores. A compiler moves no load
// past a store that may alias it, nor out of a branch, so batches are written out. If a batch is cut short, the
// remaining loads repeat the batch's first address, and their values are not used.

#include "activation.h"
#include "cuda/params.h"

namespace {

using namespace syncbn::cuda;
using syncbn::Range;

#ifndef SYNCBN_BLOCK
#error "compile with -DSYNCBN_BLOCK=N: see kBlock in csrc/cuda"
#endif
constexpr int kThreads = SYNCBN_BLOCK;  // threads of every block
constexpr int kWarp = 32;
constexpr int kPack = 16;  // bytes of the widest load

struct Half {
    unsigned short bits;
};

// Only the host lacks __CUDACC__. There the tests' emulator has its own conversion.
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

// The type in which a type of data is computed.
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

// An aligned group of kUnit neighbours, moved with one load or store.
template <typename T, int kUnit>
struct alignas(kUnit * sizeof(T)) Pack {
    T values[kUnit];
};

template <typename T, int kUnit>
__device__ inline Pack<T, kUnit> load(const T* from) {
    return *reinterpret_cast<const Pack<T, kUnit>*>(from);
}

// Loads n packs that are `stride` apart. Beyond n, loads repeat the first pack.
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

struct Layout : Tiling {
    __device__ explicit Layout(const Tiling& tiling) : Tiling(tiling) {}
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

// The part of `total` for this block's chunk.
struct Chunk {
    Index begin, end;

    __device__ explicit Chunk(Index total) {
        const Index each = (total + gridDim.z - 1) / gridDim.z;
        begin = each * blockIdx.z < total ? each * blockIdx.z : total;
        end = begin + each < total ? begin + each : total;
    }
};

// The length of a full run, known to the compiler.
template <int kRun>
struct Full {
    __device__ constexpr operator int() const { return kRun; }
};

// Splits a float64 value into two of the narrower type, so that x - mean keeps the digits that the type can hold.
template <typename Wide>
struct Split {
    Wide high, low;

    __device__ explicit Split(double value)
        : high(static_cast<Wide>(value)), low(static_cast<Wide>(value - static_cast<double>(high))) {}
    __device__ Wide below(Wide x) const { return (x - high) - low; }
};

// Computes z of one channel. Kernels that need its sign use the same expression as the kernel that writes it.
template <typename Wide>
struct Normal {
    Split<Wide> mean = Split<Wide>(0);
    Wide scale = 0, shift = 0;

    __device__ Wide of(Wide x) const { return mean.below(x) * scale + shift; }
    __device__ Wide back(Wide z) const { return ((z - shift) / scale + mean.low) + mean.high; }
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
// Calls take<kUnit>(j, offset) for the values of this thread. After each run of n values it calls add(n) and
// put<kUnit>(n). So stores wait until a whole run has been read. Counts within a channel fit into 32 bits, which a GPU
// adds in one instruction. It adds 64 bits in two.
template <typename T, int kUnit, class Reduction>
__device__ void down_rows(Reduction& reduction, const Layout& layout) {
    const Index slot = blockIdx.y;
    const Chunk chunk(layout.outer_of(slot) * (layout.inner / kUnit));
    const unsigned per_row = static_cast<unsigned>(layout.inner / kUnit), end = static_cast<unsigned>(chunk.end);
    const unsigned rows = kThreads / per_row, columns = kThreads % per_row;  // a thread's step to its next pack
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
__device__ void down_columns(Reduction& reduction, const Layout& layout) {
    const int width = layout.width;
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

// Walks, combines the threads' results and leaves the packed vector of each chunk and slot in partial[chunk][slot].
template <typename T, class Reduction>
__device__ void reduce(Reduction& reduction, const Layout& layout, double* partial, bool packs) {
    typedef typename Reduction::Result Result;
    __shared__ Result shared[kThreads];
    const Index slot = blockIdx.y;
    double* out = partial + (blockIdx.z * layout.slots + slot) * Result::length(layout.channels);
    if (layout.inner == 1) {
        const int width = layout.width;
        down_columns<T>(reduction, layout);
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

// Count, mean and the sum of squares about it. The merge is by Chan, Golub and LeVeque ("Updating formulae and a
// pairwise algorithm for computing sample variances", 1979).
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

// The position [outer][inner] of a value in a tensor.
__device__ inline Index position_of(const Tiling& tiling, Index offset) {
    return offset / (tiling.channels * tiling.inner) * tiling.inner + offset % tiling.inner;
}

// With a mask, only values count whose position has a mask that is not 0. The others may hold anything.
template <typename T, bool kMasked>
struct MomentsOf {
    typedef Moments Result;
    typedef typename Number<T>::Wide Wide;
    static constexpr int kRun = kMasked ? 8 : 16;  // values that a thread reads before it adds them up
    const T* x;
    const unsigned char* mask;
    const Tiling tiling;
    Wide origin;  // near the values, so that they lose no digits on the way
    Wide count = 0, mean = 0, m2 = 0;
    Wide run[kRun];
    bool counts[kRun];
    bool found = false;  // a masked thread's origin, its first value

    __device__ MomentsOf(const T* x, const void* mask, const Tiling& tiling, Index any)
        : x(x),
          mask(static_cast<const unsigned char*>(mask)),
          tiling(tiling),
          origin(kMasked ? 0 : Number<T>::widen(x[any])) {}

    template <int kUnit>
    __device__ void take(int j, Index offset) {
        const Pack<T, kUnit> pack = load<T, kUnit>(x + offset);
        const Index position = kMasked ? position_of(tiling, offset) : 0;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const Wide value = Number<T>::widen(pack.values[i]);
            counts[j + i] = !kMasked || mask[position + i] != 0;
            if (kMasked && counts[j + i] && !found) {
                origin = value;
                found = true;
            }
            run[j + i] = value - origin;
        }
    }
    template <class N>
    __device__ void add(N n) {
        int number = kMasked ? 0 : static_cast<int>(n);
        Wide sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n && counts[i]) {
                number += kMasked;
                sum += run[i];
            }
        if (number == 0) return;
        const Wide here = sum / static_cast<Wide>(number);
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n && counts[i]) squares += (run[i] - here) * (run[i] - here);
        const Wide total = count + static_cast<Wide>(number), delta = here - mean;
        const Wide share = static_cast<Wide>(number) / total;
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

// Sums of dz, which is dy after the backward of the activation. `normal` makes z of `marks`, which is x. If y is
// available, `marks` is y and `normal` the identity. Both cases share one expression; a second load of x hits the
// cache. If `dz` is not null, it is written.
template <typename T, class A>
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
    typename A::template On<Wide> activation;
    double sum_dy = 0, sum_dy_centred = 0;
    Wide heads[kRun], centred[kRun];
    Index places[kRun];

    __device__ SumsOf(const T* dy, const T* x, double mean, double invstd, const T* marks, T* dz,
                      const Normal<Wide>& normal, const typename A::template On<Wide>& activation)
        : dy(dy), x(x), mean(mean), invstd(invstd), marks(marks), dz(dz), normal(normal), activation(activation) {}

    template <int kUnit>
    __device__ void take(int j, Index offset) {
        const Pack<T, kUnit> head = load<T, kUnit>(dy + offset), value = load<T, kUnit>(x + offset);
        const Pack<T, kUnit> mark = A::kChanges ? load<T, kUnit>(marks + offset) : value;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            heads[j + i] = Number<T>::widen(head.values[i]);
            centred[j + i] = mean.below(Number<T>::widen(value.values[i]));
            if (!A::kChanges) continue;
            activation.through(&heads[j + i], normal.of(Number<T>::widen(mark.values[i])));
            if (dz != nullptr) heads[j + i] = Number<T>::widen(Number<T>::narrow(heads[j + i]));  // as others read it
        }
        if (A::kChanges) places[j] = offset;
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
            if (A::kChanges && dz != nullptr && j < n) store<T, kUnit>(dz + places[j], out);
        }
    }
    __device__ Sums result() const { return {sum_dy, sum_dy_centred * invstd}; }
};

// Combines the results of `chunks` chunks, [chunks][slots][length]: a warp for each slot and channel.
template <class Result>
__device__ void merge(const MergeArguments& with) {
    const Index slots = with.slots, channels = with.channels;
    const Index warp = (Index(blockIdx.x) * kThreads + threadIdx.x) / kWarp, length = Result::length(channels);
    if (warp >= slots * channels) return;
    const Index slot = warp / channels, channel = warp % channels;
    const int lane = threadIdx.x % kWarp;
    Result total = {};
    for (int chunk = lane; chunk < with.chunks; chunk += kWarp)
        total.merge(Result::at(with.partial + (chunk * slots + slot) * length, channel, channels));
    for (int distance = kWarp / 2; distance > 0; distance /= 2) total.merge(total.from_lane(distance));
    if (lane == 0) total.leave(with.out + slot * length, channel, channels);
}

// ---- pools -----------------------------------------------------------------------------------------------------

// The gathered slots of one list.
struct List {
    const int* members;
    Range range;

    __device__ List(const Lists& lists, Index slot) : members(lists.members) {
        const int moved = lists.step * static_cast<int>(slot);
        range = {lists.first.begin + moved, lists.first.end + moved};
        if (lists.irregular != 0) range = lists.few[slot];
        if (lists.ranges != nullptr) range = lists.ranges[slot];
    }
    // Calls visit(slot) for each. Neighbours are the usual case, and need no load and no registers for members.
    template <class Visit>
    __device__ void each(const Visit& visit) const {
        if (members == nullptr) {
            for (int slot = range.begin; slot < range.end; ++slot) visit(slot);
        } else {
#pragma unroll 1
            for (int place = range.begin; place < range.end; ++place) visit(members[place]);
        }
    }
};

// The statistic of one channel; share is 1 / count, or 0 for an empty pool.
struct Statistic {
    double share, mean, variance;
};

// Merges about the first slot's mean, which is close to all, so that a large offset costs no digit. It divides once,
// because consumer GPUs take 32 times as long for float64 as for float32.
__device__ inline Statistic statistic(const double* gathered, const List& list, Index channel, Index channels) {
    const Index length = Moments::length(channels);
    double count = 0, apart = 0, m2 = 0;
    list.each([&](int slot) { count += gathered[slot * length]; });
    if (count == 0) return {0, 0, 0};
    const double share = 1 / count;
    double origin = 0;
    bool found = false;
    list.each([&](int slot) {
        const Moments part = Moments::at(gathered + slot * length, channel, channels);
        if (!found && part.count > 0) origin = part.mean;
        found = found || part.count > 0;
        if (part.count > 0) apart += part.count * (part.mean - origin);
    });
    apart *= share;
    list.each([&](int slot) {
        const Moments part = Moments::at(gathered + slot * length, channel, channels);
        const double delta = part.mean - origin - apart;
        if (part.count > 0) m2 += part.m2 + part.count * delta * delta;
    });
    return {share, origin + apart, m2 * share};
}

// The backward's data of a slot: [share, used mean[C], used invstd[C], fed mean[C], fed invstd[C]].
__device__ inline Index kept_length(Index channels) { return 1 + 4 * channels; }

// Those of one channel.
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
    // The slot holds values, and another statistic normalises it than the one that it feeds.
    __device__ bool by_another() const { return share != 0 && (mean != used_mean || invstd != used_invstd); }
    __device__ double variance(double epsilon) const { return 1 / (invstd * invstd) - epsilon; }
    __device__ bool constant(double epsilon, double part) const {
        return variance(epsilon) * invstd * invstd <= part;
    }
};

// ---- elementwise ---------------------------------------------------------------------------------------------

// The number of packs that a thread reads before it writes.
template <int kUnit>
struct Batch {
    static constexpr int kCount = kUnit > 1 ? 4 : 8;
};

// Calls use(slot, channel) when the statistics change, then apply<kUnit>(offset, stride, n) for each batch: n packs,
// `stride` apart. Rows are counted in 32 bits, because a division of 64 bits would cost more than a short row.
template <int kUnit, class Map>
__device__ void over_rows(Map& map, const Layout& layout) {
    const Index segment = layout.segment;
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
__device__ void over_columns(Map& map, const Layout& layout) {
    const int width = layout.width;
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
__device__ void each(Map map, const Tiling& tiling, bool packs) {
    const Layout layout(tiling);
    if (layout.inner == 1)
        over_columns(map, layout);
    else if (packs && layout.inner % Lanes<T>::kCount == 0)
        over_rows<Lanes<T>::kCount>(map, layout);
    else
        over_rows<1>(map, layout);
}

// The statistics that normalise: those of a batch, or the running ones if `frozen`.
template <typename P>
__device__ inline Statistic statistic(const NormaliseArguments& with, const Lists& lists, Index slot, Index channel) {
    if (with.frozen == 0) return statistic(with.gathered, List(lists, slot), channel, with.tiling.channels);
    return {0, static_cast<double>(static_cast<const P*>(with.running_mean)[channel]),
            static_cast<double>(static_cast<const P*>(with.running_var)[channel])};
}
__device__ inline double invstd(const NormaliseArguments& with, const Statistic& of) {
    // Where no value counts, xhat is 0.
    return with.frozen == 0 && of.share == 0 ? 0.0 : rsqrt(of.variance + with.epsilon);
}

// Gamma, unless it is fixed, and beta.
template <typename P>
__device__ inline double gamma(const Weights& weights, Index channel) {
    return weights.fix_gamma ? 1.0 : static_cast<double>(static_cast<const P*>(weights.gamma)[channel]);
}
template <typename P>
__device__ inline double beta(const Weights& weights, Index channel) {
    return static_cast<double>(static_cast<const P*>(weights.beta)[channel]);
}

// Computes y = (x - mean) * scale + shift, then the addition and the activation if there are any.
template <typename T, typename P, class A>
struct Normalise {
    typedef typename Number<T>::Wide Wide;
    const NormaliseArguments& with;
    const T *x, *addend;
    T* y;
    typename A::template On<Wide> activation;
    Normal<Wide> normal = Normal<Wide>();

    __device__ explicit Normalise(const NormaliseArguments& with)
        : with(with),
          x(static_cast<const T*>(with.x)),
          addend(static_cast<const T*>(with.addend)),
          y(static_cast<T*>(with.y)),
          activation(with.epilogue.slope, with.epilogue.ceiling) {}
    __device__ void use(Index slot, Index channel) {
        const Statistic used = statistic<P>(with, with.used, slot, channel);
        normal.mean = Split<Wide>(used.mean);
        normal.scale = static_cast<Wide>(invstd(with, used) * gamma<P>(with.weights, channel));
        normal.shift = static_cast<Wide>(beta<P>(with.weights, channel));
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> in[kCount], out[kCount] = {};
        load_batch<T>(in, x + offset, stride, n);
        if (A::kChanges && addend != nullptr) load_batch<T>(out, addend + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            Pack<T, kUnit> before = {};
            // This case is rare: it may wait, and must not take registers from the others.
            if (with.add) before = load<T, kUnit>(y + offset + (j < n ? j * stride : 0));
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                Wide value = normal.of(Number<T>::widen(in[j].values[i]));
                if (A::kChanges) {
                    value += Number<T>::widen(out[j].values[i]);
                    activation.apply(&value);
                }
                out[j].values[i] = Number<T>::narrow(with.add ? Number<T>::widen(before.values[i]) + value : value);
            }
            if (j < n) store<T, kUnit>(y + offset + j * stride, out[j]);
        }
    }
};

// Computes dx = scale * dz - (shift + (x - mean) * slope): the direct gradient, and that through the statistics.
//
//     dx = gamma * invstd_u * dz - gamma * invstd_f / n_f * (S1 + (x - mean_f) * invstd_f * S2)
//
// The slot uses pool u and feeds pool f. S1 = sum dz and S2 = sum dz*xhat go over the slots that use f. The gradient dz
// is dy or, if A::kChanges, dy after the backward of the activation.
template <typename T, typename P, class A, bool kAdd, bool kMasked>
struct GradInput {
    typedef typename Number<T>::Wide Wide;
    const GradInputArguments& with;
    const T *dy, *x;
    T* dx;
    const unsigned char* mask;
    typename A::template On<Wide> activation;
    Split<Wide> mean = Split<Wide>(0);
    Wide scale = 0, shift = 0, slope = 0;
    Normal<Wide> normal = Normal<Wide>();

    __device__ explicit GradInput(const GradInputArguments& with)
        : with(with),
          dy(static_cast<const T*>(with.dy)),
          x(static_cast<const T*>(with.x)),
          dx(static_cast<T*>(with.dx)),
          mask(static_cast<const unsigned char*>(with.mask)),
          activation(with.epilogue.slope, with.epilogue.ceiling) {}
    __device__ void use(Index slot, Index channel) {
        const Index channels = with.tiling.channels;
        const Kept mine(with.kept, slot, channel, channels);
        const double weight = gamma<P>(with.weights, channel);
        scale = static_cast<Wide>(weight * mine.used_invstd);
        mean = Split<Wide>(mine.mean);
        if (A::kChanges)
            normal = {Split<Wide>(mine.used_mean), scale, static_cast<Wide>(beta<P>(with.weights, channel))};
        shift = slope = 0;
        if (mine.share == 0) return;  // running statistics get no gradient
        Sums sums = {};
        List(with.users, slot).each([&](int user) {
            sums.merge(Sums::at(with.gathered + user * Sums::length(channels), channel, channels));
        });
        const double share = weight * mine.invstd * mine.share;
        shift = static_cast<Wide>(share * sums.dy);
        slope = static_cast<Wide>(share * mine.invstd * sums.dy_xhat);
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> head[kCount], in[kCount], out[kCount] = {};
        load_batch<T>(head, dy + offset, stride, n);
        load_batch<T>(in, x + offset, stride, n);
        if (kAdd) load_batch<T>(out, dx + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const Index position = kMasked ? position_of(with.tiling, offset + (j < n ? j * stride : 0)) : 0;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const Wide at = Number<T>::widen(in[j].values[i]);
                Wide through = shift + mean.below(at) * slope;
                if (kMasked && mask[position + i] == 0) through = 0;
                Wide dz = Number<T>::widen(head[j].values[i]);
                if (A::kChanges) activation.through(&dz, normal.of(at));
                const Wide value = scale * dz - through;
                out[j].values[i] = Number<T>::narrow(kAdd ? Number<T>::widen(out[j].values[i]) + value : value);
            }
            if (j < n) store<T, kUnit>(dx + offset + j * stride, out[j]);
        }
    }
};

// Computes x from the y of `Normalise`.
template <typename T, typename P, class A>
struct Recover {
    typedef typename Number<T>::Wide Wide;
    const RecoverArguments& with;
    const T* y;
    T* x;
    typename A::template On<Wide> activation;
    Normal<Wide> normal = Normal<Wide>();

    __device__ explicit Recover(const RecoverArguments& with)
        : with(with),
          y(static_cast<const T*>(with.y)),
          x(static_cast<T*>(with.x)),
          activation(with.epilogue.slope, with.epilogue.ceiling) {}
    __device__ void use(Index slot, Index channel) {
        const Kept mine(with.kept, slot, channel, with.tiling.channels);
        const Wide shift = static_cast<Wide>(beta<P>(with.weights, channel));
        normal = {Split<Wide>(mine.used_mean), static_cast<Wide>(mine.used_invstd * gamma<P>(with.weights, channel)),
                  shift};
        // x is the mean, for every y
        if (mine.used_invstd == 0 || (mine.by_another() && mine.constant(with.epsilon, with.constant)))
            normal = {Split<Wide>(mine.mean), static_cast<Wide>(rsqrt(0.0)), shift};
    }
    template <int kUnit>
    __device__ void apply(Index offset, Index stride, int n) const {
        constexpr int kCount = Batch<kUnit>::kCount;
        Pack<T, kUnit> packs[kCount];
        load_batch<T>(packs, y + offset, stride, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                Wide z = Number<T>::widen(packs[j].values[i]);
                activation.undo(&z);
                packs[j].values[i] = Number<T>::narrow(normal.back(z));
            }
            if (j < n) store<T, kUnit>(x + offset + j * stride, packs[j]);
        }
    }
};

__device__ inline Index thread() { return Index(blockIdx.x) * kThreads + threadIdx.x; }

// The threads of a launch and this one's number, for any grid: for work once per channel in a kernel of another
// purpose.
__device__ inline Index all_threads() { return Index(gridDim.x) * gridDim.y * gridDim.z * kThreads; }
__device__ inline Index any_thread() {
    return ((Index(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
}

// The index of the first packed moment that is not finite; -1 if all are finite.
__device__ inline Index not_finite(const double* moments, Index begin, Index end) {
    for (Index i = begin; i < end; ++i)
        if (!isfinite(moments[i])) return i;
    return -1;
}

// The running statistics of one channel.
template <typename P>
__device__ inline void move(void* running, Index channel, double momentum, double to) {
    P* const values = static_cast<P*>(running);
    values[channel] = static_cast<P>(momentum * values[channel] + (1 - momentum) * to);
}

// Computes the mean over the pools that the replica tracks.
template <typename P>
__device__ void track(const NormaliseArguments& with) {
    const Index channels = with.tiling.channels, length = Moments::length(channels);
    volatile Findings* const findings = with.findings;
    if (with.watch == kLeaveOutAndTell && any_thread() == 0) {
        const Index at = not_finite(with.own, 0, with.tiling.slots * length);
        if (at >= 0) {
            findings->value = with.own[at];
            findings->at = at;
        }
    }
    for (Index channel = any_thread(); channel < channels; channel += all_threads()) {
        double mean = 0, variance = 0, parts = 0;
        for (int pool = 0; pool < with.pools; ++pool) {
            const Statistic part = statistic<P>(with, with.tracked, pool, channel);
            if (part.share == 0) continue;
            mean += part.mean;
            variance += with.unbiased != 0 && part.share < 1 ? part.variance / (1 - part.share) : part.variance;
            parts += 1;
        }
        if (parts > 1) {
            mean /= parts;
            variance /= parts;
        }
        bool any = parts > 0;
        // Each thread looks by itself: it is rarely requested, and the data is in the cache.
        for (int pool = 0; any && with.watch != kPropagate && pool < with.pools; ++pool) {
            List(with.tracked, pool).each([&](int slot) {
                any = any && not_finite(with.gathered, slot * length, (slot + 1) * length) < 0;
            });
        }
        if (with.batch != nullptr) {
            if (channel == 0) with.batch[0] = any && with.hand_on != 0;
            with.batch[1 + channel] = with.hand_on != 0 ? mean : 0;
            with.batch[1 + channels + channel] = with.hand_on != 0 ? variance : 0;
        } else if (with.running_mean != nullptr && any && !findings->given_up) {
            move<P>(with.running_mean, channel, with.momentum, mean);
            move<P>(with.running_var, channel, with.momentum, variance);
        }
    }
}

template <typename P>
__device__ void keep(const NormaliseArguments& with) {
    const Index channels = with.tiling.channels;
    for (Index i = any_thread(); i < with.tiling.slots * channels; i += all_threads()) {
        const Index slot = i / channels, channel = i % channels;
        double* mine = with.kept + slot * kept_length(channels);
        const Statistic used = statistic<P>(with, with.used, slot, channel);
        const Range of_used = List(with.used, slot).range, of_fed = List(with.fed, slot).range;
        const bool same =
            with.used.members == with.fed.members && of_used.begin == of_fed.begin && of_used.end == of_fed.end;
        const Statistic fed = same ? used : statistic<P>(with, with.fed, slot, channel);
        if (channel == 0) mine[0] = fed.share;
        mine[1 + channel] = used.mean;
        mine[1 + channels + channel] = invstd(with, used);
        mine[1 + 2 * channels + channel] = fed.mean;
        mine[1 + 3 * channels + channel] = invstd(with, fed);
    }
}

// `Invertible` of csrc/types.h.
template <typename P>
struct Invertible {
    const RecoverArguments& with;

    __device__ double weight(Index channel) const { return fabs(gamma<P>(with.weights, channel)); }
    __device__ double lost(Index channel) const {
        return with.per_beta * fabs(beta<P>(with.weights, channel)) + with.least;
    }
    __device__ bool by_gamma(Index channel) const { return weight(channel) > lost(channel); }
    __device__ bool hidden_by_another(Index channel) const {
        for (Index slot = 0; slot < with.tiling.slots; ++slot) {
            const Kept mine(with.kept, slot, channel, with.tiling.channels);
            if (!mine.by_another() || mine.constant(with.epsilon, with.constant)) continue;
            const double apart = fabs(mine.mean - mine.used_mean);
            if (weight(channel) * sqrt(mine.variance(with.epsilon)) <=
                lost(channel) / mine.used_invstd + with.per_beta * weight(channel) * apart)
                return true;
        }
        return false;
    }
};

// Finds the first channel with a hidden x, and the cause, in the first block.
template <typename P>
__device__ void tell_hidden(const RecoverArguments& with) {
    if (blockIdx.x + blockIdx.y + blockIdx.z > 0) return;
    const Invertible<P> invertible = {with};
    const Index channels = with.tiling.channels;
    __shared__ Index first[kThreads];
    first[threadIdx.x] = channels;
    for (Index channel = threadIdx.x; channel < channels && first[threadIdx.x] == channels; channel += kThreads)
        if (!invertible.by_gamma(channel) || invertible.hidden_by_another(channel)) first[threadIdx.x] = channel;
    __syncthreads();
    if (threadIdx.x > 0) return;
    Index found = channels;
    for (int i = 0; i < kThreads; ++i) found = first[i] < found ? first[i] : found;
    if (found == channels) return;
    volatile Findings* const findings = with.findings;
    findings->value = invertible.by_gamma(found) ? 1 : 0;
    findings->at = found;
}

// Adds up this replica's own slots, each [2][channels].
template <typename P>
__device__ void parameter_gradients(const GradInputArguments& with) {
    const Index channels = with.tiling.channels;
    P *const dgamma = static_cast<P*>(with.dgamma), *const dbeta = static_cast<P*>(with.dbeta);
    for (Index channel = any_thread(); channel < channels; channel += all_threads()) {
        Sums sums = {};
        for (Index slot = 0; slot < with.tiling.slots; ++slot)
            sums.merge(Sums::at(with.own + slot * Sums::length(channels), channel, channels));
        if (dgamma != nullptr)
            dgamma[channel] = static_cast<P>((with.add_dgamma ? static_cast<double>(dgamma[channel]) : 0.0) +
                                             (with.weights.fix_gamma ? 0.0 : sums.dy_xhat));
        if (dbeta != nullptr)
            dbeta[channel] = static_cast<P>((with.add_dbeta ? static_cast<double>(dbeta[channel]) : 0.0) + sums.dy);
    }
}

// ---- the kernels, for a type of data T and the type P of its parameters and running statistics: see params.h
// ----------
//
// A slot without a sample leaves zeros, and the other slots skip it.

// The channel of this thread of a reduction; the number of channels if it has none.
__device__ inline Index channel_of(const Layout& layout) {
    const Index channel = layout.inner > 1 ? blockIdx.x : Index(blockIdx.x) * layout.width + threadIdx.x % layout.width;
    return channel < layout.channels ? channel : layout.channels;
}

template <typename T, bool kMasked = false>
__device__ void moments(const MomentsArguments& with) {
    const Layout layout(with.tiling);
    const T* const x = static_cast<const T*>(with.x);
    const Index channel = channel_of(layout);
    const bool any = layout.outer_of(blockIdx.y) > 0 && channel < layout.channels;
    const Index row = any ? layout.first_outer(blockIdx.y) * layout.channels + channel : 0;
    MomentsOf<T, kMasked> reduction(x, with.mask, with.tiling, row * layout.inner);
    reduce<T>(reduction, layout, with.partial, aligned(x));
}

// Of numbers in the order of bytes of GPUs, the last byte has the sign.
__device__ inline void expand(const ExpandArguments& with) {
    const Index position = thread();
    if (position >= with.positions) return;
    Index at = 0, rest = position;
    for (int i = kMaskAxes - 1; i >= 0; --i) {
        at += rest % with.extents[i] * with.strides[i];
        rest /= with.extents[i];
    }
    const unsigned char* const value = static_cast<const unsigned char*>(with.from) + at * with.bytes;
    int any = value[with.bytes - 1] & (with.floating != 0 ? 0x7f : 0xff);
    for (int i = 0; i + 1 < with.bytes; ++i) any |= value[i];
    static_cast<unsigned char*>(with.to)[position] = any != 0;
}

template <typename T, typename P, class A>
__device__ void normalise(const NormaliseArguments& with) {
    const bool packs = aligned(with.x) && aligned(with.y) && (!A::kChanges || aligned(with.addend));
    if (with.y != nullptr && with.tiling.samples > 0) each<T>(Normalise<T, P, A>(with), with.tiling, packs);
    keep<P>(with);
    if (with.frozen == 0) track<P>(with);
}

template <typename T, typename P, class A>
__device__ void grad_sums(const GradSumsArguments& with) {
    typedef typename Number<T>::Wide Wide;
    const Layout layout(with.tiling);
    const Index channels = layout.channels, channel = channel_of(layout);
    const bool any = channel < channels;
    const double* mine = with.kept + blockIdx.y * kept_length(channels) + 1 + channel;
    const double mean = any ? mine[0] : 0.0, invstd = any ? mine[channels] : 0.0;
    Normal<Wide> normal;
    normal.scale = 1;
    if (A::kChanges && with.y == nullptr && any)
        normal = {Split<Wide>(mean), static_cast<Wide>(invstd * gamma<P>(with.weights, channel)),
                  static_cast<Wide>(beta<P>(with.weights, channel))};
    const T *const dy = static_cast<const T*>(with.dy), *const x = static_cast<const T*>(with.x);
    const T* const marks = with.y != nullptr ? static_cast<const T*>(with.y) : x;
    SumsOf<T, A> reduction(dy, x, mean, invstd, marks, static_cast<T*>(with.dz), normal,
                                    typename A::template On<Wide>(with.epilogue.slope, with.epilogue.ceiling));
    const bool packs = aligned(x) && aligned(dy) && (!A::kChanges || (aligned(with.y) && aligned(with.dz)));
    reduce<T>(reduction, layout, with.partial, packs);
}

template <typename T, typename P, class A, bool kMasked = false>
__device__ void grad_input(const GradInputArguments& with) {
    const bool packs = aligned(with.x) && aligned(with.dy) && aligned(with.dx);
    if (with.dx != nullptr && with.tiling.samples > 0) {
        if (with.add)
            each<T>(GradInput<T, P, A, true, kMasked>(with), with.tiling, packs);
        else
            each<T>(GradInput<T, P, A, false, kMasked>(with), with.tiling, packs);
    }
    parameter_gradients<P>(with);
}

template <typename T, typename P, class A>
__device__ void recover(const RecoverArguments& with) {
    each<T>(Recover<T, P, A>(with), with.tiling, aligned(with.x) && aligned(with.y));
    tell_hidden<P>(with);
}

template <typename P>
__device__ void update_running(const UpdateRunningArguments& with) {
    const Index channel = thread();
    if (channel >= with.channels || with.batch[0] == 0) return;
    move<P>(with.running_mean, channel, with.momentum, with.batch[1 + channel]);
    move<P>(with.running_var, channel, with.momentum, with.batch[1 + with.channels + channel]);
}

template <typename T>
__device__ void copy(const CopyArguments& with) {
    const Index i = thread();
    if (i >= with.n) return;
    const T* const from = static_cast<const T*>(with.from);
    T* const to = static_cast<T*>(with.to);
    to[i] = with.add ? Number<T>::narrow(Number<T>::widen(to[i]) + Number<T>::widen(from[i])) : from[i];
}

template <typename T>
__device__ void widen(const CopyArguments& with) {
    const Index i = thread();
    if (i < with.n)
        static_cast<typename Number<T>::Wide*>(with.to)[i] = Number<T>::widen(static_cast<const T*>(with.from)[i]);
}
template <typename T>
__device__ void narrow(const CopyArguments& with) {
    const Index i = thread();
    typedef typename Number<T>::Wide Wide;
    if (i < with.n) static_cast<T*>(with.to)[i] = Number<T>::narrow(static_cast<const Wide*>(with.from)[i]);
}

template <typename T>
__device__ void fill(const FillArguments& with) {
    if (thread() < with.n)
        static_cast<T*>(with.out)[thread()] = Number<T>::narrow(static_cast<typename Number<T>::Wide>(with.value));
}

// For each type of data: the type itself and the type of its parameters.
typedef Half Data_float16;
typedef float Data_float32, Parameter_float16, Parameter_float32;
typedef double Data_float64, Parameter_float64;

}  // namespace

#define SYNCBN_KERNEL(NAME, Arguments, ...) \
    extern "C" __global__ void __launch_bounds__(kThreads) NAME(const Arguments with) { __VA_ARGS__(with); }

#define SYNCBN_KERNELS(TYPE)                                                          \
    SYNCBN_KERNEL(moments_##TYPE, MomentsArguments, moments<Data_##TYPE>)             \
    SYNCBN_KERNEL(copy_##TYPE, CopyArguments, copy<Data_##TYPE>)                      \
    SYNCBN_KERNEL(widen_##TYPE, CopyArguments, widen<Data_##TYPE>)                    \
    SYNCBN_KERNEL(narrow_##TYPE, CopyArguments, narrow<Data_##TYPE>)                  \
    SYNCBN_KERNEL(fill_##TYPE, FillArguments, fill<Data_##TYPE>)                      \
    SYNCBN_KERNEL(update_running_##TYPE, UpdateRunningArguments, update_running<Parameter_##TYPE>)

#define SYNCBN_KERNELS_OF(TYPE, NAME, A, KERNEL, Arguments) \
    SYNCBN_KERNEL(KERNEL##_##NAME##_##TYPE, Arguments, KERNEL<Data_##TYPE, Parameter_##TYPE, A>)
#define SYNCBN_ACTIVATED_KERNELS(NAME, A, TYPE)                               \
    SYNCBN_KERNELS_OF(TYPE, NAME, A, normalise, NormaliseArguments)  \
    SYNCBN_KERNELS_OF(TYPE, NAME, A, grad_sums, GradSumsArguments)   \
    SYNCBN_KERNELS_OF(TYPE, NAME, A, grad_input, GradInputArguments) \
    SYNCBN_KERNELS_OF(TYPE, NAME, A, recover, RecoverArguments)

#define SYNCBN_ONE_MASKED_KERNEL(NAME, A, TYPE)                           \
    SYNCBN_KERNEL(masked_grad_input_##NAME##_##TYPE, GradInputArguments, \
                  grad_input<Data_##TYPE, Parameter_##TYPE, syncbn::A, true>)
#define SYNCBN_MASKED_KERNELS(TYPE)                                                   \
    SYNCBN_KERNEL(masked_moments_##TYPE, MomentsArguments, moments<Data_##TYPE, true>) \
    SYNCBN_ACTIVATIONS(SYNCBN_ONE_MASKED_KERNEL, TYPE)

// Compiling all kernels takes too long for a first step: SYNCBN_TYPE and SYNCBN_ACTIVATION or SYNCBN_MASKED select some.
#ifdef SYNCBN_TYPE
#define SYNCBN_APPLY(MACRO, ...) MACRO(__VA_ARGS__)
#if defined(SYNCBN_MASKED)
SYNCBN_APPLY(SYNCBN_MASKED_KERNELS, SYNCBN_TYPE)
#elif defined(SYNCBN_ACTIVATION)
#define SYNCBN_TRAIT_OF(NAME, A) typedef syncbn::A Activation_##NAME;
namespace {
SYNCBN_ACTIVATIONS(SYNCBN_TRAIT_OF)
}
#define SYNCBN_ONE_ACTIVATION(NAME, TYPE) SYNCBN_ACTIVATED_KERNELS(NAME, Activation_##NAME, TYPE)
SYNCBN_APPLY(SYNCBN_ONE_ACTIVATION, SYNCBN_ACTIVATION, SYNCBN_TYPE)
#else
SYNCBN_APPLY(SYNCBN_KERNELS, SYNCBN_TYPE)
SYNCBN_APPLY(SYNCBN_ACTIVATED_KERNELS, identity, syncbn::Identity, SYNCBN_TYPE)
#endif
#else
#define SYNCBN_ALL_TYPES(NAME, A)                         \
    SYNCBN_ACTIVATED_KERNELS(NAME, syncbn::A, float16) \
    SYNCBN_ACTIVATED_KERNELS(NAME, syncbn::A, float32) \
    SYNCBN_ACTIVATED_KERNELS(NAME, syncbn::A, float64)
SYNCBN_KERNELS(float16)
SYNCBN_KERNELS(float32)
SYNCBN_KERNELS(float64)
SYNCBN_ACTIVATIONS(SYNCBN_ALL_TYPES)
SYNCBN_MASKED_KERNELS(float16)
SYNCBN_MASKED_KERNELS(float32)
SYNCBN_MASKED_KERNELS(float64)
#endif

SYNCBN_KERNEL(expand_mask, ExpandArguments, expand)
SYNCBN_KERNEL(merge_moments, MergeArguments, merge<Moments>)
SYNCBN_KERNEL(merge_sums, MergeArguments, merge<Sums>)

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
// Replicas contribute packed vectors of float64, as in csrc/pooling/statistics.h, one for each of their slots.
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

using namespace syncbn;
using namespace syncbn::cuda;

constexpr int kWarp = 32;
constexpr int kPack = 16;  // bytes of the widest load

// IEEE binary16, which is computed in float32.
struct Half {
    unsigned short bits;
    Half() = default;
// Only the host lacks __CUDACC__. There the tests' emulator has its own conversion.
#ifdef __CUDACC__
    __device__ explicit Half(float value) { asm("{ cvt.rn.f16.f32 %0, %1; }" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const {
        float out;
        asm("{ cvt.f32.f16 %0, %1; }" : "=f"(out) : "h"(bits));
        return out;
    }
#else
    explicit Half(float value) : bits(emulated_float_to_half(value)) {}
    operator float() const { return emulated_half_to_float(bits); }
#endif
};

// The type in which a type of data is computed.
template <typename T>
using Wide = decltype(T() + T());
template <typename T>
constexpr int kLanes = kPack / static_cast<int>(sizeof(T));

// An aligned group of kUnit neighbours, moved with one load or store.
template <typename T, int kUnit>
struct alignas(kUnit * sizeof(T)) Pack {
    T values[kUnit];
};

template <typename T, int kUnit>
__device__ inline Pack<T, kUnit> load(const void* values, Index offset) {
    return *reinterpret_cast<const Pack<T, kUnit>*>(static_cast<const T*>(values) + offset);
}

template <typename T, int kUnit>
__device__ inline void store(void* values, Index offset, const Pack<T, kUnit>& pack) {
    *reinterpret_cast<Pack<T, kUnit>*>(static_cast<T*>(values) + offset) = pack;
}

__device__ inline bool aligned(const void* pointer) {
    return reinterpret_cast<unsigned long long>(pointer) % kPack == 0;
}

struct Spread : Tiling {
    __device__ explicit Spread(const Tiling& tiling) : Tiling(tiling) {}
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
template <typename V>
struct Split {
    V high, low;

    __device__ explicit Split(double value)
        : high(static_cast<V>(value)), low(static_cast<V>(value - static_cast<double>(high))) {}
    __device__ V below(V x) const { return (x - high) - low; }
};

// Computes z of one channel. Kernels that need its sign use the same expression as the kernel that writes it.
template <typename V>
struct Normal {
    Split<V> mean;
    V scale, shift;

    __device__ explicit Normal(double mean = 0, double scale = 1, double shift = 0)
        : mean(mean), scale(static_cast<V>(scale)), shift(static_cast<V>(shift)) {}
    __device__ V of(V x) const { return mean.below(x) * scale + shift; }
};

// ---- reductions ----------------------------------------------------------------------------------------------

// Calls read<kUnit>(j, offset) for the values of this thread, from its place `at` on, `step` apart. `advance` moves the
// offset by a step. After each run of n values it calls add(n) and put<kUnit>(n). So stores wait until a whole run has
// been read. Counts within a channel fit into 32 bits, which a GPU adds in one instruction. It adds 64 bits in two.
template <int kUnit, class Reduction, class Advance>
__device__ void down(Reduction& reduction, unsigned at, unsigned end, unsigned step, Index offset,
                     const Advance& advance) {
    constexpr int kRun = Reduction::kRun;
    while (at < end) {
        const Index first = offset;
        int n = 0;
#pragma unroll
        for (int j = 0; j < kRun; j += kUnit) {
            const bool there = at < end;
            reduction.template read<kUnit>(j, there ? offset : first);
            n += there ? kUnit : 0;
            at += step;
            advance(&offset);
        }
        if (n == kRun)
            reduction.add(Full<kRun>());
        else
            reduction.add(n);
        reduction.template put<kUnit>(n);
    }
}

template <typename T, int kUnit, class Reduction>
__device__ void down_rows(Reduction& reduction, const Spread& spread) {
    const Index slot = blockIdx.y;
    const Chunk chunk(spread.outer_of(slot) * (spread.inner / kUnit));
    const unsigned per_row = static_cast<unsigned>(spread.inner / kUnit);
    const unsigned rows = kBlock / per_row, columns = kBlock % per_row;  // a thread's step to its next pack
    const Index row_length = spread.channels * spread.inner;
    const Index step = rows * row_length + columns * kUnit, next_row = row_length - spread.inner;
    const unsigned at = static_cast<unsigned>(chunk.begin) + threadIdx.x;
    unsigned column = at % per_row;
    const Index row = spread.first_outer(slot) + at / per_row;
    down<kUnit>(reduction, at, static_cast<unsigned>(chunk.end), kBlock,
                row * row_length + blockIdx.x * spread.inner + column * kUnit, [&](Index* offset) {
                    *offset += step;
                    column += columns;
                    if (column >= per_row) {
                        column -= per_row;
                        *offset += next_row;
                    }
                });
}

template <typename T, class Reduction>
__device__ void down_columns(Reduction& reduction, const Spread& spread) {
    const int width = spread.width;
    const unsigned step = kBlock / width;
    const Index slot = blockIdx.y, channel = Index(blockIdx.x) * width + threadIdx.x % width;
    if (channel >= spread.channels) return;
    const Chunk chunk(spread.outer_of(slot));
    const unsigned row = static_cast<unsigned>(chunk.begin) + threadIdx.x / width;
    down<1>(reduction, row, static_cast<unsigned>(chunk.end), step,
            (spread.first_outer(slot) + row) * spread.channels + channel,
            [&](Index* offset) { *offset += step * spread.channels; });
}

// Merges the results of threads that are a multiple of `width`, a power of two, apart: the first `width` threads get the
// totals. Every thread of the block has to call this.
template <class Result>
__device__ Result merged(const Result& own, int width) {
    __shared__ Result shared[kBlock];
    shared[threadIdx.x] = own;
    for (int half = kBlock / 2; half >= width; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x].merge(shared[threadIdx.x + half]);
    }
    return shared[threadIdx.x];
}

// Walks, combines the threads' results and writes the packed vector of each chunk and slot in partial[chunk][slot].
template <typename T, class Reduction>
__device__ void reduce(Reduction& reduction, const Spread& spread, double* partial, bool packs) {
    if (spread.inner == 1)
        down_columns<T>(reduction, spread);
    else if (packs && spread.inner % kLanes<T> == 0)
        down_rows<T, kLanes<T>>(reduction, spread);
    else
        down_rows<T, 1>(reduction, spread);
    const int width = spread.inner == 1 ? spread.width : 1;
    const auto total = merged(reduction.result(), width);
    const Index slot = blockIdx.y, channel = Index(blockIdx.x) * width + threadIdx.x;
    if (threadIdx.x < width && channel < spread.channels)
        total.write(partial + (blockIdx.z * spread.slots + slot) * total.length(spread.channels), channel,
                    spread.channels);
}

// Count, mean and the sum of squares about it. The merge is by Chan, Golub and LeVeque ("Updating formulae and a
// pairwise algorithm for computing sample variances", 1979).
template <typename V>
struct MomentsIn {
    V count, mean, m2;

    __device__ static Index length(Index channels) { return 1 + 2 * channels; }

    __device__ void merge(const MomentsIn& other) {
        if (other.count == 0) return;
        const V total = count + other.count, delta = other.mean - mean, share = other.count / total;
        mean += delta * share;
        m2 += other.m2 + delta * delta * count * share;
        count = total;
    }
    __device__ static MomentsIn at(const double* packed, Index channel, Index channels) {
        return {packed[0], packed[1 + channel], packed[1 + channels + channel]};
    }
    // An empty slot has zeros.
    __device__ void write(double* out, Index channel, Index channels) const {
        if (channel == 0) out[0] = count;
        out[1 + channel] = count == 0 ? 0 : mean;
        out[1 + channels + channel] = m2;
    }
};
typedef MomentsIn<double> Moments;

// The position [outer][inner] of a value in a tensor.
__device__ inline Index position_of(const Tiling& tiling, Index offset) {
    return offset / (tiling.channels * tiling.inner) * tiling.inner + offset % tiling.inner;
}
__device__ inline bool counts_at(const void* mask, Index position) {
    return static_cast<const unsigned char*>(mask)[position] != 0;
}

// With a mask, only values count whose position has a mask that is not 0. The others may hold anything.
template <typename T, bool kMasked>
struct MomentsOf {
    static constexpr int kRun = kMasked ? 8 : 16;  // values that a thread reads before it adds them up
    const MomentsArguments& with;
    Wide<T> origin;  // near the values, so that they lose no digits on the way; a masked thread's is its first value
    MomentsIn<Wide<T>> total = {};  // of values - origin
    Wide<T> run[kRun] = {};
    bool counts[kRun] = {};
    bool found = false;  // that first value

    template <int kUnit>
    __device__ void read(int j, Index offset) {
        const Pack<T, kUnit> pack = load<T, kUnit>(with.x, offset);
        const Index position = kMasked ? position_of(with.tiling, offset) : 0;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const Wide<T> value = pack.values[i];
            counts[j + i] = !kMasked || counts_at(with.mask, position + i);
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
        Wide<T> sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n && counts[i]) {
                number += kMasked;
                sum += run[i];
            }
        if (number == 0) return;
        const Wide<T> here = sum / static_cast<Wide<T>>(number);
#pragma unroll
        for (int i = 0; i < kRun; ++i)
            if (i < n && counts[i]) squares += (run[i] - here) * (run[i] - here);
        total.merge({static_cast<Wide<T>>(number), here, squares});
    }
    template <int kUnit>
    __device__ void put(int) const {}
    __device__ Moments result() const {
        return {static_cast<double>(total.count), static_cast<double>(origin) + static_cast<double>(total.mean),
                static_cast<double>(total.m2)};
    }
};

struct GradSums {
    double dy, dy_xhat;

    __device__ static Index length(Index channels) { return 2 * channels; }

    __device__ void merge(const GradSums& other) {
        dy += other.dy;
        dy_xhat += other.dy_xhat;
    }
    __device__ static GradSums at(const double* packed, Index channel, Index channels) {
        return {packed[channel], packed[channels + channel]};
    }
    __device__ void write(double* out, Index channel, Index channels) const {
        out[channel] = dy;
        out[channels + channel] = dy_xhat;
    }
};

// Sums of dz, which is dy after the backward of the activation. `normal` makes z of `marks`, which is x. If y is
// available, `marks` is y and `normal` the identity. Both cases share one expression; a second load of x hits the
// cache. If `dz` is not null, it is written.
template <typename T, class A>
struct SumsOf {
    static constexpr int kRun = 8;  // of each of two tensors
    const GradSumsArguments& with;
    Split<Wide<T>> mean;
    double invstd;
    const void* marks;
    Normal<Wide<T>> normal;
    const typename A::template On<Wide<T>> activation = {with.affine.slope, with.affine.ceiling};
    double sum_dy = 0, sum_dy_centred = 0;
    Wide<T> heads[kRun] = {}, centred[kRun] = {};
    Index places[kRun] = {};

    template <int kUnit>
    __device__ void read(int j, Index offset) {
        const Pack<T, kUnit> head = load<T, kUnit>(with.dy, offset), value = load<T, kUnit>(with.x, offset);
        const Pack<T, kUnit> mark = A::kChanges ? load<T, kUnit>(marks, offset) : value;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            Wide<T>& dz = heads[j + i] = head.values[i];
            centred[j + i] = mean.below(value.values[i]);
            if (!A::kChanges) continue;
            activation.through(&dz, normal.of(mark.values[i]));
            if (with.dz != nullptr) dz = static_cast<T>(dz);  // as others read it
        }
        if (A::kChanges) places[j] = offset;
    }
    template <class N>
    __device__ void add(N n) {
        Wide<T> sum = 0, product = 0;
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
            for (int i = 0; i < kUnit; ++i) out.values[i] = static_cast<T>(heads[j + i]);
            if (A::kChanges && with.dz != nullptr && j < n) store(with.dz, places[j], out);
        }
    }
    __device__ GradSums result() const { return {sum_dy, sum_dy_centred * invstd}; }
};

// Combines the results of `chunks` chunks, [chunks][slots][length]: a warp's worth of threads for each slot and channel.
template <class Result>
__device__ void merge(const MergeArguments& with) {
    constexpr int kWidth = kBlock / kWarp;
    const Index slots = with.slots, channels = with.channels, length = Result::length(channels);
    const Index at = Index(blockIdx.x) * kWidth + threadIdx.x % kWidth, slot = at / channels, channel = at % channels;
    Result total = {};
    for (Index chunk = threadIdx.x / kWidth; slot < slots && chunk < with.chunks; chunk += kWarp)
        total.merge(Result::at(with.partial + (chunk * slots + slot) * length, channel, channels));
    total = merged(total, kWidth);
    if (threadIdx.x < kWidth && slot < slots) total.write(with.out + slot * length, channel, channels);
}

// ---- pools -----------------------------------------------------------------------------------------------------

__device__ inline Range range_of(const Lists& lists, Index slot) {
    return lists.ranges != nullptr ? lists.ranges[slot] : lists.few[slot];
}
// Calls visit(gathered slot) for those in a range of a list. Neighbours are the usual case, and need no load and no
// registers for members.
template <class Visit>
__device__ void each_of(const Lists& lists, const Range& range, const Visit& visit) {
    if (lists.members == nullptr) {
        for (int slot = range.begin; slot < range.end; ++slot) visit(slot);
    } else {
#pragma unroll 1
        for (int place = range.begin; place < range.end; ++place) visit(lists.members[place]);
    }
}

// The statistic of one channel; share is 1 / count, or 0 for an empty pool.
struct ChannelStatistic {
    double share, mean, variance;
};

// Merges about the first slot's mean, which is close to all, so that a large offset costs no digit. It divides once,
// because consumer GPUs take 32 times as long for float64 as for float32.
__device__ inline ChannelStatistic pooled(const double* gathered, const Lists& lists, const Range& range, Index channel,
                                          Index channels) {
    const Index length = Moments::length(channels);
    double count = 0, apart = 0, m2 = 0;
    each_of(lists, range, [&](int slot) { count += gathered[slot * length]; });
    if (count == 0) return {0, 0, 0};
    const double share = 1 / count;
    double origin = 0;
    bool found = false;
    each_of(lists, range, [&](int slot) {
        const Moments part = Moments::at(gathered + slot * length, channel, channels);
        if (!found && part.count > 0) origin = part.mean;
        found = found || part.count > 0;
        if (part.count > 0) apart += part.count * (part.mean - origin);
    });
    apart *= share;
    each_of(lists, range, [&](int slot) {
        const Moments part = Moments::at(gathered + slot * length, channel, channels);
        const double delta = part.mean - origin - apart;
        if (part.count > 0) m2 += part.m2 + part.count * delta * delta;
    });
    return {share, origin + apart, m2 * share};
}

// ---- elementwise ---------------------------------------------------------------------------------------------

// The number of packs that a thread reads before it writes.
template <int kUnit>
constexpr int kBatch = kUnit > 1 ? 4 : 8;

// Writes map.value(inputs, position) for n packs, `stride` apart, from those of map.from. Of these, the ones behind
// kNeeded may be null, and count as 0.
template <typename T, int kUnit, class Map>
__device__ inline void apply(const Map& map, Index offset, Index stride, int n) {
    Pack<T, kUnit> in[Map::kInputs][kBatch<kUnit>] = {};
#pragma unroll
    for (int k = 0; k < Map::kInputs; ++k)
        if (k < Map::kNeeded || map.from[k] != nullptr)
#pragma unroll
            for (int j = 0; j < kBatch<kUnit>; ++j)
                in[k][j] = load<T, kUnit>(map.from[k], offset + (j < n ? j * stride : 0));
#pragma unroll
    for (int j = 0; j < kBatch<kUnit>; ++j) {
        const Index at = offset + (j < n ? j * stride : 0);
        const Index position = Map::kMasked ? position_of(map.with.tiling, at) : 0;
        Pack<T, kUnit> out;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            Wide<T> values[Map::kInputs];
#pragma unroll
            for (int k = 0; k < Map::kInputs; ++k) values[k] = in[k][j].values[i];
            out.values[i] = static_cast<T>(map.value(values, position + i));
        }
        if (j < n) store(map.to, at, out);
    }
}

// Calls use(slot, channel) when the statistics change, then `apply` for each batch. Rows are counted in 32 bits, because
// a division of 64 bits would cost more than a short row.
template <typename T, int kUnit, class Map>
__device__ void over_rows(Map& map, const Spread& spread) {
    const Index segment = spread.segment;
    const unsigned rows = static_cast<unsigned>(spread.outer() * spread.channels);
    const unsigned channels = static_cast<unsigned>(spread.channels);
    const unsigned segments = static_cast<unsigned>((spread.inner + segment - 1) / segment);
    const unsigned warps = gridDim.x * (kBlock / kWarp);
    for (unsigned task = blockIdx.x * (kBlock / kWarp) + threadIdx.x / kWarp; task < rows * segments; task += warps) {
        const unsigned row = segments == 1 ? task : task / segments, outer = row / channels;
        const Index begin = (task - row * segments) * segment;
        const Index end = begin + segment < spread.inner ? begin + segment : spread.inner;
        map.use(spread.slots == 1 ? 0 : spread.slot_of(outer), row - outer * channels);
        const Index base = row * spread.inner + begin;
        const int length = static_cast<int>(end - begin), stride = kWarp * kUnit;
        for (int i = threadIdx.x % kWarp * kUnit; i < length; i += kBatch<kUnit> * stride)
            apply<T, kUnit>(map, base + i, stride, (length - i + stride - 1) / stride);
    }
}

template <typename T, class Map>
__device__ void over_columns(Map& map, const Spread& spread) {
    const int width = spread.width;
    const Index slot = blockIdx.y, channel = Index(blockIdx.x) * width + threadIdx.x % width;
    if (channel >= spread.channels) return;
    const Chunk chunk(spread.outer_of(slot));
    map.use(slot, channel);
    const int step = kBlock / width, length = static_cast<int>(chunk.end - chunk.begin);
    const Index base = (spread.first_outer(slot) + chunk.begin) * spread.channels + channel;
    for (int row = threadIdx.x / width; row < length; row += kBatch<1> * step)
        apply<T, 1>(map, base + row * spread.channels, step * spread.channels, (length - row + step - 1) / step);
}

// `segment` is a multiple of every pack.
template <typename T, class Map>
__device__ void each(Map map, const Tiling& tiling) {
    const Spread spread(tiling);
    bool packs = spread.inner % kLanes<T> == 0 && aligned(map.to);
#pragma unroll
    for (int k = 0; k < Map::kInputs; ++k) packs = packs && aligned(map.from[k]);
    if (spread.inner == 1)
        over_columns<T>(map, spread);
    else if (packs)
        over_rows<T, kLanes<T>>(map, spread);
    else
        over_rows<T, 1>(map, spread);
}

// The threads of a launch and this one's number, for any grid.
__device__ inline Index all_threads() { return Index(gridDim.x) * gridDim.y * gridDim.z * kBlock; }
__device__ inline Index any_thread() {
    return ((Index(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * kBlock + threadIdx.x;
}

// The index of the first packed moment that is not finite; -1 if all are finite.
__device__ inline Index not_finite(const double* moments, Index begin, Index end) {
    for (Index i = begin; i < end; ++i)
        if (!isfinite(moments[i])) return i;
    return -1;
}

// The channel of this thread of a reduction; the last one if it has none.
__device__ inline Index channel_of(const Spread& spread) {
    const Index channel = spread.inner > 1 ? blockIdx.x : Index(blockIdx.x) * spread.width + threadIdx.x % spread.width;
    return channel < spread.channels ? channel : spread.channels - 1;
}

// ---- the kernels ---------------------------------------------------------------------------------------------
//
// See params.h. A slot without a sample leaves zeros, and the other slots skip it.

// Those for a type of data and an activation.
template <typename T, class A>
struct Kernels {
    typedef Wide<T> V;  // of parameters and running statistics, too

    // The statistics that normalise: those of a batch, or the running ones if `frozen`.
    __device__ static ChannelStatistic statistic(const NormaliseArguments& with, const Lists& lists, Index slot,
                                                 Index channel) {
        if (with.frozen == 0) return pooled(with.gathered, lists, range_of(lists, slot), channel, with.tiling.channels);
        return {0, static_cast<double>(static_cast<const V*>(with.running_mean)[channel]),
                static_cast<double>(static_cast<const V*>(with.running_var)[channel])};
    }
    __device__ static double invstd(const NormaliseArguments& with, const ChannelStatistic& of) {
        // Where no value counts, xhat is 0.
        return with.frozen == 0 && of.share == 0 ? 0.0 : rsqrt(of.variance + with.epsilon);
    }

    // Gamma, unless it is fixed, and beta.
    __device__ static double gamma(const Affine& affine, Index channel) {
        return affine.fix_gamma ? 1.0 : static_cast<double>(static_cast<const V*>(affine.gamma)[channel]);
    }
    __device__ static double beta(const Affine& affine, Index channel) {
        return static_cast<double>(static_cast<const V*>(affine.beta)[channel]);
    }

    // Computes y = (x - mean) * scale + shift, then the addition and the activation if there are any.
    struct Normalise {
        static constexpr int kInputs = 2, kNeeded = 1;
        static constexpr bool kMasked = false;
        const NormaliseArguments& with;
        const void* const from[kInputs] = {with.x, A::kChanges ? with.addend : nullptr};
        void* const to = with.y;
        const typename A::template On<V> activation = {with.affine.slope, with.affine.ceiling};
        Normal<V> normal = Normal<V>();

        __device__ void use(Index slot, Index channel) {
            const ChannelStatistic used = statistic(with, with.used, slot, channel);
            normal = Normal<V>(used.mean, invstd(with, used) * gamma(with.affine, channel), beta(with.affine, channel));
        }
        __device__ V value(const V (&in)[kInputs], Index) const {
            V z = normal.of(in[0]);
            if (A::kChanges) z += in[1];
            activation.apply(&z);
            return z;
        }
    };

    // Computes dx of reference.py as scale * dz - (shift + (x - mean) * slope): the direct gradient, and that through the
    // statistics. The gradient dz is dy or, if A::kChanges, dy after the backward of the activation.
    template <bool kAdd, bool kMasks>
    struct GradInput {
        static constexpr int kInputs = kAdd ? 3 : 2, kNeeded = kInputs;
        static constexpr bool kMasked = kMasks;
        const GradInputArguments& with;
        const void* const from[3] = {with.dy, with.x, with.dx};  // the old dx, if kAdd
        void* const to = with.dx;
        const typename A::template On<V> activation = {with.affine.slope, with.affine.ceiling};
        Split<V> mean = Split<V>(0);
        V scale = 0, shift = 0, slope = 0;
        Normal<V> normal = Normal<V>();

        __device__ void use(Index slot, Index channel) {
            const Index channels = with.tiling.channels;
            const Saved saved = with.saved[slot * channels + channel];
            const double weight = gamma(with.affine, channel);
            scale = static_cast<V>(weight * saved.used_invstd);
            mean = Split<V>(saved.mean);
            if (A::kChanges)
                normal = Normal<V>(saved.used_mean, weight * saved.used_invstd, beta(with.affine, channel));
            shift = slope = 0;
            if (saved.share == 0) return;  // running statistics get no gradient
            GradSums sums = {};
            each_of(with.users, range_of(with.users, slot), [&](int user) {
                sums.merge(GradSums::at(with.gathered + user * GradSums::length(channels), channel, channels));
            });
            const double share = weight * saved.invstd * saved.share;
            shift = static_cast<V>(share * sums.dy);
            slope = static_cast<V>(share * saved.invstd * sums.dy_xhat);
        }
        __device__ V value(const V (&in)[kInputs], Index position) const {
            V dz = in[0], through = shift + mean.below(in[1]) * slope;
            if (kMasked && !counts_at(with.mask, position)) through = 0;
            activation.through(&dz, normal.of(in[1]));
            const V value = scale * dz - through;
            return kAdd ? in[kInputs - 1] + value : value;
        }
    };

    // The running statistics of one channel.
    __device__ static void move(void* running, Index channel, double momentum, double to) {
        V* const values = static_cast<V*>(running);
        values[channel] = static_cast<V>(momentum * values[channel] + (1 - momentum) * to);
    }

    // Computes the mean over the pools that the replica tracks, each of which has a value.
    __device__ static void track(const NormaliseArguments& with) {
        const Index channels = with.tiling.channels, length = Moments::length(channels);
        volatile Status* const status = with.status;
        if (with.watch != 0 && any_thread() == 0) {
            const Index at = not_finite(with.own, 0, with.tiling.slots * length);
            if (at >= 0) {
                status->value = with.own[at];
                status->at = at;
            }
        }
        for (Index channel = any_thread(); channel < channels; channel += all_threads()) {
            if (with.affine.fix_gamma) static_cast<V*>(with.affine.gamma)[channel] = 1;
            double mean = 0, variance = 0;
            bool finite = true;
            for (int pool = 0; pool < with.pools; ++pool) {
                const ChannelStatistic part = statistic(with, with.tracked, pool, channel);
                mean += part.mean;
                variance += with.unbiased != 0 && part.share < 1 ? part.variance / (1 - part.share) : part.variance;
                if (with.watch == 0) continue;
                // Each thread looks by itself: it is rarely requested, and the data is in the cache.
                each_of(with.tracked, range_of(with.tracked, pool), [&](int slot) {
                    finite = finite && not_finite(with.gathered, slot * length, (slot + 1) * length) < 0;
                });
            }
            if (with.pools > 1) {
                mean /= with.pools;
                variance /= with.pools;
            }
            if (with.running_mean != nullptr && with.pools > 0 && finite && !status->given_up) {
                move(with.running_mean, channel, with.momentum, mean);
                move(with.running_var, channel, with.momentum, variance);
            }
        }
    }

    __device__ static void save(const NormaliseArguments& with) {
        const Index channels = with.tiling.channels;
        for (Index i = any_thread(); i < with.tiling.slots * channels; i += all_threads()) {
            const Index slot = i / channels, channel = i % channels;
            const ChannelStatistic used = statistic(with, with.used, slot, channel);
            const Range of_used = range_of(with.used, slot), of_fed = range_of(with.fed, slot);
            const bool same =
                with.used.members == with.fed.members && of_used.begin == of_fed.begin && of_used.end == of_fed.end;
            const ChannelStatistic fed = same ? used : statistic(with, with.fed, slot, channel);
            with.saved[i] = {fed.share, used.mean, invstd(with, used), fed.mean, invstd(with, fed)};
        }
    }

    // Adds up this replica's own slots, each [2][channels].
    __device__ static void parameter_gradients(const GradInputArguments& with) {
        const Index channels = with.tiling.channels;
        const auto put = [](void* to, Index channel, int add, double value) {
            if (to == nullptr) return;
            V& out = static_cast<V*>(to)[channel];
            out = static_cast<V>((add ? static_cast<double>(out) : 0.0) + value);
        };
        for (Index channel = any_thread(); channel < channels; channel += all_threads()) {
            GradSums sums = {};
            for (Index slot = 0; slot < with.tiling.slots; ++slot)
                sums.merge(GradSums::at(with.own + slot * GradSums::length(channels), channel, channels));
            put(with.dgamma, channel, with.add_dgamma, with.affine.fix_gamma ? 0.0 : sums.dy_xhat);
            put(with.dbeta, channel, with.add_dbeta, sums.dy);
        }
    }

    __device__ static void moments(const MomentsArguments& with) { moments_of<false>(with); }
    __device__ static void masked_moments(const MomentsArguments& with) { moments_of<true>(with); }
    __device__ static void merge_moments(const MergeArguments& with) { merge<Moments>(with); }
    __device__ static void merge_sums(const MergeArguments& with) { merge<GradSums>(with); }
    __device__ static void grad_input(const GradInputArguments& with) { grad_input_of<false>(with); }
    __device__ static void masked_grad_input(const GradInputArguments& with) { grad_input_of<true>(with); }

    template <bool kMasked>
    __device__ static void moments_of(const MomentsArguments& with) {
        const Spread spread(with.tiling);
        const Index row = spread.first_outer(blockIdx.y) * spread.channels + channel_of(spread);
        const bool any = !kMasked && spread.outer_of(blockIdx.y) > 0;
        const V origin = any ? static_cast<const T*>(with.x)[row * spread.inner] : V(0);
        MomentsOf<T, kMasked> reduction = {with, origin};
        reduce<T>(reduction, spread, with.partial, aligned(with.x));
    }

    // Of numbers in the order of bytes of GPUs, the last byte has the sign.
    __device__ static void expand_mask(const ExpandArguments& with) {
        const Mask& mask = with.mask;
        const Index position = any_thread();
        if (position >= with.positions) return;
        Index at = 0, rest = position;
        for (int i = 3; i >= 0; --i) {
            at += rest % mask.extents[i] * mask.strides[i];
            rest /= mask.extents[i];
        }
        const unsigned char* const value = static_cast<const unsigned char*>(with.from) + at * mask.bytes;
        int any = value[mask.bytes - 1] & (mask.floating != 0 ? 0x7f : 0xff);
        for (int i = 0; i + 1 < mask.bytes; ++i) any |= value[i];
        static_cast<unsigned char*>(with.to)[position] = any != 0;
    }

    __device__ static void normalise(const NormaliseArguments& with) {
        if (with.y != nullptr && with.tiling.samples > 0) each<T>(Normalise{with}, with.tiling);
        save(with);
        if (with.frozen == 0) track(with);
    }

    __device__ static void grad_sums(const GradSumsArguments& with) {
        const Spread spread(with.tiling);
        const Index channel = channel_of(spread);
        const Saved saved = with.saved[blockIdx.y * spread.channels + channel];
        Normal<V> normal;
        if (A::kChanges && with.y == nullptr)
            normal =
                Normal<V>(saved.used_mean, saved.used_invstd * gamma(with.affine, channel), beta(with.affine, channel));
        SumsOf<T, A> reduction = {with, Split<V>(saved.used_mean), saved.used_invstd,
                                  with.y != nullptr ? with.y : with.x, normal};
        reduce<T>(reduction, spread, with.partial,
                  aligned(with.x) && aligned(with.dy) && aligned(with.y) && aligned(with.dz));
    }

    template <bool kMasked>
    __device__ static void grad_input_of(const GradInputArguments& with) {
        if (with.dx != nullptr && with.tiling.samples > 0) {
            if (with.add)
                each<T>(GradInput<true, kMasked>{with}, with.tiling);
            else
                each<T>(GradInput<false, kMasked>{with}, with.tiling);
        }
        parameter_gradients(with);
    }

    __device__ static void add(const AddArguments& with) {
        const Index i = any_thread();
        if (i >= with.n) return;
        T& to = static_cast<T*>(with.to)[i];
        to = static_cast<T>(to + static_cast<const T*>(with.from)[i]);
    }
};

typedef Half Data_float16;
typedef float Data_float32;
typedef double Data_float64;
typedef Identity Activation_identity;
typedef Rectifier Activation_rectifier;

template <class Arguments>
__device__ Arguments arguments_of(void (*kernel)(const Arguments&));

}  // namespace

// Compiling all kernels takes too long for a first step. So csrc/cuda/driver.cc adds a line with this for each that it
// needs.
#define SYNCBN_KERNEL(STEM, ACTIVATION, TYPE)                                                      \
    extern "C" __global__ void __launch_bounds__(kBlock) STEM##_##ACTIVATION##_##TYPE(             \
        const decltype(arguments_of(&Kernels<Data_##TYPE, Activation_##ACTIVATION>::STEM)) with) { \
        Kernels<Data_##TYPE, Activation_##ACTIVATION>::STEM(with);                                 \
    }

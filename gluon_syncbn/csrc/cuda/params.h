// What each kernel of kernels.cu is given: one plain structure, which host and device share. NVRTC brings no header of the
// standard library, and none is needed.
#pragma once

#include "pooling/range.h"

namespace syncbn {
namespace cuda {

typedef long long Index;
static_assert(sizeof(int) == 4 && sizeof(Index) == 8 && sizeof(void*) == 8, "the same on host and device");

// A list of gathered slots for each slot of this replica, as `Pools` of csrc/pooling has them. A few ranges travel with the
// launch, which saves a copy.
constexpr int kFewRanges = 64;
struct Lists {
    const Range* ranges;  // [slots]; null: the ranges travel
    const int* members;   // null: ranges are of slots
    Range first;          // that of slot s is `first`, moved by s * step
    int step;
    int irregular;  // that of slot s is few[s]
    Range few[kFewRanges];
};

// A tensor, and how it is spread over the blocks of a launch: see kernels.cu.
struct Spread {
    Index samples, per_sample, channels, inner, slots, segment;
    int width;
};

struct Weights {
    const void *gamma, *beta;  // [channels]
    int fix_gamma;
};

struct Behind {
    double slope, ceiling;
};

// In memory of the host: what it says to a launch that is on its way, and hears of it.
struct Told {
    int given_up;  // the step has failed: what is on the stream shall leave nothing behind
    Index at;      // of the replica's packed moments, the first that is not finite; of `recover`, a channel; -1: none
    double value;  // which it is; of `recover`, whether another slot's statistic hides x
};

// What becomes of moments that are not finite.
enum Watch { kPropagate, kLeaveOut, kLeaveOutAndTell };

// partial [chunks][slots] of packed moments. Grid: channels (inner > 1) or tiles of `width` channels; slots; chunks.
struct MomentsArguments {
    Spread spread;
    const void* x;
    double* partial;
};

// Chunks of a slot, put together: [chunks][slots] into [slots]. Grid: a warp for each slot and channel.
struct MergeArguments {
    Index slots, channels;
    const double* partial;
    double* out;
    int chunks;
};

// The moments of a slot and the sums that an all-reduce adds, of each other; see kernels.cu. Grid: a thread for each channel.
struct SumsArguments {
    Index channels;
    const double* from;
    double* to;
};

// y = (x - mean) * invstd * gamma + beta [+ addend], and what stands behind it, added to y where `add`, with the gathered
// moments of the pools or, where `frozen`, the running statistics; y may be null. What the backward needs is left in
// `kept`; then the running statistics move. Grid: any number of blocks (inner > 1), or tiles; slots; chunks.
struct NormaliseArguments {
    Spread spread;
    const void* x;
    const void* addend;  // null: none; `normalise` without an activation does not look at it
    void* y;
    Weights weights;
    Behind behind;
    const double* gathered;  // [slots of all replicas][1 + 2C]
    Lists used, fed;
    double epsilon;
    double* kept;       // [slots][1 + 4C]
    Lists tracked;      // of each pool that the running statistics go towards
    int pools;          // so many
    const double* own;  // the packed moments of this replica's slots
    int add, frozen;
    int hand_on;   // into `batch`: this replica's statistics, not zeros
    int unbiased;  // the variance that the running one takes
    int watch;     // `Watch`
    double momentum;
    void *running_mean, *running_var;  // null: nothing is tracked
    double* batch;  // [1, mean[C], variance[C]], or [0 ...] where there is nothing; null: the running ones
    Told* told;
};

// partial [chunks][slots] of packed gradients, of dz. The sign of its z is found by x or, where that is not null, by y; dz is
// written where that is not null. `grad_input` computes z again; whoever has dz gives that to it. Grid as for moments.
struct GradSumsArguments {
    Spread spread;
    const void *dy, *x, *y;
    void* dz;
    Weights weights;
    Behind behind;
    const double* kept;
    double* partial;
};

// dx, added to where `add`, and this replica's part of dgamma and dbeta; all three may be null. Grid as for normalise.
struct GradInputArguments {
    Spread spread;
    const void *dy, *x;
    void* dx;
    Weights weights;
    Behind behind;
    const double* kept;
    const double* gathered;  // packed gradients of all replicas
    Lists users;
    const double* own;  // those of this one
    void *dgamma, *dbeta;
    int add, add_dgamma, add_dbeta;
};

// x from the y of `normalise` without an addend, by what that has `kept`. In told->at the first channel where that cannot
// be, and in told->value whether another slot's statistic is why. Grid as for normalise.
struct RecoverArguments {
    Spread spread;
    const void* y;
    void* x;
    Weights weights;
    Behind behind;
    const double* kept;
    double per_beta, least, epsilon, constant;  // `Invertible` and `kConstant` of csrc/types.h
    Told* told;
};

// running <- momentum * running + (1 - momentum) * batch, for batch [1 or 0, mean[C], variance[C]].
struct UpdateRunningArguments {
    Index channels;
    const double* batch;
    double momentum;
    void *running_mean, *running_var;
};

// to = from, added where `add`.
struct CopyArguments {
    Index n;
    const void* from;
    void* to;
    int add;
};

struct FillArguments {
    Index n;
    void* out;
    double value;
};

}  // namespace cuda
}  // namespace syncbn

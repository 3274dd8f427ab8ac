// Defines the arguments of each kernel of kernels.cu: one plain structure, which host and device share. NVRTC brings no
// headers of the standard library, and none is needed.
#pragma once

#include "plain.h"

namespace syncbn {
namespace cuda {

// The threads of every block.
constexpr int kBlock = 256;

typedef long long Index;
static_assert(sizeof(int) == 4 && sizeof(Index) == 8 && sizeof(void*) == 8, "the same on host and device");

// A list of gathered slots for each slot of this replica, as in `Pools` of csrc/pooling. A few ranges travel with the
// launch, which saves a copy.
constexpr int kFewRanges = 64;
struct Lists {
    const Range* ranges;  // [slots]; null: `few` has them
    const int* members;   // null: ranges are of slots
    Range few[kFewRanges];
};

// A tensor, and its distribution over the blocks of a launch: see kernels.cu.
struct Tiling {
    Index samples, per_sample, channels, inner, slots, segment;
    int width;
};

struct Affine {
    void* gamma;            // [channels]
    const void* beta;       // [channels]
    int fix_gamma;          // gamma counts as 1, and the update of running statistics sets it to that
    double slope, ceiling;  // of the activation
};

// What the backward needs of the forward, for a slot and a channel.
struct Saved {
    double share;                   // 1 / count of the pool that the slot feeds; 0: none
    double used_mean, used_invstd;  // of the pool that normalises it
    double mean, invstd;            // of the pool that it feeds
};

// Memory of the host that a running launch reads and writes.
struct Status {
    int given_up;  // the step has failed: work on the stream shall leave no results
    Index at;      // index of the replica's first packed moment that is not finite; -1: none
    double value;  // its value
};

// to[position] is 1 where the value of a mask is not 0, else 0. Grid: a thread for each position.
struct ExpandArguments {
    Index positions;
    const void* from;
    void* to;
    Mask mask;
};

// partial [chunks][slots] of packed moments. `masked_moments` leaves out positions [outer][inner] where the expanded mask
// is 0. Grid: channels (inner > 1) or tiles of `width` channels; slots; chunks.
struct MomentsArguments {
    Tiling tiling;
    const void* x;
    double* partial;
    const void* mask;
};

// Combines the chunks of a slot: [chunks][slots] into [slots]. Grid: a block for each kBlock / 32 slots and channels.
struct MergeArguments {
    Index slots, channels;
    const double* partial;
    double* out;
    int chunks;
};

// y = (x - mean) * invstd * gamma + beta [+ addend], then the activation. The statistics come from the gathered moments
// of the pools or, if `frozen`, are the running ones. `y` may be null. The data for the backward goes to `saved`; then the
// running statistics move. Grid: any number of blocks (inner > 1), or tiles; slots; chunks.
struct NormaliseArguments {
    Tiling tiling;
    const void* x;
    const void* addend;  // null: none; `normalise` without an activation ignores it
    void* y;
    Affine affine;
    const double* gathered;  // [slots of all replicas][1 + 2C]
    Lists used, fed;
    double epsilon;
    Saved* saved;       // [slots][channels]
    Lists tracked;      // the pools that update the running statistics
    int pools;          // their number
    const double* own;  // the packed moments of this replica's slots
    int frozen;
    int unbiased;  // selects the variance that updates the running one
    int watch;     // leaves moments that are not finite out of the running statistics, and reports the first
    double momentum;
    void *running_mean, *running_var;  // null: no running statistics
    Status* status;
};

// partial [chunks][slots] of packed gradients, of dz. The sign of z comes from y if that is not null, else from x. If
// `dz` is not null, it is written. `grad_input` computes z again, or gets dz as its argument. Grid as for moments.
struct GradSumsArguments {
    Tiling tiling;
    const void *dy, *x, *y;
    void* dz;
    Affine affine;
    const Saved* saved;
    double* partial;
};

// dx, added to if `add`, and this replica's part of dgamma and dbeta; all three may be null. For `masked_grad_input`, no
// gradient flows through statistics where the expanded mask is 0. Grid as for normalise.
struct GradInputArguments {
    Tiling tiling;
    const void *dy, *x;
    void* dx;
    Affine affine;
    const Saved* saved;
    const double* gathered;  // packed gradients of all replicas
    Lists users;
    const double* own;  // those of this replica
    void *dgamma, *dbeta;
    int add, add_dgamma, add_dbeta;
    const void* mask;
};

// Adds `from` to `to`.
struct AddArguments {
    Index n;
    const void* from;
    void* to;
};

}  // namespace cuda
}  // namespace syncbn

// Defines the activations y = f(z) after a normalisation. The kernels of the CPU and those of CUDA include them from
// here.
//
// An activation is a trait:
//     kChanges                    y is not z
//     On<V, C>                    f on values V: scalars, or vectors of the scalar C
//         apply(z)                z becomes y
//         through(grad, z)        the gradient with respect to y becomes that with respect to z. After an addition only
//                                 y is kept, and it gets y; otherwise z is computed again from x
#pragma once

#if defined(__CUDACC__) || defined(CUDA_EMULATOR)
#define SYNCBN_ANYWHERE __device__ inline
#else
#define SYNCBN_ANYWHERE inline __attribute__((always_inline))
#endif

namespace syncbn {

struct Identity {
    static constexpr bool kChanges = false;

    template <typename V, typename C = V>
    struct On {
        SYNCBN_ANYWHERE On(double, double) {}
        SYNCBN_ANYWHERE void apply(V*) const {}
        SYNCBN_ANYWHERE void through(V*, const V&) const {}
    };
};

// y = z if z > 0, but at most `ceiling`, else slope * z. Slope 0 is ReLU, and gives 0 for minus infinity too. A NaN
// stays a NaN. A slope of 1 leaves z as it is; only ReLU has a ceiling. An infinite z is below no ceiling, and passes
// its gradient on.
struct Rectifier {
    static constexpr bool kChanges = true;

    template <typename V, typename C = V>
    struct On {
        V slope, ceiling, floor;  // NVRTC has no name for infinity
        SYNCBN_ANYWHERE On(double slope, double ceiling)
            : slope(V{} + static_cast<C>(slope)),
              ceiling(V{} + static_cast<C>(ceiling)),
              floor(V{} + (slope == 0 ? C(0) : static_cast<C>(-1 / 0.0))) {}
        SYNCBN_ANYWHERE void apply(V* z) const {
            const V above = ceiling < *z ? ceiling : *z, below = (*z > floor ? *z : floor) * slope;
            *z = *z <= 0 ? below : above;
        }
        SYNCBN_ANYWHERE void through(V* grad, const V& z) const {
            *grad = (z > 0) & ((z < ceiling) | (ceiling * 2 == ceiling)) ? *grad : *grad * slope;
        }
    };
};

}  // namespace syncbn

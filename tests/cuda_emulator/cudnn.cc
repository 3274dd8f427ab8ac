// Convolutions of cuDNN, of float32 in NCHW, as MXNet calls them: loops on the host, behind what the stream
// holds. The algorithm is always the first, and needs no workspace.
#include <array>
#include <cstdint>

#include "emulator.h"

using namespace emulator;

namespace {

enum { kGood = 0, kBadParameter = 3, kFailed = 8, kUnsupported = 9 };
constexpr int kFloat = 0, kNchw = 0;

struct Handle {
    void* stream = nullptr;
};

// Of a tensor or a filter: [images, channels, height, width]
struct Shape {
    int type = kFloat;
    int64_t n = 0, c = 0, h = 0, w = 0;
    size_t size() const { return static_cast<size_t>(n * c * h * w); }
    int64_t at(int64_t i, int64_t channel, int64_t y, int64_t x) const { return ((i * c + channel) * h + y) * w + x; }
};
// Of a convolution.
struct Window {
    int64_t pad_h = 0, pad_w = 0, stride_h = 1, stride_w = 1;
};

struct Performance {  // cudnnConvolutionFwdAlgoPerf_t, and those of the gradients
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, math, reserved[3];
};
static_assert(sizeof(Performance) == 48, "cuDNN's layout");

enum { kX, kW, kY };
struct Tensor {
    Shape shape;
    const void* data;
    Bytes bytes() const { return {data, shape.size() * sizeof(float)}; }
};
using Tensors = std::array<Tensor, 3>;

// One of the three becomes alpha * (the products of the others, which belong together, added up) + beta * itself.
template <int kOut>
int convolve(const Handle* handle, const void* alpha, const void* beta, const Window* by, const Tensors& of) {
    constexpr int kOne = kOut == kX ? kW : kX, kOther = kOut == kY ? kW : kY;
    const StreamPointer stream = find_stream(handle->stream);
    if (!stream) return kBadParameter;
    for (const Tensor& one : of)
        if (one.shape.type != kFloat) return kUnsupported;
    const float a = *static_cast<const float*>(alpha), b = *static_cast<const float*>(beta);
    count(device_of(*stream), kLaunches);
    const auto work = [=, window = *by] {
        const Shape &x = of[kX].shape, &w = of[kW].shape, &y = of[kY].shape;
        const float* const one = static_cast<const float*>(of[kOne].data);
        const float* const other = static_cast<const float*>(of[kOther].data);
        std::vector<float> sums(of[kOut].shape.size());
        for (int64_t i = 0; i < y.n; ++i)
            for (int64_t to = 0; to < y.c; ++to)
                for (int64_t from = 0; from < w.c; ++from)
                    for (int64_t a = 0; a < w.h; ++a)
                        for (int64_t b = 0; b < w.w; ++b)
                            for (int64_t row = 0; row < y.h; ++row) {
                                const int64_t x_row = row * window.stride_h - window.pad_h + a;
                                if (x_row < 0 || x_row >= x.h) continue;
                                for (int64_t column = 0; column < y.w; ++column) {
                                    const int64_t x_column = column * window.stride_w - window.pad_w + b;
                                    if (x_column < 0 || x_column >= x.w) continue;
                                    const int64_t at[] = {x.at(i, from, x_row, x_column), w.at(to, from, a, b),
                                                          y.at(i, to, row, column)};
                                    sums[at[kOut]] += one[at[kOne]] * other[at[kOther]];
                                }
                            }
        float* const out = static_cast<float*>(const_cast<void*>(of[kOut].data));
        for (size_t i = 0; i < sums.size(); ++i) out[i] = a * sums[i] + (b == 0 ? 0 : b * out[i]);
    };
    const Status status =
        compute(stream, "a convolution", {of[kOne].bytes(), of[kOther].bytes()}, of[kOut].bytes(), work);
    return status ? kFailed : kGood;
}

template <typename T>
int create(T** out) {
    *out = new T;
    return kGood;
}
template <typename T>
int destroy(T* it) {
    delete it;
    return kGood;
}

}  // namespace

extern "C" {

unsigned long cudnnGetVersion() { return 8101; }  // what MXNet was compiled with
int cudnnCreate(Handle** out) { return create(out); }
int cudnnDestroy(Handle* handle) { return destroy(handle); }
int cudnnSetStream(Handle* handle, void* stream) {
    handle->stream = stream;
    return kGood;
}

// ---- descriptors ---------------------------------------------------------------------------------------------

int cudnnCreateTensorDescriptor(Shape** out) { return create(out); }
int cudnnDestroyTensorDescriptor(Shape* it) { return destroy(it); }
int cudnnCreateFilterDescriptor(Shape** out) { return create(out); }
int cudnnDestroyFilterDescriptor(Shape* it) { return destroy(it); }
int cudnnCreateConvolutionDescriptor(Window** out) { return create(out); }
int cudnnDestroyConvolutionDescriptor(Window* it) { return destroy(it); }

int cudnnSetTensor4dDescriptor(Shape* it, int format, int type, int n, int c, int h, int w) {
    *it = {type, n, c, h, w};
    return format == kNchw ? kGood : kUnsupported;
}
int cudnnSetTensorNdDescriptor(Shape* it, int type, int count, const int* shape, const int* strides) {
    if (count != 4 || (strides[1] != shape[2] * shape[3] && shape[1] > 1)) return kUnsupported;
    return cudnnSetTensor4dDescriptor(it, kNchw, type, shape[0], shape[1], shape[2], shape[3]);
}
int cudnnSetFilter4dDescriptor(Shape* it, int type, int format, int k, int c, int h, int w) {
    return cudnnSetTensor4dDescriptor(it, format, type, k, c, h, w);
}
int cudnnSetConvolution2dDescriptor(Window* it, int pad_h, int pad_w, int stride_h, int stride_w, int dilate_h,
                                    int dilate_w, int, int) {
    *it = {pad_h, pad_w, stride_h, stride_w};
    return dilate_h == 1 && dilate_w == 1 ? kGood : kUnsupported;
}
int cudnnSetConvolutionMathType(Window*, int) { return kGood; }
int cudnnSetConvolutionGroupCount(Window*, int groups) { return groups == 1 ? kGood : kUnsupported; }

// ---- algorithms ----------------------------------------------------------------------------------------------

#define ALGORITHMS(WAY)                                                                                              \
    int cudnnGetConvolution##WAY##AlgorithmMaxCount(Handle*, int* count) {                                           \
        *count = 1;                                                                                                  \
        return kGood;                                                                                                \
    }                                                                                                                \
    int cudnnGetConvolution##WAY##Algorithm_v7(Handle*, void*, void*, void*, void*, int, int* count,                 \
                                               Performance* found) {                                                 \
        *count = 1;                                                                                                  \
        *found = {0, kGood, 0.0f, 0, 1, 0, {}};                                                                      \
        return kGood;                                                                                                \
    }                                                                                                                \
    int cudnnFindConvolution##WAY##Algorithm(Handle*, void*, void*, void*, void*, int, int* count,                   \
                                             Performance* found) {                                                   \
        return cudnnGetConvolution##WAY##Algorithm_v7(nullptr, nullptr, nullptr, nullptr, nullptr, 1, count, found); \
    }                                                                                                                \
    int cudnnGetConvolution##WAY##WorkspaceSize(Handle*, void*, void*, void*, void*, int, size_t* size) {            \
        *size = 0;                                                                                                   \
        return kGood;                                                                                                \
    }
ALGORITHMS(Forward)
ALGORITHMS(BackwardData)
ALGORITHMS(BackwardFilter)

// ---- what computes ---------------------------------------------------------------------------------------------

int cudnnConvolutionForward(Handle* handle, const void* alpha, const Shape* x, const void* x_data, const Shape* w,
                            const void* w_data, const Window* window, int, void*, size_t, const void* beta,
                            const Shape* y, void* y_data) {
    return convolve<kY>(handle, alpha, beta, window, {{{*x, x_data}, {*w, w_data}, {*y, y_data}}});
}
int cudnnConvolutionBackwardData(Handle* handle, const void* alpha, const Shape* w, const void* w_data, const Shape* dy,
                                 const void* dy_data, const Window* window, int, void*, size_t, const void* beta,
                                 const Shape* dx, void* dx_data) {
    return convolve<kX>(handle, alpha, beta, window, {{{*dx, dx_data}, {*w, w_data}, {*dy, dy_data}}});
}
int cudnnConvolutionBackwardFilter(Handle* handle, const void* alpha, const Shape* x, const void* x_data,
                                   const Shape* dy, const void* dy_data, const Window* window, int, void*, size_t,
                                   const void* beta, const Shape* dw, void* dw_data) {
    return convolve<kW>(handle, alpha, beta, window, {{{*x, x_data}, {*dw, dw_data}, {*dy, dy_data}}});
}
}

// Convolutions and pooling of cuDNN, of float32 in NCHW, as MXNet calls them: loops on the host, behind what the stream
// holds. The algorithm is always the first, and needs no workspace.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "copies.h"
#include "device.h"

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
// Of a convolution or of pooling, whose windows have an extent of their own.
struct Window {
    int64_t pad_h = 0, pad_w = 0, stride_h = 1, stride_w = 1, dilate_h = 1, dilate_w = 1, h = 0, w = 0;
    int groups = 1, mode = 0;
};
enum { kMax = 0, kMeanWithPadding = 1, kMean = 2, kMaxDeterministic = 3 };

struct Performance {  // cudnnConvolutionFwdAlgoPerf_t, and those of the gradients
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, math, reserved[3];
};
static_assert(sizeof(Performance) == 48, "cuDNN's layout");

struct Input {
    const void* data;
    const Shape& shape;
};

// In the stream, where all these are float32 in this device's memory:
// out = alpha * (what `work` adds to zeros) + beta * out
int launch(const Handle* handle, const std::string& name, const std::vector<Input>& inputs, const void* alpha,
           const void* beta, void* out, const Shape& shape, std::function<void(float*)> work) {
    const StreamPointer stream = find_stream(handle->stream);
    if (!stream) return kBadParameter;
    std::vector<Bytes> reads;
    for (const Input& input : inputs) {
        if (input.shape.type != kFloat) return kUnsupported;
        reads.push_back({input.data, input.shape.size() * sizeof(float)});
    }
    const float a = *static_cast<const float*>(alpha), b = *static_cast<const float*>(beta);
    const size_t size = shape.size();
    count(device_of(*stream), kLaunches);
    const Status status = compute(stream, name, reads, {out, size * sizeof(float)}, [=] {
        std::vector<float> sums(size, 0.0f);
        work(sums.data());
        float* const to = static_cast<float*>(out);
        for (size_t i = 0; i < size; ++i) to[i] = a * sums[i] + (b == 0 ? 0 : b * to[i]);
    });
    return status ? kFailed : kGood;
}

// Calls `visit(place in x, place in w, place in y)` for each product of a convolution.
template <typename Visit>
void products(const Shape& x, const Shape& w, const Shape& y, const Window& window, Visit visit) {
    const int64_t of_group = y.c / window.groups;  // w.c: channels of x in a group
    for (int64_t i = 0; i < y.n; ++i)
        for (int64_t to = 0; to < y.c; ++to)
            for (int64_t from = 0; from < w.c; ++from)
                for (int64_t a = 0; a < w.h; ++a)
                    for (int64_t b = 0; b < w.w; ++b)
                        for (int64_t row = 0; row < y.h; ++row) {
                            const int64_t x_row = row * window.stride_h - window.pad_h + a * window.dilate_h;
                            if (x_row < 0 || x_row >= x.h) continue;
                            for (int64_t column = 0; column < y.w; ++column) {
                                const int64_t x_column = column * window.stride_w - window.pad_w + b * window.dilate_w;
                                if (x_column < 0 || x_column >= x.w) continue;
                                visit(x.at(i, to / of_group * w.c + from, x_row, x_column), w.at(to, from, a, b),
                                      y.at(i, to, row, column));
                            }
                        }
}

// Calls `visit(place in y, places in x, the divisor of a mean)` for each window of pooling.
template <typename Visit>
void windows(const Shape& x, const Shape& y, const Window& window, Visit visit) {
    std::vector<int64_t> places;
    for (int64_t i = 0; i < y.n; ++i)
        for (int64_t channel = 0; channel < y.c; ++channel)
            for (int64_t row = 0; row < y.h; ++row)
                for (int64_t column = 0; column < y.w; ++column) {
                    places.clear();
                    for (int64_t a = 0; a < window.h; ++a)
                        for (int64_t b = 0; b < window.w; ++b) {
                            const int64_t x_row = row * window.stride_h - window.pad_h + a;
                            const int64_t x_column = column * window.stride_w - window.pad_w + b;
                            if (x_row >= 0 && x_row < x.h && x_column >= 0 && x_column < x.w)
                                places.push_back(x.at(i, channel, x_row, x_column));
                        }
                    const size_t all = static_cast<size_t>(window.h * window.w);
                    visit(y.at(i, channel, row, column), places,
                          static_cast<float>(window.mode == kMeanWithPadding ? all : places.size()));
                }
}
int64_t highest(const std::vector<int64_t>& places, const float* x) {
    int64_t found = places.front();
    for (const int64_t place : places)
        if (x[place] > x[found]) found = place;
    return found;
}
bool is_max(const Window& window) { return window.mode == kMax || window.mode == kMaxDeterministic; }

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
const char* cudnnGetErrorString(int status) {
    return status == kUnsupported ? "not in the emulator" : status == kGood ? "no error" : "an error on the emulator";
}

// ---- descriptors ---------------------------------------------------------------------------------------------

int cudnnCreateTensorDescriptor(Shape** out) { return create(out); }
int cudnnDestroyTensorDescriptor(Shape* it) { return destroy(it); }
int cudnnCreateFilterDescriptor(Shape** out) { return create(out); }
int cudnnDestroyFilterDescriptor(Shape* it) { return destroy(it); }
int cudnnCreateConvolutionDescriptor(Window** out) { return create(out); }
int cudnnDestroyConvolutionDescriptor(Window* it) { return destroy(it); }
int cudnnCreatePoolingDescriptor(Window** out) { return create(out); }
int cudnnDestroyPoolingDescriptor(Window* it) { return destroy(it); }

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
    *it = {pad_h, pad_w, stride_h, stride_w, dilate_h, dilate_w};
    return kGood;
}
int cudnnSetConvolutionMathType(Window*, int) { return kGood; }
int cudnnSetConvolutionGroupCount(Window* it, int groups) {
    it->groups = groups;
    return kGood;
}
int cudnnSetPooling2dDescriptor(Window* it, int mode, int, int h, int w, int pad_h, int pad_w, int stride_h,
                                int stride_w) {
    *it = {pad_h, pad_w, stride_h, stride_w, 1, 1, h, w, 1, mode};
    return kGood;
}

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
    const float *from = static_cast<const float*>(x_data), *by = static_cast<const float*>(w_data);
    return launch(handle, "cudnnConvolutionForward", {{x_data, *x}, {w_data, *w}}, alpha, beta, y_data, *y,
                  [=, x = *x, w = *w, y = *y, window = *window](float* sums) {
                      products(x, w, y, window, [&](int64_t i, int64_t k, int64_t j) { sums[j] += from[i] * by[k]; });
                  });
}
int cudnnConvolutionBackwardData(Handle* handle, const void* alpha, const Shape* w, const void* w_data, const Shape* dy,
                                 const void* dy_data, const Window* window, int, void*, size_t, const void* beta,
                                 const Shape* dx, void* dx_data) {
    const float *by = static_cast<const float*>(w_data), *from = static_cast<const float*>(dy_data);
    return launch(handle, "cudnnConvolutionBackwardData", {{w_data, *w}, {dy_data, *dy}}, alpha, beta, dx_data, *dx,
                  [=, x = *dx, w = *w, y = *dy, window = *window](float* sums) {
                      products(x, w, y, window, [&](int64_t i, int64_t k, int64_t j) { sums[i] += from[j] * by[k]; });
                  });
}
int cudnnConvolutionBackwardFilter(Handle* handle, const void* alpha, const Shape* x, const void* x_data,
                                   const Shape* dy, const void* dy_data, const Window* window, int, void*, size_t,
                                   const void* beta, const Shape* dw, void* dw_data) {
    const float *from = static_cast<const float*>(x_data), *by = static_cast<const float*>(dy_data);
    return launch(handle, "cudnnConvolutionBackwardFilter", {{x_data, *x}, {dy_data, *dy}}, alpha, beta, dw_data, *dw,
                  [=, x = *x, w = *dw, y = *dy, window = *window](float* sums) {
                      products(x, w, y, window, [&](int64_t i, int64_t k, int64_t j) { sums[k] += from[i] * by[j]; });
                  });
}
int cudnnConvolutionBackwardBias(Handle* handle, const void* alpha, const Shape* dy, const void* dy_data,
                                 const void* beta, const Shape* db, void* db_data) {
    const float* from = static_cast<const float*>(dy_data);
    return launch(handle, "cudnnConvolutionBackwardBias", {{dy_data, *dy}}, alpha, beta, db_data, *db,
                  [=, y = *dy](float* sums) {
                      for (size_t j = 0; j < y.size(); ++j)
                          sums[j / static_cast<size_t>(y.h * y.w) % static_cast<size_t>(y.c)] += from[j];
                  });
}
int cudnnAddTensor(Handle* handle, const void* alpha, const Shape* bias, const void* bias_data, const void* beta,
                   const Shape* y, void* y_data) {
    const float* from = static_cast<const float*>(bias_data);
    if (bias->size() != static_cast<size_t>(y->c)) return kUnsupported;
    return launch(handle, "cudnnAddTensor", {{bias_data, *bias}, {y_data, *y}}, alpha, beta, y_data, *y,
                  [=, y = *y](float* sums) {
                      for (size_t j = 0; j < y.size(); ++j)
                          sums[j] = from[j / static_cast<size_t>(y.h * y.w) % static_cast<size_t>(y.c)];
                  });
}
int cudnnPoolingForward(Handle* handle, const Window* window, const void* alpha, const Shape* x, const void* x_data,
                        const void* beta, const Shape* y, void* y_data) {
    const float* from = static_cast<const float*>(x_data);
    return launch(handle, "cudnnPoolingForward", {{x_data, *x}}, alpha, beta, y_data, *y,
                  [=, x = *x, y = *y, window = *window](float* sums) {
                      windows(x, y, window, [&](int64_t j, const std::vector<int64_t>& places, float divisor) {
                          if (is_max(window))
                              sums[j] = from[highest(places, from)];
                          else
                              for (const int64_t place : places) sums[j] += from[place] / divisor;
                      });
                  });
}
int cudnnPoolingBackward(Handle* handle, const Window* window, const void* alpha, const Shape* y, const void* y_data,
                         const Shape* dy, const void* dy_data, const Shape* x, const void* x_data, const void* beta,
                         const Shape* dx, void* dx_data) {
    const float *heads = static_cast<const float*>(dy_data), *from = static_cast<const float*>(x_data);
    return launch(handle, "cudnnPoolingBackward", {{y_data, *y}, {dy_data, *dy}, {x_data, *x}}, alpha, beta, dx_data,
                  *dx, [=, x = *x, y = *y, window = *window](float* sums) {
                      windows(x, y, window, [&](int64_t j, const std::vector<int64_t>& places, float divisor) {
                          if (is_max(window))
                              sums[highest(places, from)] += heads[j];
                          else
                              for (const int64_t place : places) sums[place] += heads[j] / divisor;
                      });
                  });
}
}

#include "tensor.h"

#include <string>

#include "failure.h"
#include "mxnet_api.h"

namespace syncbn {

void* data(Array array) {
    if (array.values != nullptr) return array.values;
    void* out = nullptr;
    if (mx.MXNDArrayGetData(array.handle, &out) == 0) return out;
    const std::string error = mx.MXGetLastError();
    throw Failure("MXNet gave no memory for an array: " + error.substr(0, error.find('\n')));  // a stack trace follows
}

void Tensor::lay_out(int64_t block) {
    shape.block = block;
    for (Slot& slot : slots) slot.shape.block = block;
}

void Tensor::cut(int64_t count) {
    slots.clear();
    const int64_t per_sample = samples == 0 ? 0 : shape.outer / samples;
    int64_t sample = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t size = samples / count + (i < samples % count);
        Shape part = shape;
        part.outer = size * per_sample;
        slots.push_back({part, sample * per_sample * shape.channels * shape.inner, nullptr, nullptr});
        sample += size;
    }
}

}  // namespace syncbn

// The CPU's kernels on MXNet's arrays.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend.h"
#include "cpu/half.h"
#include "cpu/kernels.h"
#include "meeting/process.h"
#include "mxnet_api.h"

namespace syncbn {
namespace {

template <typename T = void>
T* data(Array array) {
    void* out = nullptr;
    if (mx.ndarray_get_data(array, &out) != 0) throw Failure("MXNet gave no memory for an array");
    return static_cast<T*>(out);
}

void* at(void* values, const Batch& batch, const Slot& slot) {
    return static_cast<char*>(values) + slot.first * size_of(batch.type);
}

Vector vector(Array array, Type type, int64_t n) {
    if (type == Type::kFloat64) return Vector(data<double>(array), data<double>(array) + n);
    return Vector(data<float>(array), data<float>(array) + n);
}

Vector scale(const Slot& slot, const Batch& batch, const Affine& affine) {
    if (affine.fix_gamma) return slot.used->invstd;
    Vector out = vector(affine.gamma, batch.parameter_type(), batch.shape.channels);
    for (size_t c = 0; c < out.size(); ++c) out[c] *= slot.used->invstd[c];
    return out;
}

template <typename P, typename F>
void replace(P* out, size_t n, F value) {
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<P>(value(i, static_cast<double>(out[i])));
}

// out[i] = value(i, out[i])
template <typename F>
void replace(Array out, Type type, size_t n, F value) {
    if (type == Type::kFloat64)
        replace(data<double>(out), n, value);
    else
        replace(data<float>(out), n, value);
}

template <typename T>
void add_values(const T* from, int64_t n, T* to) {
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

class CpuBackend : public Backend {
  public:
    Vector moments(Array x, const Batch& batch) override {
        const int64_t channels = batch.shape.channels;
        Vector packed(batch.slots.size() * (1 + 2 * channels));
        double* part = packed.data();
        for (const Slot& slot : batch.slots) {
            part[0] = static_cast<double>(slot.shape.per_channel());
            cpu::moments(at(data(x), batch, slot), batch.type, slot.shape, threads, part + 1, part + 1 + channels);
            part += 1 + 2 * channels;
        }
        return packed;
    }

    Statistic frozen(Array running_mean, Array running_var, const Batch& batch, double epsilon) override {
        const int64_t channels = batch.shape.channels;
        Vector invstd = vector(running_var, batch.parameter_type(), channels);
        for (double& v : invstd) v = 1 / std::sqrt(v + epsilon);
        return {1, vector(running_mean, batch.parameter_type(), channels), std::move(invstd)};
    }

    void normalise(Array x, const Batch& batch, const Affine& affine, Array y, bool add) override {
        const Vector shift = vector(affine.beta, batch.parameter_type(), batch.shape.channels);
        for (const Slot& slot : batch.slots)
            if (slot.used)
                cpu::normalise(at(data(x), batch, slot), batch.type, slot.shape, threads, slot.used->mean.data(),
                               scale(slot, batch, affine).data(), shift.data(), at(data(y), batch, slot), add);
    }

    void track(const Vector& mean, const Vector& variance, double momentum, Type type, Array running_mean,
               Array running_var) override {
        const auto towards = [momentum](const Vector& batch) {
            return [momentum, &batch](size_t c, double old) { return momentum * old + (1 - momentum) * batch[c]; };
        };
        replace(running_mean, type, mean.size(), towards(mean));
        replace(running_var, type, mean.size(), towards(variance));
    }

    Vector grad_sums(Array dy, Array x, const Batch& batch) override {
        const int64_t channels = batch.shape.channels;
        Vector sums(batch.slots.size() * 2 * channels);
        double* part = sums.data();
        for (const Slot& slot : batch.slots) {
            if (slot.used)
                cpu::grad_sums(at(data(dy), batch, slot), at(data(x), batch, slot), batch.type, slot.shape, threads,
                               slot.used->mean.data(), slot.used->invstd.data(), part, part + channels);
            part += 2 * channels;
        }
        return sums;
    }

    void grad_input(Array dy, Array x, const Batch& batch, const Affine& affine, const Pull& pull, Array dx,
                    bool add) override {
        for (size_t i = 0; i < batch.slots.size(); ++i) {
            const Slot& slot = batch.slots[i];
            if (!slot.used) continue;
            const size_t first = i * batch.shape.channels;
            cpu::grad_input(at(data(dy), batch, slot), at(data(x), batch, slot), batch.type, slot.shape, threads,
                            slot.own->mean.data(), scale(slot, batch, affine).data(), &pull.mean_dy[first],
                            &pull.slope[first], at(data(dx), batch, slot), add);
        }
    }

    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        if (!add)
            std::memcpy(data(to), data(from), static_cast<size_t>(n * size_of(type)));
        else if (type == Type::kFloat64)
            add_values(data<double>(from), n, data<double>(to));
        else if (type == Type::kFloat32)
            add_values(data<float>(from), n, data<float>(to));
        else
            for (int64_t i = 0; i < n; ++i)
                data<uint16_t>(to)[i] =
                    float_to_half(half_to_float(data<uint16_t>(to)[i]) + half_to_float(data<uint16_t>(from)[i]));
    }

    Vector read(Array from, int64_t n) override { return vector(from, Type::kFloat64, n); }

    void give(const Vector& values, Type type, Array out, bool add) override {
        replace(out, type, values.size(), [&](size_t i, double old) { return values[i] + (add ? old : 0.0); });
    }

    void fill(Array out, Type type, int64_t n, double value) override {
        if (type == Type::kFloat64)
            std::fill_n(data<double>(out), n, value);
        else if (type == Type::kFloat32)
            std::fill_n(data<float>(out), n, static_cast<float>(value));
        else
            std::fill_n(data<uint16_t>(out), n, value != value ? uint16_t{0x7e00} : uint16_t{0});
    }
};

}  // namespace

std::unique_ptr<Backend> cpu_backend() { return std::make_unique<CpuBackend>(); }

}  // namespace syncbn

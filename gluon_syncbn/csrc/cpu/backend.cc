#include "cpu/backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/numbers.h"
#include "pooling/statistics.h"

namespace syncbn {
namespace cpu {
namespace {

// The address of the slot's part; null for null.
const void* at(const void* values, const Tensor& tensor, const Slot& slot) {
    return values == nullptr ? nullptr : static_cast<const char*>(values) + slot.first * size_of(tensor.type);
}
void* at(void* values, const Tensor& tensor, const Slot& slot) {
    return const_cast<void*>(at(static_cast<const void*>(values), tensor, slot));
}

Vector vector(Array array, Type type, int64_t n) {
    Vector out(static_cast<size_t>(n));
    with_type(type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T* const values = data<T>(array);
        for (int64_t i = 0; i < n; ++i) out[i] = Value<T>::load(values + i);
    });
    return out;
}

Vector scale_of(const Slot& slot, const Tensor& tensor, const Affine& affine) {
    if (affine.fix_gamma) return slot.used->invstd;
    Vector out = vector(affine.gamma, tensor.parameter_type(), tensor.shape.channels);
    for (size_t c = 0; c < out.size(); ++c) out[c] *= slot.used->invstd[c];
    return out;
}

// Returns the shift of each channel.
Vector shift_of(const Tensor& tensor, const Affine& affine) {
    return vector(affine.beta, tensor.parameter_type(), tensor.shape.channels);
}

// The mask of values that are not 0, but for bits that do not matter.
template <typename Bits>
void expand(const void* values, const Mask& mask, float* out) {
    const auto* const from = static_cast<const Bits*>(values);
    const Bits matters = static_cast<Bits>(~(mask.floating != 0 ? Bits{1} << (8 * sizeof(Bits) - 1) : Bits{0}));
    const auto *extents = mask.extents, *strides = mask.strides;
    for (int64_t i = 0; i < extents[0]; ++i)
        for (int64_t j = 0; j < extents[1]; ++j)
            for (int64_t k = 0; k < extents[2]; ++k) {
                const Bits* row = from + i * strides[0] + j * strides[1] + k * strides[2];
                for (int64_t l = 0; l < extents[3]; ++l) *out++ = (row[l * strides[3]] & matters) != 0;
            }
}

// to[i] = value(i, to[i])
template <typename F>
void replace(Array to, Type type, int64_t n, const F& value) {
    with_type(type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        using C = typename Value<T>::Compute;
        T* const out = data<T>(to);
        for (int64_t i = 0; i < n; ++i) Value<T>::store(out + i, static_cast<C>(value(i, Value<T>::load(out + i))));
    });
}

}  // namespace

std::vector<float> Backend::mask(const void* values, const Mask& layout) const {
    const auto* extents = layout.extents;
    std::vector<float> out(static_cast<size_t>(extents[0] * extents[1] * extents[2] * extents[3]));
    switch (layout.bytes) {
        case 1:
            expand<uint8_t>(values, layout, out.data());
            return out;
        case 2:
            expand<uint16_t>(values, layout, out.data());
            return out;
        case 4:
            expand<uint32_t>(values, layout, out.data());
            return out;
        case 8:
            expand<uint64_t>(values, layout, out.data());
            return out;
    }
    throw std::invalid_argument("a mask has values of " + std::to_string(layout.bytes) + " bytes");
}

Vector Backend::moments(Array x, const Tensor& tensor, const float* mask) const {
    const int64_t channels = tensor.shape.channels;
    Vector packed(tensor.slots.size() * moments_length(channels));
    double* part = packed.data();
    for (const Slot& slot : tensor.slots) {
        part[0] = static_cast<double>(
            cpu::moments(work(tensor, slot, mask), at(data(x), tensor, slot), part + 1, part + 1 + channels));
        part += moments_length(channels);
    }
    return packed;
}

Statistic Backend::frozen(Array running_mean, Array running_var, const Tensor& tensor, double epsilon) const {
    const int64_t channels = tensor.shape.channels;
    Vector variance = vector(running_var, tensor.parameter_type(), channels), invstd;
    for (double v : variance) invstd.push_back(1 / std::sqrt(v + epsilon));
    return {1, vector(running_mean, tensor.parameter_type(), channels), std::move(variance), std::move(invstd)};
}

void Backend::normalise(Array x, const Tensor& tensor, const Affine& affine, const void* addend, Array y,
                        bool add) const {
    const Vector shift = shift_of(tensor, affine);
    for (const Slot& slot : tensor.slots) {
        if (!slot.used) continue;
        const Vector scale = scale_of(slot, tensor, affine);
        cpu::normalise(
            work(tensor, slot), at(data(x), tensor, slot),
            {{slot.used->mean.data(), scale.data(), shift.data(), affine.activation}, at(addend, tensor, slot), add},
            at(data(y), tensor, slot));
    }
}

void Backend::update_running(const Vector& mean, const Vector& variance, double momentum, Type type, Array running_mean,
                             Array running_var) const {
    const auto towards = [momentum](const Vector& values) {
        return [momentum, &values](int64_t c, double old) { return momentum * old + (1 - momentum) * values[c]; };
    };
    replace(running_mean, type, static_cast<int64_t>(mean.size()), towards(mean));
    replace(running_var, type, static_cast<int64_t>(mean.size()), towards(variance));
}

Vector Backend::grad_sums(const void* dy, const void* x, const Tensor& tensor, const Affine& affine,
                          const std::optional<ByOutput>& by_output) const {
    const int64_t channels = tensor.shape.channels;
    const bool by_input = affine.activation.any() && !by_output;
    const Vector shift = by_input ? shift_of(tensor, affine) : Vector();
    Vector sums(tensor.slots.size() * gradients_length(channels));
    double* part = sums.data();
    for (const Slot& slot : tensor.slots) {
        if (slot.used) {
            const Vector scale = by_input ? scale_of(slot, tensor, affine) : Vector();
            cpu::grad_sums(work(tensor, slot), at(dy, tensor, slot), at(x, tensor, slot),
                           {{slot.used->mean.data(), scale.data(), shift.data(), affine.activation},
                            slot.used->invstd.data(),
                            by_output ? at(by_output->y, tensor, slot) : nullptr,
                            by_output ? at(by_output->dz, tensor, slot) : nullptr},
                           part, part + channels);
        }
        part += gradients_length(channels);
    }
    return sums;
}

void Backend::grad_input(const void* dy, const void* x, const Tensor& tensor, const Affine& affine,
                         const ThroughStatistics& through, const float* mask, Array dx, bool add) const {
    const Vector shift = affine.activation.any() ? shift_of(tensor, affine) : Vector();
    for (size_t i = 0; i < tensor.slots.size(); ++i) {
        const Slot& slot = tensor.slots[i];
        if (!slot.used) continue;
        const size_t first = i * tensor.shape.channels;
        const Vector scale = scale_of(slot, tensor, affine);
        cpu::grad_input(work(tensor, slot, mask), at(dy, tensor, slot), at(x, tensor, slot),
                        {{slot.used->mean.data(), scale.data(), shift.data(), affine.activation},
                         (slot.fed ? slot.fed : slot.used)->mean.data(),
                         &through.mean_dz[first],
                         &through.slope[first],
                         add},
                        at(data(dx), tensor, slot));
    }
}

void Backend::recover(const void* y, const Tensor& tensor, const Affine& affine, void* x) const {
    const Vector shift = shift_of(tensor, affine);
    for (const Slot& slot : tensor.slots) {
        if (!slot.used) continue;
        Vector mean = slot.used->mean, scale = scale_of(slot, tensor, affine);
        if (slot.used->none()) std::fill(scale.begin(), scale.end(), std::numeric_limits<double>::infinity());
        for (size_t c = 0; c < mean.size() && slot.fed && slot.used != slot.fed; ++c) {
            if (!slot.fed->constant(c)) continue;
            mean[c] = slot.fed->mean[c];  // for every y
            scale[c] = std::numeric_limits<double>::infinity();
        }
        cpu::recover(work(tensor, slot), at(y, tensor, slot),
                     {mean.data(), scale.data(), shift.data(), affine.activation}, at(x, tensor, slot));
    }
}

std::optional<Hidden> Backend::first_hidden(const Tensor& tensor, const Affine& affine) const {
    const size_t channels = static_cast<size_t>(tensor.shape.channels);
    const Vector gamma =
        affine.fix_gamma ? Vector(channels, 1.0) : vector(affine.gamma, tensor.parameter_type(), channels);
    const Vector beta = shift_of(tensor, affine);
    const Invertible invertible = invertible_by(tensor.type, affine.activation.slope);
    const auto by_another = [&](const Slot& slot, size_t c) {
        if (slot.used == slot.fed || !slot.fed || slot.fed->constant(c)) return false;
        return invertible.hidden_by_another(gamma[c], beta[c], std::sqrt(slot.fed->variance[c]),
                                            1 / slot.used->invstd[c], slot.fed->mean[c] - slot.used->mean[c]);
    };
    for (size_t c = 0; c < channels; ++c) {
        if (!invertible(gamma[c], beta[c])) return Hidden{static_cast<int64_t>(c), false};
        for (const Slot& slot : tensor.slots)
            if (slot.used && by_another(slot, c)) return Hidden{static_cast<int64_t>(c), true};
    }
    return std::nullopt;
}

void Backend::copy(const void* from, Type type, int64_t n, Array to, bool add) const {
    if (n == 0) return;  // and does not access memory
    if (!add) {
        std::memcpy(data(to), from, static_cast<size_t>(n * size_of(type)));
        return;
    }
    with_type(type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T* const values = static_cast<const T*>(from);
        T* const out = data<T>(to);
        for (int64_t i = 0; i < n; ++i) Value<T>::store(out + i, Value<T>::load(out + i) + Value<T>::load(values + i));
    });
}

Vector Backend::read(Array from, int64_t n) const { return vector(from, Type::kFloat64, n); }

void Backend::write(const Vector& values, Type type, Array out, bool add) const {
    replace(out, type, static_cast<int64_t>(values.size()),
            [&](int64_t i, double old) { return values[i] + (add ? old : 0.0); });
}

void Backend::fill(Array out, Type type, int64_t n, double value) const {
    with_type(type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        using C = typename Value<T>::Compute;
        T* const values = data<T>(out);
        for (int64_t i = 0; i < n; ++i) Value<T>::store(values + i, static_cast<C>(value));
    });
}

}  // namespace cpu
}  // namespace syncbn

// Runs a call on a CPU context: its statistics are vectors here, and so are the other replicas'.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "cpu/kernels.h"
#include "cpu/numbers.h"
#include "operator/call.h"
#include "point.h"
#include "pooling/statistics.h"

namespace syncbn {
namespace {

using cpu::Compute;
using cpu::Value;
using cpu::with_type;

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

Vector read(Array from, Type type, int64_t n) {
    Vector out(static_cast<size_t>(n));
    with_type(type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T* const values = data<T>(from);
        for (int64_t i = 0; i < n; ++i) out[i] = Value<T>::load(values + i);
    });
    return out;
}

// to[i] = value(i, to[i])
template <typename F>
void replace(Array to, Type type, int64_t n, const F& value) {
    with_type(type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        T* const out = data<T>(to);
        for (int64_t i = 0; i < n; ++i)
            Value<T>::store(out + i, static_cast<Compute<T>>(value(i, Value<T>::load(out + i))));
    });
}

// Writes values into an array, or adds them if `add`.
void write(const Vector& values, Type type, Array to, bool add) {
    replace(to, type, static_cast<int64_t>(values.size()),
            [&](int64_t i, double old) { return values[i] + (add ? old : 0.0); });
}

class HostCall : public Call {
  public:
    using Call::Call;

  protected:
    void begin_normalise(const Arrays& arrays) override;
    void normalise(const Arrays& arrays, const int* reqs) override;
    void begin_differentiate(const Arrays& arrays, const int* reqs) override;
    void differentiate(const Arrays& arrays, const int* reqs) override;
    void track(const Arrays& arrays) override {
        update_running(read(arrays[node_.batch()], Type::kFloat64, moments_length(channels())), arrays);
    }
    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        if (n == 0) return;  // and does not access memory
        if (!add) {
            std::memcpy(data(to), data(from), static_cast<size_t>(n * size_of(type)));
            return;
        }
        with_type(type, [&](auto* t) {
            using T = std::remove_pointer_t<decltype(t)>;
            const T* const values = data<T>(from);
            T* const out = data<T>(to);
            for (int64_t i = 0; i < n; ++i)
                Value<T>::store(out + i, Value<T>::load(out + i) + Value<T>::load(values + i));
        });
    }
    void fill(Array to, Type type, int64_t n, double value) override {
        replace(to, type, n, [value](int64_t, double) { return value; });
    }
    void fill_with_zeros(Array to, int64_t bytes) override { std::memset(data(to), 0, static_cast<size_t>(bytes)); }

  private:
    cpu::Work work(const Slot& slot, const std::vector<float>& mask = {}) const {
        static const int all = std::min(omp_get_num_procs(), omp_get_max_threads());
        const size_t replicas = frozen_ ? 1 : place_.meeting ? place_.meeting->replicas() : config_->replicas;
        const int threads = std::max(1, all / std::max(1, static_cast<int>(replicas)));  // the others use the rest
        return {tensor_.type, slot.shape, threads, mask.empty() ? nullptr : mask.data() + slot.first / channels()};
    }
    // The address of the slot's part; null for null.
    void* at(void* values, const Slot& slot) const {
        return values == nullptr ? nullptr : static_cast<char*>(values) + slot.first * size_of(tensor_.type);
    }
    // Of each channel.
    Vector scale_of(const Slot& slot, const Affine& affine) const {
        if (affine.fix_gamma) return slot.used->invstd;
        Vector out = read(affine.gamma, tensor_.parameter_type(), channels());
        for (size_t c = 0; c < out.size(); ++c) out[c] *= slot.used->invstd[c];
        return out;
    }
    Vector shift_of(const Affine& affine) const { return read(affine.beta, tensor_.parameter_type(), channels()); }
    void write_output(const Arrays& arrays, int req);
    // The mask, which is at this index, as `Work` has it; empty if all positions count.
    std::vector<float> mask(const Arrays& arrays, int index) const;
    // Throws if x cannot be found from y.
    void check_recoverable(const Affine& affine) const;
    // Computes x from y, into the memory of dx or of `scratch`.
    void* recovered(const Arrays& arrays, const int* reqs, std::vector<char>* scratch) const;
    std::vector<char> buffer() const {
        return std::vector<char>(static_cast<size_t>(tensor_.shape.size() * size_of(tensor_.type)));
    }
    std::shared_ptr<const Statistic> statistic(double count, Vector mean, Vector variance) const {
        Vector invstd;
        for (const double v : variance) invstd.push_back(1 / std::sqrt(v + node_.epsilon));
        return std::make_shared<Statistic>(Statistic{count, std::move(mean), std::move(variance), std::move(invstd)});
    }
    // Gives the slots their statistics. Returns [1, mean[C], variance[C]] for the running ones; [0, ...] if there is none.
    Vector assign_statistics(const Total& moments);
    void update_running(const Vector& batch, const Arrays& arrays);

    // The results of the first half of a backward.
    struct Gradients {
        void *x, *dz;  // dz is dy if `affine` has the activation
        Affine affine;
        Vector gamma, beta;  // this replica's part
        std::vector<char> x_buffer, dz_buffer;
    };

    Gradients gradients_;
};

std::vector<float> HostCall::mask(const Arrays& arrays, int index) const {
    if (!node_.masks || tensor_.shape.size() == 0) return {};
    std::vector<float> out(static_cast<size_t>(tensor_.shape.per_channel()));
    const int bytes = node_.mask.bytes;
    const auto expand_values = bytes == 1   ? expand<uint8_t>
                               : bytes == 2 ? expand<uint16_t>
                               : bytes == 4 ? expand<uint32_t>
                                            : expand<uint64_t>;
    expand_values(data(arrays[index]), node_.mask, out.data());
    return out;
}

// ---- statistics ----------------------------------------------------------------------------------------------

Vector HostCall::assign_statistics(const Total& moments) {
    const int64_t length = moments_length(channels());
    assign(counts_of(moments, length));
    std::map<int, std::shared_ptr<const Statistic>> statistics;  // by the beginning of the pool's list
    const auto of = [&](Range pool) -> std::shared_ptr<const Statistic> {
        if (pool.begin == pool.end) return nullptr;
        auto& found = statistics[pool.begin];
        if (found) return found;
        const Vector all = combined(pools_, pool, moments.values, length, Combine::kMerge);
        const auto mean = all.begin() + 1, m2 = mean + channels();
        Vector variance(m2, all.end());
        for (double& v : variance) v /= all[0];
        return found = statistic(all[0], Vector(mean, m2), std::move(variance));
    };
    const Vector zeros(static_cast<size_t>(channels()));
    const auto none = node_.masks ? std::make_shared<const Statistic>(Statistic{0, zeros, zeros, zeros}) : nullptr;
    for (size_t i = 0; i < tensor_.slots.size(); ++i) {
        if (tensor_.slots[i].shape.size() == 0) continue;
        tensor_.slots[i].fed = of(pools_.fed[i]);
        tensor_.slots[i].used = of(pools_.used[i]);
        if (!tensor_.slots[i].used) tensor_.slots[i].used = none;
    }
    Vector batch(static_cast<size_t>(length), 0.0);
    const double parts = static_cast<double>(pools_.tracked.size());
    for (const Range pool : pools_.tracked) {
        const auto part = of(pool);
        const double correction = node_.unbiased ? part->count / std::max(part->count - 1, 1.0) : 1;
        for (int64_t c = 0; c < channels(); ++c) {
            batch[1 + c] += part->mean[c] / parts;
            batch[1 + channels() + c] += part->variance[c] * correction / parts;
        }
    }
    batch[0] = parts > 0;
    return batch;
}

void HostCall::update_running(const Vector& batch, const Arrays& arrays) {
    if (batch[0] == 0) return;
    SYNCBN_POINT("before_running_statistics");
    const auto update = [&](int running, const double* values) {
        replace(arrays[running], tensor_.parameter_type(), channels(),
                [&](int64_t c, double old) { return node_.momentum * old + (1 - node_.momentum) * values[c]; });
    };
    update(node_.running_mean(), &batch[1]);
    update(node_.running_mean() + 1, &batch[1 + channels()]);
}

// ---- forward -------------------------------------------------------------------------------------------------

void HostCall::begin_normalise(const Arrays& arrays) {
    const std::vector<float> mask = this->mask(arrays, node_.mask_input());
    Vector own(tensor_.slots.size() * moments_length(channels()));  // [count, mean[C], m2[C]] of each slot
    double* part = own.data();
    for (const Slot& slot : tensor_.slots) {
        part[0] = static_cast<double>(
            cpu::moments(work(slot, mask), at(data(arrays[kX]), slot), part + 1, part + 1 + channels()));
        part += moments_length(channels());
    }
    check_finite(own);
    contribute(std::move(own));
}

void HostCall::normalise(const Arrays& arrays, const int* reqs) {
    Vector batch(moments_length(channels()), 0.0);
    const int running = node_.running_mean();
    if (frozen_) {
        Slot& all = tensor_.slots[0];
        if (tensor_.shape.size() > 0)
            all.fed = all.used = statistic(1, read(arrays[running], tensor_.parameter_type(), channels()),
                                           read(arrays[running + 1], tensor_.parameter_type(), channels()));
    } else if (recall_.again) {  // the running statistics have this batch already
        repeat();
    } else {
        batch = assign_statistics(total());
        if (watches() && first_not_finite(batch) >= 0) batch[0] = 0;
        remember(nullptr);
    }
    write_output(arrays, reqs[0]);
    if (node_.role == Role::kWhole) {
        update_running(batch, arrays);
    } else if (node_.role == Role::kMeet && reqs[1] != kNull) {
        if (!recall_.again && !place_.is_first_of_context()) batch[0] = 0;  // one replica of a context is enough
        write(batch, Type::kFloat64, arrays[node_.batch_output()], false);
    }
}

void HostCall::write_output(const Arrays& arrays, int req) {
    if (req == kNull) return;
    SYNCBN_POINT("before_output");
    void* const addend = node_.adds ? data(arrays[kAddend]) : nullptr;
    const Affine affine = this->affine(arrays, 0);
    const Vector shift = shift_of(affine);
    for (const Slot& slot : tensor_.slots) {
        if (!slot.used) continue;
        const Vector scale = scale_of(slot, affine);
        cpu::normalise(
            work(slot), at(data(arrays[kX]), slot),
            {{slot.used->mean.data(), scale.data(), shift.data(), affine.activation}, at(addend, slot), req == kAdd},
            at(data(arrays[node_.output()]), slot));
    }
}

// ---- backward ------------------------------------------------------------------------------------------------

void HostCall::check_recoverable(const Affine& affine) const {
    const Vector gamma = affine.fix_gamma ? Vector(static_cast<size_t>(channels()), 1.0)
                                          : read(affine.gamma, tensor_.parameter_type(), channels());
    const Vector beta = shift_of(affine);
    const Invertible invertible = invertible_by(tensor_.type, affine.activation.slope);
    const auto by_another = [&](const Slot& slot, size_t c) {
        if (slot.used == slot.fed || !slot.fed || slot.fed->constant(c)) return false;
        return invertible.hidden_by_another(gamma[c], beta[c], std::sqrt(slot.fed->variance[c]),
                                            1 / slot.used->invstd[c], slot.fed->mean[c] - slot.used->mean[c]);
    };
    for (size_t c = 0; c < gamma.size(); ++c) {
        if (!invertible(gamma[c], beta[c])) refuse_to_recover({static_cast<int64_t>(c), false});
        for (const Slot& slot : tensor_.slots)
            if (slot.used && by_another(slot, c)) refuse_to_recover({static_cast<int64_t>(c), true});
    }
}

void* HostCall::recovered(const Arrays& arrays, const int* reqs, std::vector<char>* scratch) const {
    const Affine affine = this->affine(arrays, node_.outputs());
    check_recoverable(affine);
    void* x = nullptr;
    if (reqs[kX] == kWrite) {
        x = data(arrays[node_.gradients() + kX]);
    } else {
        *scratch = buffer();
        x = scratch->data();
    }
    const Vector shift = shift_of(affine);
    for (const Slot& slot : tensor_.slots) {
        if (!slot.used) continue;
        Vector mean = slot.used->mean, scale = scale_of(slot, affine);
        if (slot.used->none()) std::fill(scale.begin(), scale.end(), std::numeric_limits<double>::infinity());
        for (size_t c = 0; c < mean.size() && slot.fed && slot.used != slot.fed; ++c) {
            if (!slot.fed->constant(c)) continue;
            mean[c] = slot.fed->mean[c];  // for every y
            scale[c] = std::numeric_limits<double>::infinity();
        }
        cpu::recover(work(slot), at(data(arrays[node_.output_in_backward()]), slot),
                     {mean.data(), scale.data(), shift.data(), affine.activation}, at(x, slot));
    }
    return x;
}

void HostCall::begin_differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t n = channels();
    const int inputs = node_.outputs(), gradients = node_.gradients();
    Gradients& found = gradients_ = {};
    Affine& affine = found.affine = this->affine(arrays, inputs);
    found.x = node_.inplace ? recovered(arrays, reqs, &found.x_buffer) : data(arrays[inputs + kX]);
    found.gamma = found.beta = Vector(n, 0.0);
    void *const dy = data(arrays[0]), *y = nullptr;
    found.dz = dy;
    const bool by_output = node_.adds && affine.activation.any();  // y gives the sign of z; dz is the addend's gradient
    const bool by_input = affine.activation.any() && !by_output;
    if (by_output) {
        y = data(arrays[node_.output_in_backward()]);
        const bool into_buffer = reqs[kAddend] == kNull || reqs[kAddend] == kAdd;
        if (into_buffer) found.dz_buffer = buffer();
        found.dz = into_buffer ? found.dz_buffer.data() : data(arrays[gradients + kAddend]);
    }
    const Vector shift = by_input ? shift_of(affine) : Vector();
    Vector sums(tensor_.slots.size() * gradients_length(n));  // [sum dz[C], sum dz*xhat[C]] of each slot
    double* part = sums.data();
    for (const Slot& slot : tensor_.slots) {
        if (slot.used) {
            const Vector scale = by_input ? scale_of(slot, affine) : Vector();
            cpu::grad_sums(work(slot), at(dy, slot), at(found.x, slot),
                           {{slot.used->mean.data(), scale.data(), shift.data(), affine.activation},
                            slot.used->invstd.data(),
                            at(y, slot),
                            by_output ? at(found.dz, slot) : nullptr},
                           part, part + n);
        }
        for (int64_t c = 0; c < n; ++c) {
            found.beta[c] += part[c];
            if (!node_.fix_gamma) found.gamma[c] += part[n + c];
        }
        part += gradients_length(n);
    }
    if (by_output) affine.activation = {};
    if (!frozen_) contribute(std::move(sums));
}

void HostCall::differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t n = channels();
    const int gradients = node_.gradients();
    const Gradients found = std::exchange(gradients_, {});
    const Vector all = frozen_ ? Vector() : total().values;

    if (node_.adds && reqs[kAddend] != kNull && found.dz != data(arrays[gradients + kAddend]))
        copy({nullptr, found.dz}, tensor_.type, tensor_.shape.size(), arrays[gradients + kAddend],
             reqs[kAddend] == kAdd);
    SYNCBN_POINT("before_gradients");
    if (reqs[kX] != kNull) {
        const std::vector<float> mask =
            frozen_ ? std::vector<float>() : this->mask(arrays, node_.outputs() + node_.mask_input());
        const Vector shift = found.affine.activation.any() ? shift_of(found.affine) : Vector();
        for (size_t i = 0; i < tensor_.slots.size(); ++i) {
            const Slot& slot = tensor_.slots[i];
            if (!slot.used) continue;
            // Through the statistics: dx = gamma * invstd * (dz - mean_dz - (x - mean) * slope). The mean is that of the
            // pool that the slot feeds, the invstd that of the pool that it used.
            Vector mean_dz(n, 0.0), slope(n, 0.0);
            if (slot.fed && !frozen_) {
                // Over the slots that use the statistic that this one feeds.
                const Vector sums = combined(pools_, pools_.users[i], all, gradients_length(n), Combine::kAdd);
                const double *sum_dy = sums.data(), *sum_dy_xhat = sum_dy + n;
                for (int64_t c = 0; c < n; ++c) {
                    const double share = slot.fed->invstd[c] / slot.used->invstd[c];
                    mean_dz[c] = share * (sum_dy[c] / slot.fed->count);
                    slope[c] = share * (sum_dy_xhat[c] / slot.fed->count * slot.fed->invstd[c]);
                }
            }
            const Vector scale = scale_of(slot, found.affine);
            cpu::grad_input(work(slot, mask), at(found.dz, slot), at(found.x, slot),
                            {{slot.used->mean.data(), scale.data(), shift.data(), found.affine.activation},
                             (slot.fed ? slot.fed : slot.used)->mean.data(),
                             mean_dz.data(),
                             slope.data(),
                             reqs[kX] == kAdd},
                            at(data(arrays[gradients + kX]), slot));
        }
    }
    const auto write_gradient = [&](const Vector& values, Input input) {
        if (reqs[input] != kNull)
            write(values, tensor_.parameter_type(), arrays[gradients + input], reqs[input] == kAdd);
    };
    write_gradient(found.gamma, kGamma);
    write_gradient(found.beta, kBeta);
}

}  // namespace

std::unique_ptr<Call> host_call(Node node, std::string context, Tensor tensor) {
    return std::make_unique<HostCall>(std::move(node), std::move(context), std::move(tensor));
}

}  // namespace syncbn

// Runs a call on a CPU context: its statistics are vectors here, and so are the other replicas'.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/kernels.h"
#include "cpu/numbers.h"
#include "operator/call.h"
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

class HostCall : public Call {
  public:
    using Call::Call;

  protected:
    // ---- forward ---------------------------------------------------------------------------------------------

    bool begin_normalise() override {
        const std::vector<float> mask = this->mask();
        Vector own(tensor_.slots.size() * moments_length(channels()));  // [count, mean[C], m2[C]] of each slot
        double* part = own.data();
        for (const Slot& slot : tensor_.slots) {
            part[0] = static_cast<double>(
                cpu::moments(work(slot, mask), at(data(arrays_[kX]), slot), part + 1, part + 1 + channels()));
            part += moments_length(channels());
        }
        return contribute(std::move(own));
    }

    void normalise() override {
        Vector batch;
        if (frozen_) {
            Slot& all = tensor_.slots[0];
            if (tensor_.shape.size() > 0)
                all.fed = all.used = statistic(1, parameter(arrays_[kRunningMean]), parameter(arrays_[kRunningVar]));
        } else if (repeats_) {  // the running statistics have this batch already
            repeat();
        } else {
            batch = assign_statistics(*total());
            if (watches() && first_not_finite(batch) >= 0) batch.clear();
            remember(nullptr);
        }
        if (arrays_.wants(kY)) {
            void* const addend = node_->adds ? data(arrays_[kAddend]) : nullptr;
            const Vector shift = this->shift();
            for (const Slot& slot : tensor_.slots) {
                if (!slot.used) continue;
                const Vector scale = this->scale(slot);
                cpu::normalise(work(slot), at(data(arrays_[kX]), slot),
                               {slot.used->mean.data(), scale.data(), shift.data(), node_->activation},
                               at(addend, slot), at(data(arrays_[kY]), slot));
            }
        }
        if (!frozen_ && !repeats_) update_running(std::move(batch));
        if (!frozen_ && node_->fix_gamma)
            replace(arrays_[kGamma], tensor_.parameter_type(), channels(), [](int64_t, double) { return 1; });
    }

    // ---- backward --------------------------------------------------------------------------------------------

    bool begin_differentiate() override {
        const int64_t n = channels();
        Vector dgamma(n, 0.0), dbeta(n, 0.0);  // this replica's part
        // With an addend, y gives the sign of z.
        void* const y = node_->adds && node_->activation.any() ? data(arrays_[kY]) : nullptr;
        const Vector shift = by_input() ? this->shift() : Vector();
        Vector sums(tensor_.slots.size() * gradients_length(n));  // [sum dz[C], sum dz*xhat[C]] of each slot
        double* part = sums.data();
        for (const Slot& slot : tensor_.slots) {
            if (slot.used) {
                const Vector scale = by_input() ? this->scale(slot) : Vector();
                cpu::grad_sums(work(slot), at(data(arrays_[kDy]), slot), at(data(arrays_[kX]), slot),
                               {{slot.used->mean.data(), scale.data(), shift.data(), node_->activation},
                                slot.used->invstd.data(),
                                at(y, slot),
                                y == nullptr ? nullptr : at(data(dz_), slot)},
                               part, part + n);
            }
            for (int64_t c = 0; c < n; ++c) {
                dbeta[c] += part[c];
                if (!node_->fix_gamma) dgamma[c] += part[n + c];
            }
            part += gradients_length(n);
        }
        const auto write = [&](const Vector& values, Role of) {
            if (arrays_.wants(of))
                replace(arrays_[of], tensor_.parameter_type(), n,
                        [&](int64_t c, double old) { return values[c] + (arrays_.adds(of) ? old : 0.0); });
        };
        write(dgamma, kDgamma);
        write(dbeta, kDbeta);
        return frozen_ || contribute(std::move(sums));
    }

    void differentiate() override {
        const int64_t n = channels();
        const auto all = frozen_ ? nullptr : total();
        if (!node_->activation.any() && data(dz_) != data(arrays_[kDy]))
            std::copy_n(data<char>(arrays_[kDy]), tensor_.shape.size() * size_of(tensor_.type), data<char>(dz_));
        if (arrays_.wants(kDx)) {
            const std::vector<float> mask = frozen_ ? std::vector<float>() : this->mask();
            const Activation activation = by_input() ? node_->activation : Activation{};
            const Vector shift = by_input() ? this->shift() : Vector();
            for (size_t i = 0; i < tensor_.slots.size(); ++i) {
                const Slot& slot = tensor_.slots[i];
                if (!slot.used) continue;
                // Through the statistics: dx = gamma * invstd * (dz - mean_dz - (x - mean) * slope). The mean is that
                // of the pool that the slot feeds, the invstd that of the pool that it used.
                Vector mean_dz(n, 0.0), slope(n, 0.0);
                if (slot.fed && !frozen_) {
                    // Over the slots that use the statistic that this one feeds.
                    const Vector sums =
                        combined(*pools_, pools_->users[i], all->values, gradients_length(n), Combine::kAdd);
                    const double *sum_dy = sums.data(), *sum_dy_xhat = sum_dy + n;
                    for (int64_t c = 0; c < n; ++c) {
                        const double share = slot.fed->invstd[c] / slot.used->invstd[c];
                        mean_dz[c] = share * (sum_dy[c] / slot.fed->count);
                        slope[c] = share * (sum_dy_xhat[c] / slot.fed->count * slot.fed->invstd[c]);
                    }
                }
                const Vector scale = this->scale(slot);
                cpu::grad_input(work(slot, mask), at(data(dz_), slot), at(data(arrays_[kX]), slot),
                                {{slot.used->mean.data(), scale.data(), shift.data(), activation},
                                 (slot.fed ? slot.fed : slot.used)->mean.data(),
                                 mean_dz.data(),
                                 slope.data(),
                                 arrays_.adds(kDx)},
                                at(data(arrays_[kDx]), slot));
            }
        }
    }

    // ---- arrays ----------------------------------------------------------------------------------------------

    void add_data(Array from, Array to) override {
        with_type(tensor_.type, [&](auto* t) {
            using T = std::remove_pointer_t<decltype(t)>;
            const T* const values = data<T>(from);
            T* const out = data<T>(to);
            for (int64_t i = 0; i < tensor_.shape.size(); ++i)
                Value<T>::store(out + i, Value<T>::load(out + i) + Value<T>::load(values + i));
        });
    }
    void fill(Array to, int64_t bytes, int value) override { std::memset(data(to), value, static_cast<size_t>(bytes)); }
    Array scratch() override {
        scratch_.emplace_back(1 + tensor_.shape.size() * size_of(tensor_.type));  // never empty
        return {nullptr, scratch_.back().data()};
    }
    void finish() override { scratch_.clear(); }
    void clear_up() override { scratch_.clear(); }

  private:
    cpu::Work work(const Slot& slot, const std::vector<float>& mask = {}) const {
        static const int all = std::min(omp_get_num_procs(), omp_get_max_threads());
        const size_t replicas = frozen_ ? 1 : place_.meeting ? place_.meeting->replicas() : config_->contexts.size();
        const int threads = std::max(1, all / std::max(1, static_cast<int>(replicas)));  // the others use the rest
        Shape shape = slot.shape;
        shape.block = arrays_.block;
        return {tensor_.type, shape, threads, mask.empty() ? nullptr : mask.data() + slot.first / channels()};
    }
    // The address of the slot's part; null for null.
    void* at(void* values, const Slot& slot) const {
        return values == nullptr ? nullptr : static_cast<char*>(values) + slot.first * size_of(tensor_.type);
    }
    Vector parameter(Array from) const {
        Vector out(static_cast<size_t>(channels()));
        with_type(tensor_.parameter_type(), [&](auto* t) {
            using T = std::remove_pointer_t<decltype(t)>;
            const T* const values = data<T>(from);
            for (size_t c = 0; c < out.size(); ++c) out[c] = Value<T>::load(values + c);
        });
        return out;
    }
    // Of each channel.
    Vector scale(const Slot& slot) const {
        Vector out = node_->fix_gamma ? Vector(static_cast<size_t>(channels()), 1.0) : parameter(arrays_[kGamma]);
        for (size_t c = 0; c < out.size(); ++c) out[c] *= slot.used->invstd[c];
        return out;
    }
    Vector shift() const { return parameter(arrays_[kBeta]); }

    // The mask as `Work` has it; empty if all positions count.
    std::vector<float> mask() const {
        if (!node_->masks || tensor_.shape.size() == 0) return {};
        std::vector<float> out(static_cast<size_t>(tensor_.shape.per_channel()));
        const int bytes = tensor_.mask.bytes;
        const auto expand_values = bytes == 1   ? expand<uint8_t>
                                   : bytes == 2 ? expand<uint16_t>
                                   : bytes == 4 ? expand<uint32_t>
                                                : expand<uint64_t>;
        expand_values(data(arrays_[kMask]), tensor_.mask, out.data());
        return out;
    }

    std::shared_ptr<const Statistic> statistic(double count, Vector mean, Vector variance) const {
        Vector invstd;
        for (const double v : variance) invstd.push_back(1 / std::sqrt(v + node_->epsilon));
        return std::make_shared<Statistic>(Statistic{count, std::move(mean), std::move(variance), std::move(invstd)});
    }

    // Gives the slots their statistics. Returns [mean[C], variance[C]] for the running ones; empty if there is none.
    Vector assign_statistics(const Total& moments) {
        const int64_t length = moments_length(channels());
        assign(moments, length);
        // By the beginning of the pool's list, which is among the members or the slots.
        std::vector<std::shared_ptr<const Statistic>> statistics(
            std::max(pools_->members.size(), moments.values.size() / static_cast<size_t>(length)));
        const auto of = [&](Range pool) -> std::shared_ptr<const Statistic> {
            if (pool.begin == pool.end) return nullptr;
            auto& found = statistics[static_cast<size_t>(pool.begin)];
            if (found) return found;
            const Vector all = combined(*pools_, pool, moments.values, length, Combine::kMerge);
            const auto mean = all.begin() + 1, m2 = mean + channels();
            Vector variance(m2, all.end());
            for (double& v : variance) v /= all[0];
            return found = statistic(all[0], Vector(mean, m2), std::move(variance));
        };
        const Vector zeros(static_cast<size_t>(channels()));
        const auto none = node_->masks ? std::make_shared<const Statistic>(Statistic{0, zeros, zeros, zeros}) : nullptr;
        for (size_t i = 0; i < tensor_.slots.size(); ++i) {
            if (tensor_.slots[i].shape.size() == 0) continue;
            tensor_.slots[i].fed = of(pools_->fed[i]);
            tensor_.slots[i].used = of(pools_->used[i]);
            if (!tensor_.slots[i].used) tensor_.slots[i].used = none;
        }
        if (pools_->tracked.empty()) return {};
        Vector batch(2 * channels(), 0.0);
        const double parts = static_cast<double>(pools_->tracked.size());
        for (const Range pool : pools_->tracked) {
            const auto part = of(pool);
            const double correction = node_->unbiased ? part->count / std::max(part->count - 1, 1.0) : 1;
            for (int64_t c = 0; c < channels(); ++c) {
                batch[c] += part->mean[c] / parts;
                batch[channels() + c] += part->variance[c] * correction / parts;
            }
        }
        return batch;
    }

    // `batch` is empty if it has no statistics.
    void update_running(Vector batch) {
        const Array mean{nullptr, data(arrays_[kRunningMean])}, variance{nullptr, data(arrays_[kRunningVar])};
        update_in_turn([=, batch = std::move(batch), momentum = node_->momentum, type = tensor_.parameter_type()] {
            const size_t n = batch.size() / 2;
            const auto update = [&](Array running, const double* values) {
                replace(running, type, static_cast<int64_t>(n),
                        [&](int64_t c, double old) { return momentum * old + (1 - momentum) * values[c]; });
            };
            update(mean, batch.data());
            update(variance, batch.data() + n);
        });
    }

    std::vector<std::vector<char>> scratch_;
};

}  // namespace

std::unique_ptr<Call> host_call(NodePtr node, std::string context, Tensor tensor) {
    return std::make_unique<HostCall>(std::move(node), std::move(context), std::move(tensor));
}

}  // namespace syncbn

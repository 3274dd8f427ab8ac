// Runs a call on a CPU context: its statistics are vectors here, and so are the other replicas'.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "cpu/backend.h"
#include "operator/call.h"
#include "point.h"
#include "pooling/statistics.h"

namespace syncbn {
namespace {

// The number of threads for one replica's kernels, while the other replicas use the rest.
int threads_for(size_t replicas) {
    static const int all = std::min(omp_get_num_procs(), omp_get_max_threads());
    return std::max(1, all / static_cast<int>(std::max<size_t>(1, replicas)));
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
        update_running(backend_.read(arrays[node_.batch()], moments_length(channels())), arrays);
    }
    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        backend_.copy(data(from), type, n, to, add);
    }
    void fill(Array to, Type type, int64_t n, double value) override { backend_.fill(to, type, n, value); }
    void fill_with_zeros(Array to, int64_t bytes) override { std::memset(data(to), 0, static_cast<size_t>(bytes)); }

  private:
    int threads() const;
    void write_output(const Arrays& arrays, int req);
    // The mask, which is at this index; empty if all positions count.
    std::vector<float> mask(const Arrays& arrays, int index) const {
        if (!node_.masks || tensor_.shape.size() == 0) return {};
        return backend_.mask(data(arrays[index]), node_.mask);
    }
    // Computes x from y, into the memory of dx or of `scratch`.
    void* recovered(const Arrays& arrays, const int* reqs, std::vector<char>* scratch) const;
    std::vector<char> buffer() const {
        return std::vector<char>(static_cast<size_t>(tensor_.shape.size() * size_of(tensor_.type)));
    }
    std::shared_ptr<const Statistic> statistic(const Vector& moments) const;
    // Gives the slots their statistics. Returns [1, mean[C], variance[C]] for the running ones; [0, ...] if there is none.
    Vector assign_statistics(const Total& moments);
    void update_running(const Vector& batch, const Arrays& arrays);

    // The results of the first half of a backward.
    struct Gradients {
        const void *x, *dz;  // dz is dy if `affine` has the activation
        Affine affine;
        Vector gamma, beta;  // this replica's part
        std::vector<char> x_buffer, dz_buffer;
    };

    cpu::Backend backend_;
    Gradients gradients_;
};

int HostCall::threads() const {
    if (frozen_) return threads_for(1);
    return threads_for(place_.meeting ? place_.meeting->replicas() : terms_->replicas);
}

// ---- statistics ----------------------------------------------------------------------------------------------

std::shared_ptr<const Statistic> HostCall::statistic(const Vector& moments) const {
    const auto mean = moments.begin() + 1, m2 = mean + channels();
    Vector variance(m2, moments.end()), invstd(variance.size());
    for (size_t c = 0; c < variance.size(); ++c) {
        variance[c] /= moments[0];
        invstd[c] = 1 / std::sqrt(variance[c] + node_.epsilon);
    }
    return std::make_shared<Statistic>(Statistic{moments[0], Vector(mean, m2), std::move(variance), std::move(invstd)});
}

Vector HostCall::assign_statistics(const Total& moments) {
    const int64_t length = moments_length(channels());
    assign(counts_of(moments, length));
    std::map<int, std::shared_ptr<const Statistic>> statistics;  // by the beginning of the pool's list
    const auto of = [&](Range pool) -> std::shared_ptr<const Statistic> {
        if (pool.begin == pool.end) return nullptr;
        auto& found = statistics[pool.begin];
        if (!found) found = statistic(combined(pools_, pool, moments.values, length, Combine::kMerge));
        return found;
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
    const auto mean = batch.begin() + 1, variance = mean + channels();
    const int running = node_.running_mean();
    SYNCBN_POINT("before_running_statistics");
    backend_.update_running(Vector(mean, variance), Vector(variance, batch.end()), node_.momentum,
                            tensor_.parameter_type(), arrays[running], arrays[running + 1]);
}

// ---- forward -------------------------------------------------------------------------------------------------

void HostCall::begin_normalise(const Arrays& arrays) {
    backend_.threads = threads();
    const std::vector<float> mask = this->mask(arrays, node_.mask_input());
    Vector own = backend_.moments(arrays[kX], tensor_, mask.empty() ? nullptr : mask.data());
    check_finite(own);
    contribute(std::move(own));
}

void HostCall::normalise(const Arrays& arrays, const int* reqs) {
    Vector batch(moments_length(channels()), 0.0);
    const int running = node_.running_mean();
    if (frozen_) {
        Slot& all = tensor_.slots[0];
        if (tensor_.shape.size() > 0)
            all.fed = all.used = std::make_shared<Statistic>(
                backend_.frozen(arrays[running], arrays[running + 1], tensor_, node_.epsilon));
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
        if (!recall_.again && !place_.first_lane()) batch[0] = 0;  // one replica of a context is enough
        backend_.write(batch, Type::kFloat64, arrays[node_.batch_output()], false);
    }
}

void HostCall::write_output(const Arrays& arrays, int req) {
    if (req == kNull) return;
    backend_.threads = threads();
    SYNCBN_POINT("before_output");
    const void* addend = node_.adds ? data(arrays[kAddend]) : nullptr;
    backend_.normalise(arrays[kX], tensor_, affine(arrays, 0), addend, arrays[node_.output()], req == kAdd);
}

// ---- backward ------------------------------------------------------------------------------------------------

void* HostCall::recovered(const Arrays& arrays, const int* reqs, std::vector<char>* scratch) const {
    const Affine affine = this->affine(arrays, node_.outputs());
    if (const auto hidden = backend_.first_hidden(tensor_, affine)) refuse_to_recover(*hidden);
    void* x = nullptr;
    if (reqs[kX] == kWrite) {
        x = data(arrays[node_.gradients() + kX]);
    } else {
        *scratch = buffer();
        x = scratch->data();
    }
    backend_.recover(data(arrays[node_.output_in_backward()]), tensor_, affine, x);
    return x;
}

void HostCall::begin_differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t n = channels();
    const int inputs = node_.outputs(), gradients = node_.gradients();
    Gradients& found = gradients_ = {};
    Affine& affine = found.affine = this->affine(arrays, inputs);
    found.x = node_.inplace ? recovered(arrays, reqs, &found.x_buffer) : data(arrays[inputs + kX]);
    found.dz = data(arrays[0]);
    std::optional<cpu::ByOutput> by_output;
    if (node_.adds && affine.activation.any()) {  // dz is the addend's gradient
        by_output = {data(arrays[node_.output_in_backward()]), nullptr};
        if (reqs[kAddend] == kNull || reqs[kAddend] == kAdd) {
            found.dz_buffer = buffer();
            by_output->dz = found.dz_buffer.data();
        } else {
            by_output->dz = data(arrays[gradients + kAddend]);
        }
    }
    Vector sums = backend_.grad_sums(found.dz, found.x, tensor_, affine, by_output);
    if (by_output) {
        found.dz = by_output->dz;
        affine.activation = {};
    }
    found.gamma = found.beta = Vector(n, 0.0);
    for (size_t at = 0; at < sums.size(); at += 2 * n)
        for (int64_t c = 0; c < n; ++c) {
            found.beta[c] += sums[at + c];
            if (!node_.fix_gamma) found.gamma[c] += sums[at + n + c];
        }
    if (!frozen_) contribute(std::move(sums));
}

void HostCall::differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t n = channels();
    const int gradients = node_.gradients();
    const Gradients found = std::exchange(gradients_, {});
    const Vector all = frozen_ ? Vector() : total().values;

    if (node_.adds && reqs[kAddend] != kNull && found.dz != data(arrays[gradients + kAddend]))
        backend_.copy(found.dz, tensor_.type, tensor_.shape.size(), arrays[gradients + kAddend], reqs[kAddend] == kAdd);
    SYNCBN_POINT("before_gradients");
    if (reqs[kX] != kNull) {
        const size_t slots = tensor_.slots.size();
        cpu::ThroughStatistics through{Vector(slots * n, 0.0), Vector(slots * n, 0.0)};
        for (size_t i = 0; i < slots && !frozen_; ++i) {
            const Slot& slot = tensor_.slots[i];
            if (!slot.fed) continue;
            // Over the slots that use the statistic that this one feeds.
            const Vector sums = combined(pools_, pools_.users[i], all, gradients_length(n), Combine::kAdd);
            const double *sum_dy = sums.data(), *sum_dy_xhat = sum_dy + n;
            for (int64_t c = 0; c < n; ++c) {
                const double share = slot.fed->invstd[c] / slot.used->invstd[c];
                through.mean_dz[i * n + c] = share * (sum_dy[c] / slot.fed->count);
                through.slope[i * n + c] = share * (sum_dy_xhat[c] / slot.fed->count * slot.fed->invstd[c]);
            }
        }
        std::vector<float> mask;
        if (!frozen_) mask = this->mask(arrays, node_.outputs() + node_.mask_input());
        backend_.grad_input(found.dz, found.x, tensor_, found.affine, through, mask.empty() ? nullptr : mask.data(),
                            arrays[gradients + kX], reqs[kX] == kAdd);
    }
    const auto write = [&](const Vector& values, Input input) {
        if (reqs[input] != kNull)
            backend_.write(values, tensor_.parameter_type(), arrays[gradients + input], reqs[input] == kAdd);
    };
    write(found.gamma, kGamma);
    write(found.beta, kBeta);
}

}  // namespace

std::unique_ptr<Call> host_call(Node node, std::string context, Tensor tensor) {
    return std::make_unique<HostCall>(std::move(node), std::move(context), std::move(tensor));
}

}  // namespace syncbn

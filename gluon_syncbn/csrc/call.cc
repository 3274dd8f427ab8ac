#include "call.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels.h"

namespace syncbn {

MXNet mx;

namespace {

// Threads of this process for one replica's kernels, while its partners use the others.
int threads_for(size_t replicas) {
    static const int all = std::min(omp_get_num_procs(), omp_get_max_threads());
    return std::max(1, all / static_cast<int>(std::max<size_t>(1, replicas)));
}

bool naive_engine() {
    const char* engine = std::getenv("MXNET_ENGINE_TYPE");
    return engine != nullptr && std::strcmp(engine, "NaiveEngine") == 0;
}

void fill(void* out, Type type, int64_t n, double value) {
    if (type == Type::kFloat64)
        std::fill_n(static_cast<double*>(out), n, value);
    else if (type == Type::kFloat32)
        std::fill_n(static_cast<float*>(out), n, static_cast<float>(value));
    else
        std::fill_n(static_cast<uint16_t*>(out), n, value != value ? uint16_t{0x7e00} : uint16_t{0});
}

template <typename P>
void give(const Vector& values, P* out, int req) {
    if (req == kNull) return;
    for (size_t i = 0; i < values.size(); ++i)
        out[i] = static_cast<P>(values[i] + (req == kAdd ? static_cast<double>(out[i]) : 0.0));
}

template <typename P>
Vector times(Vector invstd, const P* gamma, bool fix_gamma) {
    if (!fix_gamma)
        for (size_t c = 0; c < invstd.size(); ++c) invstd[c] *= gamma[c];
    return invstd;
}

// running <- momentum * running + (1 - momentum) * the mean over the packed moments that hold values.
template <typename P>
void update_running(const Vector& moments, int64_t channels, double momentum, P* running_mean, P* running_var) {
    const size_t length = 1 + 2 * channels;
    double parts = 0;
    for (size_t at = 0; at < moments.size(); at += length) parts += moments[at] > 0;
    if (parts == 0) return;
    for (int64_t c = 0; c < channels; ++c) {
        double mean = 0, variance = 0;
        for (size_t at = 0; at < moments.size(); at += length) {
            if (moments[at] == 0) continue;
            mean += moments[at + 1 + c];
            variance += moments[at + 1 + channels + c] / moments[at];
        }
        running_mean[c] = static_cast<P>(momentum * running_mean[c] + (1 - momentum) * (mean / parts));
        running_var[c] = static_cast<P>(momentum * running_var[c] + (1 - momentum) * (variance / parts));
    }
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

}  // namespace

void Call::issue(const void* caller) {
    settings_.layer->issued(context_);
    if (settings_.lanes == 1) return;
    place_ = settings_.layer->join(context_, settings_.node, caller, false);
    seated_ = true;
}

void Call::forward(const Arrays& arrays, const int* reqs, bool training) {
    frozen_ = !training;
    complete_ = false;
    try {
        if (type_ == Type::kFloat64)
            normalise<double>(arrays, reqs[0]);
        else
            normalise<float>(arrays, reqs[0]);
        complete_ = true;
    } catch (const std::exception& e) {
        fail(e.what());  // whatever it was, the other replicas need not wait for this one
        if (reqs[0] != kNull) fill(arrays.data(settings_.output()), type_, shape_.size(), kNaN);
        throw;
    }
}

void Call::backward(const Arrays& arrays, const int* reqs) {
    const int gradients = settings_.gradients();
    try {
        // MXNet skips what depends on a failure only until somebody has read that failure.
        if (!complete_)
            throw Failure("SyncBatchNorm '" + settings_.layer->name +
                          "': no gradient, because the forward of this call failed. " + failure());
        if (type_ == Type::kFloat64)
            differentiate<double>(arrays, reqs);
        else
            differentiate<float>(arrays, reqs);
        for (int i = kRunningMean; i < settings_.inputs(); ++i)  // nothing flows into the running statistics
            if (reqs[i] == kWrite || reqs[i] == kInplace)
                fill(arrays.data(gradients + i), parameter_type(), shape_.channels, 0);
    } catch (const std::exception& e) {
        fail(e.what());
        for (int i = 0; i < settings_.inputs(); ++i)
            if (reqs[i] != kNull)
                fill(arrays.data(gradients + i), i == kX ? type_ : parameter_type(),
                     i == kX ? shape_.size() : shape_.channels, kNaN);
        throw;
    }
}

// ---- slots ---------------------------------------------------------------------------------------------------

Statistic::Statistic(double count, const double* mean, const double* variance, int64_t channels, double epsilon)
    : count(count), mean(mean, mean + channels), invstd(variance, variance + channels) {
    for (double& v : invstd) v = 1 / std::sqrt(v + epsilon);
}

std::shared_ptr<const Statistic> Call::statistic(const double* moments) const {
    const int64_t channels = shape_.channels;
    if (moments[0] == 0) return nullptr;
    Vector variance(moments + 1 + channels, moments + 1 + 2 * channels);
    for (double& v : variance) v /= moments[0];
    return std::make_shared<Statistic>(moments[0], moments + 1, variance.data(), channels, settings_.epsilon);
}

// As numpy.array_split: the first slots get one sample more where they cannot all have the same number.
void Call::cut(int64_t slots) {
    slots_.clear();
    const int64_t per_sample = samples_ == 0 ? 0 : shape_.outer / samples_;
    int64_t sample = 0;
    for (int64_t i = 0; i < slots; ++i) {
        const int64_t samples = samples_ / slots + (i < samples_ % slots);
        const Shape shape{samples * per_sample, shape_.channels, shape_.inner};
        slots_.push_back({shape, sample * per_sample * shape_.channels * shape_.inner, nullptr, nullptr});
        sample += samples;
    }
}

template <typename V>
V* Call::at(V* data, const Slot& slot) const {
    using Byte = std::conditional_t<std::is_const<V>::value, const char, char>;
    return static_cast<Byte*>(data) + slot.first * size_of(type_);
}

int Call::threads() const {
    if (frozen_) return threads_for(1);
    return threads_for(mode() == Mode::kLocal ? settings_.layer->replicas() : place_.meeting->replicas());
}

// ---- forward -------------------------------------------------------------------------------------------------

void Call::sit_down() {
    if (settings_.lanes != settings_.layer->lanes())
        throw Failure("SyncBatchNorm '" + settings_.layer->name +
                      "': the number of replicas per context has changed since the net was traced; call "
                      "net.hybridize() again.");
    if (!seated_) place_ = settings_.layer->join(context_, settings_.node, this, repeated_);
    seated_ = false;  // a state that is executed again sits down again
    repeated_ = true;
    if (place_.meeting->replicas() > 1 && naive_engine())
        throw Failure("SyncBatchNorm '" + settings_.layer->name +
                      "': MXNET_ENGINE_TYPE=NaiveEngine runs one replica after the other, so they can never meet. "
                      "Unset it.");
}

Vector Call::pool(const void* x) {
    if (mode() != Mode::kLocal) sit_down();
    cut(mode() == Mode::kSync ? 1 : settings_.layer->pooling.slots);
    const int64_t channels = shape_.channels;
    const size_t length = 1 + 2 * channels;
    Vector moments(slots_.size() * length);
    double* packed = moments.data();
    for (const Slot& slot : slots_) {
        packed[0] = static_cast<double>(slot.shape.per_channel());
        cpu::moments(at(x, slot), type_, slot.shape, threads(), packed + 1, packed + 1 + channels);
        packed += length;
    }
    if (group() > 0) return assign_grouped(settings_.layer->gather_moments(place_, type_, channels, moments));
    if (mode() == Mode::kSync) {
        moments = settings_.layer->merge_moments(place_, type_, channels, std::move(moments));
        slots_[0].own = slots_[0].used = statistic(moments.data());
        return moments;
    }
    for (size_t i = 0; i < slots_.size(); ++i) slots_[i].own = slots_[i].used = statistic(&moments[i * length]);
    if (mode() == Mode::kShuffle) assign_shuffled(settings_.layer->gather_moments(place_, type_, channels, moments));
    return moments;
}

// Groups are consecutive replicas, over all processes.
Vector Call::assign_grouped(const Total& all) {
    const size_t length = 1 + 2 * shape_.channels, replicas = all.values.size() / length;
    const size_t first = all.first / length / group() * group();
    Vector total(length, 0.0);
    for (size_t i = first; i < std::min(first + group(), replicas); ++i)
        merge_moments(&total, Vector(&all.values[i * length], &all.values[i * length] + length));
    slots_[0].own = slots_[0].used = statistic(total.data());
    return total;
}

// Slots without values take no part.
void Call::assign_shuffled(const Total& total) {
    const Vector& all = total.values;
    const size_t length = 1 + 2 * shape_.channels;
    std::vector<size_t> taking_part;
    for (size_t slot = 0; slot * length < all.size(); ++slot)
        if (all[slot * length] > 0) taking_part.push_back(slot);
    if (taking_part.size() < 2)
        throw Failure("SyncBatchNorm '" + settings_.layer->name + "': mode 'shuffle' had " +
                      std::to_string(taking_part.size()) +
                      " slot with values in this step, expected at least two: use more devices, virtual_devices or "
                      "samples.");
    Draw draw = place_.meeting->draw;
    draw.layer = total.key;
    const auto source = derangement(draw, taking_part.size());
    const size_t first = total.first / length;
    for (size_t i = 0; i < source.size(); ++i) {
        const size_t slot = taking_part[i], from = taking_part[source[i]];
        if (slot >= first && slot < first + slots_.size()) slots_[slot - first].used = statistic(&all[from * length]);
        if (from >= first && from < first + slots_.size()) slots_[from - first].user = slot;
    }
}

template <typename P>
void Call::normalise(const Arrays& arrays, int req) {
    const int64_t channels = shape_.channels;
    const void* x = arrays.data(kX);
    const P *gamma = arrays.data<P>(kGamma), *beta = arrays.data<P>(kBeta);
    P *running_mean = arrays.data<P>(settings_.running_mean()),
      *running_var = arrays.data<P>(settings_.running_mean() + 1);

    if (frozen_) {
        cut(1);
        const Vector mean(running_mean, running_mean + channels), variance(running_var, running_var + channels);
        slots_[0].own = slots_[0].used =
            std::make_shared<Statistic>(1, mean.data(), variance.data(), channels, settings_.epsilon);
    } else {
        const Vector moments = pool(x);
        if (mode() == Mode::kLocal || place_.first_lane())
            update_running(moments, channels, settings_.momentum, running_mean, running_var);
    }
    if (req == kNull) return;
    void* y = arrays.data(settings_.output());
    const Vector shift(beta, beta + channels);
    for (const Slot& slot : slots_)
        if (slot.used)
            cpu::normalise(at(x, slot), type_, slot.shape, threads(), slot.used->mean.data(),
                           times(slot.used->invstd, gamma, settings_.fix_gamma).data(), shift.data(), at(y, slot),
                           req == kAdd);
}

// ---- backward ------------------------------------------------------------------------------------------------

Vector Call::pull(Vector sums) {
    const int64_t channels = shape_.channels;
    if (mode() == Mode::kLocal) return sums;
    if (mode() == Mode::kSync && group() == 0)
        return settings_.layer->add_gradients(place_, type_, channels, std::move(sums));
    const size_t length = 2 * channels;
    const Total all = settings_.layer->gather_gradients(place_, type_, channels, std::move(sums));
    const auto part = [&](size_t i) { return Vector(&all.values[i * length], &all.values[i * length] + length); };
    Vector out(slots_.size() * length);
    if (group() > 0) {
        const size_t first = all.first / length / group() * group(), replicas = all.values.size() / length;
        for (size_t i = first; i < std::min(first + group(), replicas); ++i) add_to(out.data(), part(i));
        return out;
    }
    for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].own) std::copy_n(part(slots_[i].user).begin(), length, &out[i * length]);
    return out;
}

// For slot i, normalised with the statistics of slot j, S1 = sum dy and S2 = sum dy*xhat are its gradient with respect
// to beta and gamma, and what it owes to the mean and the variance of slot j:
//   dx_j = gamma * invstd_used_by_j * dy_j  -  gamma * invstd_j / n_j * (S1 + (x_j - mean_j) * invstd_j * S2)
template <typename P>
void Call::differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t channels = shape_.channels;
    const void *dy = arrays.data(0), *x = arrays.data(1 + kX);
    const P* gamma = arrays.data<P>(1 + kGamma);
    Vector sums(slots_.size() * 2 * channels), dgamma(channels), dbeta(channels);
    for (size_t i = 0; i < slots_.size(); ++i) {
        const Slot& slot = slots_[i];
        if (!slot.used) continue;
        double *sum_dy = &sums[i * 2 * channels], *sum_dy_xhat = sum_dy + channels;
        cpu::grad_sums(at(dy, slot), at(x, slot), type_, slot.shape, threads(), slot.used->mean.data(),
                       slot.used->invstd.data(), sum_dy, sum_dy_xhat);
        // The parameters' gradients are this replica's part; the trainer adds the parts, as for any parameter.
        for (int64_t c = 0; c < channels; ++c) {
            dbeta[c] += sum_dy[c];
            if (!settings_.fix_gamma) dgamma[c] += sum_dy_xhat[c];
        }
    }
    if (!frozen_) sums = pull(std::move(sums));

    const int gradients = settings_.gradients();
    void* dx = reqs[kX] == kNull ? nullptr : arrays.data(gradients + kX);
    Vector mean_dy(channels, 0.0), slope(channels, 0.0);
    for (size_t i = 0; i < slots_.size() && dx != nullptr; ++i) {
        const Slot& slot = slots_[i];
        if (!slot.used) continue;
        for (int64_t c = 0; c < channels && !frozen_; ++c) {
            const double *sum_dy = &sums[i * 2 * channels], *sum_dy_xhat = sum_dy + channels;
            const double share = slot.own->invstd[c] / slot.used->invstd[c];
            mean_dy[c] = share * (sum_dy[c] / slot.own->count);
            slope[c] = share * (sum_dy_xhat[c] / slot.own->count * slot.own->invstd[c]);
        }
        cpu::grad_input(at(dy, slot), at(x, slot), type_, slot.shape, threads(), slot.own->mean.data(),
                        times(slot.used->invstd, gamma, settings_.fix_gamma).data(), mean_dy.data(), slope.data(),
                        at(dx, slot), reqs[kX] == kAdd);
    }
    give(dgamma, arrays.data<P>(gradients + kGamma), reqs[kGamma]);
    give(dbeta, arrays.data<P>(gradients + kBeta), reqs[kBeta]);
}

}  // namespace syncbn

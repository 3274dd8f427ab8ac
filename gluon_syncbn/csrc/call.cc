#include "call.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

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

template <typename P>
Vector Call::scale(const P* gamma) const {
    Vector out = invstd_;
    if (!settings_.fix_gamma)
        for (size_t c = 0; c < out.size(); ++c) out[c] *= gamma[c];
    return out;
}

template <typename P>
void Call::normalise(const Arrays& arrays, int req) {
    const int64_t channels = shape_.channels;
    const void* x = arrays.data(kX);
    const P *gamma = arrays.data<P>(kGamma), *beta = arrays.data<P>(kBeta);
    P *running_mean = arrays.data<P>(settings_.running_mean()),
      *running_var = arrays.data<P>(settings_.running_mean() + 1);
    mean_.resize(channels);
    invstd_.resize(channels);
    int threads = threads_for(1);

    if (frozen_) {
        for (int64_t c = 0; c < channels; ++c) {
            mean_[c] = running_mean[c];
            invstd_[c] = 1 / std::sqrt(running_var[c] + settings_.epsilon);
        }
    } else {
        if (settings_.lanes != settings_.layer->lanes())
            throw Failure("SyncBatchNorm '" + settings_.layer->name +
                          "': the number of replicas per context has changed since the net was traced; call "
                          "net.hybridize() again.");
        if (!seated_) place_ = settings_.layer->join(context_, settings_.node, this, repeated_);
        seated_ = false;  // a state that is executed again sits down again
        repeated_ = true;
        const size_t replicas = place_.meeting->replicas();
        if (replicas > 1 && naive_engine())
            throw Failure("SyncBatchNorm '" + settings_.layer->name +
                          "': MXNET_ENGINE_TYPE=NaiveEngine runs one replica after the other, so they can never meet. "
                          "Unset it.");
        threads = threads_for(replicas);
        Vector own(1 + 2 * channels);  // [count, mean[C], m2[C]]
        own[0] = static_cast<double>(shape_.per_channel());
        cpu::moments(x, type_, shape_, threads, own.data() + 1, own.data() + 1 + channels);
        const Vector all = settings_.layer->merge_moments(place_, type_, channels, std::move(own));
        count_ = all[0];
        const bool update = place_.first_lane();
        for (int64_t c = 0; c < channels; ++c) {
            const double mean = all[1 + c], variance = all[1 + channels + c] / count_;
            mean_[c] = mean;
            invstd_[c] = 1 / std::sqrt(variance + settings_.epsilon);
            if (!update) continue;
            const double keep = settings_.momentum;
            running_mean[c] = static_cast<P>(keep * running_mean[c] + (1 - keep) * mean);
            running_var[c] = static_cast<P>(keep * running_var[c] + (1 - keep) * variance);
        }
    }
    if (req == kNull) return;
    const Vector shift(beta, beta + channels);
    cpu::normalise(x, type_, shape_, threads, mean_.data(), scale(gamma).data(), shift.data(),
                   arrays.data(settings_.output()), req == kAdd);
}

template <typename P>
void Call::differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t channels = shape_.channels;
    const void *dy = arrays.data(0), *x = arrays.data(1 + kX);
    const P* gamma = arrays.data<P>(1 + kGamma);
    const int threads = threads_for(frozen_ ? 1 : place_.meeting->replicas());
    Vector sums(2 * channels);  // [sum dy[C], sum dy*xhat[C]]
    cpu::grad_sums(dy, x, type_, shape_, threads, mean_.data(), invstd_.data(), sums.data(), sums.data() + channels);
    // The parameters' gradients are this replica's part; the trainer adds the parts, as for any parameter.
    Vector dgamma(sums.begin() + channels, sums.end()), dbeta(sums.begin(), sums.begin() + channels);
    if (settings_.fix_gamma) std::fill(dgamma.begin(), dgamma.end(), 0.0);

    Vector mean_dy(channels, 0.0), slope(channels, 0.0);
    if (!frozen_) {
        const Vector all = settings_.layer->add_gradients(place_, type_, channels, std::move(sums));
        for (int64_t c = 0; c < channels; ++c) {
            mean_dy[c] = all[c] / count_;
            slope[c] = all[channels + c] / count_ * invstd_[c];
        }
    }
    const int gradients = settings_.gradients();
    if (reqs[kX] != kNull)
        cpu::grad_input(dy, x, type_, shape_, threads, mean_.data(), scale(gamma).data(), mean_dy.data(), slope.data(),
                        arrays.data(gradients + kX), reqs[kX] == kAdd);
    give(dgamma, arrays.data<P>(gradients + kGamma), reqs[kGamma]);
    give(dbeta, arrays.data<P>(gradients + kBeta), reqs[kBeta]);
}

}  // namespace syncbn

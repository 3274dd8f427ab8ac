#include "operator/call.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

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
    const Array x = arrays[kX], y = arrays[settings_.output()];
    try {
        throw_if_closed();
        if (settings_.role == (frozen_ ? Role::kMeet : Role::kTrack))
            pass(x, y, reqs[0]);
        else if (frozen_)
            normalise_frozen(arrays, reqs[0]);
        else
            normalise(arrays, reqs);
        if (settings_.role == Role::kTrack && !frozen_)
            track(backend_->read(arrays[kBatch], 1 + 2 * batch_.shape.channels), arrays);
        complete_ = true;
    } catch (const std::exception& e) {
        const std::string reason = named(e.what());
        fail(reason);  // whatever it was, the other replicas need not wait for this one
        if (reqs[0] != kNull) spoil(y, kX);
        throw Failure(reason);
    }
}

void Call::backward(const Arrays& arrays, const int* reqs) {
    const int gradients = settings_.gradients();
    try {
        throw_if_closed();
        // MXNet skips what depends on a failure only until somebody has read that failure.
        if (!complete_)
            throw Failure("SyncBatchNorm '" + settings_.layer->name +
                          "': no gradient, because the forward of this call failed. " + failure());
        if (settings_.role == (frozen_ ? Role::kMeet : Role::kTrack)) {
            pass(arrays[0], arrays[gradients + kX], reqs[kX]);
            no_gradient(arrays, reqs);
        } else {
            differentiate(arrays, reqs);
        }
        if (settings_.role == Role::kTrack && (reqs[kBatch] == kWrite || reqs[kBatch] == kInplace))
            backend_->fill(arrays[gradients + kBatch], Type::kFloat64, 1 + 2 * batch_.shape.channels, 0);
    } catch (const std::exception& e) {
        const std::string reason = named(e.what());
        fail(reason);
        for (int i = kX; i <= kBeta; ++i)
            if (reqs[i] != kNull) spoil(arrays[gradients + i], static_cast<Input>(i));
        throw Failure(reason);
    }
}

void Call::pass(Array from, Array to, int req) {
    if (req != kNull) backend_->copy(from, batch_.type, batch_.shape.size(), to, req == kAdd);
}

void Call::no_gradient(const Arrays& arrays, const int* reqs) {
    for (int i : {kGamma, kBeta})
        if (reqs[i] == kWrite || reqs[i] == kInplace)
            backend_->fill(arrays[settings_.gradients() + i], batch_.parameter_type(), batch_.shape.channels, 0);
}

void Call::throw_if_closed() const {
    if (process().closed)
        throw Failure("SyncBatchNorm '" + settings_.layer->name +
                      "': the process has run its exit handlers. Join the threads that train before the main thread "
                      "ends.");
}

// An error with the layer and the device in it; those of the device itself know neither.
std::string Call::named(const std::string& error) const {
    return names_layer(error) ? error : "SyncBatchNorm '" + settings_.layer->name + "' on " + context_ + ": " + error;
}

// NaN into an output that is like this input, so that nothing plausible is left. A device that cannot even do this has a
// reason, and that is the one that is on its way.
void Call::spoil(Array out, Input like) {
    try {
        const bool data = like == kX;
        backend_->fill(out, data ? batch_.type : batch_.parameter_type(),
                       data ? batch_.shape.size() : batch_.shape.channels, kNaN);
    } catch (const Failure&) {
    }
}

// ---- slots ---------------------------------------------------------------------------------------------------

std::shared_ptr<const Statistic> Call::statistic(const double* moments) const {
    const int64_t channels = batch_.shape.channels;
    if (moments[0] == 0) return nullptr;
    Vector invstd(moments + 1 + channels, moments + 1 + 2 * channels);
    for (double& v : invstd) v = 1 / std::sqrt(v / moments[0] + settings_.epsilon);
    return std::make_shared<Statistic>(
        Statistic{moments[0], Vector(moments + 1, moments + 1 + channels), std::move(invstd)});
}

Affine Call::affine(const Arrays& arrays, int inputs) const {
    return {arrays[inputs + kGamma], arrays[inputs + kBeta], settings_.fix_gamma};
}

int Call::threads() const {
    if (frozen_) return threads_for(1);
    return threads_for(mode() == Mode::kLocal ? settings_.layer->replicas() : place_.meeting->replicas());
}

// ---- forward -------------------------------------------------------------------------------------------------

void Call::sit_down() {
    if (!seated_) place_ = settings_.layer->join(context_, settings_.node, this, repeated_);
    if (settings_.lanes != place_.meeting->lanes)
        throw Failure("SyncBatchNorm '" + settings_.layer->name +
                      "': the number of replicas per context has changed since the net was traced; call "
                      "net.hybridize() again.");
    seated_ = false;  // a state that is executed again sits down again
    repeated_ = true;
    if (place_.meeting->replicas() > 1 && naive_engine())
        throw Failure("SyncBatchNorm '" + settings_.layer->name +
                      "': MXNET_ENGINE_TYPE=NaiveEngine runs one replica after the other, so they can never meet. "
                      "Unset it.");
}

Vector Call::pool(Array x) {
    if (mode() != Mode::kLocal) sit_down();
    auto& slots = batch_.slots;
    batch_.cut(mode() == Mode::kSync ? 1 : settings_.layer->pooling.slots);
    const int64_t channels = batch_.shape.channels;
    const Type type = batch_.type;
    backend_->threads = threads();
    Vector moments = backend_->moments(x, batch_);
    if (group() > 0) return assign_grouped(settings_.layer->gather_moments(place_, type, channels, moments));
    if (mode() == Mode::kSync) {
        moments = settings_.layer->merge_moments(place_, type, channels, std::move(moments));
        slots[0].own = slots[0].used = statistic(moments.data());
        return moments;
    }
    const size_t length = 1 + 2 * channels;
    for (size_t i = 0; i < slots.size(); ++i) slots[i].own = slots[i].used = statistic(&moments[i * length]);
    if (mode() == Mode::kShuffle) assign_shuffled(settings_.layer->gather_moments(place_, type, channels, moments));
    return moments;
}

// Groups are consecutive replicas, over all processes.
Vector Call::assign_grouped(const Total& all) {
    const size_t length = 1 + 2 * batch_.shape.channels, replicas = all.values.size() / length;
    const size_t first = all.first / length / group() * group();
    Vector total(length, 0.0);
    for (size_t i = first; i < std::min(first + group(), replicas); ++i)
        merge_moments(total.data(), &all.values[i * length], batch_.shape.channels);
    batch_.slots[0].own = batch_.slots[0].used = statistic(total.data());
    return total;
}

// Slots without values take no part.
void Call::assign_shuffled(const Total& total) {
    const Vector& all = total.values;
    const size_t length = 1 + 2 * batch_.shape.channels;
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
        if (slot >= first && slot < first + batch_.slots.size())
            batch_.slots[slot - first].used = statistic(&all[from * length]);
        if (from >= first && from < first + batch_.slots.size()) batch_.slots[from - first].user = slot;
    }
}

void Call::normalise(const Arrays& arrays, const int* reqs) {
    const Array x = arrays[kX];
    const Vector moments = pool(x);
    if (reqs[0] != kNull)
        backend_->normalise(x, batch_, affine(arrays, 0), arrays[settings_.output()], reqs[0] == kAdd);
    Vector batch = batch_statistics(moments);
    if (settings_.role == Role::kWhole) {
        track(batch, arrays);
    } else if (reqs[1] != kNull) {
        if (!place_.first_lane()) batch[0] = 0;  // one replica of a context is enough
        backend_->give(batch, Type::kFloat64, arrays[settings_.output() + 1], false);
    }
}

void Call::normalise_frozen(const Arrays& arrays, int req) {
    batch_.cut(1);
    const int running = settings_.running_mean();
    batch_.slots[0].own = batch_.slots[0].used =
        std::make_shared<Statistic>(backend_->frozen(arrays[running], arrays[running + 1], batch_, settings_.epsilon));
    backend_->threads = threads();
    if (req != kNull)
        backend_->normalise(arrays[kX], batch_, affine(arrays, 0), arrays[settings_.output()], req == kAdd);
}

// The mean over the packed moments that hold values.
Vector Call::batch_statistics(const Vector& moments) const {
    const int64_t channels = batch_.shape.channels;
    const size_t length = 1 + 2 * channels;
    Vector batch(length, 0.0);
    double parts = 0;
    for (size_t at = 0; at < moments.size(); at += length) parts += moments[at] > 0;
    for (size_t at = 0; at < moments.size(); at += length)
        for (int64_t c = 0; c < channels && moments[at] > 0; ++c) {
            batch[1 + c] += moments[at + 1 + c] / parts;
            batch[1 + channels + c] += moments[at + 1 + channels + c] / moments[at] / parts;
        }
    batch[0] = parts > 0;
    return batch;
}

void Call::track(const Vector& batch, const Arrays& arrays) {
    if (batch[0] == 0) return;
    const auto mean = batch.begin() + 1, variance = mean + batch_.shape.channels;
    const int running = settings_.running_mean();
    backend_->track(Vector(mean, variance), Vector(variance, batch.end()), settings_.momentum, batch_.parameter_type(),
                    arrays[running], arrays[running + 1]);
}

// ---- backward ------------------------------------------------------------------------------------------------

Vector Call::pull(Vector sums) {
    const int64_t channels = batch_.shape.channels;
    if (mode() == Mode::kLocal) return sums;
    if (mode() == Mode::kSync && group() == 0)
        return settings_.layer->add_gradients(place_, batch_.type, channels, std::move(sums));
    const size_t length = 2 * channels;
    const Total all = settings_.layer->gather_gradients(place_, batch_.type, channels, std::move(sums));
    const auto part = [&](size_t i) { return Vector(&all.values[i * length], &all.values[i * length] + length); };
    Vector out(batch_.slots.size() * length);
    if (group() > 0) {
        const size_t first = all.first / length / group() * group(), replicas = all.values.size() / length;
        for (size_t i = first; i < std::min(first + group(), replicas); ++i) add_to(out.data(), part(i));
        return out;
    }
    for (size_t i = 0; i < batch_.slots.size(); ++i)
        if (batch_.slots[i].own) std::copy_n(part(batch_.slots[i].user).begin(), length, &out[i * length]);
    return out;
}

// For slot i, normalised with the statistics of slot j, S1 = sum dy and S2 = sum dy*xhat are its gradient with respect
// to beta and gamma, and what it owes to the mean and the variance of slot j:
//   dx_j = gamma * invstd_used_by_j * dy_j  -  gamma * invstd_j / n_j * (S1 + (x_j - mean_j) * invstd_j * S2)
void Call::differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t channels = batch_.shape.channels;
    const int inputs = settings_.outputs();
    const Array dy = arrays[0], x = arrays[inputs + kX];
    Vector sums = backend_->grad_sums(dy, x, batch_);
    // The parameters' gradients are this replica's part; the trainer adds the parts, as for any parameter.
    Vector dgamma(channels, 0.0), dbeta(channels, 0.0);
    for (size_t at = 0; at < sums.size(); at += 2 * channels)
        for (int64_t c = 0; c < channels; ++c) {
            dbeta[c] += sums[at + c];
            if (!settings_.fix_gamma) dgamma[c] += sums[at + channels + c];
        }
    if (!frozen_) sums = pull(std::move(sums));

    const int gradients = settings_.gradients();
    if (reqs[kX] != kNull) {
        const size_t slots = batch_.slots.size();
        Pull pull{Vector(slots * channels, 0.0), Vector(slots * channels, 0.0)};
        for (size_t i = 0; i < slots && !frozen_; ++i) {
            const Slot& slot = batch_.slots[i];
            if (!slot.used) continue;
            const double *sum_dy = &sums[i * 2 * channels], *sum_dy_xhat = sum_dy + channels;
            for (int64_t c = 0; c < channels; ++c) {
                const double share = slot.own->invstd[c] / slot.used->invstd[c];
                pull.mean_dy[i * channels + c] = share * (sum_dy[c] / slot.own->count);
                pull.slope[i * channels + c] = share * (sum_dy_xhat[c] / slot.own->count * slot.own->invstd[c]);
            }
        }
        backend_->grad_input(dy, x, batch_, affine(arrays, inputs), pull, arrays[gradients + kX], reqs[kX] == kAdd);
    }
    const auto give = [&](const Vector& values, Input input) {
        if (reqs[input] != kNull)
            backend_->give(values, batch_.parameter_type(), arrays[gradients + input], reqs[input] == kAdd);
    };
    give(dgamma, kGamma);
    give(dbeta, kBeta);
}

}  // namespace syncbn

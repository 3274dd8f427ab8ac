#include "operator/call.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>

#include "clock.h"
#include "log.h"
#include "meeting/step.h"
#include "pooling/statistics.h"

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

bool finite(const Vector& values) {
    return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

constexpr double kQuiet = 10;  // seconds

// Whose batch was warned of last. What is not finite reaches all layers behind it, and all replicas: they are not worth
// a warning each.
struct Culprit {
    std::mutex mutex;
    int64_t layer = 0;
    std::string context;
    double since = 0;
};

Culprit& culprit() {
    static Culprit* one = new Culprit;
    return *one;
}

}  // namespace

void speak_of_nonfinite_again() {
    std::lock_guard<std::mutex> lock(culprit().mutex);
    culprit().layer = 0;
}

void Call::issue(const void* caller, Recall recall) {
    recall_ = std::move(recall);
    if (recall_.again) {
        place_.backwards = recall_.memo->repeat();
        return;
    }
    node_.layer->room.issued(context_);
    if (node_.lanes == 1) return;
    place_ = node_.layer->room.join(*node_.layer->terms(), context_, node_.number, caller, false);
    seated_ = true;
}

void Call::forward(const Arrays& arrays, const int* reqs, bool training) {
    frozen_ = !training;
    complete_ = false;
    const Array x = arrays[kX], y = arrays[node_.output()];
    try {
        throw_if_closed();
        if (passes_on())
            pass(x, y, reqs[0]);
        else if (frozen_)
            normalise_frozen(arrays, reqs[0]);
        else
            normalise(arrays, reqs);
        if (node_.role == Role::kTrack && !frozen_)
            update_running(backend_->read(arrays[kBatch], moments_length(channels())), arrays);
        complete_ = true;
    } catch (const std::exception& e) {
        std::vector<std::pair<Array, Input>> outputs;
        if (reqs[0] != kNull) outputs.push_back({y, kX});
        if (node_.role == Role::kMeet && reqs[1] != kNull) outputs.push_back({arrays[node_.output() + 1], kBatch});
        fail(e, outputs);
    }
}

void Call::backward(const Arrays& arrays, const int* reqs) {
    const int gradients = node_.gradients();
    try {
        throw_if_closed();
        // MXNet skips what depends on a failure only until somebody has read that failure.
        if (!complete_) {
            const auto why = step().failure();
            throw Failure("no gradient, because the forward of this call failed. " +
                          std::string(why ? why->what() : ""));
        }
        if (passes_on()) {
            pass(arrays[0], arrays[gradients + kX], reqs[kX]);
            no_gradient(arrays, reqs);
        } else {
            differentiate(arrays, reqs);
        }
        if (node_.role == Role::kTrack && (reqs[kBatch] == kWrite || reqs[kBatch] == kInplace))
            backend_->fill(arrays[gradients + kBatch], Type::kFloat64, moments_length(channels()), 0);
    } catch (const std::exception& e) {
        std::vector<std::pair<Array, Input>> outputs;
        for (Input i : {kX, kGamma, kBeta})
            if (reqs[i] != kNull) outputs.push_back({arrays[gradients + i], i});
        fail(e, outputs);
    }
}

void Call::fail(const std::exception& error, const std::vector<std::pair<Array, Input>>& outputs) {
    const auto* known = dynamic_cast<const Failure*>(&error);
    const Failure failure =
        known != nullptr && !known->layer.empty() ? *known : Failure(node_.layer->name, context_, "", error.what());
    step().fail(failure);  // whatever it was, the other replicas need not wait for this one
    for (const auto& [out, like] : outputs) invalidate(out, like);
    throw Failure(failure);
}

// The batch's statistics become those of no batch: MXNet may run the operator that takes them (see `backward`), and the
// running statistics outlive a failed step. A device that cannot even do this has a reason, and that is the one that is on
// its way.
void Call::invalidate(Array out, Input like) {
    try {
        if (like == kBatch) return backend_->fill(out, Type::kFloat64, moments_length(channels()), 0);
        const bool data = like == kX;
        backend_->fill(out, data ? tensor_.type : tensor_.parameter_type(), data ? tensor_.shape.size() : channels(),
                       kNaN);
    } catch (const Failure&) {
    }
}

void Call::throw_if_closed() const {
    if (step().closed)
        throw Failure(
            "the process has run its exit handlers. Join the threads that train before the main thread ends.");
}

void Call::pass(Array from, Array to, int req) {
    if (req != kNull) backend_->copy(from, tensor_.type, tensor_.shape.size(), to, req == kAdd);
}

// Where the other operator of the call has the gradient with respect to gamma and beta.
void Call::no_gradient(const Arrays& arrays, const int* reqs) {
    for (int i : {kGamma, kBeta})
        if (reqs[i] == kWrite || reqs[i] == kInplace)
            backend_->fill(arrays[node_.gradients() + i], tensor_.parameter_type(), channels(), 0);
}

Affine Call::affine(const Arrays& arrays, int inputs) const {
    return {arrays[inputs + kGamma], arrays[inputs + kBeta], node_.fix_gamma};
}

int Call::threads() const {
    if (frozen_) return threads_for(1);
    return threads_for(place_.meeting ? place_.meeting->replicas() : node_.layer->terms()->replicas);
}

// ---- statistics ----------------------------------------------------------------------------------------------

void Call::sit_down() {
    if (!seated_) place_ = node_.layer->room.join(*node_.layer->terms(), context_, node_.number, this, repeated_);
    seated_ = false;  // a state that is executed again sits down again
    repeated_ = true;
    if (node_.lanes != place_.meeting->lanes)
        throw Failure(
            "the number of replicas per context has changed since the net was traced; call net.hybridize() again.");
    if (place_.meeting->replicas() > 1 && naive_engine())
        throw Failure(
            "MXNET_ENGINE_TYPE=NaiveEngine runs one replica after the other, so they can never meet. Unset it.");
}

void Call::repeat() {
    const auto outcome = recall_.memo->outcome(node_.layer->terms()->timeout);
    if (!outcome) {
        const auto why = step().failure();
        throw Failure("nothing to recompute from, because the forward of this call has not been computed. " +
                      std::string(why ? why->what() : ""));
    }
    const int backwards = place_.backwards;
    place_ = outcome->place;
    place_.backwards = backwards;
    pools_ = outcome->pools;
    first_slot_ = outcome->first_slot;
    tensor_.slots = outcome->slots;
}

Total Call::share(Direction direction, Vector values) {
    const Sharing sharing = sharing_of(node_.layer->pooling);
    if (sharing == Sharing::kNothing) return {std::move(values), 0, node_.layer->id};
    return node_.layer->room.share(*node_.layer->terms(), place_, direction, sharing, tensor_.type, channels(),
                                   std::move(values));
}

std::shared_ptr<const Statistic> Call::statistic(const Vector& moments) const {
    const auto mean = moments.begin() + 1, m2 = mean + channels();
    Vector invstd(m2, moments.end());
    for (double& v : invstd) v = 1 / std::sqrt(v / moments[0] + node_.epsilon);
    return std::make_shared<Statistic>(Statistic{moments[0], Vector(mean, m2), std::move(invstd)});
}

void Call::look_at(const Vector& moments) const {
    const Nonfinite what = node_.layer->terms()->nonfinite;
    if (what == Nonfinite::kPropagate) return;
    const bool bad = !finite(moments);
    if (what == Nonfinite::kSkip) {
        std::lock_guard<std::mutex> lock(culprit().mutex);
        const bool known = culprit().layer == node_.layer->id && culprit().context == context_;
        if (!bad && known) culprit().layer = 0;
        if (!bad || (culprit().layer != 0 && seconds() - culprit().since < kQuiet)) return;
        culprit().layer = node_.layer->id;
        culprit().context = context_;
        culprit().since = seconds();
    }
    if (!bad) return;
    const size_t length = static_cast<size_t>(moments_length(channels()));
    const size_t at = static_cast<size_t>(
        std::find_if(moments.begin(), moments.end(), [](double v) { return !std::isfinite(v); }) - moments.begin());
    const size_t slot = at / length, c = (at % length - 1) % static_cast<size_t>(channels());
    const bool mean = at % length <= static_cast<size_t>(channels());
    std::ostringstream text;
    text << "the batch is not finite: the " << (mean ? "mean" : "variance") << " of channel " << c;
    if (tensor_.slots.size() > 1) text << " in slot " << slot << " of " << tensor_.slots.size();
    text << " is " << moments[at] << ". ";
    if (what == Nonfinite::kError)
        throw Failure(node_.layer->name, context_, "", text.str() + "(gluon_syncbn.configure(nonfinite='error'))");
    text << "The running statistics leave it out (nonfinite='skip'). Nothing more is said of such batches for "
         << kQuiet << " s, or until this replica has a finite one.";
    log(Level::kWarning, Failure(node_.layer->name, context_, "", text.str()).what());
}

void Call::assign(const Total& moments) {
    const size_t length = static_cast<size_t>(moments_length(channels()));
    const Pooling& pooling = node_.layer->pooling;
    std::vector<double> counts;
    for (size_t at = 0; at < moments.values.size(); at += length) counts.push_back(moments.values[at]);
    if (sharing_of(pooling) == Sharing::kTotal && counts[0] == 0)
        throw Failure("the batches of all replicas are empty, so there is no mean.");
    Draw draw;
    if (place_.meeting) draw = place_.meeting->draw;
    draw.layer = moments.key;
    pools_ = pools_of(pooling, counts, draw);
    first_slot_ = static_cast<int64_t>(moments.first / length);
    std::map<int64_t, std::shared_ptr<const Statistic>> statistics;  // by pool
    const auto of = [&](int64_t pool) -> std::shared_ptr<const Statistic> {
        if (pool == kNone) return nullptr;
        auto& found = statistics[pool];
        if (!found) found = statistic(moments_of_pool(pools_, pool, moments.values, channels()));
        return found;
    };
    for (size_t i = 0; i < tensor_.slots.size(); ++i) {
        tensor_.slots[i].fed = of(pools_.feeds[first_slot_ + i]);
        tensor_.slots[i].used = of(pools_.uses[first_slot_ + i]);
    }
}

Vector Call::batch_statistics(const Total& moments) const {
    Vector batch(moments_length(channels()), 0.0);
    std::vector<int64_t> tracked;  // each once
    for (size_t i = 0; i < tensor_.slots.size(); ++i) {
        const int64_t pool = pools_.tracks[first_slot_ + i];
        if (pool != kNone && std::find(tracked.begin(), tracked.end(), pool) == tracked.end()) tracked.push_back(pool);
    }
    const double parts = static_cast<double>(tracked.size());
    for (int64_t pool : tracked) {
        const Vector part = moments_of_pool(pools_, pool, moments.values, channels());
        const double divisor = node_.unbiased ? std::max(part[0] - 1, 1.0) : part[0];
        for (int64_t c = 0; c < channels(); ++c) {
            batch[1 + c] += part[1 + c] / parts;
            batch[1 + channels() + c] += part[1 + channels() + c] / divisor / parts;
        }
    }
    batch[0] = parts > 0;
    return batch;
}

void Call::update_running(const Vector& batch, const Arrays& arrays) {
    if (batch[0] == 0) return;
    const auto mean = batch.begin() + 1, variance = mean + channels();
    const int running = node_.running_mean();
    backend_->update_running(Vector(mean, variance), Vector(variance, batch.end()), node_.momentum,
                             tensor_.parameter_type(), arrays[running], arrays[running + 1]);
}

Vector Call::gradients_of_users(Vector sums) {
    const Total all = share(Direction::kBackward, std::move(sums));
    const size_t length = static_cast<size_t>(gradients_length(channels()));
    Vector out(tensor_.slots.size() * length, 0.0);
    for (size_t i = 0; i < tensor_.slots.size(); ++i) {
        const int64_t pool = pools_.feeds[first_slot_ + i];
        if (pool == kNone) continue;
        const Vector of_pool = gradients_of_pool(pools_, pool, all.values, channels());
        std::copy(of_pool.begin(), of_pool.end(), out.begin() + static_cast<int64_t>(i * length));
    }
    return out;
}

// ---- forward -------------------------------------------------------------------------------------------------

void Call::normalise(const Arrays& arrays, const int* reqs) {
    const Array x = arrays[kX];
    Vector batch(moments_length(channels()), 0.0);
    if (recall_.again) {  // the running statistics have had this batch
        repeat();
        backend_->threads = threads();
    } else {
        if (sharing_of(node_.layer->pooling) != Sharing::kNothing) sit_down();
        backend_->threads = threads();
        tensor_.cut(node_.layer->pooling.slots());
        Vector own = backend_->moments(x, tensor_);
        look_at(own);
        const Total moments = share(Direction::kForward, std::move(own));
        assign(moments);
        batch = batch_statistics(moments);
        if (node_.layer->terms()->nonfinite == Nonfinite::kSkip && !finite(batch)) batch[0] = 0;
        if (recall_.memo) recall_.memo->keep({place_, pools_, first_slot_, tensor_.slots});
    }
    if (reqs[0] != kNull) backend_->normalise(x, tensor_, affine(arrays, 0), arrays[node_.output()], reqs[0] == kAdd);
    if (node_.role == Role::kWhole) {
        update_running(batch, arrays);
    } else if (reqs[1] != kNull) {
        if (!recall_.again && !place_.first_lane()) batch[0] = 0;  // one replica of a context is enough
        backend_->write(batch, Type::kFloat64, arrays[node_.output() + 1], false);
    }
}

void Call::normalise_frozen(const Arrays& arrays, int req) {
    tensor_.cut(1);
    const int running = node_.running_mean();
    tensor_.slots[0].fed = tensor_.slots[0].used =
        std::make_shared<Statistic>(backend_->frozen(arrays[running], arrays[running + 1], tensor_, node_.epsilon));
    backend_->threads = threads();
    if (req != kNull) backend_->normalise(arrays[kX], tensor_, affine(arrays, 0), arrays[node_.output()], req == kAdd);
}

// ---- backward ------------------------------------------------------------------------------------------------

// For slot i, normalised with the statistics of pool u and feeding pool f, S1 = sum dy and S2 = sum dy*xhat over the slots
// that are normalised with f:
//   dx = gamma * invstd_u * dy  -  gamma * invstd_f / n_f * (S1 + (x - mean_f) * invstd_f * S2)
void Call::differentiate(const Arrays& arrays, const int* reqs) {
    const int64_t n = channels();
    const int inputs = node_.outputs();
    const Array dy = arrays[0], x = arrays[inputs + kX];
    Vector sums = backend_->grad_sums(dy, x, tensor_);
    // The parameters' gradients are this replica's part; the trainer adds the parts, as for any parameter.
    Vector dgamma(n, 0.0), dbeta(n, 0.0);
    for (size_t at = 0; at < sums.size(); at += 2 * n)
        for (int64_t c = 0; c < n; ++c) {
            dbeta[c] += sums[at + c];
            if (!node_.fix_gamma) dgamma[c] += sums[at + n + c];
        }
    if (!frozen_) sums = gradients_of_users(std::move(sums));

    const int gradients = node_.gradients();
    if (reqs[kX] != kNull) {
        const size_t slots = tensor_.slots.size();
        ThroughStatistics through{Vector(slots * n, 0.0), Vector(slots * n, 0.0)};
        for (size_t i = 0; i < slots && !frozen_; ++i) {
            const Slot& slot = tensor_.slots[i];
            if (!slot.used) continue;
            const double *sum_dy = &sums[i * 2 * n], *sum_dy_xhat = sum_dy + n;
            for (int64_t c = 0; c < n; ++c) {
                const double share = slot.fed->invstd[c] / slot.used->invstd[c];
                through.mean_dy[i * n + c] = share * (sum_dy[c] / slot.fed->count);
                through.slope[i * n + c] = share * (sum_dy_xhat[c] / slot.fed->count * slot.fed->invstd[c]);
            }
        }
        backend_->grad_input(dy, x, tensor_, affine(arrays, inputs), through, arrays[gradients + kX], reqs[kX] == kAdd);
    }
    const auto write = [&](const Vector& values, Input input) {
        if (reqs[input] != kNull)
            backend_->write(values, tensor_.parameter_type(), arrays[gradients + input], reqs[input] == kAdd);
    };
    write(dgamma, kGamma);
    write(dbeta, kBeta);
}

}  // namespace syncbn

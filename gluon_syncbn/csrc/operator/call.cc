#include "operator/call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <tuple>

#include "log.h"
#include "pooling/statistics.h"
#include "to_python.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int kBytesOfNaN = 0xff;  // of every type of data
constexpr double kQuiet = 10;      // seconds
// Seconds, longer than replicas on equal batches mostly wait for each other. The engine's thread waits so long, because
// another thread would cost two wake-ups, and often has no core. If another branch that the others wait for needs the
// engine's thread, this branch is late by as much.
constexpr double kEngineThreadWaits = 0.005;

}  // namespace

void Node::list_roles() {
    forward.written = {kY};
    backward.all = {kDy};
    for (const Role role : {kX, kGamma, kBeta, kAddend, kMask, kY, kRunningMean, kRunningVar}) {
        if ((role == kAddend && !adds) || (role == kMask && !masks)) continue;
        forward.all.push_back(role);
        if (role <= kY) backward.all.push_back(role);
        if (role < kY) backward.written.push_back(gradient_of(role));
    }
    inputs = backward.written.size();
    backward.all.insert(backward.all.end(), backward.written.begin(), backward.written.end());
}

void Call::issue() {
    config_ = node_->layer->config();
    std::tie(memo_, repeats_) = next_memo();
    kept_ = within_graph;
    if (repeats_)
        place_.phase = memo_->repeat();
    else if (within_graph || !shares())
        return;
    else
        place_ = node_->layer->join(config_, context_, node_->number);
    issued_ = true;
}

template <typename Work>
void Call::attempt(const Work& work) {
    try {
        if (step().closed)
            throw Failure(
                "the process has run its exit handlers. Join the threads that train before the main thread ends.");
        work();
    } catch (const std::exception& error) {
        const std::exception_ptr failure = end_step(error);  // in any case, the others need not wait for this replica
        fill_written(true);
        clear_up();
        std::rethrow_exception(failure);
    }
}

void Call::fill_written(bool failed) {
    const bool left_out = tensor_.shape.outer != outer_;
    for (const Role role : written()) {
        const bool is_zero = role == kDmask || (is_data(role) && left_out);
        if (!arrays_.wants(role) || !(failed || (is_zero && !arrays_.adds(role)))) continue;
        const int64_t bytes = is_data(role)    ? outer_ * channels() * tensor_.shape.inner * size_of(tensor_.type)
                              : role == kDmask ? tensor_.mask.size * tensor_.mask.bytes
                                               : channels() * size_of(tensor_.parameter_type());
        try {
            fill(arrays_[role], bytes, failed ? kBytesOfNaN : 0);
        } catch (const std::exception&) {
            if (!failed) throw;  // a device that cannot even do this: its own reason is reported
        }
    }
}

bool Call::begin(bool backward, const Arrays& arrays, bool training) {
    arrays_ = arrays;
    backward_ = backward;
    if (backward) {
        ++place_.phase;
    } else {
        complete_ = false;
        if (!std::exchange(issued_, false)) {
            config_ = node_->layer->config();
            place_ = {};
        }
        frozen_ = !training || node_->frozen;
        const bool left_out = training && step().out_of_batches;  // the call works on no sample, and its results are 0
        tensor_.shape.outer = left_out ? 0 : outer_;
        tensor_.samples = left_out ? 0 : samples_;
    }
    bool ready = frozen_;
    attempt([&] {
        // MXNet skips dependents of a failure only until the failure has been read.
        if (orphaned()) {
            const auto why = step().failure();
            throw Failure("no gradient, because the forward of this call failed. " +
                          std::string(why ? why->what() : ""));
        }
        clear_up();  // after an execution that found no thread to go on in
        // Before this replica contributes. MXNet allocates a GPU's memory under a lock. It also frees under that lock,
        // and CUDA then waits for all work of the GPU (src/storage/gpu_device_storage.h). While a collective hangs, an
        // allocation would wait without a limit.
        for (const Role role : written())
            if (arrays_.wants(role)) data(arrays_[role]);
        if (backward) {
            const bool writes_dz = arrays_.wants(kDaddend) && !arrays_.adds(kDaddend);
            dz_ = writes_dz ? arrays_[kDaddend] : node_->adds && node_->activation.any() ? scratch() : arrays_[kDy];
            ready = begin_differentiate();
        } else if (!frozen_ && !repeats_) {  // otherwise it may have to wait for the call that it repeats
            if (shares()) join_meeting();
            tensor_.cut(node_->layer->pooling.slots());
            ready = begin_normalise();
        }
    });
    return ready;
}

void Call::end() {
    attempt([&] {
        if (backward_) {
            if (arrays_.adds(kDaddend))  // first, because dx may have the memory of dy
                add_data(dz_, arrays_[kDaddend]);
            differentiate();
        } else {
            if (frozen_) tensor_.cut(1);
            normalise();
        }
        fill_written(false);
        finish();
        complete_ = true;
    });
}

std::exception_ptr Call::end_step(const std::exception& error) const noexcept {
    try {
        const auto* known = dynamic_cast<const Failure*>(&error);
        const Failure failure = known != nullptr && !known->layer.empty()
                                    ? *known
                                    : Failure(node_->layer->name, context_, "", reason_of(error));
        if (place_.meeting)
            node_->layer->fail(*place_.meeting, failure);
        else if (!orphaned())
            step().fail(failure);  // otherwise the forward failed before it met the others: none waits for the backward
        return std::make_exception_ptr(failure);
    } catch (const std::bad_alloc& none) {
        step().fail(none);
        return std::current_exception();
    }
}

// ---- statistics ----------------------------------------------------------------------------------------------

void Call::join_meeting() {
    if (!place_.meeting) place_ = node_->layer->announced(config_, context_, node_->number);
    config_ = place_.meeting->config;
    if (place_.meeting->replicas() > 1 && is_naive_engine)
        throw Failure(
            "MXNET_ENGINE_TYPE=NaiveEngine runs one replica after the other, so they can never meet. Unset it.");
}

std::shared_ptr<const void> Call::repeat() {
    Wait wait(config_->timeout, node_->layer->name,
              "the forward that this call repeats (gluon_syncbn.recompute) has not been computed",
              "An operator before it does not finish, or the replicas of the forward were not all called.");
    const auto result = memo_->result(wait);
    place_ = {result->place.meeting, result->place.position, place_.phase};
    pools_ = result->pools;
    tensor_.slots = result->slots;
    return result->device;
}

void Call::remember(std::shared_ptr<const void> device) const {
    if (memo_) memo_->keep({place_, pools_, tensor_.slots, std::move(device)});
}

void Call::check_finite(int64_t at, double value) const {
    const Nonfinite what = config_->nonfinite;
    if (at < 0) return;
    double last = said_not_finite;
    const double now = seconds();
    if (what == Nonfinite::kSkip && (now < last + kQuiet || !said_not_finite.compare_exchange_strong(last, now)))
        return;
    const int64_t length = moments_length(channels()), within = at % length;
    std::ostringstream text;
    text << "the batch is not finite: the " << (within <= channels() ? "mean" : "variance") << " of channel "
         << (within - 1) % channels();
    if (tensor_.slots.size() > 1) text << " in slot " << at / length << " of " << tensor_.slots.size();
    text << " is " << (std::isnan(value) ? kNaN : value) << ". ";  // the sign of a NaN has no meaning
    if (what == Nonfinite::kError)
        throw Failure(node_->layer->name, context_, "", text.str() + "(gluon_syncbn.configure(nonfinite='error'))");
    text << "The running statistics leave it out (nonfinite='skip'). No further warning comes for " << kQuiet << " s.";
    log(Level::kWarning, Failure(node_->layer->name, context_, "", text.str()).what());
}

bool Call::contribute(Vector values, std::shared_ptr<const cuda::OnDevice> device) {
    if (!backward_ && device == nullptr && watches()) {
        const int64_t at = first_not_finite(values);
        check_finite(at, at < 0 ? 0 : values[static_cast<size_t>(at)]);
    }
    if (!shares()) {
        own_ = std::make_shared<const Total>(Total{std::move(values)});
        return true;
    }
    return node_->layer->contribute(place_, {tensor_.type, channels(), std::move(values), std::move(device)},
                                    kEngineThreadWaits);
}

std::shared_ptr<const Total> Call::total() const { return shares() ? node_->layer->total(place_) : own_; }

void Call::assign(const Total& of_slots, int64_t length) {
    const Pooling& pooling = node_->layer->pooling;
    const auto step = static_cast<size_t>(length);
    Vector counts;
    for (size_t at = 0; at < of_slots.values.size(); at += step) counts.push_back(of_slots.values[at]);
    if (sharing_of(pooling) == Sharing::kTotal && std::accumulate(counts.begin(), counts.end(), 0.0) == 0)
        throw Failure("the batches of all replicas are empty or masked, so there is no mean.");
    const Draw draw = place_.meeting ? place_.meeting->draw : Draw{};
    const int begin = static_cast<int>((of_slots.first + place_.position * of_slots.stride) / step);
    const Range own{begin, begin + static_cast<int>(tensor_.slots.size())};
    pools_ = std::make_shared<const Pools>(pools_of(pooling, counts, draw, own, of_slots.groups));
    const bool has_one_value = std::any_of(pools_->used.begin(), pools_->used.end(), [&](Range pool) {
        double sum = 0;
        for (int place = pool.begin; place < pool.end; ++place) sum += counts[pools_->slot(place)];
        return sum == 1;
    });
    if (has_one_value && !node_->layer->spoke_of_one_value.exchange(true))
        log(Level::kWarning,
            Failure(node_->layer->name, context_, "",
                    "a statistic has one value for each channel. It normalises to 0, so the output is beta, and the "
                    "input gets no gradient. Give the device more samples, or share the statistics of several devices.")
                .what());
}

}  // namespace syncbn

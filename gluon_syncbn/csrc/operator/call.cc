#include "operator/call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <sstream>

#include "log.h"
#include "point.h"
#include "pooling/statistics.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kQuiet = 10;  // seconds
// Seconds, longer than replicas on equal batches mostly wait for each other. The engine's thread waits so long, because
// another thread would cost two wake-ups, and often has no core. If another branch that the others wait for needs the
// engine's thread, this branch is late by as much.
constexpr double kEngineThreadWaits = 0.005;

// The last batch that a warning was about. A value that is not finite reaches all later layers and all replicas, and
// one warning is enough.
struct Culprit {
    std::mutex mutex;
    std::string replica;  // its context and layer; empty if there is none
    double since = 0;
};
Culprit& culprit = *new Culprit;  // outlives the threads that use it at exit

}  // namespace

void speak_of_nonfinite_again() {
    std::lock_guard<std::mutex> lock(culprit.mutex);
    culprit.replica.clear();
}

void Call::issue() {
    config_ = node_.layer->config();
    recall_ = recall();
    if (recall_.again)
        place_.phase = recall_.memo->repeat();
    else if (within_graph || !shares())
        return;
    else
        place_ = node_.layer->rendezvous.join(config_, context_, node_.number);
    issued_ = true;
}

// MXNet allocates a GPU's memory under a lock. It also frees under that lock, and CUDA then waits for all work of the
// GPU (src/storage/gpu_device_storage.h). While a collective hangs, an allocation would wait without a limit.
void Call::allocate(const Arrays& arrays, int first, int count, const int* reqs) {
    for (int i = 0; i < count; ++i)
        if (reqs[i] != kNull) data(arrays[first + i]);
}

// Outputs and gradients get NaN, because they might hold plausible values. The batch's statistics count as missing: MXNet
// may still run the operator that takes them, and the running statistics outlive a failed step.
template <typename Work>
void Call::attempt(bool backward, const Arrays& arrays, const int* reqs, const Work& work) {
    try {
        if (step().closed)
            throw Failure(
                "the process has run its exit handlers. Join the threads that train before the main thread ends.");
        return work();
    } catch (const std::exception& error) {
        const std::exception_ptr failure = end_step(error);  // in any case, the others need not wait for this replica
        leave_out(false);
        const int first = backward ? node_.gradients() : node_.output();
        for (int i = 0; i < (backward ? node_.inputs() : node_.outputs()); ++i) {
            const bool data = node_.is_data(backward ? i : first + i), parameter = backward && !data && i <= kBeta;
            if (reqs[i] != kNull) try {
                    if (data) fill(arrays[first + i], tensor_.type, tensor_.shape.size(), kNaN);
                    if (parameter) fill(arrays[first + i], tensor_.parameter_type(), channels(), kNaN);
                    if (!backward && node_.is_batch(first + i))
                        fill(arrays[first + i], Type::kFloat64, moments_length(channels()), 0);
                } catch (const std::exception&) {  // of a device that cannot even do this; its own reason is reported
                }
        }
        clear_up();
        std::rethrow_exception(failure);
    }
}

bool Call::begin_forward(const Arrays& arrays, const int* reqs, bool training) {
    if (!issued_) {
        config_ = node_.layer->config();
        place_ = {};
    }
    issued_ = complete_ = lost_ = false;
    frozen_ = !training || node_.frozen;
    tensor_.lay_out(arrays.block);
    leave_out(training && step().out_of_batches);
    ready_ = passes_on() || frozen_;
    attempt(false, arrays, reqs, [&] {
        clear_up();  // after an execution that found no thread to go on in
        if (!ready_) {
            allocate(arrays, node_.output(), node_.outputs(), reqs);
            if (!recall_.again) {  // otherwise it may have to wait for the call that it repeats
                if (shares()) join_meeting();
                tensor_.cut(node_.layer->pooling.slots());
                begin_normalise(arrays);
            }
        }
        if (!ready_) leave_thread();
    });
    return ready_;
}

void Call::end_forward(const Arrays& arrays, const int* reqs) {
    attempt(false, arrays, reqs, [&] {
        if (passes_on()) {
            pass(arrays[kX], arrays[node_.output()], reqs[0]);
            if (node_.hands_addend_on()) pass(arrays[kAddend], arrays[node_.addend_output()], reqs[2]);
        } else {
            if (frozen_) tensor_.cut(1);
            normalise(arrays, reqs);
        }
        // As MXNet's BatchNorm does: an optimizer may have changed a gamma that does not count. Operators that write the
        // running statistics of a context come one after the other.
        if (node_.fix_gamma && !frozen_ && node_.role != Role::kMeet)
            fill(arrays[kGamma], tensor_.parameter_type(), channels(), 1);
        if (node_.role == Role::kTrack && !frozen_) {
            // MXNet skips dependents of a failure only until the failure has been read. If it has skipped the first
            // operator, there are old values in that memory.
            if (step().take(data(arrays[node_.batch()])))
                track(arrays);
            else if (step().failure() == nullptr)
                throw Failure(
                    "no running statistics, because an operator before this layer has failed. Read its output.");
        }
        write_zeros(false, arrays, reqs);
        SYNCBN_POINT("before_forward_ends");
        finish();
        complete_ = true;
        if (node_.role == Role::kMeet && !frozen_ && reqs[1] != kNull) step().leave(data(arrays[node_.batch_output()]));
    });
}

bool Call::begin_backward(const Arrays& arrays, const int* reqs) {
    tensor_.lay_out(arrays.block);
    ready_ = passes_on() || frozen_;
    ++place_.phase;
    lost_ = !complete_ && !place_.meeting && node_.role != Role::kTrack;
    attempt(true, arrays, reqs, [&] {
        // MXNet skips dependents of a failure only until the failure has been read.
        if (!complete_) {
            const auto why = step().failure();
            throw Failure("no gradient, because the forward of this call failed. " +
                          std::string(why ? why->what() : ""));
        }
        clear_up();
        if (!passes_on()) {
            allocate(arrays, node_.gradients(), node_.inputs(), reqs);
            begin_differentiate(arrays, reqs);
        }
        if (!ready_) leave_thread();
    });
    return ready_;
}

void Call::end_backward(const Arrays& arrays, const int* reqs) {
    attempt(true, arrays, reqs, [&] {
        if (passes_on())
            pass_backward(arrays, reqs);
        else
            differentiate(arrays, reqs);
        write_zeros(true, arrays, reqs);
        SYNCBN_POINT("before_backward_ends");
        finish();
    });
}

std::exception_ptr Call::end_step(const std::exception& error) const noexcept {
    try {
        const auto* known = dynamic_cast<const Failure*>(&error);
        const Failure failure = known != nullptr && !known->layer.empty()
                                    ? *known
                                    : Failure(node_.layer->name, context_, "", reason_of(error));
        if (place_.meeting)
            node_.layer->rendezvous.fail(*place_.meeting, failure);
        else if (!lost_)
            step().fail(failure);
        return std::make_exception_ptr(failure);
    } catch (const std::bad_alloc& none) {
        step().fail(none);
        return std::current_exception();
    }
}

void Call::leave_out(bool is_out) {
    tensor_.shape.outer = is_out ? 0 : outer_;
    tensor_.samples = is_out ? 0 : samples_;
}

void Call::write_zeros(bool backward, const Arrays& arrays, const int* reqs) {
    const bool left_out = tensor_.shape.outer != outer_;
    const int first = backward ? node_.gradients() : node_.output();
    for (int i = 0; i < (backward ? node_.inputs() : node_.outputs()); ++i) {
        const Array to = arrays[first + i];
        if (reqs[i] != kWrite && reqs[i] != kInplace) continue;
        if (left_out && node_.is_data(backward ? i : first + i))
            fill(to, tensor_.type, outer_ * channels() * tensor_.shape.inner, 0);
        if (!backward) continue;
        if (node_.is_batch(i)) fill(to, Type::kFloat64, moments_length(channels()), 0);
        if (node_.is_mask(i)) fill_with_zeros(to, node_.mask.size * node_.mask.bytes);
        if (passes_on() && (i == kGamma || i == kBeta)) fill(to, tensor_.parameter_type(), channels(), 0);
    }
}

void Call::pass(Array from, Array to, int req) {
    if (req != kNull) copy(from, tensor_.type, tensor_.shape.size(), to, req == kAdd);
}

// The other operator of the call has the gradients with respect to gamma and beta, and here they are 0. It has the
// addend's, too. The second operator does not write the addend's gradient, because the first one does not read it.
void Call::pass_backward(const Arrays& arrays, const int* reqs) {
    pass(arrays[0], arrays[node_.gradients() + kX], reqs[kX]);
    if (node_.hands_addend_on())
        pass(arrays[Node::kGradientOfAddendOutput], arrays[node_.gradients() + kAddend], reqs[kAddend]);
}

Affine Call::affine(const Arrays& arrays, int inputs) const {
    return {arrays[inputs + kGamma], arrays[inputs + kBeta], node_.fix_gamma, node_.activation};
}

void Call::refuse_to_recover(const Hidden& hidden) const {
    const std::string channel = std::to_string(hidden.channel);
    const std::string outputs = std::string(" to find x from ") + name_of(tensor_.type) + " outputs (inplace=True";
    if (hidden.by_another)
        throw Failure("no gradient: in channel " + channel +
                      ", the values of a slot differ too little, compared with the statistic of another slot," +
                      outputs + ", mode='shuffle'). Train this layer with inplace=False, or with larger slots.");
    throw Failure("no gradient: gamma of channel " + channel + " is too small, compared with beta," + outputs +
                  "). Train this layer with inplace=False. Or keep its gamma away from 0: initialise it with another " +
                  "value, and exclude it from weight decay (wd_mult = 0).");
}

// ---- statistics ----------------------------------------------------------------------------------------------

void Call::join_meeting() {
    SYNCBN_POINT("before_join");
    if (!place_.meeting) place_ = node_.layer->rendezvous.take(config_, context_, node_.number);
    config_ = place_.meeting->config;
    if (node_.per_context != config_->per_context)
        throw Failure(
            "the number of replicas per context has changed since the net was traced; call net.hybridize() again.");
    if (place_.meeting->replicas() > 1 && is_naive_engine())
        throw Failure(
            "MXNET_ENGINE_TYPE=NaiveEngine runs one replica after the other, so they can never meet. Unset it.");
}

std::shared_ptr<const void> Call::repeat() {
    Wait wait(config_->timeout, config_->name,
              "the forward that this call repeats (gluon_syncbn.checkpoint) has not been computed",
              "An operator before it does not finish, or the replicas of the forward were not all called.");
    const auto outcome = recall_.memo->outcome(wait);
    const int phase = place_.phase;
    place_ = outcome->place;
    place_.phase = phase;
    pools_ = outcome->pools;
    tensor_.slots = outcome->slots;
    tensor_.lay_out(tensor_.shape.block);
    return outcome->device;
}

void Call::remember(std::shared_ptr<const void> device) const {
    if (recall_.memo) recall_.memo->keep({place_, pools_, tensor_.slots, std::move(device)});
}

void Call::check_finite(int64_t at, double value) const {
    const Nonfinite what = config_->nonfinite;
    if (what == Nonfinite::kPropagate) return;
    const bool bad = at >= 0;
    if (what == Nonfinite::kSkip) {
        const std::string own = context_ + std::to_string(node_.layer->id);
        std::lock_guard<std::mutex> lock(culprit.mutex);
        if (!bad && culprit.replica == own) culprit.replica.clear();
        if (!bad || (!culprit.replica.empty() && seconds() - culprit.since < kQuiet)) return;
        culprit.replica = own;
        culprit.since = seconds();
    }
    if (!bad) return;
    const int64_t length = moments_length(channels()), within = at % length;
    std::ostringstream text;
    text << "the batch is not finite: the " << (within <= channels() ? "mean" : "variance") << " of channel "
         << (within - 1) % channels();
    if (tensor_.slots.size() > 1) text << " in slot " << at / length << " of " << tensor_.slots.size();
    text << " is " << (std::isnan(value) ? kNaN : value) << ". ";  // the sign of a NaN has no meaning
    if (what == Nonfinite::kError)
        throw Failure(node_.layer->name, context_, "", text.str() + "(gluon_syncbn.configure(nonfinite='error'))");
    text << "The running statistics leave it out (nonfinite='skip'). No further warning comes for " << kQuiet
         << " s, or until this replica has a finite batch.";
    log(Level::kWarning, Failure(node_.layer->name, context_, "", text.str()).what());
}

void Call::check_finite(const Vector& moments) const {
    if (!watches()) return;
    const int64_t at = first_not_finite(moments);
    check_finite(at, at < 0 ? 0 : moments[static_cast<size_t>(at)]);
}

void Call::contribute(Vector values, std::shared_ptr<const cuda::OnDevice> device) {
    ready_ = !shares();
    if (ready_) {
        own_ = std::move(values);
        return;
    }
    SYNCBN_POINT("before_contribution");
    const double wait =
        config_->per_context > 1 ? 0 : kEngineThreadWaits;  // the context's next replica needs this very thread
    ready_ = node_.layer->rendezvous.contribute(place_,
                                                {tensor_.type, channels(), std::move(values), std::move(device)}, wait);
    SYNCBN_POINT("after_contribution");
}

Total Call::total() {
    if (!shares()) return {std::move(own_), 0, node_.layer->id};
    SYNCBN_POINT("before_total");
    return node_.layer->rendezvous.total(place_);
}

Total Call::counts_of(const Total& total, int64_t length) {
    const auto step = static_cast<size_t>(length);
    Total counts{{}, total.first / step, total.key, total.groups};
    for (size_t at = 0; at < total.values.size(); at += step) counts.values.push_back(total.values[at]);
    return counts;
}

void Call::assign(const Total& of_slots) {
    const Pooling& pooling = node_.layer->pooling;
    const Vector& counts = of_slots.values;
    if (sharing_of(pooling) == Sharing::kTotal && std::accumulate(counts.begin(), counts.end(), 0.0) == 0)
        throw Failure("the batches of all replicas are empty or masked, so there is no mean.");
    Draw draw;
    if (place_.meeting) draw = place_.meeting->draw;
    draw.layer = of_slots.key;
    const int begin = static_cast<int>(of_slots.first);
    pools_ = pools_of(pooling, counts, draw, {begin, begin + static_cast<int>(tensor_.slots.size())}, of_slots.groups);
    const auto values = [&](Range pool) {
        double sum = 0;
        for (int place = pool.begin; place < pool.end; ++place) sum += counts[pools_.slot(place)];
        return sum;
    };
    if (std::any_of(pools_.used.begin(), pools_.used.end(), [&](Range pool) { return values(pool) == 1; }) &&
        !node_.layer->spoke_of_one_value.exchange(true))
        log(Level::kWarning,
            Failure(node_.layer->name, context_, "",
                    "a statistic has one value for each channel. It normalises to 0, so the output is beta, and the "
                    "input gets no gradient. Give the device more samples, or share the statistics of several devices.")
                .what());
}

}  // namespace syncbn

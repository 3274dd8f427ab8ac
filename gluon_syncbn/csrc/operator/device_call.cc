// A call on a GPU: the statistics stay there. What replicas meet for is to say that theirs are on their way; the last to
// come has NCCL bring all of them to every GPU, and each puts its pools together by itself.
//
//     moments ──► packed moments of each slot ──► all-gather ──► normalise: pools, y, running statistics
//     grad_sums ──► packed gradients ──────────► all-gather ──► grad_input: pools, dx, dgamma, dbeta
//
// All of it is put on one stream, and waited for once. A KVStore of MXNet can only add, and does not know that stream: for it
// `moments` and `grad_sums` write into a vector for all slots that is zero but for its own, and are waited for. The sum of the
// vectors is what an all-gather would have brought, to the bit (but for the sign of a zero). Where neither is to be had,
// packed vectors come to the host, meet there as those of a CPU do, and go back: the same kernels read them.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "clock.h"
#include "cuda/collective.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "log.h"
#include "operator/call.h"
#include "pooling/statistics.h"
#include "waiting/stall.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

using cuda::Argument;
using cuda::ceil_div;
using cuda::Current;
using cuda::Device;
using cuda::Grid;
using cuda::kBlock;
using cuda::kMostSlots;
using cuda::launch;
using cuda::Lease;
using cuda::Memory;
using cuda::Plan;

constexpr double kGrace = 2;    // seconds that a stream gets to end after its collective has been ended
constexpr double kSpin = 1e-3;  // seconds in which a stream is asked again and again
constexpr auto kPause = std::chrono::microseconds(20);
constexpr auto kLongPause = std::chrono::milliseconds(1);
constexpr double kWatchAfter = 0.05;  // seconds until a wait counts as long enough to look around
constexpr double kLookAfter = 0.5;    // seconds between looks at other processes

std::string named(const char* kernel, Type type, bool activated = false) {
    return std::string(kernel) + (activated ? "_activated_" : "_") + name_of(type);
}

// The layout is that of `Pools` in kernels.cu.
struct PoolsOfSlots {
    enum Kind : int { kShared, kOwn, kTable };
    int kind = kOwn, own = 0, begin = 0, end = 0;
    int table[kMostSlots] = {};
};

// As in kernels.cu: what becomes of moments that are not finite.
enum Watch : int { kPropagate, kLeaveOut, kLeaveOutAndTell };

// What the replicas hand in, and what comes back; it lives until nobody points to it any more.
struct Gathered {
    Memory own, all;
    OnDevice part;
    int64_t slots = 0;
    const double* values() const { return all.data() != nullptr ? all.data() : own.part(); }
};

class DeviceCall : public Call {
  public:
    using Call::Call;

  protected:
    void normalise(const Arrays& arrays, const int* reqs) override;
    void normalise_frozen(const Arrays& arrays, int req) override;
    void differentiate(const Arrays& arrays, const int* reqs) override;
    void track(const Arrays& arrays) override;
    void copy(Array from, Type type, int64_t n, Array to, bool add) override;
    void fill(Array to, Type type, int64_t n, double value) override;
    void finish() override;
    void clear_up() override;

  private:
    // What a callback works with on its thread.
    struct Work {
        Current current;
        Lease lease;
        explicit Work(Device& device) : current(device), lease(device) {}
    };
    Device& device() {
        if (device_ == nullptr) device_ = &Device::of(std::stoi(context_.substr(4)));
        return *device_;
    }
    Work& work() {
        if (!work_) work_.emplace(device());
        return *work_;
    }
    // `ask` may end in Python, where whatever is freed meanwhile may leave another device current on this thread.
    template <typename Ask>
    auto still_current(const Ask& ask) -> decltype(ask()) {
        const Current again(device());
        return ask();
    }
    Memory memory(int64_t size) {
        work();
        return Memory(device(), size);
    }
    // The same until the callback ends.
    double* scratch(int64_t size) {
        scratch_.push_back(memory(size));
        return scratch_.back().data();
    }
    // The size of the data.
    int64_t in_doubles() const {
        return ceil_div(tensor_.shape.size() * size_of(tensor_.type), int64_t{sizeof(double)});
    }
    // For the numbers of all replicas, zero but for `size` of this one.
    Memory memory_for_all(int64_t size) {
        const std::vector<std::string>& all = place_.meeting->contexts;  // one replica on each
        const int64_t before = std::find(all.begin(), all.end(), context_) - all.begin();
        return Memory(device(), {static_cast<int64_t>(all.size()) * size, before * size, size}, work().lease.stream());
    }
    void run(const std::string& kernel, Grid grid, std::initializer_list<Argument> arguments) {
        launch(device(), work().lease.stream(), kernel, grid, arguments);
    }

    // Whether a KVStore brings together what is on the devices, which are one for each replica.
    bool adds_on_devices() const;
    bool gathers_on_devices(Direction direction);
    // Packed vectors of `length` for each slot, from a kernel and, where it works in chunks, from what merges those.
    template <typename Launch>
    Memory reduced(int64_t length, const char* merge, const Launch& launch_with);
    // The packed vectors of all replicas, from those of this one. The counts of their slots come back in the forward.
    Total gather(Direction direction, int64_t length);
    void run_normalise(const Arrays& arrays, int req, const PoolsOfSlots& pools, void* batch);
    // x, from y, into the room of dx or of scratch.
    void* recovered(const Arrays& arrays, const int* reqs);
    void copy_data(const void* from, Type type, int64_t n, void* to, bool add);
    PoolsOfSlots used() const;
    PoolsOfSlots users() const;
    bool idle_within(double seconds) const;
    // Until what is on the stream is done; throws Failure.
    void wait();

    Device* device_ = nullptr;
    std::optional<Work> work_;
    std::vector<Memory> scratch_;         // until the callback ends
    std::shared_ptr<Gathered> gathered_;  // the same
    bool may_be_posted_ = false;          // others may put something on the stream
    bool tells_ = false;                  // the forward has said whether the moments are finite
    bool recovers_ = false;               // the backward has said whether x could be found
    bool kept_for_repetition_ = false;    // what was gathered
    int64_t spread_ = 0;                  // replicas of all processes, where GPUs of several meet
    Direction direction_ = Direction::kForward;
    bool on_devices_ = false;  // what was gathered is that of each slot, not of all together
    Memory kept_;              // for the backward
};

Plan plan_of(const Tensor& tensor) {
    return Plan(tensor.shape, tensor.samples, static_cast<int64_t>(tensor.slots.size()));
}

// ---- pools -------------------------------------------------------------------------------------------------------

PoolsOfSlots shared(int64_t own, int64_t begin, int64_t end) {
    PoolsOfSlots out;
    out.kind = PoolsOfSlots::kShared;
    out.own = static_cast<int>(own);
    out.begin = static_cast<int>(begin);
    out.end = static_cast<int>(end);
    return out;
}

// The gathered slots that feed what each slot of this replica is normalised with.
PoolsOfSlots DeviceCall::used() const {
    const Pooling& pooling = node_.layer->pooling;
    if (pooling.mode == Mode::kSync) {
        const int64_t begin = pooling.group == 0 ? 0 : first_slot_ / pooling.group * pooling.group;
        const int64_t end = pooling.group == 0 ? gathered_->slots : std::min(begin + pooling.group, gathered_->slots);
        return shared(first_slot_, begin, end);
    }
    PoolsOfSlots out;
    out.own = static_cast<int>(first_slot_);
    if (pooling.mode == Mode::kLocal) return out;
    out.kind = PoolsOfSlots::kTable;
    for (size_t i = 0; i < tensor_.slots.size(); ++i) {
        const int64_t pool = pools_.uses[first_slot_ + i];
        out.table[i] = pool == kNone ? out.own + static_cast<int>(i) : static_cast<int>(pool);  // an empty slot: any
    }
    return out;
}

// Those that are normalised with what each slot of this replica feeds.
PoolsOfSlots DeviceCall::users() const {
    PoolsOfSlots out = used();
    if (out.kind != PoolsOfSlots::kTable) return out;
    for (size_t i = 0; i < tensor_.slots.size(); ++i) {
        const auto user = std::find(pools_.uses.begin(), pools_.uses.end(), first_slot_ + static_cast<int64_t>(i));
        out.table[i] =
            user == pools_.uses.end() ? out.own + static_cast<int>(i) : static_cast<int>(user - pools_.uses.begin());
    }
    return out;
}

// ---- what is gathered ----------------------------------------------------------------------------------------------

// Several replicas on a GPU would be several members of a collective, of which a GPU can be only one.
bool one_gpu_each(const Meeting& meeting) {
    return meeting.lanes == 1 && std::all_of(meeting.contexts.begin(), meeting.contexts.end(),
                                             [](const auto& context) { return context.compare(0, 4, "gpu(") == 0; });
}

bool DeviceCall::adds_on_devices() const {
    if (frozen_ || !shares()) return false;
    const Meeting& meeting = *place_.meeting;
    return meeting.exchange->gpu_route() == GpuRoute::kStore && meeting.replicas() > 1 && one_gpu_each(meeting);
}

bool DeviceCall::gathers_on_devices(Direction direction) {
    const Meeting& meeting = *place_.meeting;
    const GpuRoute route = meeting.exchange->gpu_route();
    spread_ = 0;
    if (route == GpuRoute::kHost || !one_gpu_each(meeting)) return false;
    if (route == GpuRoute::kStore) return true;
    if (route == GpuRoute::kProcesses) {
        spread_ = still_current([&] { return node_.layer->room.spread(*node_.layer->terms(), place_, direction); });
        return spread_ > 0;
    }
    if (meeting.replicas() == 1) return true;
    const std::string missing = cuda::why_no_collective();
    if (missing.empty()) return true;
    if (route == GpuRoute::kNccl) throw Failure("kvstore 'nccl' was asked for, but " + missing);
    static std::once_flag said;
    std::call_once(said, [&] { log(Level::kWarning, "the statistics of GPUs go over the host: " + missing); });
    return false;
}

template <typename Launch>
Memory DeviceCall::reduced(int64_t length, const char* merge, const Launch& launch_with) {
    const int64_t slots = static_cast<int64_t>(tensor_.slots.size()), size = slots * length;
    Memory out = adds_on_devices() ? memory_for_all(size) : memory(size);
    if (tensor_.shape.size() == 0) {
        run("fill_float64", {ceil_div(size, kBlock)}, {out.part(), 0.0, size});
        return out;
    }
    const Plan plan = plan_of(tensor_);
    if (plan.chunks == 1) {
        launch_with(plan, out.part());
        return out;
    }
    double* partial = scratch(plan.chunks * slots * length);
    launch_with(plan, partial);
    const int chunks = static_cast<int>(plan.chunks);
    const int64_t warps = slots * channels();
    run(merge, {ceil_div(warps, kBlock / 32)}, {partial, out.part(), chunks, slots, tensor_.shape.channels});
    return out;
}

Total DeviceCall::gather(Direction direction, int64_t length) {
    const Memory& own = gathered_->own;
    Vector counts;
    for (const Slot& slot : tensor_.slots) counts.push_back(static_cast<double>(slot.shape.per_channel()));
    direction_ = direction;
    int64_t& slots = gathered_->slots;
    slots = static_cast<int64_t>(tensor_.slots.size());
    on_devices_ = !shares() || gathers_on_devices(direction);
    if (!shares()) return {std::move(counts), 0, node_.layer->id};
    const auto terms = node_.layer->terms();
    if (on_devices_) {
        const auto capacity = spread_ > 0 ? spread_ : static_cast<int64_t>(place_.meeting->replicas());
        if (capacity > 1) gathered_->all = memory(capacity * own.part_size());
        const bool adds = adds_on_devices();
        if (adds) wait();  // MXNet knows nothing of the stream
        gathered_->part = {device().id, work().lease.stream(), adds ? own.data() : own.part(), gathered_->all.data(),
                           adds ? own.size() : own.part_size()};
        may_be_posted_ = true;
        Total total = node_.layer->room.share(
            *terms, place_, direction, tensor_.type, channels(), std::move(counts),
            std::shared_ptr<const OnDevice>(gathered_, &gathered_->part),
            [&](const std::vector<OnDevice>& parts, Vector all, const Ticket& ticket) {
                if (adds) {
                    still_current([&] { place_.meeting->exchange->add_on_devices(ticket, parts); });
                    return Total{std::move(all), 0, ticket.layer};
                }
                Turn turn;
                if (spread_ > 0) {
                    turn = still_current([&] { return place_.meeting->exchange->turn(ticket, parts, all); });
                } else {
                    turn.world = parts.size();
                    turn.counts = std::move(all);
                    turn.key = ticket.layer;
                }
                if (turn.world > static_cast<size_t>(capacity))
                    throw Failure("a step with " + std::to_string(turn.world) + " GPUs, where the processes have " +
                                  "agreed on " + std::to_string(capacity) + ": start the job again after `reset_ctx`.");
                if (turn.world > 1) cuda::all_gather(parts, turn, *terms);
                const size_t mine = turn.first * (turn.counts.size() / turn.world);
                return Total{std::move(turn.counts), mine, turn.key};
            });
        may_be_posted_ = false;
        slots = static_cast<int64_t>(total.values.size());
        return total;
    }
    Vector values(static_cast<size_t>(own.size()));
    own.download(values.data(), work().lease);
    if (direction == Direction::kForward) look_at(values);
    Total total = still_current([&] {
        hand_in(direction, std::move(values));
        return collect(direction);
    });
    gathered_->all = memory(static_cast<int64_t>(total.values.size()));
    gathered_->all.upload(total.values.data(), work().lease.stream());
    slots = gathered_->all.size() / length;
    if (direction == Direction::kForward) {
        counts.clear();
        for (int64_t slot = 0; slot < slots; ++slot) counts.push_back(total.values[slot * length]);
    }
    return {std::move(counts), total.first / static_cast<size_t>(length), total.key};
}

// ---- forward -------------------------------------------------------------------------------------------------------

void DeviceCall::normalise(const Arrays& arrays, const int* reqs) {
    const bool hands_on = node_.role == Role::kMeet && reqs[1] != kNull;
    void* batch = hands_on ? data(arrays[node_.batch_output()]) : nullptr;
    if (recall_.again) {
        gathered_ = std::const_pointer_cast<Gathered>(std::static_pointer_cast<const Gathered>(repeat()));
        return run_normalise(arrays, reqs[0], used(), batch);
    }
    if (shares()) sit_down();
    const Pooling& pooling = node_.layer->pooling;
    if (pooling.mode == Mode::kShuffle && pooling.slots() > kMostSlots)
        throw Failure("mode 'shuffle' takes at most " + std::to_string(kMostSlots) +
                      " virtual_devices on a GPU; there are " + std::to_string(pooling.slots()) + ".");
    tensor_.cut(pooling.slots());
    gathered_ = std::make_shared<Gathered>();
    const int64_t length = moments_length(channels());
    const void* x = data(arrays[kX]);
    gathered_->own = reduced(length, "merge_moments", [&](const Plan& plan, double* out) {
        run(named("moments", tensor_.type), plan.reduce(),
            {x, out, plan.samples, plan.per_sample, plan.shape.channels, plan.shape.inner, plan.slots, plan.width});
    });
    const Total counts = gather(Direction::kForward, length);
    assign(counts.values, counts.first, counts.key);
    run_normalise(arrays, reqs[0], used(), batch);
    tells_ = watches() && on_devices_;
    kept_for_repetition_ = recall_.memo != nullptr;
}

void DeviceCall::normalise_frozen(const Arrays& arrays, int req) {
    tensor_.cut(1);
    run_normalise(arrays, req, {}, nullptr);
}

void DeviceCall::run_normalise(const Arrays& arrays, int req, const PoolsOfSlots& pools, void* batch) {
    const Plan plan = plan_of(tensor_);
    const Affine affine = this->affine(arrays, 0);
    const void *x = data(arrays[kX]), *gamma = data(affine.gamma), *beta = data(affine.beta);
    const double* gathered = frozen_ ? nullptr : gathered_->values();
    const void* addend = node_.adds ? data(arrays[kAddend]) : nullptr;
    void* y = req == kNull ? nullptr : data(arrays[node_.output()]);
    void *mean = nullptr, *variance = nullptr;
    if (frozen_ || (node_.role != Role::kMeet && !recall_.again)) {
        mean = data(arrays[node_.running_mean()]);
        variance = data(arrays[node_.running_mean() + 1]);
    }
    kept_ = Memory();  // that of the last execution may serve again
    kept_ = memory(plan.slots * (1 + 4 * channels()));
    const int frozen = frozen_, fix_gamma = affine.fix_gamma, add = req == kAdd;
    // One replica of a context is enough; a call that repeats another has nothing new.
    const int hand_on = batch != nullptr && !recall_.again && place_.first_lane();
    const int unbiased = node_.unbiased;
    const int watch = !watches() ? kPropagate : on_devices_ ? kLeaveOutAndTell : kLeaveOut;
    const bool any = y != nullptr && tensor_.shape.size() > 0;
    run(named("normalise", tensor_.type, node_.adds || affine.activation.any()),
        any ? plan.each() : Grid{ceil_div(channels(), kBlock)},
        {x,
         gathered,
         pools,
         frozen,
         node_.epsilon,
         gamma,
         beta,
         fix_gamma,
         y,
         add,
         kept_.data(),
         node_.momentum,
         mean,
         variance,
         batch,
         hand_on,
         unbiased,
         watch,
         work().lease.told(),
         plan.samples,
         plan.per_sample,
         plan.shape.channels,
         plan.shape.inner,
         plan.slots,
         plan.width,
         plan.segment,
         addend,
         affine.activation.slope,
         affine.activation.ceiling});
}

// The second operator of a call: what the first one has left is [1, mean[C], variance[C]], or [0, ...].
void DeviceCall::track(const Arrays& arrays) {
    const int running = node_.running_mean();
    run(named("update_running", tensor_.parameter_type()), {ceil_div(channels(), kBlock)},
        {data(arrays[node_.batch()]), node_.momentum, data(arrays[running]), data(arrays[running + 1]),
         tensor_.shape.channels});
}

// ---- backward ------------------------------------------------------------------------------------------------------

void* DeviceCall::recovered(const Arrays& arrays, const int* reqs) {
    const Affine affine = this->affine(arrays, node_.outputs());
    void* x = reqs[kX] == kWrite ? data(arrays[node_.gradients() + kX]) : scratch(in_doubles());
    if (tensor_.shape.size() == 0) return x;
    const Plan plan = plan_of(tensor_);
    const Invertible invertible = invertible_by(tensor_.type, affine.activation.slope);
    const int fix_gamma = affine.fix_gamma;
    run(named("recover", tensor_.type), plan.each(),
        {data(arrays[node_.output_in_backward()]), x, kept_.data(), data(affine.gamma), data(affine.beta), fix_gamma,
         affine.activation.slope, invertible.per_beta, invertible.least, node_.epsilon, kConstant, work().lease.told(),
         plan.samples, plan.per_sample, plan.shape.channels, plan.shape.inner, plan.slots, plan.width, plan.segment});
    recovers_ = true;
    return x;
}

// dz, the gradient with respect to z of `Affine`, is the addend's too. Where there is an addend, `grad_sums` writes dz and
// `grad_input` reads that; else both make it of dy, by a z that they compute again.
void DeviceCall::differentiate(const Arrays& arrays, const int* reqs) {
    const int inputs = node_.outputs(), gradients = node_.gradients();
    const Affine affine = this->affine(arrays, inputs);
    const bool rectifies = affine.activation.any();
    const void *dy = data(arrays[0]), *gamma = data(affine.gamma);
    const void* x = node_.inplace ? recovered(arrays, reqs) : data(arrays[inputs + kX]);
    const void *beta = nullptr, *y = nullptr;
    const int fix_gamma = affine.fix_gamma;
    void* dz = nullptr;
    if (node_.adds) {
        y = rectifies ? data(arrays[node_.output_in_backward()]) : dy;  // whose sign does not matter
        if (reqs[kAddend] == kWrite || reqs[kAddend] == kInplace)
            dz = data(arrays[gradients + kAddend]);
        else if (rectifies)
            dz = scratch(in_doubles());
    } else if (rectifies) {
        beta = data(affine.beta);
    }
    gathered_ = std::make_shared<Gathered>();
    const int64_t length = gradients_length(channels());
    gathered_->own = reduced(length, "merge_sums", [&](const Plan& plan, double* out) {
        run(named("grad_sums", tensor_.type, dz != nullptr || beta != nullptr), plan.reduce(),
            {dy, x, kept_.data(), out, plan.samples, plan.per_sample, plan.shape.channels, plan.shape.inner, plan.slots,
             plan.width, gamma, beta, fix_gamma, affine.activation.slope, affine.activation.ceiling, y, dz});
    });
    if (!frozen_) gather(Direction::kBackward, length);

    const auto target = [&](Input i) { return reqs[i] == kNull ? nullptr : data(arrays[gradients + i]); };
    void *dx = target(kX), *dgamma = target(kGamma), *dbeta = target(kBeta);
    const void* head = dz != nullptr ? dz : dy;
    const int add = reqs[kX] == kAdd, add_dgamma = reqs[kGamma] == kAdd, add_dbeta = reqs[kBeta] == kAdd;
    const Plan plan = plan_of(tensor_);
    const bool any = dx != nullptr && tensor_.shape.size() > 0;
    run(named("grad_input", tensor_.type, beta != nullptr), any ? plan.each() : Grid{ceil_div(channels(), kBlock)},
        {head,
         x,
         kept_.data(),
         gathered_->values(),
         frozen_ ? PoolsOfSlots{} : users(),
         gathered_->own.part(),
         gamma,
         fix_gamma,
         dx,
         add,
         dgamma,
         add_dgamma,
         dbeta,
         add_dbeta,
         plan.samples,
         plan.per_sample,
         plan.shape.channels,
         plan.shape.inner,
         plan.slots,
         plan.width,
         plan.segment,
         beta,
         affine.activation.slope,
         affine.activation.ceiling});
    if (node_.adds && reqs[kAddend] == kAdd)
        copy_data(head, tensor_.type, tensor_.shape.size(), data(arrays[gradients + kAddend]), true);
}

// ---- the rest ------------------------------------------------------------------------------------------------------

void DeviceCall::copy(Array from, Type type, int64_t n, Array to, bool add) {
    copy_data(data(from), type, n, data(to), add);
}

void DeviceCall::copy_data(const void* from, Type type, int64_t n, void* to, bool add) {
    const int adds = add;
    if (n > 0) run(named("copy", type), {ceil_div(n, kBlock)}, {from, to, adds, n});
}

void DeviceCall::fill(Array to, Type type, int64_t n, double value) {
    if (n > 0) run(named("fill", type), {ceil_div(n, kBlock)}, {data(to), value, n});
}

bool DeviceCall::idle_within(double limit) const {
    for (const double end = seconds() + limit; !work_->lease.idle(); std::this_thread::sleep_for(kPause))
        if (seconds() > end) return false;
    return true;
}

// Asks, and does not wait in the driver: that would have no end where a collective hangs.
void DeviceCall::wait() {
    const double start = seconds(), timeout = node_.layer->terms()->timeout;
    std::optional<Stall> stall;
    double looked = 0;
    while (!work_->lease.idle()) {
        const double waited = seconds() - start;
        if (waited < kSpin) {
            std::this_thread::yield();
            continue;
        }
        std::this_thread::sleep_for(waited < kWatchAfter ? std::chrono::microseconds(kPause) : kLongPause);
        if (waited < kWatchAfter) continue;
        if (!stall) stall.emplace();
        stall->sample();
        watch_interrupts();
        step().throw_if_failed();
        if (stall->asked_to_end())
            throw Failure("the process was asked to end (Ctrl-C, or its main thread is gone) while the GPU worked.");
        if (spread_ > 0 && waited - looked > kLookAfter) {
            looked = waited;
            still_current([&] { node_.layer->room.look_out(*node_.layer->terms(), place_, direction_); });
        }
        if (waited >= timeout) {
            std::ostringstream why;
            why << "the GPU has not finished for " << timeout
                << " s. Either a GPU of this layer is not there any more (nvidia-smi), or another user of NCCL in this "
                   "process waits for the same GPUs; NCCL_DEBUG=INFO shows what it does, and "
                << (spread_ > 0 ? "gluon_syncbn.kvstore(..., gpus='host')" : "configure(kvstore='host')")
                << " does without NCCL.";
            throw Failure(why.str());
        }
    }
}

void DeviceCall::finish() {
    if (!work_) return;
    wait();
    if (tells_) look_at(work_->lease.told()->at, work_->lease.told()->value);
    const cuda::Told& told = *work_->lease.told();
    if (recovers_ && told.at >= 0) refuse_to_recover({told.at, told.value != 0});
    if (kept_for_repetition_) remember(gathered_);
    tells_ = recovers_ = kept_for_repetition_ = false;
    scratch_.clear();
    gathered_.reset();
    work_.reset();
}

void DeviceCall::clear_up() {
    tells_ = recovers_ = kept_for_repetition_ = false;
    if (!work_) return;
    work_->lease.told()->given_up = 1;
    bool idle = false;
    try {
        idle = idle_within(kWatchAfter);
        if (!idle) {
            cuda::abort_collectives(device().id);
            idle = idle_within(kGrace);
        }
    } catch (const Failure&) {  // the device's own error, which is on its way
    }
    if (!idle || may_be_posted_) {
        work_->lease.abandon();
        for (Memory& one : scratch_) one.abandon();
        if (gathered_) {
            gathered_->own.abandon();
            gathered_->all.abandon();
        }
        kept_.abandon();
    }
    may_be_posted_ = false;
    scratch_.clear();
    gathered_.reset();
    work_.reset();
}

}  // namespace

std::unique_ptr<Call> device_call(Node node, std::string context, Type type, Shape shape, int64_t samples) {
    return std::make_unique<DeviceCall>(std::move(node), std::move(context), type, shape, samples);
}

}  // namespace syncbn

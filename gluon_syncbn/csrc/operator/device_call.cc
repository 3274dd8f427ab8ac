// Runs a call on a GPU, where the statistics stay. Replicas meet to say that their vectors are on their way. The last
// to arrive has NCCL gather all vectors on every GPU, and each GPU combines them into pools by itself.
//
//     moments ──► packed moments of each slot ──► all-gather ──► normalise: pools, y, running statistics
//     grad_sums ──► packed gradients ──────────► all-gather ──► grad_input: pools, dx, dgamma, dbeta
//
// All work is put on one stream, with one wait at the end. Without NCCL, packed vectors go to the host, meet as those of
// a CPU do, and go back. The same kernels read them.
#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "cuda/collective.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "operator/call.h"
#include "pooling/statistics.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

using namespace cuda;

constexpr double kAbort = 2;    // seconds that a stream gets to end after its collective has been ended
constexpr double kSpin = 1e-3;  // seconds in which a stream is polled without a pause
constexpr auto kPause = std::chrono::microseconds(20);
constexpr auto kLongPause = std::chrono::milliseconds(1);
constexpr double kWatchAfter = 0.05;  // seconds after which a wait checks for other reasons to end

// An addition needs an activation too: none is a slope of 1 there.
Kernel kernel_of(const char* stem, Type type, const Activation& activation = {}, bool adds = false) {
    return {stem, name_of(type), adds || activation.any() ? "rectifier" : "identity"};
}

class DeviceCall : public Call {
  public:
    using Call::Call;
    ~DeviceCall() override { clear_up(); }

  protected:
    // ---- forward ---------------------------------------------------------------------------------------------

    bool begin_normalise() override {
        MomentsArguments with{};
        with.x = data(arrays_[kX]);
        with.mask = mask();
        const char* stem = with.mask == nullptr ? "moments" : "masked_moments";
        reduce(moments_length(channels()), kernel_of(stem, tensor_.type), "merge_moments", with);
        return contribute_gathered(with.mask != nullptr);
    }

    void normalise() override {
        if (repeats_ && !frozen_) {
            work().gathered = std::const_pointer_cast<Gathered>(std::static_pointer_cast<const Gathered>(repeat()));
        } else if (!frozen_) {
            assign(*total_gathered(), on_devices() ? 1 : moments_length(channels()));
        }
        const Plan plan = this->plan();
        saved_ = Memory();  // the memory of the last execution may serve again
        saved_ = Memory(device(), plan.slots * channels() * static_cast<int64_t>(sizeof(Saved)));
        NormaliseArguments with{};
        with.tiling = plan;
        with.x = data(arrays_[kX]);
        with.addend = node_->adds ? data(arrays_[kAddend]) : nullptr;
        with.y = target(kY);
        with.affine = affine();
        with.epsilon = node_->epsilon;
        with.saved = saved_.as<Saved>();
        with.frozen = frozen_;
        if (!frozen_) {
            put_lists();
            with.gathered = work_->gathered->values();
            with.used = list(pools_->used, 0);
            with.fed = list(pools_->fed, 1);
            with.tracked = list(pools_->tracked, 3);
            with.pools = static_cast<int>(pools_->tracked.size());
            with.own = work_->gathered->own.as<double>();
        }
        with.unbiased = node_->unbiased;
        with.momentum = node_->momentum;
        if (frozen_ || !repeats_) {  // a repeated call has nothing new
            with.watch = watches();
            with.running_mean = data(arrays_[kRunningMean]);
            with.running_var = data(arrays_[kRunningVar]);
        }
        with.status = work().lease.status();
        const Kernel kernel = kernel_of("normalise", tensor_.type, node_->activation, node_->adds);
        if (!frozen_ && !repeats_ && takes_turns()) {
            update_ = update(kernel, plan, with);
            with.running_mean = nullptr;
        }
        run(kernel, plan.each(), with);
    }

    // ---- backward --------------------------------------------------------------------------------------------

    // The addend's gradient is dz, the gradient with respect to z of `Affine`. With an addend, `grad_sums` writes dz, and
    // `grad_input` reads it. Otherwise both compute z again, and dz from dy.
    bool begin_differentiate() override {
        GradSumsArguments with{};
        with.dy = data(arrays_[kDy]);
        with.x = data(arrays_[kX]);
        with.affine = affine(by_input());
        with.saved = saved_.as<Saved>();
        // The sign of y does not matter without an activation.
        if (node_->adds) with.y = node_->activation.any() ? data(arrays_[kY]) : with.dy;
        if (dz_.handle != arrays_[kDy].handle) with.dz = data(dz_);
        reduce(gradients_length(channels()),
               kernel_of("grad_sums", tensor_.type, node_->activation, with.dz != nullptr), "merge_sums", with);
        return frozen_ || contribute_gathered();
    }

    void differentiate() override {
        if (!frozen_) total_gathered();
        const Plan plan = this->plan();
        GradInputArguments with{};
        with.tiling = plan;
        with.dy = data(dz_);
        with.x = data(arrays_[kX]);
        with.dx = target(kDx);
        with.affine = affine(by_input());
        with.saved = saved_.as<Saved>();
        with.gathered = work_->gathered->values();
        if (!frozen_) with.users = list(pools_->users, 2);
        with.own = work_->gathered->own.as<double>();
        with.dgamma = target(kDgamma);
        with.dbeta = target(kDbeta);
        with.add = arrays_.adds(kDx);
        with.add_dgamma = arrays_.adds(kDgamma);
        with.add_dbeta = arrays_.adds(kDbeta);
        if (with.dx != nullptr && !frozen_) with.mask = mask();
        run(kernel_of(with.mask == nullptr ? "grad_input" : "masked_grad_input", tensor_.type,
                      by_input() ? node_->activation : Activation{}),
            plan.each(), with);
    }

    // ---- arrays ----------------------------------------------------------------------------------------------

    void add_data(Array from, Array to) override {
        const Index n = tensor_.shape.size();
        if (n > 0) run(kernel_of("add", tensor_.type), {ceil_div(n, kBlock)}, AddArguments{n, data(from), data(to)});
    }
    void fill(Array to, int64_t bytes, int value) override {
        cuda::fill(data(to), bytes, value, work().lease.stream());
    }
    Array scratch() override {
        return {nullptr, space(1 + tensor_.shape.size() * size_of(tensor_.type))};  // never null
    }

    // ---- the end of an execution -----------------------------------------------------------------------------

    void finish() override {
        if (!work_) return;
        wait();
        const Status& status = *work_->lease.status();
        if (!backward_) check_finite(status.at, status.value);
        if (!backward_ && !frozen_ && !repeats_) remember(work_->gathered);
        if (const auto update = std::exchange(update_, nullptr)) update_in_turn(update);
        work_.reset();
    }

    // What hangs on the device may still use the memory.
    void clear_up() override {
        update_ = nullptr;
        if (!work_) return;
        work_->lease.status()->given_up = 1;
        bool idle = false;
        try {
            if (!idle_within(work().lease, kWatchAfter)) abort_collectives(work_->lease.device.id);
            idle = idle_within(work_->lease, kAbort);
        } catch (const Failure&) {  // the device's own error is reported already
        }
        if (!idle || work_->may_be_posted) {
            work_->saved = std::move(saved_);
            work_->lists = std::move(lists_);
            leave(std::move(work_));
        }
        work_.reset();
    }

  private:
    // The replicas' contributions and the results; it lives until no pointer to it is left.
    struct Gathered {
        Memory own, all;
        OnDevice part;
        const double* values() const { return (all.bytes() > 0 ? all : own).as<double>(); }
    };
    // The objects of an execution, for one thread after the other.
    struct Running {
        std::optional<Current> current;
        Lease lease;
        std::shared_ptr<Gathered> gathered = std::make_shared<Gathered>();
        std::vector<Memory> scratch;
        Memory saved;  // of the call, if it hangs
        std::shared_ptr<Memory> lists;
        bool may_be_posted = false;  // other work may have been put on the stream
        explicit Running(Device& device) : current(std::in_place, device), lease(device) {}
    };

    // What hangs on the device leaves no results, and nobody gets its stream and memory again.
    static void leave(std::unique_ptr<Running> work) {
        work->lease.status()->given_up = 1;
        work.release()->current.reset();
    }

    Running& work() {
        if (!work_) work_ = std::make_unique<Running>(Device::get(std::stoi(context_.substr(4))));
        if (!work_->current) work_->current.emplace(work_->lease.device);
        return *work_;
    }
    Device& device() { return work().lease.device; }
    Plan plan() const { return Plan(tensor_.shape, tensor_.samples, static_cast<int64_t>(tensor_.slots.size())); }

    template <typename Arguments>
    void run(const Kernel& kernel, Grid grid, const Arguments& arguments) {
        launch(work().lease, kernel, grid, &arguments);
    }

    // Returns so much memory, until the execution ends.
    void* space(int64_t bytes) {
        work().scratch.emplace_back(device(), bytes);
        return work_->scratch.back().as<void>();
    }
    // z = gamma * xhat + beta, where a fixed gamma counts as 1; then the activation.
    Affine affine(bool needs_beta = true) const {
        return {data(arrays_[kGamma]), needs_beta ? data(arrays_[kBeta]) : nullptr, node_->fix_gamma,
                node_->activation.slope, node_->activation.ceiling};
    }
    // The address of what is written; null if it is not.
    void* target(Role role) const { return arrays_.wants(role) ? data(arrays_[role]) : nullptr; }

    // Expands the mask until the callback ends; null if all positions count.
    const void* mask() {
        if (!node_->masks || tensor_.shape.size() == 0) return nullptr;
        const int64_t positions = tensor_.shape.per_channel();
        void* const to = space(positions);
        run(kernel_of("expand_mask", tensor_.type), {ceil_div(positions, kBlock)},
            ExpandArguments{positions, data(arrays_[kMask]), to, tensor_.mask});
        return to;
    }

    // Updates the running statistics in a launch of its own, which another node's thread may wait for.
    std::function<void()> update(const Kernel& kernel, const Plan& plan, NormaliseArguments with) {
        with.y = nullptr;
        with.tiling.slots = 0;  // of which the backward needs something
        return [=, at = &device(), lists = lists_, gathered = work_->gathered, limit = config_->timeout]() mutable {
            auto own = std::make_unique<Running>(*at);
            own->gathered = gathered;
            own->lists = lists;
            with.status = own->lease.status();
            try {
                launch(own->lease, kernel, plan.each(), &with);
                if (!idle_within(own->lease, limit)) throw Failure("the GPU has not updated the running statistics.");
            } catch (const Failure&) {
                leave(std::move(own));
                throw;
            }
        };
    }

    static bool idle_within(const Lease& lease, double limit) {
        const double start = seconds();
        while (!lease.idle()) {
            const double waited = seconds() - start;
            if (waited > limit) return false;
            if (waited < kSpin)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(kPause);
        }
        return true;
    }

    // Waits until all work on the stream is done; throws Failure. Polls instead of waiting in the driver, where a wait
    // would not end if a collective hangs.
    void wait() {
        if (idle_within(work().lease, kWatchAfter)) return;
        Wait wait(config_->timeout, node_->layer->name, "the GPU has not finished",
                  "Either a GPU of this layer is lost (nvidia-smi), or another user of NCCL in this process waits for "
                  "the same GPUs. NCCL_DEBUG=INFO shows what NCCL does. configure(kvstore='host') avoids NCCL.");
        for (; !work().lease.idle(); std::this_thread::sleep_for(kLongPause)) wait.look();
    }

    // ---- what is gathered ------------------------------------------------------------------------------------

    // Whether the vectors stay on GPUs.
    bool on_devices() const { return !shares() || place_.meeting->exchange->on_devices(); }

    // Computes packed vectors of `length` for each slot, by a kernel and, if it works in chunks, a merge.
    template <typename Arguments>
    void reduce(int64_t length, const Kernel& kernel, const char* merge, Arguments with) {
        const Plan plan = this->plan();
        const int64_t bytes = plan.slots * length * static_cast<int64_t>(sizeof(double));
        Memory& own = work().gathered->own = Memory(device(), bytes);
        double* const out = own.as<double>();
        if (tensor_.shape.size() == 0) return fill({nullptr, out}, bytes, 0);
        with.tiling = plan;
        with.partial = plan.chunks == 1 ? out : static_cast<double*>(space(plan.chunks * bytes));
        run(kernel, plan.reduce(), with);
        if (plan.chunks > 1)
            run(kernel_of(merge, tensor_.type), {ceil_div(plan.slots * channels(), kBlock / 32)},
                MergeArguments{plan.slots, channels(), with.partial, out, static_cast<int>(plan.chunks)});
    }

    // Contributes this replica's vectors or, on GPUs, where they are and the samples of each slot. Where a mask decides,
    // the moments have these, and the call waits for them.
    bool contribute_gathered(bool masked = false) {
        Gathered& gathered = *work_->gathered;
        const Memory& own = gathered.own;
        const int64_t length = own.bytes() / static_cast<int64_t>(sizeof(double));
        Vector values;
        if (masked || !on_devices()) {
            wait();  // the copy has no time limit
            values.resize(static_cast<size_t>(length));
            own.download(values.data(), work_->lease);
        }
        std::shared_ptr<const OnDevice> part;
        if (on_devices()) {
            const Vector moments = std::exchange(values, {});
            for (const Slot& slot : tensor_.slots)
                values.push_back(masked ? moments[values.size() * static_cast<size_t>(moments_length(channels()))]
                                        : static_cast<double>(slot.shape.per_channel()));
            const size_t replicas = shares() ? place_.meeting->replicas() : 1;
            if (replicas > 1) gathered.all = Memory(device(), static_cast<int64_t>(replicas) * own.bytes());
            gathered.part = {device().id, work_->lease.stream(), own.as<double>(), gathered.all.as<double>(), length};
            work_->may_be_posted = shares();
            part = {work_->gathered, &gathered.part};
        }
        work_->current.reset();  // another thread may continue, and what Python frees leaves another device current
        return contribute(std::move(values), std::move(part));
    }

    // Gets the packed vectors of all replicas into `gathered`. Returns them, or the samples of their slots.
    std::shared_ptr<const Total> total_gathered() {
        work_->current.reset();
        auto total = this->total();
        work_->may_be_posted = false;
        if (on_devices()) return total;
        work_->gathered->all = Memory(device(), static_cast<int64_t>(total->values.size() * sizeof(double)));
        work_->gathered->all.upload(total->values.data(), work().lease);
        return total;
    }

    // Copies the pools' lists to the device, if they do not travel with a launch.
    void put_lists() {
        lists_ = nullptr;
        if (pools_->members.empty() && pools_->used.size() <= kFewRanges) return;
        std::vector<int> all = pools_->members;
        for (const auto* ranges : {&pools_->used, &pools_->fed, &pools_->users, &pools_->tracked})
            for (const Range& range : *ranges) all.insert(all.end(), {range.begin, range.end});
        lists_ = std::make_shared<Memory>(device(), static_cast<int64_t>(all.size() * sizeof(int)));
        lists_->upload(all.data(), work().lease);
    }

    // The ranges of each slot, which are the nth of `lists_`.
    Lists list(const std::vector<Range>& ranges, size_t nth) const {
        Lists out{};
        if (lists_ == nullptr) {
            std::copy(ranges.begin(), ranges.end(), out.few);
            return out;
        }
        static_assert(sizeof(Range) == 2 * sizeof(int), "put_lists writes them as numbers");
        const int* const members = lists_->as<const int>();
        out.ranges = reinterpret_cast<const Range*>(members + pools_->members.size()) + nth * pools_->used.size();
        out.members = pools_->members.empty() ? nullptr : members;
        return out;
    }

    std::unique_ptr<Running> work_;
    Memory saved_;                   // for the backward
    std::shared_ptr<Memory> lists_;  // [members][4 times the ranges]; null if they travel with a launch
    std::function<void()> update_;   // of the running statistics, if the nodes of a graph take turns
};

}  // namespace

std::unique_ptr<Call> device_call(NodePtr node, std::string context, Tensor tensor) {
    return std::make_unique<DeviceCall>(std::move(node), std::move(context), std::move(tensor));
}

}  // namespace syncbn

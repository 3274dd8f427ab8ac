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
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "cuda/collective.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "operator/call.h"
#include "pooling/statistics.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

using cuda::ceil_div;
using cuda::Grid;
using cuda::kBlock;
using cuda::Kernel;
using cuda::Lists;
using cuda::Memory;
using cuda::Plan;

constexpr double kGrace = 2;    // seconds that a stream gets to end after its collective has been ended
constexpr double kSpin = 1e-3;  // seconds in which a stream is polled without a pause
constexpr auto kPause = std::chrono::microseconds(20);
constexpr auto kLongPause = std::chrono::milliseconds(1);
constexpr double kWatchAfter = 0.05;  // seconds after which a wait checks for other reasons to end

// The number of float64 values that have space for so many bytes.
int64_t doubles_for(int64_t bytes) { return ceil_div(bytes, sizeof(double)); }

Kernel kernel_of(const char* stem, Type type) { return {stem, name_of(type)}; }

// The kernel for a call. An addition needs an activation too: none is a slope of 1 there.
Kernel kernel_of(const char* stem, Type type, const Activation& activation, bool adds = false) {
    using Kind = Activation::Kind;
    return {stem, name_of(type), name_of(adds && !activation.any() ? Kind::kRectifier : activation.kind)};
}

cuda::Epilogue epilogue(const Activation& activation) { return {activation.slope, activation.ceiling}; }

cuda::Weights weights(const Affine& affine, bool needs_beta = true) {
    return {data(affine.gamma), needs_beta ? data(affine.beta) : nullptr, affine.fix_gamma};
}

class DeviceCall : public Call {
  public:
    using Call::Call;
    ~DeviceCall() override { clear_up(); }

  protected:
    void begin_normalise(const Arrays& arrays) override;
    void normalise(const Arrays& arrays, const int* reqs) override;
    void begin_differentiate(const Arrays& arrays, const int* reqs) override;
    void differentiate(const Arrays& arrays, const int* reqs) override;
    void track(const Arrays& arrays) override;
    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        copy_data(data(from), type, n, data(to), add);
    }
    void fill(Array to, Type type, int64_t n, double value) override {
        run_on_each(kernel_of("fill", type), n, cuda::FillArguments{n, data(to), value});
    }
    void fill_with_zeros(Array to, int64_t bytes) override {
        cuda::fill_with_zeros(data(to), bytes, work().lease.stream());
    }
    void finish() override;
    void clear_up() override;
    void leave_thread() override {
        if (work_) work_->current.reset();
    }

  private:
    // The replicas' contributions and the results; it lives until no pointer to it is left.
    struct Gathered {
        cuda::Memory own, all;
        cuda::OnDevice part;
        const double* values() const { return all.data() != nullptr ? all.data() : own.data(); }
    };
    // The objects of an execution, for one thread after the other.
    struct Work {
        std::optional<cuda::Current> current;
        cuda::Lease lease;
        std::shared_ptr<Gathered> gathered = std::make_shared<Gathered>();
        std::vector<Memory> scratch;
        bool may_be_posted = false;        // other work may have been put on the stream
        bool tells = false;                // the forward reports whether the moments are finite
        bool recovers = false;             // the backward reports whether x could be found
        bool kept_for_repetition = false;  // the gathered vectors are
        explicit Work(cuda::Device& device) : current(std::in_place, device), lease(device) {}
    };

    cuda::Device& device() {
        if (device_ == nullptr) device_ = &cuda::Device::get(std::stoi(context_.substr(4)));
        return *device_;
    }
    Work& work() {
        if (!work_) work_.emplace(device());
        if (!work_->current) work_->current.emplace(device());
        return *work_;
    }
    // `ask` may call Python. There, freed objects may leave another device current on this thread.
    template <typename Ask>
    auto still_current(const Ask& ask) -> decltype(ask()) {
        const cuda::Current again(device());
        return ask();
    }
    cuda::Memory memory(int64_t size) {
        work();
        return cuda::Memory(device(), size);
    }
    // Returns so much float64 memory, or memory for the data, until the callback ends.
    double* scratch(int64_t size) {
        work().scratch.push_back(memory(size));
        return work_->scratch.back().data();
    }
    double* scratch_for_data() { return scratch(doubles_for(tensor_.shape.size() * size_of(tensor_.type))); }
    template <typename Arguments>
    void run(const cuda::Kernel& kernel, cuda::Grid grid, const Arguments& arguments) {
        cuda::launch(device(), work().lease.stream(), kernel, grid, &arguments);
    }
    // Runs a kernel with a thread for each of n values.
    template <typename Arguments>
    void run_on_each(const cuda::Kernel& kernel, int64_t n, const Arguments& arguments) {
        if (n > 0) run(kernel, {ceil_div(n, kBlock)}, arguments);
    }
    void copy_data(const void* from, Type type, int64_t n, void* to, bool add) {
        run_on_each(kernel_of("copy", type), n, cuda::CopyArguments{n, from, to, add});
    }

    Form form() const { return shares() ? exchange().form() : Form::kDevice; }
    // Returns what is on the device. The copy has no time limit, so this waits for the stream first.
    Vector downloaded(const cuda::Memory& from);
    // Waits until all work on the stream is done; throws Failure.
    void wait();
    bool idle_within(double seconds) const;

    // Computes packed vectors of `length` for each slot, by a kernel and, if it works in chunks, a merge.
    template <typename Launch>
    Memory reduced(int64_t length, const char* merge, const Launch& launch_with);
    // Contributes this replica's vectors, which are on their way into `gathered`, and `counts` beside them.
    void contribute_gathered(Vector counts);
    // The number of values of each slot. Those that a mask leaves are in the moments: the call waits for them.
    Vector counts(bool masked = false);
    // Gets the packed vectors of all replicas into `gathered`. In the forward, returns the samples of their slots.
    Total total_gathered(int64_t length);
    // Copies the pools' lists to the device.
    void put_lists();
    Lists list(const std::vector<Range>& ranges) const;
    // Computes x from y, into the memory of dx or of scratch.
    void* recovered(const Arrays& arrays, const int* reqs);
    // Expands the mask, which is at this index, until the callback ends; null if all positions count.
    const void* mask(const Arrays& arrays, int index);

    // The results of the first half of a backward.
    struct Gradients {
        const void *x = nullptr, *dz = nullptr;
        bool by_input = false;  // dz is dy, and `grad_input` applies the activation by x
    };

    std::optional<Work> work_;
    cuda::Device* device_ = nullptr;
    Gradients gradients_;
    Memory kept_;  // for the backward
    // The lists' memory and its content; lists rarely change between calls. Empty if they travel with a launch.
    Memory lists_;
    std::vector<int> listed_;
};

// ---- the stream ----------------------------------------------------------------------------------------------------

Vector DeviceCall::downloaded(const cuda::Memory& from) {
    Vector values(static_cast<size_t>(from.size()));
    wait();
    if (!values.empty()) from.download(values.data(), work().lease);
    return values;
}

bool DeviceCall::idle_within(double limit) const {
    const double start = seconds();
    while (!work_->lease.idle()) {
        const double waited = seconds() - start;
        if (waited > limit) return false;
        if (waited < kSpin)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(kPause);
    }
    return true;
}

// Polls instead of waiting in the driver: that wait would not end if a collective hangs.
void DeviceCall::wait() {
    if (idle_within(kWatchAfter)) return;
    Wait wait(terms_->timeout, terms_->name, "the GPU has not finished",
              "Either a GPU of this layer is lost (nvidia-smi), or another user of NCCL in this process waits for the "
              "same GPUs. NCCL_DEBUG=INFO shows what NCCL does. configure(kvstore='host') avoids NCCL.");
    for (; !work_->lease.idle(); std::this_thread::sleep_for(kLongPause)) wait.look();
}

// What hangs on the device may still use the memory.
void DeviceCall::clear_up() {
    if (!work_) return;
    work_->lease.findings()->given_up = 1;
    bool idle = false;
    try {
        idle = idle_within(kWatchAfter);
        if (!idle) {
            cuda::abort_collectives(device().id);
            idle = idle_within(kGrace);
        }
    } catch (const Failure&) {  // the device's own error is reported already
    }
    if (!idle || work_->may_be_posted) {
        work_->lease.abandon();
        for (cuda::Memory& one : work_->scratch) one.abandon();
        work_->gathered->own.abandon();
        work_->gathered->all.abandon();
        kept_.abandon();
        lists_.abandon();
        listed_.clear();
    }
    work_.reset();
}

Plan plan_of(const Tensor& tensor) {
    return Plan(tensor.shape, tensor.samples, static_cast<int64_t>(tensor.slots.size()));
}

// ---- pools -------------------------------------------------------------------------------------------------------

// Whether the ranges travel with a launch: they are few, or each is the first one moved by a number of steps.
bool travels(const std::vector<Range>& ranges, Lists* out) {
    out->first = ranges.empty() ? Range{0, 0} : ranges[0];
    out->step = ranges.size() < 2 ? 0 : ranges[1].begin - ranges[0].begin;
    for (size_t i = 1; i < ranges.size(); ++i)
        if (ranges[i].begin - ranges[i - 1].begin != out->step || ranges[i].end - ranges[i - 1].end != out->step)
            out->irregular = 1;
    if (out->irregular == 0) return true;
    if (ranges.size() > cuda::kFewRanges) return false;
    std::copy(ranges.begin(), ranges.end(), out->few);
    return true;
}

void DeviceCall::put_lists() {
    std::vector<int> all = pools_.members;
    bool needed = !all.empty();
    for (const auto* ranges : {&pools_.used, &pools_.fed, &pools_.users, &pools_.tracked}) {
        Lists unused{};
        needed = !travels(*ranges, &unused) || needed;
        for (const Range& range : *ranges) all.insert(all.end(), {range.begin, range.end});
    }
    if (!needed) all.clear();
    all.resize((all.size() + 1) / 2 * 2);  // whole numbers of float64
    if (all == listed_) return;
    listed_.clear();
    lists_ = Memory();
    lists_ = memory(static_cast<int64_t>(all.size() / 2));
    lists_.upload(all.data(), work().lease.stream());
    listed_ = std::move(all);
}

Lists DeviceCall::list(const std::vector<Range>& ranges) const {
    Lists out{};
    if (listed_.empty()) {
        travels(ranges, &out);
        return out;
    }
    static_assert(sizeof(Range) == 2 * sizeof(int), "put_lists writes them as numbers");
    const int* const members = reinterpret_cast<const int*>(lists_.data());
    size_t at = pools_.members.size();
    for (const auto* before : {&pools_.used, &pools_.fed, &pools_.users, &pools_.tracked}) {
        if (before == &ranges) break;
        at += 2 * before->size();
    }
    out.ranges = reinterpret_cast<const Range*>(members + at);
    out.members = pools_.members.empty() ? nullptr : members;
    return out;
}

// ---- masks -------------------------------------------------------------------------------------------------------

const void* DeviceCall::mask(const Arrays& arrays, int index) {
    if (!node_.masks || tensor_.shape.size() == 0) return nullptr;
    const Mask& layout = node_.mask;
    const int64_t positions = tensor_.shape.per_channel();
    cuda::ExpandArguments with{};
    with.positions = positions;
    with.from = data(arrays[index]);
    with.to = scratch(doubles_for(positions));
    std::copy(std::begin(layout.extents), std::end(layout.extents), with.extents);
    std::copy(std::begin(layout.strides), std::end(layout.strides), with.strides);
    with.bytes = layout.bytes;
    with.floating = layout.floating;
    run(Kernel{"expand_mask"}, {ceil_div(positions, kBlock)}, with);
    return with.to;
}

// ---- what is gathered ----------------------------------------------------------------------------------------------

template <typename Launch>
Memory DeviceCall::reduced(int64_t length, const char* merge, const Launch& launch_with) {
    const int64_t slots = static_cast<int64_t>(tensor_.slots.size()), size = slots * length;
    Memory out = memory(size);
    if (tensor_.shape.size() == 0) {
        run(kernel_of("fill", Type::kFloat64), {ceil_div(size, kBlock)}, cuda::FillArguments{size, out.data(), 0});
        return out;
    }
    const Plan plan = plan_of(tensor_);
    if (plan.chunks == 1) {
        launch_with(plan, out.data());
        return out;
    }
    double* partial = scratch(plan.chunks * slots * length);
    launch_with(plan, partial);
    const int chunks = static_cast<int>(plan.chunks);
    const int64_t warps = slots * channels();
    run(Kernel{merge}, {ceil_div(warps, kBlock / 32)},
        cuda::MergeArguments{slots, channels(), partial, out.data(), chunks});
    return out;
}

Vector DeviceCall::counts(bool masked) {
    const Vector values = masked ? downloaded(work_->gathered->own) : Vector();
    Vector counts;
    for (const Slot& slot : tensor_.slots)
        counts.push_back(masked ? values[counts.size() * static_cast<size_t>(moments_length(channels()))]
                                : static_cast<double>(slot.shape.per_channel()));
    return counts;
}

void DeviceCall::contribute_gathered(Vector values) {
    const Memory& own = work_->gathered->own;
    if (!shares()) return contribute(std::move(values));
    std::shared_ptr<const cuda::OnDevice> part;
    if (form() == Form::kHost) {
        values = downloaded(own);
        if (place_.phase == 0) check_finite(values);
    } else {
        const auto replicas = static_cast<int64_t>(exchange().replicas());
        if (replicas > 1) work_->gathered->all = memory(replicas * own.size());
        work_->gathered->part = {device().id, work().lease.stream(), own.data(), work_->gathered->all.data(),
                                 own.size()};
        work_->may_be_posted = true;
        part = {work_->gathered, &work_->gathered->part};
    }
    still_current([&] { contribute(std::move(values), std::move(part)); });
}

Total DeviceCall::total_gathered(int64_t length) {
    const Total total = still_current([&] { return this->total(); });
    work_->may_be_posted = false;
    if (form() != Form::kHost) return total;
    work_->gathered->all = memory(static_cast<int64_t>(total.values.size()));
    work_->gathered->all.upload(total.values.data(), work().lease.stream());
    return counts_of(total, length);
}

// ---- forward -------------------------------------------------------------------------------------------------------

void DeviceCall::begin_normalise(const Arrays& arrays) {
    const void *x = data(arrays[kX]), *mask = this->mask(arrays, node_.mask_input());
    const char* stem = mask == nullptr ? "moments" : "masked_moments";
    work().gathered->own = reduced(moments_length(channels()), "merge_moments", [&](const Plan& plan, double* out) {
        run(kernel_of(stem, tensor_.type), plan.reduce(), cuda::MomentsArguments{plan.tiling(), x, out, mask});
    });
    contribute_gathered(counts(mask != nullptr));
}

void DeviceCall::normalise(const Arrays& arrays, const int* reqs) {
    const bool hands_on = node_.role == Role::kMeet && reqs[1] != kNull;
    void* batch = hands_on ? data(arrays[node_.batch_output()]) : nullptr;
    if (recall_.again && !frozen_) {
        work().gathered = std::const_pointer_cast<Gathered>(std::static_pointer_cast<const Gathered>(repeat()));
    } else if (!frozen_) {
        assign(total_gathered(moments_length(channels())));
        work_->tells = watches() && form() != Form::kHost;
        work_->kept_for_repetition = recall_.memo != nullptr;
    }
    const Plan plan = plan_of(tensor_);
    const Affine affine = this->affine(arrays, 0);
    kept_ = Memory();  // the memory of the last execution may serve again
    kept_ = memory(plan.slots * (1 + 4 * channels()));
    cuda::NormaliseArguments with{};
    with.tiling = plan.tiling();
    with.x = data(arrays[kX]);
    with.addend = node_.adds ? data(arrays[kAddend]) : nullptr;
    with.y = reqs[0] == kNull ? nullptr : data(arrays[node_.output()]);
    with.weights = weights(affine);
    with.epilogue = epilogue(affine.activation);
    with.epsilon = node_.epsilon;
    with.kept = kept_.data();
    with.add = reqs[0] == kAdd;
    with.frozen = frozen_;
    if (!frozen_) {
        put_lists();
        with.gathered = work_->gathered->values();
        with.used = list(pools_.used);
        with.fed = list(pools_.fed);
        with.tracked = list(pools_.tracked);
        with.pools = static_cast<int>(pools_.tracked.size());
        with.own = work_->gathered->own.data();
    }
    // One replica of a context is enough; a repeated call has nothing new.
    with.hand_on = batch != nullptr && !recall_.again && place_.first_lane();
    with.unbiased = node_.unbiased;
    with.watch = !watches() ? cuda::kPropagate : work_->tells ? cuda::kLeaveOutAndTell : cuda::kLeaveOut;
    with.momentum = node_.momentum;
    if (frozen_ || (node_.role != Role::kMeet && !recall_.again)) {
        with.running_mean = data(arrays[node_.running_mean()]);
        with.running_var = data(arrays[node_.running_mean() + 1]);
    }
    with.batch = static_cast<double*>(batch);
    with.findings = work().lease.findings();
    const bool any = with.y != nullptr && tensor_.shape.size() > 0;
    run(kernel_of("normalise", tensor_.type, affine.activation, node_.adds),
        any ? plan.each() : Grid{ceil_div(channels(), kBlock)}, with);
}

// The second operator of a call. The first one has written [1, mean[C], variance[C]], or [0, ...].
void DeviceCall::track(const Arrays& arrays) {
    const int running = node_.running_mean();
    run(kernel_of("update_running", tensor_.type), {ceil_div(channels(), kBlock)},
        cuda::UpdateRunningArguments{channels(), static_cast<const double*>(data(arrays[node_.batch()])),
                                     node_.momentum, data(arrays[running]), data(arrays[running + 1])});
}

// ---- backward ------------------------------------------------------------------------------------------------------

void* DeviceCall::recovered(const Arrays& arrays, const int* reqs) {
    const Affine affine = this->affine(arrays, node_.outputs());
    void* x = reqs[kX] == kWrite ? data(arrays[node_.gradients() + kX]) : scratch_for_data();
    if (tensor_.shape.size() == 0) return x;
    const Plan plan = plan_of(tensor_);
    const Invertible invertible = invertible_by(tensor_.type, affine.activation.slope);
    run(kernel_of("recover", tensor_.type, affine.activation), plan.each(),
        cuda::RecoverArguments{plan.tiling(), data(arrays[node_.output_in_backward()]), x, weights(affine),
                               epilogue(affine.activation), kept_.data(), invertible.per_beta, invertible.least,
                               node_.epsilon, kConstant, work().lease.findings()});
    work_->recovers = true;
    return x;
}

// The addend's gradient is dz, the gradient with respect to z of `Affine`. With an addend, `grad_sums` writes dz and
// `grad_input` reads it. Otherwise both compute z again, and dz from dy.
void DeviceCall::begin_differentiate(const Arrays& arrays, const int* reqs) {
    const int inputs = node_.outputs(), gradients = node_.gradients();
    const Affine affine = this->affine(arrays, inputs);
    const bool changes = affine.activation.any();
    const void *dy = data(arrays[0]), *y = nullptr;
    const void* x = node_.inplace ? recovered(arrays, reqs) : data(arrays[inputs + kX]);
    void* dz = nullptr;
    if (node_.adds) {
        y = changes ? data(arrays[node_.output_in_backward()]) : dy;  // its sign does not matter
        if (reqs[kAddend] == kWrite || reqs[kAddend] == kInplace)
            dz = data(arrays[gradients + kAddend]);
        else if (changes)
            dz = scratch_for_data();
    }
    const bool by_input = changes && !node_.adds;
    work().gathered->own = reduced(gradients_length(channels()), "merge_sums", [&](const Plan& plan, double* out) {
        run(kernel_of("grad_sums", tensor_.type, affine.activation, dz != nullptr), plan.reduce(),
            cuda::GradSumsArguments{plan.tiling(), dy, x, y, dz, weights(affine, by_input), epilogue(affine.activation),
                                    kept_.data(), out});
    });
    gradients_ = {x, dz != nullptr ? dz : dy, by_input};
    if (!frozen_) contribute_gathered(counts());
}

void DeviceCall::differentiate(const Arrays& arrays, const int* reqs) {
    const int gradients = node_.gradients();
    const Affine affine = this->affine(arrays, node_.outputs());
    const auto [x, head, by_input] = gradients_;
    if (!frozen_) total_gathered(gradients_length(channels()));

    const auto target = [&](Input i) { return reqs[i] == kNull ? nullptr : data(arrays[gradients + i]); };
    const Plan plan = plan_of(tensor_);
    cuda::GradInputArguments with{};
    with.tiling = plan.tiling();
    with.dy = head;
    with.x = x;
    with.dx = target(kX);
    with.weights = weights(affine, by_input);
    with.epilogue = epilogue(affine.activation);
    with.kept = kept_.data();
    with.gathered = work_->gathered->values();
    if (!frozen_) with.users = list(pools_.users);
    with.own = work_->gathered->own.data();
    with.dgamma = target(kGamma);
    with.dbeta = target(kBeta);
    with.add = reqs[kX] == kAdd;
    with.add_dgamma = reqs[kGamma] == kAdd;
    with.add_dbeta = reqs[kBeta] == kAdd;
    const bool any = with.dx != nullptr && tensor_.shape.size() > 0;
    if (any && !frozen_) with.mask = mask(arrays, node_.outputs() + node_.mask_input());
    run(kernel_of(with.mask == nullptr ? "grad_input" : "masked_grad_input", tensor_.type,
                  by_input ? affine.activation : Activation{}),
        any ? plan.each() : Grid{ceil_div(channels(), kBlock)}, with);
    if (node_.adds && reqs[kAddend] == kAdd)
        copy_data(head, tensor_.type, tensor_.shape.size(), data(arrays[gradients + kAddend]), true);
}

void DeviceCall::finish() {
    if (!work_) return;
    wait();
    const cuda::Findings& findings = *work_->lease.findings();
    if (work_->tells) check_finite(findings.at, findings.value);
    if (work_->recovers && findings.at >= 0) refuse_to_recover({findings.at, findings.value != 0});
    if (work_->kept_for_repetition) remember(work_->gathered);
    work_.reset();
}

}  // namespace

std::unique_ptr<Call> device_call(Node node, std::string context, Tensor tensor) {
    return std::make_unique<DeviceCall>(std::move(node), std::move(context), std::move(tensor));
}

}  // namespace syncbn

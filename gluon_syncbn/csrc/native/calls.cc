// Brings calls from MXNet's engine to the layer without MXNet's own `Custom`. That one copies arrays in oneDNN's
// layouts and frees the copies while the operator still runs. It also takes three operations of the engine for one.
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "failure.h"
#include "lock.h"
#include "native/abi.h"
#include "operator/call.h"
#include "operator/op.h"
#include "to_python.h"

// For tests: forwards and backwards with data in blocks of channels, and those that did not wait and ran in the engine's
// own threads.
SYNCBN_COUNTS syncbn_blocked_calls{0}, syncbn_lone_calls{0};

namespace syncbn::native {
namespace {

int64_t block_of(const Descriptor& descriptor) { return descriptor.inner_blocks[0]; }

// Returns oneDNN's layout if it is float32 or bfloat16 with all channels in blocks of 8 or 16 neighbours, which a call
// takes without a copy. Returns null for the order of the dimensions, and for other layouts.
const Descriptor* blocks_of(const NDArray& array, Type type, const Shape& shape) {
    const int kind = type == Type::kFloat32 ? kFloat32Kind : kBfloat16Kind;
    if ((type != Type::kFloat32 && type != Type::kBfloat16) || array.is_plain()) return nullptr;
    const Descriptor& d = array.chunk().blocked->descriptor;
    if (d.dims_count < 3 || d.type != kind || d.kind != kBlockedKind || d.offset != 0 || d.inner_count != 1)
        return nullptr;
    const int64_t block = block_of(d);
    if (d.inner_dims[0] != 1 || (block != 8 && block != 16)) return nullptr;
    int64_t stride = block;
    for (int i = d.dims_count - 1; i > 1; --i) {
        if (d.strides[i] != stride || d.padded_dims[i] != d.dims[i]) return nullptr;
        stride *= d.dims[i];
    }
    const bool dense = d.strides[1] == stride && d.strides[0] == stride / block * d.dims[1];
    const bool whole = d.padded_dims[0] == d.dims[0] && d.padded_dims[1] == d.dims[1] && d.dims[1] % block == 0;
    const bool same = d.dims[0] == shape.outer && d.dims[1] == shape.channels && stride / block == shape.inner;
    return dense && whole && same ? &d : nullptr;
}

class Execution {
  public:
    // Takes the arrays in their layout. If layouts differ, or no kernel knows one, takes plain copies. Must run in the
    // thread in which MXNet runs the operator.
    Execution(bool backward, StatePointer state, const OpContext& context, const NDArrays& inputs,
              const Requests& requests, const NDArrays& outputs)
        : backward_(backward), state_(std::move(state)), training_(context.training), complete_(context.complete) {
        const Node& node = call().node();
        const Node::Lists& roles = backward ? node.backward : node.forward;
        const std::vector<int>& needed = state_->custom->needed;
        const size_t reads = backward ? needed.size() : inputs.size();  // a backward needs no auxiliary states
        std::vector<Given> read, written;
        for (size_t i = 0; i < reads; ++i) {
            const size_t at = backward ? static_cast<size_t>(needed[i]) : i < node.inputs ? i : i + 1;
            read.emplace_back(roles.all[at], &inputs[i]);
        }
        for (size_t i = 0; i < roles.written.size(); ++i) {
            arrays_.requests[roles.written[i]] = requests[i];
            if (requests[i] != kNull) written.emplace_back(roles.written[i], &outputs[i]);
        }
        const Descriptor* common = common_layout(read, written);
        arrays_.block = common == nullptr ? 1 : block_of(*common);
        if (common != nullptr) ++syncbn_blocked_calls;
        kept_.reserve(read.size() + written.size());
        for (const auto& [role, array] : read) keep(role, is_data(role) && common != nullptr, *array, false);
        for (const auto& [role, array] : written) keep(role, is_data(role) && common != nullptr, *array, true);
    }

    Call& call() const { return *static_cast<Call*>(state_->custom->callbacks->contexts[0]); }

    // Runs the first half of the call. Returns whether the rest will not wait.
    bool begin() {
        begun_ = true;
        return call().begin(backward_, arrays_, training_);
    }

    void run() noexcept {
        std::exception_ptr failure;
        try {
            if (!begun_) begin();
            call().end();
        } catch (const std::exception&) {  // the call has told the others
            failure = std::current_exception();
        }
        kept_.clear();  // before MXNet plans with the memory
        if (failure) return complete_.fail(failure);
        complete_(nullptr);
    }

  private:
    using Given = std::pair<Role, const NDArray*>;

    void keep(Role role, bool as_is, const NDArray& given, bool written) {
        if (written || as_is)
            kept_.push_back(given);
        else
            kept_.push_back(NDArray::plain(given));
        Array& array = arrays_.of[role];
        if (as_is)
            array.values = kept_.back().chunk().values;
        else if (written && !given.is_plain())  // it is added to, or its layout is not needed
            library.reorder_chunk(&given.chunk());
        array.handle = &kept_.back();
    }

    // Returns the common layout of all data that are read, if the written data can have it.
    const Descriptor* common_layout(const std::vector<Given>& read, const std::vector<Given>& written) const {
        const Tensor& tensor = call().tensor();
        const Descriptor* common = nullptr;
        for (const auto& [role, array] : written)
            if (is_data(role) && arrays_.adds(role)) return nullptr;
        for (const auto& [role, array] : read) {
            if (!is_data(role)) continue;
            const Descriptor* own = blocks_of(*array, tensor.type, tensor.shape);
            if (own == nullptr || (common != nullptr && block_of(*own) != block_of(*common))) return nullptr;
            common = own;
        }
        if (common == nullptr) return nullptr;
        for (const auto& [role, given] : written) {
            if (!is_data(role)) continue;
            NDArray array(*given);
            const bool laid_out = library.lay_out(&array, common) != nullptr;
            library.submit(library.stream(), true);  // it has registered the memory, and would keep it
            if (!laid_out) return nullptr;
        }
        return common;
    }

    const bool backward_;
    const StatePointer state_;
    const bool training_;
    const Completion complete_;
    NDArrays kept_;
    Arrays arrays_;
    bool begun_ = false;
};

// ---- threads in which calls run and wait for each other --------------------------------------------------------

// One thread for each simultaneous call, kept for later ones.
struct Worker {
    Condition given;
    std::unique_ptr<Execution> call;
    Worker* next = nullptr;  // the one that was idle before
};

struct Workers {
    Mutex mutex;
    Worker* idle = nullptr;  // the last to work comes first again: its memory is in the cache
};

Renewed<Workers>& workers = *new Renewed<Workers>;  // never destroyed: threads may be in it when the process ends

void serve(Workers* all, Worker* self) {
    std::unique_lock<std::mutex> lock(all->mutex);
    for (;;) {
        self->given->wait(lock, [self] { return self->call != nullptr; });
        lock.unlock();
        self->call->run();
        self->call.reset();
        lock.lock();
        self->next = std::exchange(all->idle, self);
    }
}

// Runs the call on an idle thread. Throws Failure if none can be started; then the call is gone.
void start(std::unique_ptr<Execution> call) {
    std::unique_lock<std::mutex> lock(workers->mutex);
    Worker* const idle = workers->idle;
    if (idle == nullptr) {
        lock.unlock();
        auto worker = std::make_unique<Worker>();
        worker->call = std::move(call);
        try {
            std::thread(serve, &workers.get(), worker.get()).detach();
        } catch (const std::system_error& error) {
            throw Failure(std::string("no thread could be started for this call (") + error.what() +
                          "). The process has no memory for a thread, or has reached its limit of threads (ulimit -v, "
                          "ulimit -u).");
        }
        worker.release();  // for ever
        return;
    }
    workers->idle = idle->next;
    idle->call = std::move(call);
    lock.unlock();
    idle->given->notify_one();
}

// ---- MXNet's own custom operators ----------------------------------------------------------------------------

// MXNet would have made plain copies for them, and may free these before the operator ends.
struct Rest {
    NDArrays inputs;
    Completion complete;
};

void end_rest(void*, void* parameter, const dmlc::Error* error) {
    const std::unique_ptr<Rest> rest(static_cast<Rest*>(parameter));
    rest->inputs.clear();
    rest->complete(error);
}

void pass_on(const Compute& original, const StatePointer& state, const OpContext& context, const NDArrays& inputs,
             const Requests& requests, const NDArrays& outputs) {
    auto rest = std::make_unique<Rest>();
    rest->complete = context.complete;
    rest->inputs.reserve(inputs.size());
    for (const NDArray& input : inputs) rest->inputs.push_back(NDArray::plain(input));
    OpContext own = context;
    own.complete = {end_rest, context.complete.engine, rest.get()};
    const NDArrays& plain = rest->inputs;
    original(state, own, plain, requests, outputs);
    rest.release();  // until end_rest
}

// ---- the way in ----------------------------------------------------------------------------------------------

void begin(bool backward, const Compute& original, const StatePointer& state, const OpContext& context,
           const NDArrays& inputs, const Requests& requests, const NDArrays& outputs) {
    if (!is_ours(*state->custom->callbacks)) return pass_on(original, state, context, inputs, requests, outputs);
    const auto& call = *static_cast<const Call*>(state->custom->callbacks->contexts[0]);
    try {
        auto execution = std::make_unique<Execution>(backward, state, context, inputs, requests, outputs);
        // Runs in this thread of the engine, unless the call has to wait; the last replica of a meeting stays here. Not
        // in the issuing thread: MXNet runs operators there that complete by themselves and whose inputs are ready.
        if (on_main_thread() || !execution->begin()) return start(std::move(execution));
        ++syncbn_lone_calls;
        execution->run();
    } catch (const std::exception& e) {
        context.complete.fail(call.end_step(e));
    }
}

void replace(const char* op_name, bool backward, const std::string& device) {
    const OldString attribute("FStatefulComputeEx<" + device + ">"), flag("TIsMKLDNN");
    Op* op = nullptr;
    library.find_op(op_name, &op);
    const auto& known = library.computes(attribute.object()).by_index[op->index];
    const auto* original = new Compute(known.first);  // for ever
    const int priority = known.second + 1;
    library.set_compute(
        op, attribute.object(), [=](const auto&... with) { begin(backward, *original, with...); }, priority);
    library.set_flag(op, flag.object(), true, priority);  // it takes arrays as they are
}

}  // namespace

void Completion::fail(const std::exception_ptr& reason) const noexcept {
    const TurnToFail turn = turn_to_fail();
    try {
        std::rethrow_exception(reason);
    } catch (const std::exception& e) {
        const dmlc::Error error = error_with(reason_of(e), kStepError);
        (*this)(&error);
    }
}

// Takes over calls of our operator on "cpu" or "gpu" contexts; other custom operators are forwarded to MXNet's handler.
// The build of MXNet's library is known. Returns why calls come through MXNet's `Custom` all the same; otherwise empty.
SYNCBN_API(std::string, take_calls, const char* device) {
    if (is_naive_engine) return "MXNET_ENGINE_TYPE=NaiveEngine runs operators in the thread that issues them";
    library = Library();
    replace("Custom", false, device);
    replace("_backward_Custom", true, device);
    return "";
}

}  // namespace syncbn::native

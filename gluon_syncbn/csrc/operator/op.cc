// Implements the custom operator: MXNet's callbacks on one side, calls of a layer on the other.
//
// The inputs are x, gamma and beta, and the running statistics are auxiliary states. The operator writes these. So
// MXNet's engine runs the calls of one layer on one context in the order of issue. The n-th execution of an operator
// that MXNet keeps belongs to its n-th announcement. Two replicas of one context would wait for each other inside that
// queue, so a context has one.
#include "operator/op.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/registry.h"
#include "operator/call.h"
#include "to_python.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

// MXNet notes this error for an array, and once more for the call that waits for the array. Then it destroys the error,
// which ends the turn of the call.
struct ErrorOfCall : dmlc::Error {
    TurnToFail turn;
    ErrorOfCall(const dmlc::Error& why, TurnToFail turn) : dmlc::Error(why), turn(std::move(turn)) {}
};

// A turn, which one at a time has. One that MXNet's engine has lost does not keep the others for good.
struct Turn {
    sem_t free;
    Turn() { sem_init(&free, 0, 1); }
    TurnToFail taken() {
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        ++until.tv_sec;
        while (sem_timedwait(&free, &until) != 0)
            if (errno == ETIMEDOUT) return {nullptr, sem_post};
        return {&free, sem_post};
    }
};

// An operation of MXNet's engine that fails. The arrays that it writes share the error.
struct Failing {
    std::optional<dmlc::Error> why;  // if empty, the failure of the step, if it has failed by then
    TurnToFail turn_of_call = {nullptr, sem_post}, turn = {nullptr, sem_post};

    void operator()() {
        if (!why) {
            const auto failure = step().failure();
            // Hundreds of failures at once can end the process (`TurnToFail`), so none comes that nobody would see.
            if (failure == nullptr || step().exiting) return;
            why = error_with(failure->what(), kStepError);
        }
        turn = turn_to_fail();
        if (turn_of_call != nullptr) throw ErrorOfCall(*why, std::move(turn_of_call));
        throw dmlc::Error(*why);
    }
};

// Later users of one of these arrays fail for this reason. One operation of the engine waits for all arrays; then each
// array has an operation of its own. Arrays of one operation would share its exception, and the first reader would remove
// it from the others.
void fail_each(const Span<NDArrayHandle>& arrays, const std::optional<dmlc::Error>& why) {
    check(push([] {}, arrays, {}));
    for (void*& array : arrays) check(push(Failing{why}, {}, {1, &array}));
}

// MXNet keeps one exception for all custom operators. If two fail before MXNet reads it, one is lost, and that operator
// counts as done. Before completion, MXNet also checks the operator's arrays, which belong to this call alone
// (CustomOperator::Push in src/operator/custom/custom-inl.h). So one of them takes the error. MXNet notes
// the error once more, for the call. Until then, no other call fails. Such a turn is not one of `turn_to_fail`: its end
// takes an operation of the engine, whose thread may wait for one of those.
void fail_array(void* array, const char* what) {
    static Renewed<Turn>& calls = *new Renewed<Turn>;
    const dmlc::Error error = error_with(what, kStepError);
    if (push(Failing{error, calls->taken()}, {}, {1, &array}) != 0) throw error;
}

constexpr int kPropertyCallbacks = 8;

// The operator in a graph.
struct Property {
    NodePtr node;
    std::array<void*, kPropertyCallbacks> callback_states;  // MXNet keeps a pointer to these
};

// ---- callbacks of one call -----------------------------------------------------------------------------------

template <typename Object>
int destroy(Object* object) {
    delete object;
    return 1;
}

// The states that MXNet leaves to the operator.
struct Handles {
    int size;
    void** all;
    ~Handles() {
        for (int i = 0; i < size; ++i) mx.MXNDArrayFree(all[i]);
    }
};

template <bool backward>
int run(int size, void** handles, int*, const int* reqs, const int training, Call* call) {
    const Handles ours{size, handles};
    const Node::Lists& roles = backward ? call->node().backward : call->node().forward;
    try {
        Arrays arrays;
        for (size_t i = 0; i < roles.all.size(); ++i) arrays.of[roles.all[i]].handle = handles[i];
        for (size_t i = 0; i < roles.written.size(); ++i) arrays.requests[roles.written[i]] = reqs[i];
        call->begin(backward, arrays, training != 0);
        call->end();
    } catch (const std::exception& e) {
        call->end_step(e);
        fail_array(handles[0], reason_of(e));
    }
    return 1;
}

// ---- callbacks of the operator's description -------------------------------------------------------------------

using Callback = int (*)();

// MXNet passes an address for the last parameter.
template <auto function>
Callback as_callback() {
    return reinterpret_cast<Callback>(reinterpret_cast<void*>(Guarded<function>::call));
}

constexpr const char* kNames[kRoles] = {"data", "gamma",  "beta",         "addend",
                                        "mask", "output", "running_mean", "running_var"};

// Lists the names of these roles, until this thread's next list.
template <Role first, Role last>
int list(char*** out, const Node& node) {
    static thread_local std::vector<char*> listed;
    listed.clear();
    for (const Role role : node.forward.all)
        if (first <= role && role <= last) listed.push_back(const_cast<char*>(kNames[role]));
    listed.push_back(nullptr);
    *out = listed.data();
    return 1;
}

[[noreturn]] void refuse(const Node& node, const std::string& reason) {
    throw Failure(node.layer->name, "", "", reason);
}

int channel_axis(const Node& node, int dims) {
    const int axis = node.axis < 0 ? node.axis + dims : node.axis;
    if (dims < 2 || dims > 5 || axis < 0 || axis >= dims)
        refuse(node, "data has " + std::to_string(dims) + " dimensions and axis is " + std::to_string(node.axis) +
                         "; expected 2 to 5 dimensions and an axis among them");
    return axis;
}

std::string text_of(const std::vector<int64_t>& shape) {
    std::string text;
    for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

Mask mask_of(const Node& node, const std::vector<int64_t>& data, const std::vector<int64_t>& shape, int axis,
             int type) {
    std::vector<int64_t> extents = data, given = shape, full = data;
    full[axis] = 1;
    extents.erase(extents.begin() + axis);
    const auto agree = [](int64_t one, int64_t extent) { return one == 1 || one == extent; };
    if (given.size() == data.size() && given[axis] == 1) given.erase(given.begin() + axis);
    const bool fits = std::equal(given.begin(), given.end(), extents.begin(), extents.end(), agree);
    if (!fits)
        refuse(node, "the mask has the shape " + text_of(shape) + " and the data " + text_of(data) + "; expected " +
                         text_of(full) + " or " + text_of(extents) + " of the mask, where any extent may be 1");
    Mask mask{kTypes[type].bytes, kTypes[type].floating, 1, {1, 1, 1, 1}, {}};
    for (size_t i = given.size(), to = 4; i-- > 0;) {
        mask.extents[--to] = extents[i];
        mask.strides[to] = given[i] == 1 ? 0 : mask.size;
        mask.size *= given[i];
    }
    return mask;
}

int infer_shape(int size, int* dims, int** shapes, const Node& node) {
    if (dims[0] <= 0) return 1;  // not known yet
    const int axis = channel_axis(node, dims[0]);
    static thread_local std::vector<int> of_mask;
    of_mask.assign(shapes[0], shapes[0] + dims[0]);
    of_mask[axis] = 1;
    for (int i = 1; i < size; ++i) {
        const Role role = node.forward.all[static_cast<size_t>(i)];
        if (role == kMask && dims[i] > 0) continue;  // it may have another one
        dims[i] = is_data(role) || role == kMask ? dims[0] : 1;
        shapes[i] = is_data(role) ? shapes[0] : role == kMask ? of_mask.data() : shapes[0] + axis;
    }
    return 1;
}

int infer_type(int size, int* types, const Node& node) {
    const int data = types[0] >= 0 ? types[0] : types[node.inputs];
    if (data < 0) return 1;
    if (kTypes[data].floating == 0)
        refuse(node,
               std::string("data must be bfloat16, float16, float32 or float64; ") + kTypes[data].name + " was given");
    const int parameter = static_cast<int>(parameter_type_of(static_cast<Type>(data)));
    for (int i = 0; i < size; ++i) {
        const Role role = node.forward.all[static_cast<size_t>(i)];
        if (role != kMask)
            types[i] = is_data(role) ? data : parameter;
        else if (types[i] < 0)
            types[i] = data;
    }
    return 1;
}

// The activation's backward computes its sign again or, after an addition, takes the output's. MXNet keeps the arrays
// that are named here for the backward.
int backward_dependency(const int* dy, const int* inputs, const int* outputs, int* size, int** needed,
                        const Node& node) {
    static thread_local std::array<int, 5> list;
    int n = 0;
    list[n++] = dy[0];
    list[n++] = inputs[kX];
    list[n++] = inputs[kGamma];
    if (node.activation.any()) list[n++] = node.adds ? outputs[0] : inputs[kBeta];
    if (node.masks) list[n++] = inputs[node.inputs - 1];
    *size = n;
    *needed = list.data();
    return 1;
}

// Hands MXNet a call, until `destroy`.
int create_operator(const char* context, int, unsigned** shapes, const int* dims, const int* types, MXCallbackList* out,
                    const Property& property) {
    const Node& node = *property.node;
    const bool on_gpu = std::strncmp(context, "gpu", 3) == 0;
    if (!on_gpu && !node.on_cpus)
        refuse(node, std::string("the net was traced on GPUs and is now called on ") + context +
                         "; call net.hybridize() again");
    const int axis = channel_axis(node, dims[0]);
    Shape shape{1, shapes[0][axis], 1};
    for (int i = 0; i < dims[0]; ++i) {
        if (static_cast<int>(shapes[0][i]) < 0)
            refuse(node, "an extent of the data is not known; outside mx.util.np_shape, 0 means unknown");
        if (i < axis) shape.outer *= shapes[0][i];
        if (i > axis) shape.inner *= shapes[0][i];
    }
    if (axis == 0 && node.layer->pooling.virtual_devices > 1)
        refuse(node, "virtual_devices are parts of the batch along axis 0, but here that is the channel axis");
    const int64_t samples = axis == 0 ? 1 : shapes[0][0];
    Mask mask{};
    if (node.masks) {
        const size_t at = node.inputs - 1;
        const std::vector<int64_t> data(shapes[0], shapes[0] + dims[0]);
        mask = mask_of(node, data, {shapes[at], shapes[at] + dims[at]}, axis, types[at]);
    }
    const auto type = static_cast<Type>(types[0]);
    if (on_gpu && type == Type::kBfloat16)
        refuse(node, std::string(name_of(type)) + " data is on " + context +
                         ", but MXNet 1.9 computes with it on CPUs only; use float16 there");
    auto op = (on_gpu ? device_call : host_call)(property.node, context, {type, shape, samples, mask, {}});
    bool training = false;
    mx.MXAutogradIsTraining(&training);
    if (training && !node.frozen) op->issue();
    static Callback callbacks[] = {as_callback<destroy<Call>>(), as_callback<run<false>>(), as_callback<run<true>>()};
    out->num_callbacks = 3;
    out->callbacks = callbacks;
    out->contexts = op->callback_states.data();
    op->callback_states.fill(op.get());
    op.release();
    return 1;
}

const char* const kGone =
    "this graph holds a SyncBatchNorm of another process, or one that is gone. Write it again in its process: "
    "net.export, net.save and a symbol's save and tojson write BatchNorm. Then convert what is loaded.";

// The eager calls that Python has described, by their numbers, which MXNet gets in place of attributes.
struct Calls {
    Mutex mutex;  // guards the rest
    std::map<int64_t, NodePtr> nodes;
    int64_t next = 1;
};
Calls& calls = *new Calls;

// A layer's name in a graph is this and its number. It is unique among processes, so that a saved graph is recognised.
std::string& process = *new std::string;

// Of the attributes that training/replicas.py gives a node, or a call.
NodePtr node_of(size_t count, const char* const* keys, const char* const* values) {
    std::map<std::string, std::string> given;
    for (size_t i = 0; i < count; ++i) given[keys[i]] = values[i];
    if (const auto call = given.find("call"); call != given.end()) {
        std::lock_guard<std::mutex> lock(calls.mutex);
        const auto found = calls.nodes.find(std::stoll(call->second));
        if (found == calls.nodes.end()) throw Failure(kGone);
        return found->second;
    }
    const std::string& layer = given["layer"];
    if (layer.compare(0, process.size(), process) != 0) throw Failure(kGone);
    const auto number = [&](const char* of) { return std::stod(given.at(of)); };
    Node node;
    node.layer = registry().find(std::stoll(layer.substr(process.size())));
    if (!node.layer) throw Failure(kGone);
    node.number = std::stoll(given["node"]);
    if (const std::string& turn = given["turn"]; !turn.empty()) node.turn = std::stoi(turn);
    node.axis = static_cast<int>(number("axis"));
    node.epsilon = number("eps");
    node.momentum = static_cast<float>(number("momentum"));  // as MXNet's BatchNorm keeps it
    node.activation = {number("slope"), number("ceiling")};
    node.adds = number("adds") != 0;
    node.masks = number("masks") != 0;
    node.fix_gamma = number("fix_gamma") != 0;
    node.unbiased = number("unbiased") != 0;
    node.frozen = number("use_global_stats") != 0;
    node.on_cpus = number("on_cpus") != 0;
    node.list_roles();
    return std::make_shared<const Node>(std::move(node));
}

// MXNet calls `destroy` even if this function throws, so it sets the callbacks first.
int describe_layer(const char*, const int size, const char** keys, const char** values, MXCallbackList* out) {
    static Callback callbacks[] = {as_callback<destroy<Property>>(), as_callback<list<kX, kMask>>(),
                                   as_callback<list<kY, kY>>(),      as_callback<list<kRunningMean, kRunningVar>>(),
                                   as_callback<infer_shape>(),       as_callback<backward_dependency>(),
                                   as_callback<create_operator>(),   as_callback<infer_type>()};
    static void* nobody[kPropertyCallbacks] = {};
    out->num_callbacks = kPropertyCallbacks;
    out->callbacks = callbacks;
    out->contexts = nobody;
    auto* property = new Property;
    out->contexts = property->callback_states.data();
    property->callback_states.fill(property);
    property->node = node_of(static_cast<size_t>(size), keys, values);
    property->callback_states.fill(const_cast<Node*>(property->node.get()));
    property->callback_states[0] = property->callback_states[6] = property;  // of `destroy` and `create_operator`
    return 1;
}

}  // namespace

// Describes an eager call of a layer, and returns its number.
SYNCBN_API(int64_t, call_create, const Span<const char*>& keys, const Span<const char*>& values) {
    auto node = node_of(static_cast<size_t>(keys.count), keys.values, values.values);
    std::lock_guard<std::mutex> lock(calls.mutex);
    calls.nodes.emplace(calls.next, std::move(node));
    return calls.next++;
}

SYNCBN_API(void, call_drop, int64_t number) {
    std::unique_lock<std::mutex> lock(calls.mutex);
    const auto dropped = calls.nodes.extract(number);
    lock.unlock();  // its layer may end: the layer's memory on GPUs takes other locks
}

SYNCBN_API(void, layer_drop, int64_t id) { registry().drop(id); }

bool is_ours(const MXCallbackList& callbacks) { return callbacks.callbacks[0] == as_callback<destroy<Call>>(); }

TurnToFail turn_to_fail() {
    static Renewed<Turn>& turns = *new Renewed<Turn>;
    return turns->taken();
}

// Makes later users of one of these arrays fail, if the step has failed when all arrays are available. Does not wait.
SYNCBN_API(void, gate, const Span<NDArrayHandle>& arrays) { fail_each(arrays, std::nullopt); }

// Lets readers of these arrays fail.
SYNCBN_API(void, fail_arrays, const Span<NDArrayHandle>& arrays) {
    if (!is_naive_engine) fail_each(arrays, error_with("no value", kStepError));  // that one has no threads
}

// If the step has failed when these arrays are available, gives them one error in the place of theirs. An update that was
// left out has not touched them, and the first reader removes the error from all. They do not share memory.
SYNCBN_API(void, share_failure, const Span<NDArrayHandle>& arrays) { check(push(Failing{}, {}, arrays)); }

// Waits until MXNet has computed this array, or never will. Throws Failure if that takes more seconds: what has not happened,
// and what to do about it.
SYNCBN_API(void, await_array, const Span<NDArrayHandle>& array, double timeout, const char* what, const char* advice) {
    class QuietWait final : public Wait {
        using Wait::Wait;
        void warn(const std::string&) override {}  // the replicas that wait for this one do
    };
    std::promise<void> done;
    const auto future = done.get_future();
    check(push([done = std::move(done)]() mutable { done.set_value(); }, array, {}));
    QuietWait wait(timeout, "", what, advice);
    while (future.wait_for(kSlice) != std::future_status::ready) wait.look();
}

// Registers the operator, after `find_in`.
SYNCBN_API(void, register, const char* of_process) {
    mx = MXNet();
    read_environment();
    process = of_process;
    error_with("");  // allocates MXNet's error for a lack of memory now
    check(mx.MXCustomOpRegister("gluon_syncbn", Guarded<describe_layer>::call));
}

}  // namespace syncbn

// The functions that Python calls as those of `_native`, which reads their types here. They may throw: `Caught` hands
// their results and exceptions to Python.
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/collective.h"
#include "cuda/driver.h"
#include "exchange/processes.h"
#include "exchange/python.h"
#include "failure.h"
#include "log.h"
#include "meeting/diagnosis.h"
#include "meeting/registry.h"
#include "meeting/scope.h"
#include "meeting/tape.h"
#include "mxnet_api.h"
#include "native/native.h"
#include "operator/call.h"
#include "operator/op.h"
#include "pooling/statistics.h"
#include "waiting/step.h"

// Begins a function, which Python finds by its name as a pointer, beside its declaration, which it compares with this
// file's.
#define SYNCBN_API(result, name, ...)                                                      \
    static result api_##name(__VA_ARGS__);                                                 \
    extern "C" {                                                                           \
    __attribute__((visibility("default"))) auto syncbn_##name = &Caught<api_##name>::call; \
    __attribute__((visibility("default"))) extern const char syncbn_declared_##name[] =    \
        #result ", " #name ", " #__VA_ARGS__;                                              \
    }                                                                                      \
    static result api_##name(__VA_ARGS__)

namespace {

using syncbn::Asked;
using syncbn::Nccl;
using syncbn::PythonMailbox;
using syncbn::registry;
using syncbn::Segment;
using syncbn::Span;

using NDArrayHandle = void*;  // MXNet's; in Python an NDArray

thread_local std::string kept_problem;
thread_local const char* problem = "";

using Bytes = std::string;  // `bytes` in Python, where a std::string is a text

// What Python gets of a result: -1 or null after an exception. Texts and bytes stay until this thread's next call,
// exchanges as long as the process. Without bytes, the count is -1.
const Span<const char>* handed(std::optional<std::string> bytes) {
    static thread_local std::string kept;
    static thread_local Span<const char> span;
    kept = bytes.value_or("");
    span = {bytes ? static_cast<int64_t>(kept.size()) : -1, kept.data()};
    return &span;
}
const Span<const char>* handed(std::string text) { return handed(std::optional(std::move(text))); }
Asked* handed(Asked exchange) { return new Asked{std::move(exchange)}; }
int handed(bool value) { return value; }
template <typename Value>
Value handed(Value value) {
    return value;
}

// A function of C that catches what this one throws.
template <auto function>
struct Caught;
template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Caught<function> {
    static auto call(Parameters... parameters) noexcept {
        const auto run = [&] {
            if constexpr (std::is_void_v<Result>)
                return function(parameters...), 0;
            else
                return handed(function(parameters...));
        };
        try {
            return run();
        } catch (const std::exception& e) {
            try {
                problem = (kept_problem = syncbn::reason_of(e)).c_str();
            } catch (const std::bad_alloc&) {
                problem = syncbn::kNoMemory;
            }
        }
        if constexpr (std::is_pointer_v<decltype(run())>)
            return decltype(run()){nullptr};
        else
            return decltype(run()){-1};
    }
};

void check(int status) {
    if (status != 0) throw syncbn::Failure(syncbn::mx.MXGetLastError());
}

std::shared_ptr<syncbn::Layer> found(int64_t id) {
    const auto layer = registry().find(id);
    if (!layer) throw syncbn::Failure("no layer has the number " + std::to_string(id));
    return layer;
}

syncbn::Processes& of_processes(Asked* exchange) { return static_cast<syncbn::Processes&>(*exchange->host); }

}  // namespace

// The error of this thread's last call that returned null or -1.
SYNCBN_API(const char*, problem) { return problem; }

// Registers the operator. `process` begins the name of each layer in graphs, and its number follows. After `find_in`.
SYNCBN_API(void, register, const char* process) {
    const syncbn::MXNet functions;  // first, because it may throw
    syncbn::read_environment();
    registry().process = process;
    check(syncbn::register_operator(functions));
}

// Where the core finds MXNet's library, a handle of dlopen, the sources, and compiled kernels of GPUs.
SYNCBN_API(void, find_in, void* library, const char* csrc, const char* cache) {
    syncbn::mxnet_library = library;
    syncbn::cuda::setup = {csrc, cache};
}

// Returns why calls on "cpu" or "gpu" contexts come through MXNet's `Custom`; empty if they do not, from now on.
SYNCBN_API(std::string, take_calls, const char* device) { return syncbn::native::take_calls(device); }

SYNCBN_API(std::string, separate_resources) { return syncbn::native::separate_resources(); }
SYNCBN_API(bool, use_spare_space, bool uses) { return syncbn::native::use_spare_space(uses); }
SYNCBN_API(int, issue_on, int context) { return syncbn::native::issue_on(context); }

// Why GPUs cannot exchange their statistics by NCCL; empty if they can.
SYNCBN_API(std::string, nccl_problem) { return syncbn::cuda::why_no_collective(); }

// ---- layers ----

// `groups`: the group of each replica, where groups are named. Without a timeout or an exchange, the defaults hold.
SYNCBN_API(int64_t, layer_create, const char* name, int mode, int64_t virtual_devices, int64_t group,
           const Span<const int>& groups, double timeout, Asked* exchange) {
    const auto known = static_cast<syncbn::Mode>(mode);
    const auto layer = registry().create(name, {known, virtual_devices, group, groups});
    registry().change(*layer, [&](auto& config) {
        config.own_timeout = timeout;
        if (exchange != nullptr) config.own_exchange = *exchange;
    });
    return layer->id;
}

SYNCBN_API(int64_t, layers) { return static_cast<int64_t>(registry().all().size()); }

SYNCBN_API(void, layer_drop, int64_t id) {
    syncbn::forget_calls(id);
    registry().drop(id);
}

// Whether a node of a graph, or a call, has the layer, beside the registry and this function.
SYNCBN_API(bool, layer_in_use, int64_t id) { return found(id).use_count() > 2; }

SYNCBN_API(int64_t, call_create, const Span<const char*>& keys, const Span<const char*>& values) {
    return syncbn::create_call(static_cast<int>(keys.count), keys.values, values.values);
}

// Sets the contexts that hold a layer's parameters. `misplaced`: why these cannot train; empty if they can. Forgets
// unfinished meetings if the contexts have changed: `reset_ctx` to the same contexts does not wait, and a step may be
// running.
SYNCBN_API(void, layer_place, int64_t id, const Span<const char*>& contexts, const char* misplaced) {
    syncbn::read_environment();
    const auto layer = found(id);
    const std::vector<std::string> now(contexts.begin(), contexts.end());
    bool same = false;
    registry().change(*layer, [&](auto& config) {
        same = std::exchange(config.contexts, now) == now;
        config.misplaced = misplaced;
    });
    if (!same) layer->forget();
}

// The processes of an exchange have agreed on a layer: see exchange/processes.h.
SYNCBN_API(void, layer_agree, int64_t id, Asked* processes, int64_t key, size_t channels,
           const Span<const size_t>& replicas) {
    const auto layer = found(id);
    auto& exchange = of_processes(processes);
    const auto agreed = exchange.agree(key, layer->name, layer->pooling, channels, replicas);
    registry().change(*layer, [&](auto& config) {
        config.agreed = agreed;
        config.agreed_by = &exchange;
    });
}

// Says that this thread makes or executes a graph whose operators MXNet keeps, with training calls of these layers' nodes
// on this context. Graphs with the same `running` statistics run in the order in which they say so. Fails if a layer is in
// the middle of a step of another thread. `repeats`: it is an executor, which may repeat forwards, and each layer has one
// array of running statistics, which all of its operators read.
SYNCBN_API(void, begin_graph, const char* context, const Span<const size_t>& layers, const Span<const size_t>& nodes,
           const Span<NDArrayHandle>& running, bool repeats) {
    for (int64_t i = 0; i < running.count; ++i) {
        const auto begin = [](void*, void* coming) { (*static_cast<std::function<void()>*>(coming))(); };
        const auto remove = [](void* coming) { delete static_cast<std::function<void()>*>(coming); };
        auto* coming = new std::function<void()>([] {});
        if (repeats)
            *coming = [layer = found(static_cast<int64_t>(layers.values[i])), context = std::string(context)] {
                layer->forwards.announce(context);
            };
        check(syncbn::mx.MXEnginePushSyncND(begin, coming, remove, &syncbn::kCpu, nullptr, 0, &running.values[i], 1,
                                            &syncbn::kNoSkip, 0, "gluon_syncbn"));
    }
    for (int64_t i = 0; i < layers.count; ++i) {
        const auto layer = found(static_cast<int64_t>(layers.values[i]));
        if (sharing_of(layer->pooling) != syncbn::Sharing::kNothing)
            layer->join(layer->config(), context, static_cast<int64_t>(nodes.values[i]), true);
    }
    syncbn::within_graph = true;
}
SYNCBN_API(void, end_graph) { syncbn::within_graph = false; }

// ---- defaults ----

SYNCBN_API(void, default_timeout, double seconds) {
    registry().change([&](auto& all) { all.timeout = seconds; });
}
SYNCBN_API(double, timeout_of) { return registry().defaults().timeout; }

SYNCBN_API(void, devices, const Span<const char*>& contexts) {
    registry().change([&](auto& all) { all.devices = {contexts.begin(), contexts.end()}; });
}

// The values are those of syncbn::Nonfinite.
SYNCBN_API(void, nonfinite, int what) {
    syncbn::speak_of_nonfinite_again();
    registry().change([&](auto& all) { all.nonfinite = static_cast<syncbn::Nonfinite>(what); });
}
SYNCBN_API(int, nonfinite_of) { return static_cast<int>(registry().defaults().nonfinite); }

SYNCBN_API(std::string, seed_of) { return std::to_string(registry().defaults().seed); }
SYNCBN_API(void, seed, uint64_t seed) {
    registry().change([&](auto& all) { all.seed = seed; });
    for (const auto& layer : registry().all()) layer->restart_draws();
}

// ---- exchanges ----

// Sets the exchange of layers without one of their own.
SYNCBN_API(void, default_exchange, Asked* exchange) {
    registry().change([&](auto& all) { all.exchange = *exchange; });
}

// In memory of this process. `gpus`: "nccl", the "host", or either if empty.
SYNCBN_API(Asked, memory_exchange, const char* gpus) {
    const std::string way = gpus;
    return {syncbn::memory_exchange(), way == "nccl" ? Nccl::kRequired : way == "host" ? Nccl::kNever : Nccl::kIfThere};
}

// Over the contexts of this process, by a store of MXNet's, which the user has named. No other exchange runs Python.
SYNCBN_API(Asked, kvstore_exchange, syncbn::AddInPython* add) { return {syncbn::kvstore_exchange(add), Nccl::kNever}; }
// For that function: says why it fails.
SYNCBN_API(void, failed_in_python, const char* problem) { syncbn::python_problem = problem; }

// Memory that the processes of this machine share: see exchange/segment.h.
SYNCBN_API(Segment*, segment, size_t ranks, size_t rank, const char* path) { return new Segment(ranks, rank, path); }
SYNCBN_API(int, segment_number, Segment* segment) { return segment->number(); }
SYNCBN_API(void, segment_free, Segment* segment) { delete segment; }

// Over the processes of a job. A transport in Python carries the messages, if `mpi` is null.
SYNCBN_API(Asked, processes, size_t rank, size_t ranks, const syncbn::Mpi* mpi) {
    auto mail = mpi != nullptr ? syncbn::mailbox(*mpi, rank, ranks) : std::make_unique<PythonMailbox>(rank, ranks);
    return {std::make_shared<syncbn::Processes>(std::move(mail))};
}
SYNCBN_API(std::optional<Bytes>, next_message, Asked* processes, double seconds) {
    return static_cast<PythonMailbox&>(of_processes(processes).job()).next(seconds);
}
SYNCBN_API(void, deliver, Asked* processes, size_t size, const char* message) {
    static_cast<PythonMailbox&>(of_processes(processes).job()).deliver(message, size);
}
// What has become of a rank: "has ended"; empty if it is there.
SYNCBN_API(std::string, fate_of, Asked* processes, size_t rank) {
    syncbn::Mailbox& job = of_processes(processes).job();
    job.arrivals(0);  // lets messages arrive
    return job.fate_of(rank);
}
// Takes ownership of the segment, which `ranks` share, or null, where only gradients are exchanged by these `leaders`: see
// exchange/processes.h. `crowded`: there are more ranks than cores.
SYNCBN_API(void, meet, Asked* processes, Segment* segment, const Span<const size_t>& ranks,
           const Span<const size_t>& leaders, const syncbn::Mpi* mpi, size_t adds_from, bool crowded) {
    std::shared_ptr<Segment> memory(segment);
    if (memory != nullptr) memory->crowded = crowded;
    of_processes(processes).meet(std::move(memory), ranks, leaders, mpi, adds_from);
}

// Sends bytes to all ranks, in parts of these `sizes`: one for each rank, or one for all. Returns theirs: see
// exchange/processes.h.
SYNCBN_API(Bytes, bytes_of, Asked* processes, int64_t key, const char* what, const Span<const size_t>& sizes,
           const char* bytes) {
    std::vector<std::string> own;
    for (const size_t of_part : sizes) {
        own.emplace_back(bytes, of_part);
        bytes += of_part;
    }
    return of_processes(processes).bytes_of(key, what, registry().defaults().timeout, own);
}
SYNCBN_API(void, merge_moments, double* total, const double* part, int64_t channels) {
    syncbn::merge_moments(total, part, channels);
}

// Begins the sum of arrays over the processes of an exchange: see native/native.h.
SYNCBN_API(void, sum, Asked* exchange, int64_t channel, int64_t number, const char* update, const char* list,
           size_t count, const int* types, const size_t* sizes, size_t contexts, void** arrays,
           syncbn::cuda::AllReduce* gpus) {
    std::vector<syncbn::Summand> summands;
    for (size_t i = 0; i < count; ++i) summands.push_back({static_cast<syncbn::Type>(types[i]), sizes[i]});
    of_processes(exchange).job().check_open();
    syncbn::native::sum_gradients(
        of_processes(exchange).sums(),
        {channel, number, update, list, registry().defaults().timeout, std::move(summands), gpus}, contexts, arrays);
}

// What identifies a GPU; a new id for `gpus`.
SYNCBN_API(Bytes, gpu_identity, int device) { return syncbn::cuda::Device::get(device).identity; }
SYNCBN_API(Bytes, new_id) { return syncbn::cuda::new_id(); }
// The way of sums between the GPUs of several processes: see cuda/collective.h. `id` is the same in all of them, and used
// once; `first` is the place of the first of these devices among `ranks`; `bucket`: bytes, a multiple of 8.
SYNCBN_API(syncbn::cuda::AllReduce*, gpus, const Span<const int>& devices, const Span<const char>& id, int first,
           int ranks, size_t bucket) {
    return new syncbn::cuda::AllReduce(devices, {id.begin(), id.end()}, first, ranks, bucket);
}

// Reports that this process has failed, or ends.
SYNCBN_API(void, processes_failed, Asked* exchange, const char* reason) {
    of_processes(exchange).report(Segment::State::kFailed, reason);
}
SYNCBN_API(void, processes_ended, Asked* exchange) { of_processes(exchange).report(Segment::State::kEnded, ""); }
// The transport ends: it carries nothing more.
SYNCBN_API(void, processes_closed, Asked* exchange) { of_processes(exchange).job().end(); }

// ---- recomputation: see meeting/tape.h ----

SYNCBN_API(syncbn::Tape*, tape_create) { return new syncbn::Tape; }
SYNCBN_API(void, tape_free, syncbn::Tape* tape) { delete tape; }
SYNCBN_API(void, tape_begin, syncbn::Tape* tape, bool again) {
    tape->again = again;
    tape->next = 0;
    syncbn::tapes.push_back(tape);
}
// Returns the number of memos that no call has repeated since then. If there were more calls than memos, it is negative.
SYNCBN_API(int64_t, tape_end) {
    const syncbn::Tape& tape = *syncbn::tapes.back();
    syncbn::tapes.pop_back();
    return tape.again ? static_cast<int64_t>(tape.memos.size() - tape.next) : 0;
}
SYNCBN_API(bool, tape_runs) { return !syncbn::tapes.empty(); }

// ---- the step ----

// A thread of this name enters its outermost scope: see meeting/scope.h.
SYNCBN_API(void, scope_enter, const char* thread) {
    syncbn::entered_scope = std::make_shared<syncbn::Scope>(thread, true);
}

// Whether that scope is part of the current step. It is not if that step began later.
SYNCBN_API(bool, scope_is_current) { return syncbn::current_scope()->step == syncbn::step().number; }
// The thread leaves that scope. Returns why its step failed, empty if it did not.
SYNCBN_API(std::string, scope_leave) {
    const auto scope = syncbn::current_scope();
    syncbn::entered_scope = nullptr;
    scope->open = false;
    const syncbn::Failure* why = scope->why_ended();
    return why == nullptr ? "" : why->what();
}

SYNCBN_API(void, fail, const char* reason) {
    try {
        syncbn::step().fail(syncbn::Failure(reason));
    } catch (const std::exception& e) {  // no memory for the reason
        syncbn::step().fail(e);
    }
}

// Empty without a failure.
SYNCBN_API(std::string, failure) {
    const auto failure = syncbn::step().failure();
    return failure ? failure->what() : "";
}

// Forgets the failure and all unfinished meetings. No operator may be in flight.
SYNCBN_API(void, reset) {
    ++syncbn::step().number;
    for (const auto& layer : registry().all()) layer->forget();
    syncbn::step().clear();  // nothing meets before
}

// Makes later users of these arrays fail if the step has failed by then. Does not wait.
SYNCBN_API(void, gate, const Span<NDArrayHandle>& arrays) {
    check(syncbn::fail_arrays(arrays.values, arrays.count, nullptr));
}

SYNCBN_API(void, share_failure, const Span<NDArrayHandle>& arrays) {
    check(syncbn::share_failure(arrays.values, arrays.count));
}

// Lets readers of these arrays fail.
SYNCBN_API(void, fail_arrays, const Span<NDArrayHandle>& arrays) {
    check(syncbn::fail_arrays(arrays.values, arrays.count, "no value"));
}

// ---- the process ----

SYNCBN_API(void, answer_callers, const char* wait, double patience) { syncbn::answer_callers({wait, patience}); }

SYNCBN_API(void, exiting, bool is_exiting) { syncbn::step().exiting = is_exiting; }
SYNCBN_API(void, close) {
    syncbn::step().closed = true;
    syncbn::cuda::close_collectives();
}
// Called before a fork, and, with false, after it. `inside`: the forking thread is in a step.
SYNCBN_API(void, forking, bool inside) { syncbn::step().forking = inside; }
SYNCBN_API(void, out_of_batches, bool is_out) { syncbn::step().out_of_batches = is_out; }

// ---- records ----

SYNCBN_API(void, debug, bool enabled) { syncbn::wants_debug = enabled; }
// The next one, after at most `seconds`: its level, a blank and the text. Empty if there is none. The level 0 asks for
// callers.
SYNCBN_API(std::string, next_record, double seconds) {
    syncbn::Records& records = syncbn::records;
    std::unique_lock<std::mutex> lock(records.mutex);
    const auto comes = [&] { return records.asks || !records.waiting.empty(); };
    if (!records.changed->wait_for(lock, std::chrono::duration<double>(seconds), comes)) return "";
    if (std::exchange(records.asks, false)) return "0 ";
    std::string record = std::move(records.waiting.front());
    records.waiting.pop_front();
    return record;
}
SYNCBN_API(std::string, slowest) { return syncbn::slowest(); }

SYNCBN_API(const char*, instruction_set) { return syncbn::cpu::instruction_set(); }

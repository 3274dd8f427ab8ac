// The functions that Python calls as those of `_native`, which reads their types here. They have plain values and no
// exceptions. After an exception, a function returns null or -1, and Python raises an MXNetError with the text of
// `syncbn_problem`.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
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
#include "mxnet_api.h"
#include "native/calls.h"
#include "native/gradients.h"
#include "native/resources.h"
#include "operator/call.h"
#include "operator/op.h"
#include "operator/tape.h"
#include "pooling/statistics.h"
#include "waiting/callers.h"
#include "waiting/step.h"

#define SYNCBN_API extern "C" __attribute__((visibility("default")))

namespace {

using syncbn::Nccl;
using syncbn::registry;
using syncbn::Segment;
using syncbn::Span;

using NDArrayHandle = void*;  // MXNet's; in Python an NDArray

void check(int status) {
    if (status != 0) throw syncbn::Failure(syncbn::mx.MXGetLastError());
}

std::shared_ptr<syncbn::Layer> found(int64_t id) {
    const auto layer = registry().find(id);
    if (!layer) throw syncbn::Failure("no layer has the number " + std::to_string(id));
    return layer;
}

thread_local std::string kept_problem;
thread_local const char* problem = "";

// Returns the result of `work`, or `instead` after an exception.
template <typename Result, typename Work>
Result guarded(Result instead, const Work& work) noexcept {
    try {
        return work();
    } catch (const std::exception& e) {
        try {
            problem = (kept_problem = syncbn::reason_of(e)).c_str();
        } catch (const std::bad_alloc&) {
            problem = syncbn::kNoMemory;
        }
        return instead;
    }
}

template <typename Work>
int done(const Work& work) noexcept {
    return guarded(-1, [&] {
        work();
        return 0;
    });
}

// Keeps a text for Python until this thread's next call.
const char* keep(std::string value) noexcept {
    static thread_local std::string kept;
    kept = std::move(value);
    return kept.c_str();
}

template <typename Work>
const char* text(const Work& work) noexcept {
    return guarded<const char*>(nullptr, [&] { return keep(work()); });
}

// Bytes as text, with two digits for each.
std::string hex(const std::string& bytes) {
    std::string text;
    for (const unsigned char byte : bytes)
        for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
    return text;
}

std::string unhex(const std::string& text) {
    std::string bytes;
    for (size_t i = 0; i < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
    return bytes;
}

using ExchangeHandle = syncbn::Asked;

syncbn::Processes& of_processes(void* exchange) {
    return static_cast<syncbn::Processes&>(*static_cast<ExchangeHandle*>(exchange)->host);
}

// Makes a handle of the exchange that `make` returns; it lasts as long as the process.
template <typename Make>
void* handle(const Make& make) noexcept {
    return guarded<void*>(nullptr, [&] { return new ExchangeHandle{make()}; });
}

}  // namespace

// The error of this thread's last call that returned null or -1.
SYNCBN_API const char* syncbn_problem() { return problem; }

// Registers the operator. `functions` are the members of syncbn::MXNet, in that order. `process` begins the name of each
// layer in graphs, and its number follows. After `syncbn_find_in`.
SYNCBN_API int syncbn_register(const Span<void*>& functions, const char* process) {
    return done([&] {
        registry().process = process;
        syncbn::MXNet mx;
        if (functions.count * sizeof(void*) != sizeof mx) throw syncbn::Failure("MXNet's functions are others");
        std::memcpy(&mx, functions.values, sizeof mx);
        check(syncbn::register_operator(mx));
    });
}

// Where the core finds MXNet's library, a handle of dlopen, the sources, and compiled kernels of GPUs.
SYNCBN_API int syncbn_find_in(void* library, const char* csrc, const char* cache) {
    return done([&] {
        syncbn::mxnet_library = library;
        syncbn::cuda::setup = {csrc, cache};
    });
}

// Returns why calls on "cpu" or "gpu" contexts come through MXNet's `Custom`; empty if they do not, from now on.
SYNCBN_API const char* syncbn_take_calls(const char* device) {
    return text([&] { return syncbn::native::take_calls(device); });
}

// See native/resources.h.
SYNCBN_API const char* syncbn_separate_resources() { return text(syncbn::native::separate_resources); }
SYNCBN_API int syncbn_renew_resources() { return done(syncbn::native::renew_resources); }
// After true, `syncbn_issue_on` follows, with -1.
SYNCBN_API bool syncbn_issue_for(NDArrayHandle data) { return syncbn::native::issue_for(data); }
SYNCBN_API int syncbn_issue_on(int context) { return syncbn::native::issue_on(context); }

// Why GPUs cannot exchange their statistics by NCCL; empty if they can.
SYNCBN_API const char* syncbn_nccl_problem() { return text(syncbn::cuda::why_no_collective); }

// ---- layers ----

// `groups`: the group of each replica, where groups are named.
SYNCBN_API int64_t syncbn_layer_create(const char* name, int mode, int64_t virtual_devices, int64_t group,
                                       const Span<const int>& groups) {
    return guarded<int64_t>(-1, [&] {
        const auto known = static_cast<syncbn::Mode>(mode);
        return registry().create(name, {known, virtual_devices, group, {groups.begin(), groups.end()}})->id;
    });
}

// The number of layers.
SYNCBN_API int64_t syncbn_layers() { return static_cast<int64_t>(registry().all().size()); }

// Whether some layer has several replicas on a context.
SYNCBN_API bool syncbn_contexts_are_shared() { return registry().contexts_are_shared(); }

SYNCBN_API void syncbn_layer_drop(int64_t id) {
    syncbn::forget_calls(id);
    registry().drop(id);
}

SYNCBN_API int64_t syncbn_call_create(const Span<const char*>& keys, const Span<const char*>& values) {
    return guarded<int64_t>(
        -1, [&] { return syncbn::create_call(static_cast<int>(keys.count), keys.values, values.values); });
}

// Sets the contexts that hold a layer's parameters, and the number of their replicas.
SYNCBN_API int syncbn_layer_place(int64_t id, const Span<const char*>& contexts, int64_t replicas) {
    return done(
        [&] { registry().place(*found(id), {contexts.begin(), contexts.end()}, static_cast<size_t>(replicas)); });
}

// Says that this thread is about to execute a training call of a node whose operator MXNet has made before. It fails if
// the layer is in the middle of a step of another thread.
SYNCBN_API int syncbn_layer_called(int64_t id, int64_t node, const char* context) {
    return done([&] {
        const auto layer = found(id);
        layer->rendezvous.join(layer->config(), context, node, true);
    });
}

// Says that this thread begins or ends to execute a graph of which it has said that.
SYNCBN_API void syncbn_within_graph(bool inside) { syncbn::within_graph = inside; }

SYNCBN_API int syncbn_layer_timeout(int64_t id, double seconds) {
    return done([&] { registry().change(*found(id), [&](auto& own) { own.timeout = seconds; }); });
}

// Gives a layer an exchange of its own.
SYNCBN_API int syncbn_layer_exchange(int64_t id, void* exchange) {
    const auto& given = *static_cast<ExchangeHandle*>(exchange);
    return done([&] { registry().change(*found(id), [&](auto& own) { own.exchange = given; }); });
}

// ---- defaults ----

SYNCBN_API int syncbn_default_timeout(double seconds) {
    return done([&] { registry().change([&](auto& all) { all.timeout = seconds; }); });
}
SYNCBN_API double syncbn_timeout_of() { return registry().defaults().timeout; }

SYNCBN_API int syncbn_devices(const Span<const char*>& contexts) {
    return done([&] { registry().change([&](auto& all) { all.devices = {contexts.begin(), contexts.end()}; }); });
}

// The values are those of syncbn::Nonfinite.
SYNCBN_API int syncbn_nonfinite(int what) {
    syncbn::speak_of_nonfinite_again();
    return done([&] { registry().change([&](auto& all) { all.nonfinite = static_cast<syncbn::Nonfinite>(what); }); });
}

SYNCBN_API int syncbn_seed(uint64_t seed) {
    return done([&] {
        registry().change([&](auto& all) { all.seed = seed; });
        for (const auto& layer : registry().all()) layer->rendezvous.restart_calls();
    });
}

// ---- exchanges ----

// Sets the exchange of layers without one of their own.
SYNCBN_API int syncbn_default_exchange(void* exchange) {
    return done([&] { registry().change([&](auto& all) { all.exchange = *static_cast<ExchangeHandle*>(exchange); }); });
}

// In memory of this process. `gpus`: "nccl", the "host", or either if empty.
SYNCBN_API void* syncbn_memory_exchange(const char* gpus) {
    const std::string way = gpus;
    const Nccl nccl = way == "nccl" ? Nccl::kRequired : way == "host" ? Nccl::kNever : Nccl::kIfThere;
    return handle([&] { return ExchangeHandle{syncbn::memory_exchange(), nccl}; });
}

// Over the contexts of this process, by a store of MXNet's: an exchange in Python, identified by its number.
SYNCBN_API void* syncbn_kvstore_exchange(int64_t number) {
    return handle([&] { return ExchangeHandle{syncbn::kvstore_exchange(number), Nccl::kNever}; });
}

// Called once, before the first use; the functions must stay as long as the process.
SYNCBN_API void syncbn_python_functions(const syncbn::PythonFunctions* functions) {
    syncbn::set_python_functions(*functions);
}

// For those functions: fill in their results. `ranks`: without groups none.
SYNCBN_API int syncbn_agreed(syncbn::Agreed* out, int64_t key, const Span<const size_t>& ranks, int64_t channels,
                             int64_t replicas, const Span<const int>& members, const Span<const int>& groups,
                             int64_t first) {
    return done([&] {
        *out = {key,      {ranks.begin(), ranks.end()},     channels,
                replicas, {members.begin(), members.end()}, {groups.begin(), groups.end()},
                first};
    });
}

// Memory that the processes of this machine share: see exchange/segment.h. Rank 0 creates it, and the others open it by
// rank 0's process, and by its number and token there.
SYNCBN_API void* syncbn_segment_create(int64_t ranks) {
    return guarded<void*>(nullptr, [&] { return Segment::create(static_cast<size_t>(ranks)).release(); });
}
SYNCBN_API void* syncbn_segment_open(int64_t ranks, int64_t rank, int64_t process, int64_t number, const char* token) {
    return guarded<void*>(nullptr, [&] {
        return Segment::open(static_cast<size_t>(ranks), static_cast<size_t>(rank), process, static_cast<int>(number),
                             unhex(token))
            .release();
    });
}
SYNCBN_API int64_t syncbn_segment_number(void* segment) { return static_cast<Segment*>(segment)->number(); }
SYNCBN_API const char* syncbn_segment_token(void* segment) {
    return text([&] { return hex(static_cast<Segment*>(segment)->token()); });
}
SYNCBN_API void syncbn_segment_free(void* segment) { delete static_cast<Segment*>(segment); }

// Over the processes of a job. `number` identifies an exchange in Python, which knows the layers. It also carries
// vectors, if `mpi` is null.
SYNCBN_API void* syncbn_processes(int64_t number, int64_t rank, int64_t ranks, const syncbn::Mpi* mpi) {
    return handle([&] {
        const auto own = static_cast<size_t>(rank), count = static_cast<size_t>(ranks);
        auto mail = mpi != nullptr ? syncbn::mailbox(*mpi, own, count) : syncbn::mailbox(own, count);
        auto job = std::make_shared<syncbn::Job>(number, std::move(mail));
        return ExchangeHandle{std::make_shared<syncbn::Processes>(std::move(job))};
    });
}
// For a carrier in Python: see exchange/python.h. The first returns bytes, until this thread's next call; a size of -1
// stands for the end.
SYNCBN_API const void* syncbn_next_message(void* processes, double seconds, int64_t* size) {
    return text([&] {
        std::string message;
        const bool goes_on = syncbn::next_message(*of_processes(processes).job()->all, seconds, &message);
        *size = goes_on ? static_cast<int64_t>(message.size()) : -1;
        return message;
    });
}
SYNCBN_API int syncbn_deliver(void* processes, int64_t size, const char* message) {
    return done([&] { syncbn::deliver(*of_processes(processes).job()->all, message, static_cast<size_t>(size)); });
}
// What has become of a rank: "has ended"; empty if it is there.
SYNCBN_API const char* syncbn_fate_of(void* processes, int64_t rank) {
    return text([&] { return of_processes(processes).job()->all->fate_of(static_cast<size_t>(rank)); });
}
// The same with memory of this machine. Takes ownership of the segment, which `ranks` share. `leaders`: of all machines.
// They add gradients by MPI; if `mpi` is null, see exchange/machines.h.
SYNCBN_API void* syncbn_exchange_machine(void* processes, void* segment, const Span<const size_t>& ranks,
                                         const Span<const size_t>& leaders, const syncbn::Mpi* mpi,
                                         int64_t carried_from) {
    return handle([&] {
        auto job = of_processes(processes).job();
        std::unique_ptr<Segment> machine(static_cast<Segment*>(segment));
        machine->members = {{ranks.begin(), ranks.end()}, job->all->ranks()};
        return ExchangeHandle{std::make_shared<syncbn::Processes>(std::move(job), std::move(machine),
                                                                  syncbn::Ranks(leaders.begin(), leaders.end()), mpi,
                                                                  static_cast<size_t>(carried_from))};
    });
}

// Sends bytes to all ranks, in parts of these `sizes`: one for each rank, or one for all. Returns theirs until this
// thread's next call: see exchange/processes.h.
SYNCBN_API const void* syncbn_bytes_of(void* processes, int64_t key, const char* what, double timeout,
                                       const Span<const size_t>& sizes, const char* bytes, int64_t* size) {
    return text([&] {
        std::vector<std::string> own;
        for (const size_t of_part : sizes) {
            own.emplace_back(bytes, of_part);
            bytes += of_part;
        }
        std::string all = of_processes(processes).bytes_of(key, what, timeout, own);
        *size = static_cast<int64_t>(all.size());
        return all;
    });
}
// The number of messages, for tests.
SYNCBN_API int64_t syncbn_sent(void* processes) { return of_processes(processes).job()->all->sent; }

SYNCBN_API void syncbn_merge_moments(double* total, const double* part, int64_t channels) {
    syncbn::merge_moments(total, part, channels);
}

// Returns an exchange's result for the one row of this process.
SYNCBN_API int syncbn_allreduce(void* exchange, bool merges, const syncbn::CallId* id, int64_t length,
                                const double* row, double* out) {
    return done([&] {
        const auto combine = merges ? syncbn::Combine::kMerge : syncbn::Combine::kAdd;
        syncbn::Exchange& host = *static_cast<ExchangeHandle*>(exchange)->host;
        const syncbn::Total total = host.begin(combine, *id, {{row}, static_cast<size_t>(length)})->total();
        std::copy(total.values.begin(), total.values.end(), out);
    });
}

// Begins the sum of arrays over the processes of an exchange in shared memory: see native/gradients.h.
SYNCBN_API int syncbn_sum(void* exchange, int64_t channel, int64_t number, double timeout,
                          const Span<const char*>& names, const int* types, const int64_t* sizes, int64_t contexts,
                          void** arrays, void* gpus) {
    return done([&] {
        std::vector<syncbn::Summand> summands;
        for (int64_t i = 0; i < names.count; ++i)
            summands.push_back({names.values[i], static_cast<syncbn::Type>(types[i]), static_cast<size_t>(sizes[i])});
        of_processes(exchange).job()->all->check_open();
        syncbn::native::sum_gradients(of_processes(exchange).sums(), channel, number, timeout, std::move(summands),
                                      static_cast<size_t>(contexts), arrays,
                                      static_cast<syncbn::cuda::AllReduce*>(gpus));
    });
}

// What identifies a GPU; a new id for `gpus`.
SYNCBN_API const char* syncbn_gpu_identity(int device) {
    return text([&] { return hex(syncbn::cuda::Device::get(device).identity); });
}
SYNCBN_API const char* syncbn_new_id() {
    return text([] { return hex(syncbn::cuda::new_id()); });
}
// The way of sums between the GPUs of several processes: see cuda/collective.h. `id` is the same in all of them, and used
// once; `first` is the place of the first of these devices among `ranks`; `bucket`: bytes, a multiple of 8.
SYNCBN_API void* syncbn_gpus(const Span<const int>& devices, const char* id, int first, int ranks, int64_t bucket) {
    return guarded<void*>(nullptr, [&] {
        const auto size = static_cast<size_t>(bucket);
        return new syncbn::cuda::AllReduce({devices.begin(), devices.end()}, unhex(id), first, ranks, size);
    });
}

// Reports that this process has failed, or ends.
SYNCBN_API int syncbn_processes_failed(void* exchange, const char* reason) {
    return done([&] { of_processes(exchange).leave(Segment::State::kFailed, reason); });
}
SYNCBN_API int syncbn_processes_ended(void* exchange) {
    return done([&] { of_processes(exchange).leave(Segment::State::kEnded, ""); });
}

// ---- recomputation: see operator/tape.h ----

SYNCBN_API void* syncbn_tape_create() {
    return guarded<void*>(nullptr, [] { return new syncbn::Tape; });
}

SYNCBN_API void syncbn_tape_free(void* tape) { delete static_cast<syncbn::Tape*>(tape); }

SYNCBN_API int syncbn_tape_begin(void* tape, bool again) {
    return done([&] { syncbn::begin_tape(*static_cast<syncbn::Tape*>(tape), again); });
}

SYNCBN_API int64_t syncbn_tape_end() { return syncbn::end_tape(); }
SYNCBN_API bool syncbn_tape_runs() { return !syncbn::tapes.empty(); }

// ---- the step ----

// A thread of this name enters its outermost scope: see meeting/scope.h.
SYNCBN_API int syncbn_scope_enter(const char* thread) {
    return done([&] { syncbn::enter_scope(thread); });
}

// Whether that scope is part of the current step. It is not if that step began later.
SYNCBN_API bool syncbn_scope_is_current() { return syncbn::current_scope()->step == syncbn::step().number; }
// The thread leaves that scope. Returns why its step failed, empty if it did not.
SYNCBN_API const char* syncbn_scope_leave() {
    return text([&] {
        const auto scope = syncbn::current_scope();
        syncbn::leave_scope();
        const syncbn::Failure* why = scope->why_ended();
        return std::string(why == nullptr ? "" : why->what());
    });
}

SYNCBN_API void syncbn_fail(const char* reason) {
    try {
        syncbn::step().fail(syncbn::Failure(reason));
    } catch (const std::exception& e) {  // no memory for the reason
        syncbn::step().fail(e);
    }
}

// Empty without a failure.
SYNCBN_API const char* syncbn_failure() {
    return text([] {
        const auto failure = syncbn::step().failure();
        return std::string(failure ? failure->what() : "");
    });
}

// Forgets the failure and all unfinished meetings. No operator may be in flight.
SYNCBN_API int syncbn_reset() {
    return done([&] {
        ++syncbn::step().number;
        for (const auto& layer : registry().all()) layer->rendezvous.forget();
        syncbn::step().clear();  // nothing meets before
    });
}

// Makes later users of these arrays fail if the step has failed by then. Does not wait.
SYNCBN_API int syncbn_gate(const Span<NDArrayHandle>& arrays) {
    return done([&] { check(syncbn::gate_arrays(arrays.values, arrays.count)); });
}

// Lets readers of these arrays fail.
SYNCBN_API int syncbn_fail_arrays(const Span<NDArrayHandle>& arrays) {
    return done([&] { check(syncbn::fail_arrays(arrays.values, arrays.count)); });
}

// ---- the process ----

// See waiting/callers.h.
SYNCBN_API bool syncbn_asked_for_callers(double seconds) { return syncbn::asked_for_callers(seconds); }
SYNCBN_API int syncbn_answer_callers(const char* wait, bool for_all) {
    return done([&] { syncbn::answer_callers(wait, for_all); });
}

// See waiting/step.h.
SYNCBN_API void syncbn_nobody_left(bool is_nobody_left) { syncbn::step().nobody_left = is_nobody_left; }
SYNCBN_API void syncbn_nobody_reads() { syncbn::step().unread = true; }
SYNCBN_API int syncbn_close() {
    syncbn::step().closed = true;
    return done(syncbn::cuda::close_collectives);
}
// Called before a fork, and, with false, after it. `inside`: the forking thread is in a step.
SYNCBN_API void syncbn_forking(bool inside) { syncbn::step().forking = inside; }
SYNCBN_API void syncbn_out_of_batches(bool is_out) { syncbn::step().out_of_batches = is_out; }

// Called in the child of a fork.
SYNCBN_API int syncbn_forked() {
    return done([&] {
        syncbn::step().forking = syncbn::step().unread = syncbn::step().nobody_left = false;
        syncbn::forget_callers();
        syncbn::forget_records();
        syncbn::native::forget_workers();
        syncbn::native::forget_resources();
        registry().forked();
        syncbn::step().clear();
    });
}

// ---- records ----

// See log.h and meeting/diagnosis.h.
SYNCBN_API void syncbn_debug(bool enabled) { syncbn::wants_debug = enabled; }
SYNCBN_API const char* syncbn_next_record(double seconds) {
    return text([&] { return syncbn::next_record(seconds); });
}
SYNCBN_API const char* syncbn_slowest() { return text(syncbn::slowest); }

SYNCBN_API const char* syncbn_instruction_set() { return syncbn::cpu::instruction_set(); }

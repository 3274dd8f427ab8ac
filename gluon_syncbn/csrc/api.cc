// Implements the functions that `_native.py` calls, with plain values and without exceptions. After an exception, a
// function returns null or -1, and Python raises an error with the text of `syncbn_problem`.
#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/collective.h"
#include "cuda/compiler.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "exchange/memory.h"
#include "exchange/mxnet_kvstore.h"
#include "exchange/nccl.h"
#include "exchange/processes.h"
#include "exchange/python.h"
#include "failure.h"
#include "log.h"
#include "meeting/registry.h"
#include "meeting/scope.h"
#include "meeting/timing.h"
#include "mxnet_api.h"
#include "native/calls.h"
#include "native/gradients.h"
#include "native/resources.h"
#include "native/workers.h"
#include "operator/call.h"
#include "operator/op.h"
#include "operator/tape.h"
#include "pooling/statistics.h"
#include "waiting/callers.h"
#include "waiting/stall.h"
#include "waiting/step.h"
#include "waiting/wait.h"

#define SYNCBN_API extern "C" __attribute__((visibility("default")))

namespace {

using syncbn::Nccl;
using syncbn::registry;
using syncbn::Segment;

std::vector<std::string> strings(int64_t count, const char** values) {
    return std::vector<std::string>(values, values + count);
}

std::shared_ptr<syncbn::Layer> found(int64_t id) {
    const auto layer = registry().find(id);
    if (!layer) throw syncbn::Failure("no layer has the number " + std::to_string(id));
    return layer;
}

thread_local char problem[512] = "";  // works without memory

// Returns the result of `work`, or `instead` after an exception.
template <typename Result, typename Work>
Result guarded(Result instead, const Work& work) noexcept {
    try {
        return work();
    } catch (const std::exception& e) {
        std::strncpy(problem, syncbn::reason_of(e), sizeof problem - 1);
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

// `functions` are the members of syncbn::MXNet, in that order.
SYNCBN_API int syncbn_register(void** functions, int64_t count) {
    syncbn::MXNet mx;
    if (count * sizeof(void*) != sizeof mx) return -1;
    std::memcpy(&mx, functions, sizeof mx);
    return guarded(-1, [&] { return syncbn::register_operator(mx); });
}

// `library` is MXNet's, a handle of dlopen. Returns why calls on "cpu" or "gpu" contexts come through MXNet's `Custom`;
// empty if they do not.
SYNCBN_API const char* syncbn_native_operator(void* library, const char* device) {
    return text([&] { return syncbn::native::take_calls(library, device); });
}

// `library` is MXNet's, a handle of dlopen. Returns why CPU contexts share resources; empty if they do not, from now on.
SYNCBN_API const char* syncbn_separate_resources(void* library) {
    return text([&] { return syncbn::native::separate_resources(library); });
}

SYNCBN_API int64_t syncbn_resources() { return syncbn::native::resources(); }
SYNCBN_API int syncbn_renew_resources() { return done(syncbn::native::renew_resources); }

// Says that this thread begins to issue the operators of a replica; `data` is an NDArrayHandle on its context. Returns
// whether that is so: it trains on a CPU, within no other call. Then `syncbn_issue_on` follows, with -1.
SYNCBN_API int syncbn_issue_for(void* data) { return syncbn::native::issue_for(data); }
SYNCBN_API int syncbn_issue_on(int context) { return syncbn::native::issue_on(context); }

// The number of calls with data in blocks of channels.
SYNCBN_API int64_t syncbn_blocked_calls() { return syncbn::native::blocked_calls(); }
SYNCBN_API int64_t syncbn_lone_calls() { return syncbn::native::lone_calls(); }

// `library` is MXNet's, a handle of dlopen; then the path of the kernels' source and the folder of compiled kernels.
SYNCBN_API int syncbn_cuda(void* library, const char* source, const char* cache) {
    return done([&] {
        syncbn::cuda::set_library(library);
        syncbn::cuda::set_source(source);
        syncbn::cuda::set_cache(cache);
    });
}

SYNCBN_API int syncbn_cuda_close() { return done(syncbn::cuda::close_collectives); }

// Empty if there is none.
SYNCBN_API const char* syncbn_nccl_problem() { return text(syncbn::cuda::why_no_collective); }

// The next three are for compilations and launches outside MXNet. The threads of a block.
SYNCBN_API int syncbn_cuda_block() { return syncbn::cuda::kBlock; }

// The source for NVRTC, given the path of kernels.cu.
SYNCBN_API const char* syncbn_cuda_source(const char* path) {
    return text([&] { return syncbn::cuda::source(path); });
}

// The plan: [tiles, slots, chunks] of the reductions, blocks of the others along x, width, segment.
SYNCBN_API void syncbn_cuda_plan(int64_t samples, int64_t per_sample, int64_t channels, int64_t inner, int64_t slots,
                                 int64_t* out) {
    const syncbn::cuda::Plan plan({samples * per_sample, channels, inner}, samples, slots);
    const int64_t values[] = {plan.tiles, slots, plan.chunks, plan.each().x, plan.width, plan.segment};
    std::copy(std::begin(values), std::end(values), out);
}

// ---- layers ----

// `groups`: the group of each of so many replicas, if groups are named.
SYNCBN_API int64_t syncbn_layer_create(const char* name, int mode, int64_t virtual_devices, int64_t group,
                                       int64_t replicas, const int* groups) {
    return guarded<int64_t>(-1, [&] {
        const auto known = static_cast<syncbn::Mode>(mode);
        return registry().create(name, {known, virtual_devices, group, {groups, groups + replicas}})->id;
    });
}

SYNCBN_API int64_t syncbn_layers() { return static_cast<int64_t>(registry().count()); }

SYNCBN_API int syncbn_contexts_are_shared() { return registry().contexts_are_shared(); }

SYNCBN_API void syncbn_layer_drop(int64_t id) {
    syncbn::forget_calls(id);
    registry().drop(id);
}

SYNCBN_API int64_t syncbn_call_create(int64_t count, const char** keys, const char** values) {
    return guarded<int64_t>(-1, [&] {
        syncbn::Attributes attributes;
        for (int64_t i = 0; i < count; ++i) attributes[keys[i]] = values[i];
        return syncbn::create_call(attributes);
    });
}

SYNCBN_API const char* syncbn_layer_token(int64_t id) {
    return text([&] { return registry().token_of(*found(id)); });
}

SYNCBN_API int syncbn_layer_place(int64_t id, int64_t count, const char** contexts, int64_t replicas) {
    return done([&] { registry().place(*found(id), strings(count, contexts), static_cast<size_t>(replicas)); });
}

SYNCBN_API int syncbn_layer_called(int64_t id, const char* context) {
    return done([&] { found(id)->rendezvous.called(context); });
}

SYNCBN_API int syncbn_layer_timeout(int64_t id, double seconds) {
    return done([&] { registry().set_timeout(*found(id), seconds); });
}

// Sets a layer's own exchange, a handle; see below.
SYNCBN_API int syncbn_layer_exchange(int64_t id, void* exchange) {
    return done([&] { registry().set_exchange(*found(id), *static_cast<ExchangeHandle*>(exchange)); });
}

// Says that this thread begins or ends to execute a graph of this number, below -1, with these layers at its nodes.
// Nothing is noted unless it trains. `data` is an NDArrayHandle on its context.
SYNCBN_API int syncbn_graph_begins(int64_t count, const int64_t* ids, void* data, int64_t graph) {
    return done([&] {
        constexpr int kGpu = 2;  // mshadow's number of the device type
        bool training = false;
        int type = 0, number = 0;
        if (syncbn::mx.autograd_is_training(&training) != 0 ||
            (training && syncbn::mx.ndarray_get_context(data, &type, &number) != 0))
            throw syncbn::Failure(syncbn::mx.last_error());
        if (!training) return;
        const std::string context = (type == kGpu ? "gpu(" : "cpu(") + std::to_string(number) + ")";
        const auto first = found(ids[0]);
        first->rendezvous.issued_again(*first->terms(), context, graph);
        for (int64_t i = 0; i < count; ++i) found(ids[i])->rendezvous.called(context);
        syncbn::within_graph() = true;
    });
}
SYNCBN_API void syncbn_graph_ends() { syncbn::within_graph() = false; }

// ---- defaults ----

SYNCBN_API int syncbn_timeout(double seconds) {
    return done([&] { registry().set_default_timeout(seconds); });
}

// Returns the timeout of a layer; for an unknown number that of the process.
SYNCBN_API double syncbn_timeout_of(int64_t id) {
    const auto layer = registry().find(id);
    return layer ? layer->terms()->timeout : registry().default_timeout();
}

SYNCBN_API int syncbn_devices(int64_t count, const char** contexts) {
    return done([&] { registry().set_devices(strings(count, contexts)); });
}

// The values are those of syncbn::Nonfinite.
SYNCBN_API int syncbn_nonfinite(int what) {
    return done([&] {
        registry().set_nonfinite(static_cast<syncbn::Nonfinite>(what));
        syncbn::speak_of_nonfinite_again();
    });
}

SYNCBN_API int syncbn_seed(uint64_t seed) {
    return done([&] { registry().set_seed(seed); });
}

// ---- exchanges ----

// Sets the exchange of layers without one of their own.
SYNCBN_API int syncbn_exchange(void* exchange) {
    return done([&] { registry().set_default_exchange(*static_cast<ExchangeHandle*>(exchange)); });
}

// In memory of this process. GPUs use NCCL or else the host; only NCCL; only the host.
SYNCBN_API void* syncbn_exchange_memory() {
    return handle([] { return ExchangeHandle{syncbn::memory_exchange()}; });
}
SYNCBN_API void* syncbn_exchange_nccl() {
    return handle([] { return ExchangeHandle{syncbn::memory_exchange(), Nccl::kRequired}; });
}
SYNCBN_API void* syncbn_exchange_host() {
    return handle([] { return ExchangeHandle{syncbn::memory_exchange(), Nccl::kNever}; });
}

// Exchanges in Python, identified by their number: over the contexts of this process.
SYNCBN_API void* syncbn_exchange_contexts(int64_t number) {
    return handle([&] { return ExchangeHandle{syncbn::mxnet_kvstore(number), Nccl::kNever}; });
}

// Called once, before the first use; the functions must stay as long as the process.
SYNCBN_API void syncbn_python_functions(const syncbn::PythonFunctions* functions) {
    syncbn::set_python_functions(*functions);
}

// For those functions: fill in their results. `ranks`: without groups none.
SYNCBN_API int syncbn_agreed(syncbn::Agreed* out, int64_t key, int64_t ranks, const size_t* some, int64_t channels,
                             int64_t replicas, int64_t count, const int* members, const int* groups, int64_t first) {
    return done([&] {
        *out = {key,  {some, some + ranks}, channels, replicas, {members, members + count}, {groups, groups + count},
                first};
    });
}

// The vector of the next rank.
SYNCBN_API int syncbn_part(std::deque<syncbn::Vector>* out, int64_t length, const double* values) {
    return done([&] { out->emplace_back(values, values + length); });
}

// Memory that the processes of this machine share. Rank 0 creates it, and the others open it by rank 0's process and
// number.
SYNCBN_API void* syncbn_segment_create(int64_t ranks) {
    return guarded<void*>(nullptr, [&] { return Segment::create(static_cast<size_t>(ranks)).release(); });
}
SYNCBN_API void* syncbn_segment_open(int64_t ranks, int64_t rank, int64_t process, int64_t number, const char* token,
                                     int64_t token_size) {
    return guarded<void*>(nullptr, [&] {
        const std::string expected(token, static_cast<size_t>(token_size));
        return Segment::open(static_cast<size_t>(ranks), static_cast<size_t>(rank), process, static_cast<int>(number),
                             expected)
            .release();
    });
}
SYNCBN_API int64_t syncbn_segment_number(void* segment) { return static_cast<Segment*>(segment)->number(); }
// Returns its length; `out` is large enough.
SYNCBN_API int64_t syncbn_segment_token(void* segment, char* out) {
    return guarded<int64_t>(-1, [&] {
        const std::string token = static_cast<Segment*>(segment)->token();
        std::copy(token.begin(), token.end(), out);
        return static_cast<int64_t>(token.size());
    });
}
SYNCBN_API void syncbn_segment_free(void* segment) { delete static_cast<Segment*>(segment); }

// Over the processes of a job. `number` identifies an exchange in Python, which knows the layers. It also carries
// vectors, if `mpi` is null.
SYNCBN_API void* syncbn_exchange_processes(int64_t number, int64_t rank, int64_t ranks, const syncbn::Mpi* mpi) {
    return handle([&] {
        const auto own = static_cast<size_t>(rank), count = static_cast<size_t>(ranks);
        auto job = std::make_shared<syncbn::Job>();
        job->number = number, job->rank = own, job->ranks = count;
        if (mpi != nullptr) {
            job->mpi = *mpi;
            syncbn::Members all{{}, count};
            for (size_t i = 0; i < count; ++i) all.ranks.push_back(i);
            job->by_mpi = std::make_unique<syncbn::Tier>(syncbn::mailbox(*mpi, own, count), std::move(all), true);
        }
        return ExchangeHandle{std::make_shared<syncbn::Processes>(std::move(job))};
    });
}
// The same with memory of this machine. Takes ownership of the segment, which `ranks` share. `leaders`: of all machines.
SYNCBN_API void* syncbn_exchange_machine(void* processes, void* segment, int64_t count, const size_t* ranks,
                                         int64_t machines, const size_t* leaders) {
    return handle([&] {
        auto job = of_processes(processes).job();
        syncbn::Members members{{ranks, ranks + count}, job->ranks};
        return ExchangeHandle{std::make_shared<syncbn::Processes>(
            std::move(job), std::unique_ptr<Segment>(static_cast<Segment*>(segment)), std::move(members),
            syncbn::Ranks(leaders, leaders + machines))};
    });
}

// Sends bytes to some ranks and brings theirs, in their order, this one's included. `kind`, `key`, `call` and `phase`
// identify the messages, `what` is for errors. Needs MPI. `syncbn_bytes_free` frees the result.
using BytesOfRanks = std::vector<std::string>;
SYNCBN_API void* syncbn_bytes_of(void* processes, int64_t count, const size_t* ranks, int64_t kind, int64_t key,
                                 int64_t call, int64_t phase, const char* what, double timeout, int64_t size,
                                 const char* bytes) {
    return guarded<void*>(nullptr, [&] {
        return new BytesOfRanks(of_processes(processes).bytes_of(
            {ranks, ranks + count}, {key, phase, call, -1 - kind, 0}, what, timeout, {bytes, bytes + size}));
    });
}
SYNCBN_API const void* syncbn_bytes_at(void* bytes, int64_t place, int64_t* size) {
    const std::string& found = (*static_cast<BytesOfRanks*>(bytes))[static_cast<size_t>(place)];
    *size = static_cast<int64_t>(found.size());
    return found.data();
}
// The number of messages by MPI, for tests.
SYNCBN_API int64_t syncbn_sent(void* processes) {
    const auto& job = of_processes(processes).job();
    return job->by_mpi == nullptr ? 0 : job->by_mpi->sent;
}
SYNCBN_API void syncbn_bytes_free(void* bytes) { delete static_cast<BytesOfRanks*>(bytes); }

SYNCBN_API void syncbn_merge_moments(double* total, const double* part, int64_t channels) {
    syncbn::merge_moments(total, part, channels);
}

// Returns an exchange's result for the one row of this process.
SYNCBN_API int syncbn_allreduce(void* exchange, int merges, const syncbn::Ticket* ticket, int64_t length,
                                const double* row, double* out) {
    return done([&] {
        const auto combine = merges != 0 ? syncbn::Combine::kMerge : syncbn::Combine::kAdd;
        syncbn::Exchange& host = *static_cast<ExchangeHandle*>(exchange)->host;
        const syncbn::Total total = host.allreduce(combine, *ticket, {{row}, static_cast<size_t>(length)});
        std::copy(total.values.begin(), total.values.end(), out);
    });
}

// Begins the sum of arrays over the processes of an exchange in shared memory: see native/gradients.h.
SYNCBN_API int syncbn_sum(void* exchange, int64_t channel, int64_t number, double timeout, int64_t count,
                          const char** names, const int* types, const int64_t* sizes, int64_t contexts, void** arrays,
                          void* gpus) {
    return done([&] {
        std::vector<syncbn::Summand> summands;
        for (int64_t i = 0; i < count; ++i)
            summands.push_back({names[i], static_cast<syncbn::Type>(types[i]), static_cast<size_t>(sizes[i])});
        syncbn::native::sum_gradients(
            of_processes(exchange).sums(), channel, number, timeout, std::move(summands), static_cast<size_t>(contexts),
            arrays, gpus == nullptr ? nullptr : static_cast<syncbn::cuda::AllReduce*>(gpus)->shared_from_this());
    });
}

// Writes what identifies these GPUs, 16 bytes each, and a new name for a communicator, 128 bytes.
SYNCBN_API int syncbn_gpus_identify(const int* devices, int64_t count, char* identities, char* id) {
    return done([&] {
        for (int64_t i = 0; i < count; ++i)
            syncbn::cuda::Device::of(devices[i]).identity().copy(identities + 16 * i, 16);
        syncbn::cuda::new_id().copy(id, 128);
    });
}
// The way of sums between the GPUs of several processes: see cuda/collective.h. It lasts as long as the process.
SYNCBN_API void* syncbn_gpus(const int* devices, int64_t count, const char* id, int first, int ranks, int64_t bucket) {
    return guarded<void*>(nullptr, [&] {
        return syncbn::cuda::AllReduce::create({devices, devices + count}, {id, 128}, first, ranks,
                                               static_cast<size_t>(bucket))
            .get();
    });
}

// In the leader of a machine, before the first sum: the way to the other leaders, by MPI if `python` is null.
SYNCBN_API int syncbn_sum_between(void* exchange, int first, const syncbn::MachinesInPython* python,
                                  const syncbn::Mpi* mpi) {
    return done([&] {
        syncbn::Processes& processes = of_processes(exchange);
        processes.sums().between(python != nullptr
                                     ? syncbn::machines(first != 0, *python)
                                     : syncbn::machines(first != 0, *mpi, *processes.job()->by_mpi->mail));
    });
}

// Reports that this process has failed, or ends.
SYNCBN_API int syncbn_processes_fail(void* exchange, const char* reason) {
    return done([&] { of_processes(exchange).leave(Segment::State::kFailed, reason); });
}
SYNCBN_API int syncbn_processes_end(void* exchange) {
    return done([&] { of_processes(exchange).leave(Segment::State::kEnded, ""); });
}

// ---- recomputation ----

using TapeHandle = std::shared_ptr<syncbn::Tape>;

SYNCBN_API void* syncbn_tape_create() {
    return guarded<void*>(nullptr, [] { return new TapeHandle(std::make_shared<syncbn::Tape>()); });
}

SYNCBN_API void syncbn_tape_free(void* tape) { delete static_cast<TapeHandle*>(tape); }

SYNCBN_API int syncbn_tape_begin(void* tape, int again) {
    return done([&] { syncbn::begin_tape(*static_cast<TapeHandle*>(tape), again != 0); });
}

SYNCBN_API int64_t syncbn_tape_end() { return syncbn::end_tape(); }
SYNCBN_API int syncbn_tape_runs() { return syncbn::tape_runs(); }

// ---- the step ----

// A thread of this name enters its outermost scope.
SYNCBN_API int syncbn_scope_enter(const char* thread) {
    return done([&] { syncbn::enter_scope(thread); });
}

// The thread leaves that scope. Returns why its step failed, empty if it did not. `current` says whether the scope was
// part of the current step; it is 0 if that step began later.
SYNCBN_API const char* syncbn_scope_leave(int* current) {
    return text([&] {
        const auto scope = syncbn::current_scope();
        *current = scope->step == syncbn::step().number;
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
        syncbn::forget_handed_over();
        registry().forget_meetings();
        syncbn::step().clear();  // nothing meets before
    });
}

// Returns MXNet's status.
SYNCBN_API int syncbn_gate_arrays(void** arrays, int64_t count) { return syncbn::gate_arrays(arrays, count); }

// A wait in an exchange in Python, which knows the object of the wait.
class WaitInPython : public syncbn::Wait {
  public:
    using Wait::Wait;
    // Returns why the wait should end; "long" once, for a warning; empty if it goes on.
    std::string ask() {
        said_ = "";
        try {
            look();
        } catch (const syncbn::Failure&) {
            return said_.empty() ? "failed" : said_;
        }
        return said_;
    }

  protected:
    std::string text(Why why) override {
        if (why == Why::kAskedToEnd) return said_ = "asked to end";
        if (why == Why::kForked) return said_ = "forked";
        return said_ = why == Why::kLate ? "late" : "long";
    }
    void warn(const std::string&) override {}

  private:
    std::string said_;
};

// The number of interrupts before such a wait; a new wait; `ask`; its end.
SYNCBN_API long syncbn_interrupts() { return syncbn::interrupts(); }

SYNCBN_API void* syncbn_wait_begin(double timeout, double warn_after, long interrupts) {
    return guarded<void*>(nullptr, [&] { return new WaitInPython(timeout, warn_after, interrupts); });
}

SYNCBN_API const char* syncbn_wait_poll(void* wait) {
    return text([&] { return static_cast<WaitInPython*>(wait)->ask(); });
}

// See exchange/exchange.h. The values of `why` are those of syncbn::Wait::Why.
SYNCBN_API const char* syncbn_text_of_wait(int why, const char* what, const char* rank, const char* missing,
                                           double limit, double waited) {
    return text(
        [&] { return syncbn::text_of_wait(static_cast<syncbn::Wait::Why>(why), what, rank, missing, limit, waited); });
}

SYNCBN_API void syncbn_wait_end(void* wait) { delete static_cast<WaitInPython*>(wait); }

// ---- the process ----

SYNCBN_API void syncbn_nobody_left(int so) { syncbn::nobody_left(so != 0); }

// Whether a waiting thread asks, within so many seconds, which thread could still call a missing replica.
SYNCBN_API int syncbn_asked_for_callers(double seconds) { return syncbn::asked_for_callers(seconds); }

// The answer: what all of them wait for, empty if one could call. `for_all`: for all pending operations.
SYNCBN_API int syncbn_answer_callers(const char* wait, int for_all) {
    return done([&] { syncbn::answer_callers(wait, for_all != 0); });
}

SYNCBN_API void syncbn_nobody_reads() { syncbn::step().unread = true; }

SYNCBN_API void syncbn_close() { syncbn::step().closed = true; }

// Called before a fork, which waits for all operators in flight, and after it. `inside`: the forking thread is in a
// step.
SYNCBN_API void syncbn_forking(int inside) { syncbn::step().forking = inside != 0; }

SYNCBN_API void syncbn_out_of_batches(int so) { syncbn::step().out_of_batches = so != 0; }

// Called in the child of a fork.
SYNCBN_API int syncbn_forked() {
    return done([&] {
        syncbn::step().forking = syncbn::step().unread = false;
        syncbn::nobody_left(false);
        syncbn::forget_callers();
        syncbn::forget_records();
        syncbn::native::forget_workers();
        syncbn::native::forget_resources();
        registry().forked();
        syncbn::step().clear();
    });
}

// ---- records ----

SYNCBN_API void syncbn_debug(int so) { syncbn::set_debugging(so != 0); }

// Returns the level of the next record, after at most `seconds`, and its text; 0 if there is none.
SYNCBN_API int syncbn_next_record(double seconds, const char** out) {
    syncbn::Record record;
    if (!syncbn::next_record(seconds, &record)) return 0;
    *out = keep(std::move(record.text));
    return static_cast<int>(record.level);
}

SYNCBN_API const char* syncbn_slowest() { return text(syncbn::slowest); }

SYNCBN_API const char* syncbn_instruction_set() { return syncbn::cpu::instruction_set(); }

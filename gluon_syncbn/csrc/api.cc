// The functions that Python calls of layers, exchanges, steps and the process. Others are with what they do.
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/collective.h"
#include "cuda/driver.h"
#include "exchange/processes.h"
#include "failure.h"
#include "log.h"
#include "meeting/registry.h"
#include "meeting/scope.h"
#include "mxnet_api.h"
#include "operator/call.h"
#include "to_python.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

std::shared_ptr<Layer> found(int64_t id) {
    const auto layer = registry().find(id);
    if (!layer) throw Failure("no layer has the number " + std::to_string(id));
    return layer;
}

Processes& of_processes(Asked* exchange) { return static_cast<Processes&>(*exchange->host); }

}  // namespace

// The error of this thread's last call that returned null or -1.
SYNCBN_API(const char*, problem) { return problem; }

// Where the core finds MXNet's library, a handle of dlopen, the sources, and compiled kernels of GPUs.
SYNCBN_API(void, find_in, void* library, const char* csrc, const char* cache) {
    mxnet_library = library;
    cuda::setup = {csrc, cache};
}

// Why GPUs cannot exchange their statistics by NCCL; empty if they can.
SYNCBN_API(std::string, nccl_problem) { return cuda::why_no_collective(); }

// ---- layers ----

// `groups`: the group of each replica, where groups are named. Without a timeout or an exchange, the defaults hold.
SYNCBN_API(int64_t, layer_create, const char* name, int mode, int64_t virtual_devices, int64_t group,
           const Span<const int>& groups, double timeout, Asked* exchange) {
    const auto known = static_cast<Mode>(mode);
    const auto layer = registry().create(name, {known, virtual_devices, group, groups});
    registry().change(*layer, [&](auto& config) {
        config.own_timeout = timeout;
        if (exchange != nullptr) config.own_exchange = *exchange;
    });
    return layer->id;
}

SYNCBN_API(int64_t, layers) { return static_cast<int64_t>(registry().all().size()); }

// Whether a node of a graph, or a call, has the layer, beside the registry and this function.
SYNCBN_API(bool, layer_in_use, int64_t id) { return found(id).use_count() > 2; }

// Sets the contexts that hold a layer's parameters. Forgets unfinished meetings if they have changed: `reset_ctx` to the
// same contexts does not wait, and a step may be running.
SYNCBN_API(void, layer_place, int64_t id, const Span<const char*>& contexts) {
    read_environment();
    const auto layer = found(id);
    const std::vector<std::string> now(contexts.begin(), contexts.end());
    bool same = false;
    registry().change(*layer, [&](auto& config) { same = std::exchange(config.contexts, now) == now; });
    if (!same) layer->forget();
}

// The processes, of which this one is `rank`, have agreed on a layer, which has so many replicas in each. All of them do so
// before its first call.
SYNCBN_API(void, layer_agree, int64_t id, Asked* processes, int64_t key, size_t rank,
           const Span<const size_t>& replicas) {
    const auto layer = found(id);
    const std::vector<size_t> of_each(replicas.begin(), replicas.end());
    const auto agreed =
        std::make_shared<const Agreed>(Agreed{reach_of(layer->pooling, of_each, rank), key, of_each[rank]});
    registry().change(*layer, [&](auto& config) {
        config.agreed = agreed;
        config.agreed_over = processes->host.get();
    });
    layer->restart_calls();
}

// See `executing` in training/replicas.py. Fails if a layer is in the middle of a step of another thread. `running`: the
// arrays of running statistics, two for each layer.
SYNCBN_API(void, begin_graph, const char* context, const Span<const size_t>& layers, const Span<const size_t>& nodes,
           const Span<NDArrayHandle>& running) {
    for (int64_t i = 0; i < running.count; i += 2) check(push([] {}, {}, {2, running.values + i}));
    for (int64_t i = 0; i < layers.count; ++i) {
        const auto layer = found(static_cast<int64_t>(layers.values[i]));
        if (sharing_of(layer->pooling) != Sharing::kNothing)
            layer->join(layer->config(), context, static_cast<int64_t>(nodes.values[i]), true);
    }
    within_graph = true;
}
// MXNet's engine does not know that the operators of the graph write these arrays. Who reads them later waits for all.
SYNCBN_API(void, end_graph, const Span<NDArrayHandle>& running) {
    within_graph = false;
    for (int64_t i = 0; i < running.count; i += 2) {
        const auto update = [mean = data({running.values[i]})] {
            try {
                updates->make(mean);
            } catch (const std::exception& error) {
                step().fail(error);
            }
        };
        check(push(update, {}, {2, running.values + i}));
    }
}

// ---- defaults ----

// Those of Python's `Session`. The next batch that is not finite gives a warning, even shortly after the last one.
SYNCBN_API(void, configure, double timeout, int nonfinite, const Span<const char*>& devices, Asked* exchange) {
    said_not_finite = -kForEver;
    registry().change([&](Settings& all) {
        all = {timeout, *exchange, {devices.begin(), devices.end()}, all.seed, static_cast<Nonfinite>(nonfinite)};
    });
}
SYNCBN_API(double, timeout_of) { return registry().defaults().timeout; }

SYNCBN_API(void, seed, uint64_t seed) {
    registry().change([&](auto& all) { all.seed = seed; });
    for (const auto& layer : registry().all()) layer->restart_draws();
}

// ---- exchanges ----

// In memory of this process. `gpus`: a number of `Nccl`.
SYNCBN_API(Asked, memory_exchange, int gpus) { return {std::make_shared<Exchange>(), static_cast<Nccl>(gpus)}; }

// By a store of MXNet's, which the user has named. No other exchange runs Python.
SYNCBN_API(Asked, python_exchange, syncbn::AddInPython* add, size_t processes) {
    return {python_exchange(add, processes), Nccl::kNever};
}
// For that function: says why it fails.
SYNCBN_API(void, failed_in_python, const char* problem) { python_problem = problem; }

// Over the processes of a job.
SYNCBN_API(Asked, processes, const syncbn::Mpi* mpi, size_t rank, size_t ranks) {
    return {std::make_shared<Processes>(*mpi, rank, ranks)};
}
// What has become of a rank: "has ended"; empty if it is there.
SYNCBN_API(std::string, fate_of, Asked* processes, size_t rank) {
    Mailbox& mail = of_processes(processes).mail();
    mail.arrivals();  // lets messages arrive
    return mail.fate_of(rank);
}
// Whether this machine has more processes of the job than cores for them.
SYNCBN_API(void, crowded, Asked* processes, bool crowded) { of_processes(processes).mail().crowded = crowded; }

// Sends bytes to all ranks, in parts of these `sizes`: one for each rank, or one for all. Returns theirs, in the order of
// the ranks: the sizes, then all bytes. `key` identifies the messages.
SYNCBN_API(Bytes, bytes_of, Asked* processes, int64_t key, const char* what, const Span<const size_t>& sizes,
           const char* bytes) {
    std::vector<std::string> own;
    for (const size_t of_part : sizes) {
        own.emplace_back(bytes, of_part);
        bytes += of_part;
    }
    std::string lengths, all;
    for (const auto& part :
         of_processes(processes).bytes_of({Label::kBytes, 0, key}, what, registry().defaults().timeout, own)) {
        const size_t length = part.size();
        lengths.append(reinterpret_cast<const char*>(&length), sizeof length);
        all += part;
    }
    return lengths + all;
}
SYNCBN_API(void, merge_moments, double* total, const double* part, int64_t channels) {
    merge_moments(total, part, channels);
}

SYNCBN_API(void, processes_failed, Asked* exchange, const char* reason) {
    of_processes(exchange).mail().report(Mailbox::State::kFailed, reason);
}
SYNCBN_API(void, processes_ended, Asked* exchange) { of_processes(exchange).mail().report(Mailbox::State::kEnded, ""); }
// MPI ends with the process.
SYNCBN_API(void, processes_closed, Asked* exchange) { of_processes(exchange).mail().end(); }

// ---- recomputation: see meeting/tape.h ----

SYNCBN_API(syncbn::Tape*, tape_create) { return new Tape; }
SYNCBN_API(void, tape_free, syncbn::Tape* tape) { delete tape; }
SYNCBN_API(void, tape_begin, syncbn::Tape* tape, bool again) {
    tape->again = again;
    tape->next = 0;
    tapes.push_back(tape);
}
// Returns the number of memos that no call has repeated since then. If there were more calls than memos, it is negative.
SYNCBN_API(int64_t, tape_end) {
    const Tape& tape = *tapes.back();
    tapes.pop_back();
    return tape.again ? static_cast<int64_t>(tape.memos.size() - tape.next) : 0;
}
SYNCBN_API(bool, tape_runs) { return !tapes.empty(); }

// ---- the step ----

// A thread of this name enters its outermost scope: see meeting/scope.h.
SYNCBN_API(void, scope_enter, const char* thread) { entered_scope = std::make_shared<Scope>(thread, true); }

// Whether that scope is part of the current step. It is not if that step began later.
SYNCBN_API(bool, scope_is_current) { return current_scope()->step == step().number; }
// The thread leaves that scope. Returns why its step failed, empty if it did not.
SYNCBN_API(std::string, scope_leave) {
    const auto scope = current_scope();
    entered_scope = nullptr;
    scope->open = false;
    const auto why = scope->why_ended.failure();
    return why == nullptr ? "" : why->what();
}

SYNCBN_API(void, fail, const char* reason) {
    try {
        step().fail(Failure(reason));
    } catch (const std::exception& e) {  // no memory for the reason
        step().fail(e);
    }
}

// Empty without a failure.
SYNCBN_API(std::string, failure) {
    const auto failure = step().failure();
    return failure ? failure->what() : "";
}

// Forgets the failure and all unfinished meetings. No operator may be in flight.
SYNCBN_API(void, reset) {
    ++step().number;
    for (const auto& layer : registry().all()) layer->forget();
    step().clear();  // nothing meets before
}

// ---- the process ----

SYNCBN_API(void, exiting, bool is_exiting) { step().exiting = is_exiting; }
SYNCBN_API(void, close) {
    step().closed = true;
    cuda::close_collectives();
}
// Called before a fork, and, with false, after it. `inside`: the forking thread is in a step.
SYNCBN_API(void, forking, bool inside) { step().forking = inside; }
SYNCBN_API(void, out_of_batches, bool is_out) { step().out_of_batches = is_out; }

// ---- records ----

// The next one, after at most `seconds`: its level, a blank and the text. Empty if there is none. The level 0 asks for
// callers, and `kDoubt` to watch what the layers write.
SYNCBN_API(std::string, next_record, double seconds) {
    std::unique_lock<std::mutex> lock(records->mutex);
    const auto comes = [] { return records->asks || !records->waiting.empty(); };
    if (!records->changed->wait_for(lock, std::chrono::duration<double>(seconds), comes)) return "";
    if (std::exchange(records->asks, false)) return "0 ";
    std::string record = std::move(records->waiting.front());
    records->waiting.pop_front();
    return record;
}

SYNCBN_API(const char*, instruction_set) { return cpu::instruction_set(); }

}  // namespace syncbn

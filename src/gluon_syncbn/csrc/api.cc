// The functions that `_native.py` calls: plain values in and out, no exception passes.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/module.h"
#include "cuda/plan.h"
#include "meeting/rendezvous.h"
#include "meeting/stall.h"
#include "mxnet_api.h"
#include "operator/op.h"

#define SYNCBN_API extern "C" __attribute__((visibility("default")))

namespace {

std::vector<std::string> strings(int64_t count, const char** values) {
    return std::vector<std::string>(values, values + count);
}

// Text for Python; valid until this thread's next call.
const char* text(std::string value) {
    static thread_local std::string kept;
    kept = std::move(value);
    return kept.c_str();
}

}  // namespace

// `functions` are those of syncbn::MXNet, in that order.
SYNCBN_API int syncbn_register(void** functions, int64_t count) {
    syncbn::MXNet mx;
    if (count * sizeof(void*) != sizeof mx) return -1;
    std::memcpy(&mx, functions, sizeof mx);
    return syncbn::register_operator(mx);
}

SYNCBN_API void syncbn_cuda_source(const char* path) { syncbn::cuda::set_source(path); }

// [tiles, slots, chunks] of the reductions, blocks of the others along x, width, segment: for launches outside MXNet.
SYNCBN_API void syncbn_cuda_plan(int64_t samples, int64_t per_sample, int64_t channels, int64_t inner, int64_t slots,
                                 int64_t* out) {
    const syncbn::cuda::Plan plan({samples * per_sample, channels, inner}, samples, slots);
    const int64_t values[] = {plan.tiles, slots, plan.chunks, plan.each().x, plan.width, plan.segment};
    std::copy(std::begin(values), std::end(values), out);
}

SYNCBN_API int64_t syncbn_layer_create(const char* name, int mode, int64_t slots, int64_t group) {
    return syncbn::create_layer(name, {static_cast<syncbn::Mode>(mode), slots, group})->id;
}

SYNCBN_API int64_t syncbn_layers() { return syncbn::count_layers(); }

SYNCBN_API int syncbn_contexts_are_shared() { return syncbn::contexts_are_shared(); }

SYNCBN_API void syncbn_layer_drop(int64_t id) { syncbn::drop_layer(id); }

SYNCBN_API const char* syncbn_layer_token(int64_t id) { return text(token_of(*syncbn::find_layer(id))); }

SYNCBN_API void syncbn_layer_replicas(int64_t id, int64_t count, const char** contexts, int64_t replicas) {
    syncbn::find_layer(id)->configure(strings(count, contexts), static_cast<size_t>(replicas));
}

SYNCBN_API void syncbn_layer_timeout(int64_t id, double seconds) { syncbn::find_layer(id)->set_timeout(seconds); }

SYNCBN_API void syncbn_layer_reach(int64_t id, int reach) {
    syncbn::find_layer(id)->set_reach(static_cast<syncbn::Reach>(reach));
}

SYNCBN_API void syncbn_timeout(double seconds) { syncbn::set_default_timeout(seconds); }

SYNCBN_API double syncbn_timeout_of(int64_t layer) { return syncbn::timeout_of(layer); }

// For a wait in an exchange: the interrupts before it; a new one; whether it should go on (sampled now and then); its end.
SYNCBN_API long syncbn_interrupts() { return syncbn::interrupts(); }

SYNCBN_API void* syncbn_wait_begin(long interrupts) { return new syncbn::Stall(interrupts); }

SYNCBN_API int syncbn_wait_goes_on(void* stall) {
    syncbn::watch_interrupts();
    static_cast<syncbn::Stall*>(stall)->sample();
    return !static_cast<syncbn::Stall*>(stall)->asked_to_end() && syncbn::failure().empty();
}

SYNCBN_API void syncbn_wait_end(void* stall) { delete static_cast<syncbn::Stall*>(stall); }

// Once: the hook has to stay as long as the process.
SYNCBN_API void syncbn_hook(syncbn::Hook hook) { syncbn::set_hook(hook); }

SYNCBN_API void syncbn_reach(int reach) { syncbn::set_default_reach(static_cast<syncbn::Reach>(reach)); }

// For the hook: fills in its result.
SYNCBN_API void syncbn_total(syncbn::Total* out, int64_t length, const double* values, int64_t first, int64_t key) {
    out->values.assign(values, values + length);
    out->first = static_cast<size_t>(first);
    out->key = key;
}

SYNCBN_API void syncbn_devices(int64_t count, const char** contexts) { syncbn::set_devices(strings(count, contexts)); }

SYNCBN_API void syncbn_seed(uint64_t seed) { syncbn::set_seed(seed); }

SYNCBN_API void syncbn_fail(const char* reason) { syncbn::fail(reason); }

SYNCBN_API const char* syncbn_failure() { return text(syncbn::failure()); }

SYNCBN_API void syncbn_reset() { syncbn::reset(); }

SYNCBN_API void syncbn_nobody_left(int so) { syncbn::nobody_left(so != 0); }

SYNCBN_API void syncbn_close() { syncbn::close(); }

SYNCBN_API void syncbn_forking(int inside) { syncbn::set_forking(inside != 0); }

SYNCBN_API void syncbn_forked() { syncbn::forked(); }

SYNCBN_API const char* syncbn_instruction_set() { return syncbn::cpu::instruction_set(); }

// An operation for MXNet's engine: fails as long as the step has failed.
SYNCBN_API void syncbn_gate(void*, void*) {
    const std::string reason = syncbn::failure();
    if (!reason.empty()) throw dmlc::Error(reason);
}

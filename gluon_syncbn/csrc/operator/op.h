// Declares the custom operator `gluon_syncbn`.
#pragma once

#include <semaphore.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>

#include "failure.h"
#include "mxnet_api.h"
#include "waiting/step.h"

namespace syncbn {

// Registers the operator with the MXNet library of these functions. Returns MXNet's status.
int register_operator(const MXNet& functions);

// Keeps the attributes of a call, and returns a number: an eager call has it in their place, as the attribute `call`.
int64_t create_call(int count, const char** keys, const char** values);
// Forgets those of a layer.
void forget_calls(int64_t layer);

// A function for MXNet, some of whose threads catch only dmlc::Error.
template <auto function>
struct Guarded;
template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Guarded<function> {
    static Result call(Parameters... parameters) {
        try {
            return function(parameters...);
        } catch (const std::exception& e) {
            const auto failure = step().failure();
            const bool failed = failure != nullptr && std::strcmp(reason_of(e), failure->what()) == 0;
            throw error_with(reason_of(e), failed ? kStepError : "");
        }
    }
};

// Whether these callbacks of a custom operator belong to a `Call`, which is the state of each.
bool is_ours(const MXCallbackList& callbacks);

// A turn to fail. MXNet's list of all errors has no lock (AddToGlobalExceptions in src/engine/threaded_engine.h).
// Simultaneous failures may end the process, so they come one by one. A turn lasts from before a failure reaches MXNet
// until MXNet has noted it, and 1 s at most. It may end on another thread.
using TurnToFail = std::unique_ptr<sem_t, int (*)(sem_t*)>;
TurnToFail turn_to_fail();

// Later users of one of these arrays fail for this reason; null: for that of the step, if it has failed when all arrays
// are available. One operation of the engine waits for all arrays; then each array has an operation of its own. Arrays of
// one operation would share its exception, and the first reader would remove it from the others. Returns MXNet's status.
int fail_arrays(void** arrays, int64_t count, const char* why);

// If the step has failed when these arrays are available, gives them one error in the place of theirs. An update that was
// left out has not touched them, and the first reader removes the error from all. They do not share memory. Returns MXNet's
// status.
int share_failure(void** arrays, int64_t count);

}  // namespace syncbn

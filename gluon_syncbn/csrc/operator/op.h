// Declares the custom operator `gluon_syncbn`.
#pragma once

#include <semaphore.h>

#include <cstring>
#include <exception>
#include <memory>

#include "failure.h"
#include "mxnet_api.h"
#include "waiting/step.h"

namespace syncbn {

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

}  // namespace syncbn

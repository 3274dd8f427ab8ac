// Finds the failure of an operator that is not the layer's. MXNet's engine leaves out all operators behind it, the layer's
// too, so the other replicas would wait for one that never comes.
#include <exception>
#include <memory>
#include <string>

#include "failure.h"
#include "mxnet_api.h"
#include "native/abi.h"
#include "to_python.h"
#include "waiting/step.h"

namespace syncbn::native {
namespace {

// Fails the step for a failure that this operation of the engine has found in its array. `parameter`: of what it is.
void look(void*, void* complete, void* parameter) {
    const Completion& completion = *static_cast<const Completion*>(complete);
    const auto found = static_cast<const Block*>(completion.parameter)->operation->failure;
    if (found != nullptr && *found != nullptr) try {
            std::rethrow_exception(*found);
        } catch (const std::exception& error) {
            const std::string text = error.what();
            if (text.find(kStepError) == std::string::npos)  // a stack trace follows the first line
                step().fail(Failure("An operator of " + *static_cast<const std::string*>(parameter) +
                                    " has failed: " + text.substr(0, text.find('\n'))));
        }
    completion(nullptr);
}

}  // namespace

// Fails the step if one of these arrays, which belong to the replica on this context, has the error of an operator when it
// is available. Does not wait. Only in the libraries whose layout abi.h knows. Where another thread may issue an operator
// that writes several of them, each has to be watched by itself: see `Session.issuing`.
SYNCBN_API(void, watch, const char* context, const Span<NDArrayHandle>& arrays) {
    if (library.find_op == nullptr) return;
    const auto remove = [](void* parameter) { delete static_cast<std::string*>(parameter); };
    check(mx.MXEnginePushAsyncND(look, new std::string(std::string("the replica on ") + context), remove, &kCpu,
                                 arrays.values, static_cast<int>(arrays.count), nullptr, 0, &kNoSkip, 0,
                                 "gluon_syncbn_watch", false));
}

}  // namespace syncbn::native

// Sums gradients over processes as operations of MXNet's engine. An operation takes an array when the backward has
// written it, and ends when the sum is there.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exchange/processes.h"
#include "failure.h"
#include "meeting/registry.h"
#include "mxnet_api.h"
#include "native/abi.h"
#include "tensor.h"
#include "to_python.h"

namespace syncbn::native {
namespace {

// An array in each context.
struct Handles : std::vector<void*> {
    ~Handles() {
        for (void* handle : *this) mx.MXNDArrayFree(handle);
    }
};

struct Operation {
    const std::shared_ptr<Gradients::Round> round;
    const size_t index;
    const std::shared_ptr<Handles> arrays = std::make_shared<Handles>();
    bool ran = false;

    static void run(void*, void* complete, void* parameter) {
        auto& self = *static_cast<Operation*>(parameter);
        self.ran = true;
        const Completion& done = *static_cast<const Completion*>(complete);
        std::vector<void*> values;
        Gradients::Round::Done end;
        try {
            for (void* handle : *self.arrays) {
                const NDArray& array = *static_cast<NDArray*>(handle);
                if (library.is_blocked != nullptr && !array.is_plain()) library.reorder_chunk(&array.chunk());
                values.push_back(data({handle}));
            }
            end = [done, arrays = self.arrays](const std::exception_ptr& failure) {
                failure == nullptr ? done(nullptr) : done.fail(failure);
            };
        } catch (const std::exception& error) {
            self.round->lose(self.index, reason_of(error));
            return done.fail(std::current_exception());
        }
        self.round->come(self.index, std::move(values), std::move(end));
    }
    // MXNet leaves out an operation if one before it has failed.
    static void remove(void* parameter) {
        const std::unique_ptr<Operation> self(static_cast<Operation*>(parameter));
        if (!self->ran)
            self->round->lose(self->index, "an operator before it has failed, and reading its result says why.");
    }
};

void push(const std::shared_ptr<Gradients::Round>& round, size_t index, size_t contexts, void** arrays) {
    auto operation = std::make_unique<Operation>(Operation{round, index});
    for (size_t i = 0; i < contexts; ++i) {
        void* own = nullptr;
        check(mx.MXShallowCopyNDArray(arrays[i], &own));
        operation->arrays->push_back(own);
    }
    // MXNet removes it, whatever happens.
    check(mx.MXEnginePushAsyncND(Operation::run, operation.release(), Operation::remove, &kCpu, nullptr, 0, arrays,
                                 static_cast<int>(contexts), nullptr, 0, "gluon_syncbn_sum", false));
}

}  // namespace

// A Trainer, the next one in all processes. Returns its number.
SYNCBN_API(int64_t, add_trainer, Asked* exchange) {
    return static_cast<Processes&>(*exchange->host).gradients().add_trainer();
}

// Begins the sum of a Trainer's gradients over the processes, and does not wait. The arrays become the sums together, or
// all of them raise the failure. `arrays`: of each summand a handle for each context, one summand after the other. They
// are dense, and on CPUs. Throws Failure if MXNet refuses.
SYNCBN_API(void, sum, Asked* exchange, int64_t trainer, const char* update, const char* list, size_t count,
           const int* types, const size_t* sizes, size_t contexts, void** arrays) {
    if (is_naive_engine)
        throw Failure(
            "MXNET_ENGINE_TYPE=NaiveEngine waits for each array in turn, and the processes add all arrays of a step "
            "together. Unset it.");
    auto& processes = static_cast<Processes&>(*exchange->host);
    std::vector<Summand> summands;
    for (size_t i = 0; i < count; ++i) summands.push_back({static_cast<Type>(types[i]), sizes[i]});
    processes.mail().check_open();
    const double timeout = registry().defaults().timeout;
    const auto round = std::make_shared<Gradients::Round>(processes.gradients(),
                                                          Brought{trainer, update, list, timeout, std::move(summands)});
    try {
        for (size_t i = 0; i < count; ++i) push(round, i, contexts, arrays + i * contexts);
        processes.gradients().begin(round);
    } catch (const std::exception&) {
        round->end(std::current_exception());  // operations that MXNet has must end
        throw;
    }
}

}  // namespace syncbn::native

// Sums gradients over processes as operations of MXNet's engine. An operation takes an array when the backward has
// written it, and ends when the sum is there.
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "exchange/processes.h"
#include "failure.h"
#include "lock.h"
#include "meeting/registry.h"
#include "mxnet_api.h"
#include "native/abi.h"
#include "tensor.h"
#include "to_python.h"

namespace syncbn {
namespace native {
namespace {

// The values of an array that this thread may write.
void* plain_values(void* handle) {
    NDArray& array = *static_cast<NDArray*>(handle);
    if (library.is_blocked != nullptr && !array.is_plain()) library.reorder_chunk(&array.chunk());
    return data({handle});
}

class Arrays : public Gradients::Round, public std::enable_shared_from_this<Arrays> {
  public:
    Arrays(Gradients& gradients, Brought brought) : Round(gradients, std::move(brought)), items_(summands.size()) {}
    ~Arrays() override {
        for (const Item& item : items_)
            for (void* handle : item.handles) mx.MXNDArrayFree(handle);
    }

    void push(size_t index, size_t contexts, void** arrays) {
        std::vector<void*>& handles = items_[index].handles;
        for (size_t i = 0; i < contexts; ++i) {
            void* own = nullptr;
            check(mx.MXShallowCopyNDArray(arrays[i], &own));
            handles.push_back(own);
        }
        // MXNet removes it, whatever happens.
        check(mx.MXEnginePushAsyncND(Operation::run, new Operation{shared_from_this(), index}, Operation::remove, &kCpu,
                                     nullptr, 0, handles.data(), static_cast<int>(contexts), nullptr, 0,
                                     "gluon_syncbn_sum", false));
    }

    void succeed() noexcept override {
        for (const Item& item : items_) (*item.complete)(nullptr);
    }
    void fail(const std::exception& reason) noexcept override {
        std::vector<const Item*> here;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            failure_ = std::make_exception_ptr(Failure(reason_of(reason)));
            for (const Item& item : items_)
                if (item.complete) here.push_back(&item);
        }
        for (const Item* item : here) item->complete->fail(failure_);
    }

  private:
    struct Item {
        std::vector<void*> handles;          // for each context
        std::optional<Completion> complete;  // since the values are here
    };

    struct Operation {
        const std::shared_ptr<Arrays> round;
        const size_t index;
        bool ran = false;

        static void run(void*, void* complete, void* parameter) {
            auto& self = *static_cast<Operation*>(parameter);
            self.ran = true;
            self.round->begin(self.index, *static_cast<const Completion*>(complete));
        }
        // MXNet leaves out an operation if one before it has failed.
        static void remove(void* parameter) {
            const std::unique_ptr<Operation> self(static_cast<Operation*>(parameter));
            if (!self->ran) self->round->lose(self->index);
        }
    };

    static void check(int status) {
        if (status != 0)
            throw Failure(std::string("MXNet's engine refused a sum of gradients: ") + mx.MXGetLastError());
    }

    void begin(size_t index, const Completion& complete) {
        Item& item = items_[index];
        std::vector<void*> values;
        std::exception_ptr failure;
        try {
            for (void* handle : item.handles) values.push_back(plain_values(handle));
        } catch (const std::exception&) {
            failure = std::current_exception();
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (failure == nullptr) failure = failure_;
            if (failure == nullptr) item.complete = complete;
        }
        if (failure == nullptr) return come(index, std::move(values));
        lose(index);
        complete.fail(failure);
    }

    Mutex mutex_;  // guards the completions and the failure
    std::vector<Item> items_;
    std::exception_ptr failure_;
};

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
    const auto round =
        std::make_shared<Arrays>(processes.gradients(), Brought{trainer, update, list, timeout, std::move(summands)});
    try {
        for (size_t i = 0; i < count; ++i) round->push(i, contexts, arrays + i * contexts);
        processes.gradients().begin(round);
    } catch (const std::exception& reason) {
        round->fail(reason);  // operations that MXNet has must end
        throw;
    }
}

}  // namespace native
}  // namespace syncbn

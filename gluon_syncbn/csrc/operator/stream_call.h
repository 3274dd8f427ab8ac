// A call whose work goes to a stream of a GPU. It waits once, when it ends.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/collective.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "operator/call.h"
#include "waiting/wait.h"

namespace syncbn {

// The number of float64 values that have space for so many bytes.
inline int64_t doubles_for(int64_t bytes) { return cuda::ceil_div(bytes, sizeof(double)); }

inline cuda::Kernel kernel_of(const char* stem, Type type) { return {stem, name_of(type)}; }

class StreamCall : public Call {
  public:
    using Call::Call;

  protected:
    // The replicas' contributions and the results; it lives until no pointer to it is left.
    struct Gathered {
        cuda::Memory own, all;
        cuda::OnDevice part;
        int64_t slots = 0;
        const double* values() const { return all.data() != nullptr ? all.data() : own.data(); }
    };
    // The objects of an execution, for one thread after the other.
    struct Work {
        std::optional<cuda::Current> current;
        cuda::Lease lease;
        explicit Work(cuda::Device& device) : current(std::in_place, device), lease(device) {}
    };

    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        copy_data(data(from), type, n, data(to), add);
    }
    void fill(Array to, Type type, int64_t n, double value) override;
    void fill_with_zeros(Array to, int64_t bytes) override;
    void finish() override;
    // The destructor of a derived class calls it.
    void clear_up() override;
    void leave_thread() override {
        if (work_) work_->current.reset();
    }
    // Gives up the memory of the derived class, which hanging work may still use.
    virtual void abandon() {}

    cuda::Device& device() {
        if (device_ == nullptr) device_ = &cuda::Device::of(std::stoi(context_.substr(4)));
        return *device_;
    }
    Work& work() {
        if (!work_) work_.emplace(device());
        if (!work_->current) work_->current.emplace(device());
        return *work_;
    }
    // `ask` may call Python. There, freed objects may leave another device current on this thread.
    template <typename Ask>
    auto still_current(const Ask& ask) -> decltype(ask()) {
        const cuda::Current again(device());
        return ask();
    }
    cuda::Memory memory(int64_t size) {
        work();
        return cuda::Memory(device(), size);
    }
    // The size of so many values of the data, in float64.
    int64_t in_doubles(int64_t values) const { return doubles_for(values * size_of(tensor_.type)); }
    // Returns float64 memory until the callback ends.
    double* scratch(int64_t size) {
        scratch_.push_back(memory(size));
        return scratch_.back().data();
    }
    template <typename Arguments>
    void run(const cuda::Kernel& kernel, cuda::Grid grid, const Arguments& arguments) {
        cuda::launch(device(), work().lease.stream(), kernel, grid, &arguments);
    }
    // Runs a kernel with a thread for each of n values.
    template <typename Arguments>
    void run_on_each(const cuda::Kernel& kernel, int64_t n, const Arguments& arguments) {
        if (n > 0) run(kernel, {(n + cuda::kBlock - 1) / cuda::kBlock}, arguments);
    }
    void copy_data(const void* from, Type type, int64_t n, void* to, bool add) {
        run_on_each(kernel_of("copy", type), n, cuda::CopyArguments{n, from, to, add});
    }

    Form form() const { return exchange_ != nullptr ? exchange_->form() : Form::kDevice; }
    // Contributes what the stream writes to `gathered_->own`, and `counts` beside it.
    void contribute_part(Direction direction, Vector counts);
    // Returns what is on the device. The copy has no time limit, so this waits for the stream first.
    Vector downloaded(const cuda::Memory& from);
    // Waits until all work on the stream is done; throws Failure.
    void wait();

    std::optional<Work> work_;
    std::shared_ptr<Gathered> gathered_;  // until the callback ends
    Exchange* exchange_ = nullptr;        // the meeting's, if there is one
    Direction direction_ = Direction::kForward;
    bool may_be_posted_ = false;  // other work may have been put on the stream

  private:
    bool idle_within(double seconds) const;
    std::unique_ptr<Wait> wait_for_gpu();

    cuda::Device* device_ = nullptr;
    std::vector<cuda::Memory> scratch_;  // until the callback ends
};

}  // namespace syncbn

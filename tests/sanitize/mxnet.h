// MXNet on CPUs, as far as the core sees it: arrays, the engine, and the callbacks of `Custom`
// (src/operator/custom/custom.cc).
#pragma once

#include "figures.h"
#include "mxnet_api.h"
#include "types.h"

namespace driver {

using syncbn::Type;

class Array {
  public:
    Array(Type type, int64_t size, double value);
    double get(int64_t i) const;
    void set(int64_t i, double value);

    const Type type;
    const int64_t size;
    std::atomic<bool> broken{false};  // MXNet has no memory for it
    char* memory() { return memory_.get(); }

  private:
    const std::unique_ptr<char[]> memory_;  // not a byte more than it needs: what lies beyond is an error
};
using ArrayP = std::shared_ptr<Array>;
inline ArrayP make_array(Type type, int64_t size, double value) { return std::make_shared<Array>(type, size, value); }

// What is pushed for one thing runs in the order in which it was pushed, everything else at the same time, on threads
// that become more as they are needed.
class Engine {
  public:
    Engine() = default;
    ~Engine() {
        wait_for_all();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        changed_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void push(const void* thing, std::function<void()> work) {
        std::lock_guard<std::mutex> lock(mutex_);
        ++unfinished_;
        auto& queue = queues_[thing];
        queue.push_back(std::move(work));
        if (queue.size() == 1) start(&queue);
    }
    void wait_for_all() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return unfinished_ == 0; });
        queues_.clear();
    }

  private:
    using Queue = std::deque<std::function<void()>>;

    void start(Queue* queue) {  // needs the lock
        ready_.push_back(queue);
        if (ready_.size() > free_threads_) {
            threads_.emplace_back(&Engine::run, this);
            ++free_threads_;
        }
        changed_.notify_all();
    }
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return ends_ || !ready_.empty(); });
            if (ready_.empty()) return;
            Queue& queue = *ready_.front();
            ready_.pop_front();
            auto work = std::move(queue.front());
            --free_threads_;
            lock.unlock();
            work();
            work = nullptr;  // whatever it alone held on to goes here
            lock.lock();
            ++free_threads_;
            queue.pop_front();
            if (!queue.empty()) start(&queue);
            if (--unfinished_ == 0) changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<const void*, Queue> queues_;
    std::deque<Queue*> ready_;
    std::vector<std::thread> threads_;
    size_t unfinished_ = 0, free_threads_ = 0;
    bool ends_ = false;
};

// As long as one lives, this thread is in the core; or back in the program that plays MXNet.
class Within {
  public:
    explicit Within(bool core);
    ~Within();

  private:
    const bool before_;
};
// The n-th allocation of the core from now on fails, and no other; 0: none.
void fail_allocation(long n);
// Whether it has.
bool allocation_has_failed();

// CustomOpPropCallbacks and CustomOpCallbacks in MXNet's c_api.h
enum { kInferShape = 4, kBackwardDependency, kCreate, kInferType };
enum { kDelete, kForward, kBackward };

// The error that the core has handed to an array of the call that this thread runs, once; empty if there is none.
std::string take_error();

// What the core has made of a node of a graph or an eager call, or the state of a call. MXNet deletes both through them.
struct Callbacks {
    MXCallbackList list{};

    Callbacks() = default;
    Callbacks(const Callbacks&) = delete;
    ~Callbacks() {
        if (list.num_callbacks > 0) call(kDelete);
    }
    template <typename... Parameters>
    void call(int which, Parameters... parameters) const {
        const auto function = reinterpret_cast<int (*)(Parameters..., void*)>(  // of the operator's own type
            reinterpret_cast<void*>(list.callbacks[which]));
        const auto within = [&] {
            const Within core(true);
            return function(parameters..., list.contexts[which]);
        };
        const bool done = within() != 0;
        const std::string error = take_error();
        if (!done || !error.empty()) throw dmlc::Error(done ? error : "Check failed");
    }
};
std::shared_ptr<Callbacks> make_property(const std::map<std::string, std::string>& attributes);

// What MXNet hands to a callback, which frees it. Of an array that the callback has not asked for (null) it is empty.
void* new_handle(const ArrayP& array);

// Hands MXNet's functions to the core, which registers its operator.
void load_core();
// MXNet has this flag for each thread: what `autograd.record()` and `autograd.predict_mode()` set.
void set_training(bool training);

}  // namespace driver

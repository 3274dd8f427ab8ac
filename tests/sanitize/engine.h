// MXNet on CPUs, as far as a call sees it: arrays, and the engine.
#pragma once

#include "cpu/numbers.h"
#include "driver.h"

namespace driver {

using syncbn::Type;

class Array {
  public:
    Array(Type type, int64_t size, double value)
        : type(type), size(size), memory_(new char[static_cast<size_t>(size * size_of(type))]) {
        for (int64_t i = 0; i < size; ++i) set(i, value);
    }
    double get(int64_t i) const {
        const void* at = memory_.get() + i * size_of(type);
        if (type == Type::kFloat64) return *static_cast<const double*>(at);
        if (type == Type::kFloat32) return *static_cast<const float*>(at);
        return syncbn::cpu::Value<syncbn::cpu::Half>::load(static_cast<const syncbn::cpu::Half*>(at));
    }
    void set(int64_t i, double value) {
        void* at = memory_.get() + i * size_of(type);
        if (type == Type::kFloat64)
            *static_cast<double*>(at) = value;
        else if (type == Type::kFloat32)
            *static_cast<float*>(at) = static_cast<float>(value);
        else
            syncbn::cpu::Value<syncbn::cpu::Half>::store(static_cast<syncbn::cpu::Half*>(at),
                                                         static_cast<float>(value));
    }
    // As MXNDArrayGetData has it for the core.
    static int data(void* handle, void** to) {
        const auto& array = *static_cast<Array*>(handle);
        *to = array.memory_.get();
        return array.broken ? -1 : 0;
    }

    const Type type;
    const int64_t size;
    std::atomic<bool> broken{false};  // MXNet has no memory for it

  private:
    const std::unique_ptr<char[]> memory_;  // not a byte more than it needs: what lies beyond is an error
};
using ArrayP = std::shared_ptr<Array>;
inline ArrayP make_array(Type type, int64_t size, double value) { return std::make_shared<Array>(type, size, value); }

// What is pushed for one thing runs in the order in which it was pushed, everything else at the same time.
class Engine {
  public:
    void push(const void* thing, std::function<void()> work) {
        std::lock_guard<std::mutex> lock(mutex_);
        queues_[thing].push(std::move(work));
    }
    void wait_for_all() { queues_.clear(); }

  private:
    class Queue {
      public:
        ~Queue() {
            push(nullptr);
            thread_.join();
        }
        void push(std::function<void()> work) {
            std::lock_guard<std::mutex> lock(mutex_);
            waiting_.push_back(std::move(work));
            changed_.notify_one();
        }

      private:
        // Until what it gets is nothing.
        void run() {
            for (;;) {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [this] { return !waiting_.empty(); });
                const auto work = std::move(waiting_.front());  // what it alone held on to goes with it
                waiting_.pop_front();
                lock.unlock();
                if (!work) return;
                work();
            }
        }

        std::mutex mutex_;
        std::condition_variable changed_;
        std::deque<std::function<void()>> waiting_;
        std::thread thread_{&Queue::run, this};  // the last to begin
    };

    std::mutex mutex_;
    std::map<const void*, Queue> queues_;
};

}  // namespace driver

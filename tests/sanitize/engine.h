// MXNet's engine: what reads and writes the same things runs in the order in which it was pushed, everything else at the
// same time, on threads that become more as they are needed (CustomOperator::Push in src/operator/custom/custom-inl.h).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace driver {

class Engine {
  public:
    using Variable = const void*;

    Engine() = default;
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void push(const std::vector<Variable>& reads, const std::vector<Variable>& writes, std::function<void()> work);
    void wait_for_all();

  private:
    struct Operation {
        std::function<void()> work;
        size_t waits_for = 0;
        bool done = false;
        std::vector<std::shared_ptr<Operation>> followers;
    };
    using OperationP = std::shared_ptr<Operation>;
    struct Users {
        OperationP writer;
        std::vector<OperationP> readers;  // since then
    };

    // These need the lock.
    void follow(const OperationP& operation, const OperationP& earlier);
    void start(const OperationP& operation);
    void run();

    std::mutex mutex_;
    std::condition_variable ready_or_end_, all_done_;
    std::map<Variable, Users> users_;
    std::deque<OperationP> ready_;
    std::vector<std::thread> threads_;
    size_t unfinished_ = 0, free_threads_ = 0;
    bool ends_ = false;
};

}  // namespace driver

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
    ~Engine() {
        wait_for_all();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        ready_or_end_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void push(const std::vector<Variable>& reads, const std::vector<Variable>& writes, std::function<void()> work) {
        const auto operation = std::make_shared<Operation>();
        operation->work = std::move(work);
        std::lock_guard<std::mutex> lock(mutex_);
        ++unfinished_;
        for (Variable variable : reads) {
            Users& users = users_[variable];
            follow(operation, users.writer);
            users.readers.push_back(operation);
        }
        for (Variable variable : writes) {
            Users& users = users_[variable];
            follow(operation, users.writer);
            for (const auto& reader : users.readers) follow(operation, reader);
            users = {operation, {}};
        }
        if (operation->waits_for == 0) start(operation);
    }

    void wait_for_all() {
        std::unique_lock<std::mutex> lock(mutex_);
        all_done_.wait(lock, [this] { return unfinished_ == 0; });
        users_.clear();
    }

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

    // These two need the lock.
    void follow(const OperationP& operation, const OperationP& earlier) {
        if (!earlier || earlier->done || earlier == operation) return;
        earlier->followers.push_back(operation);
        ++operation->waits_for;
    }

    void start(const OperationP& operation) {
        ready_.push_back(operation);
        if (ready_.size() > free_threads_) {
            threads_.emplace_back(&Engine::run, this);
            ++free_threads_;
        }
        ready_or_end_.notify_one();
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            ready_or_end_.wait(lock, [this] { return ends_ || !ready_.empty(); });
            if (ready_.empty()) return;
            const OperationP operation = ready_.front();
            ready_.pop_front();
            --free_threads_;
            lock.unlock();
            operation->work();
            operation->work = nullptr;  // whatever it alone held on to goes here
            lock.lock();
            ++free_threads_;
            operation->done = true;
            for (const auto& follower : operation->followers)
                if (--follower->waits_for == 0) start(follower);
            operation->followers.clear();
            if (--unfinished_ == 0) all_done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable ready_or_end_, all_done_;
    std::map<Variable, Users> users_;
    std::deque<OperationP> ready_;
    std::vector<std::thread> threads_;
    size_t unfinished_ = 0, free_threads_ = 0;
    bool ends_ = false;
};

}  // namespace driver

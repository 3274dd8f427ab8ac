#include "engine.h"

namespace driver {

Engine::~Engine() {
    wait_for_all();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
    }
    ready_or_end_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Engine::push(const std::vector<Variable>& reads, const std::vector<Variable>& writes, std::function<void()> work) {
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

void Engine::follow(const OperationP& operation, const OperationP& earlier) {
    if (!earlier || earlier->done || earlier == operation) return;
    earlier->followers.push_back(operation);
    ++operation->waits_for;
}

void Engine::start(const OperationP& operation) {
    ready_.push_back(operation);
    if (ready_.size() > free_threads_) {
        threads_.emplace_back(&Engine::run, this);
        ++free_threads_;
    }
    ready_or_end_.notify_one();
}

void Engine::run() {
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

void Engine::wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return unfinished_ == 0; });
    users_.clear();
}

}  // namespace driver

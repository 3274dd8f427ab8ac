#include "native/workers.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace syncbn {
namespace native {
namespace {

struct Worker {
    std::condition_variable given;
    std::unique_ptr<Work> work;
};

struct Workers {
    std::mutex mutex;
    std::vector<Worker*> idle;  // whoever was last at work is first again: its memory is warm
};

Workers* workers = new Workers;  // never destroyed: threads may be in it when the process ends

void serve(Workers* all, Worker* self) {
    std::unique_lock<std::mutex> lock(all->mutex);
    for (;;) {
        self->given.wait(lock, [self] { return self->work != nullptr; });
        lock.unlock();
        self->work->run();
        self->work.reset();
        lock.lock();
        all->idle.push_back(self);
    }
}

}  // namespace

void start(std::unique_ptr<Work> work) {
    std::unique_lock<std::mutex> lock(workers->mutex);
    if (workers->idle.empty()) {
        auto* worker = new Worker;
        worker->work = std::move(work);
        lock.unlock();
        std::thread(serve, workers, worker).detach();
        return;
    }
    Worker* worker = workers->idle.back();
    workers->idle.pop_back();
    worker->work = std::move(work);
    lock.unlock();
    worker->given.notify_one();
}

void forget_workers() { workers = new Workers; }

}  // namespace native
}  // namespace syncbn

#include "native/workers.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "failure.h"
#include "point.h"

namespace syncbn {
namespace native {
namespace {

struct Worker {
    std::condition_variable given;
    std::unique_ptr<Work> work;
};

struct Workers {
    std::mutex mutex;
    std::vector<Worker*> idle;  // the last to work comes first again: its memory is in the cache
    size_t count = 0;           // of all workers; `idle` has capacity for as many
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
    SYNCBN_POINT("before_worker");
    std::unique_lock<std::mutex> lock(workers->mutex);
    if (workers->idle.empty()) {
        auto worker = std::make_unique<Worker>();
        workers->idle.reserve(++workers->count);
        lock.unlock();
        worker->work = std::move(work);
        try {
            std::thread(serve, workers, worker.get()).detach();
        } catch (const std::system_error& error) {
            lock.lock();
            --workers->count;
            throw Failure(std::string("no thread could be started for this call (") + error.what() +
                          "). The process has no memory for a thread, or has reached its limit of threads (ulimit -v, "
                          "ulimit -u).");
        }
        worker.release();  // for ever
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

#include "emulator.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

namespace emulator {

struct Task {
    std::function<void()> work;
    std::promise<void> done;
    bool always;
};

class Stream {
  public:
    explicit Stream(int device_) : device(device_) {}

    const int device;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> tasks;
    Completion last;  // of the newest task
    bool started = false;
    bool destroyed = false;
};

namespace {

// Is something under way, and not yet over?
bool pending(const Completion& it) {
    return it.valid() && it.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

Completion last(const StreamPointer& stream) {
    std::lock_guard<std::mutex> lock(stream->mutex);
    return stream->last;
}

// Never destroyed: the threads of streams outlive main().
struct Streams {
    std::mutex mutex;
    std::map<void*, StreamPointer> all;
    StreamPointer of_devices[kDevices];  // the default ones
};
Streams& streams = *new Streams;

void serve(StreamPointer stream) {
    current_device = stream->device;
    for (;;) {
        Task task;
        {
            std::unique_lock<std::mutex> lock(stream->mutex);
            stream->changed.wait(lock, [&] { return !stream->tasks.empty() || stream->destroyed; });
            if (stream->tasks.empty()) return;  // a destroyed stream still does what it was given
            task = std::move(stream->tasks.front());
            stream->tasks.pop_front();
        }
        if (task.always || sticky(stream->device) == kSuccess) task.work();
        task.work = nullptr;  // what it holds goes before anybody learns that it is over
        task.done.set_value();
    }
}

std::vector<StreamPointer> streams_of(int device) {
    std::lock_guard<std::mutex> lock(streams.mutex);
    std::vector<StreamPointer> found;
    for (const auto& one : streams.all)
        if (one.second->device == device) found.push_back(one.second);
    if (streams.of_devices[device]) found.push_back(streams.of_devices[device]);
    return found;
}

}  // namespace

void* create_stream(int device) {
    const StreamPointer stream = std::make_shared<Stream>(device);
    std::lock_guard<std::mutex> lock(streams.mutex);
    // The object's address may be one that a destroyed stream had; a counter is never the same.
    static uintptr_t next = 0x51000000;
    void* const handle = reinterpret_cast<void*>(next += 16);
    streams.all[handle] = stream;
    return handle;
}

Status destroy_stream(void* handle) {
    StreamPointer stream;
    {
        std::lock_guard<std::mutex> lock(streams.mutex);
        const auto found = streams.all.find(handle);
        if (found == streams.all.end()) return kInvalidHandle;
        stream = found->second;
        streams.all.erase(found);
    }
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->destroyed = true;
    stream->changed.notify_all();
    return kSuccess;
}

StreamPointer find_stream(void* handle) {
    std::lock_guard<std::mutex> lock(streams.mutex);
    if (handle == nullptr) {
        StreamPointer& stream = streams.of_devices[current_device];
        if (!stream) stream = std::make_shared<Stream>(current_device);
        return stream;
    }
    const auto found = streams.all.find(handle);
    return found == streams.all.end() ? nullptr : found->second;
}

int device_of(const Stream& stream) { return stream.device; }

Completion enqueue(const StreamPointer& stream, std::function<void()> work, bool always) {
    Task task{std::move(work), {}, always};
    const Completion done = task.done.get_future().share();
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->tasks.push_back(std::move(task));
    stream->last = done;
    if (!stream->started) {
        stream->started = true;
        std::thread(serve, stream).detach();
    }
    stream->changed.notify_all();
    return done;
}

Status synchronize(const StreamPointer& stream) {
    count(stream->device, kWaits);
    if (const Completion end = last(stream); end.valid()) end.wait();
    return sticky(stream->device);
}

Status query(const StreamPointer& stream) {
    const Status status = sticky(stream->device);
    if (status == kSuccess && pending(last(stream))) return kNotReady;
    count(stream->device, kWaits);  // the one that sees the end
    return status;
}

Status synchronize_device(int device) {
    for (const StreamPointer& stream : streams_of(device))
        if (const Completion end = last(stream); end.valid()) end.wait();
    return sticky(device);
}

}  // namespace emulator

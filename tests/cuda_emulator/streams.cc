#include "streams.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace emulator {

struct Task {
    std::function<void()> work;
    std::vector<Completion> after;  // on other streams
    std::promise<void> done;
    bool always;
};

class Stream {
  public:
    Stream(int device_, StreamKind kind_) : device(device_), kind(kind_) {}

    const int device;
    const StreamKind kind;
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
    StreamPointer legacy[kMaxDevices];
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
        for (const Completion& other : task.after)
            if (other.valid()) other.wait();
        task.after.clear();
        if (task.always || sticky(stream->device) == kSuccess) task.work();
        task.work = nullptr;  // what it holds goes before anybody learns that it is over
        task.done.set_value();
    }
}

StreamPointer legacy_stream(int device) {
    std::lock_guard<std::mutex> lock(streams.mutex);
    StreamPointer& stream = streams.legacy[device];
    if (!stream) stream = std::make_shared<Stream>(device, kLegacy);
    return stream;
}

std::vector<StreamPointer> streams_of(int device) {
    std::lock_guard<std::mutex> lock(streams.mutex);
    std::vector<StreamPointer> found;
    for (const auto& one : streams.all)
        if (one.second->device == device) found.push_back(one.second);
    if (streams.legacy[device]) found.push_back(streams.legacy[device]);
    return found;
}

}  // namespace

void* create_stream(int device, StreamKind kind) {
    const StreamPointer stream = std::make_shared<Stream>(device, kind);
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
    if (reinterpret_cast<uintptr_t>(handle) <= 2) return legacy_stream(current_device);
    std::lock_guard<std::mutex> lock(streams.mutex);
    const auto found = streams.all.find(handle);
    return found == streams.all.end() ? nullptr : found->second;
}

int device_of(const Stream& stream) { return stream.device; }

Completion enqueue(const StreamPointer& stream, std::function<void()> work, bool always) {
    Task task{std::move(work), {}, {}, always};
    // The legacy stream comes after everything on the device's blocking streams, and they come after it.
    if (stream->kind == kLegacy) {
        for (const StreamPointer& other : streams_of(stream->device))
            if (other->kind == kBlocking) task.after.push_back(last(other));
    } else if (stream->kind == kBlocking) {
        task.after.push_back(last(legacy_stream(stream->device)));
    }
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
    // An empty task of the legacy stream is behind all others.
    const Completion end = stream->kind == kLegacy ? enqueue(stream, [] {}, true) : last(stream);
    if (end.valid()) end.wait();
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

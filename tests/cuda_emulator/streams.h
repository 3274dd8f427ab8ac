// Streams: a thread each, that runs what was enqueued in order.
#pragma once

#include <functional>
#include <future>
#include <memory>

#include "errors.h"

namespace emulator {

// The end of something on a stream. Not valid where there was nothing.
using Completion = std::shared_future<void>;

class Stream;
using StreamPointer = std::shared_ptr<Stream>;

void* create_stream(int device);
Status destroy_stream(void* handle);

// The stream of a handle; null is the default stream of the current device, which waits for no other. Empty where there
// is no such stream (any more).
StreamPointer find_stream(void* handle);
// What `use` does with that stream.
template <typename Use>
Status on_stream(void* handle, Use use) {
    const StreamPointer stream = find_stream(handle);
    return stream ? use(stream) : kInvalidHandle;
}
int device_of(const Stream& stream);

// Puts `work` behind all that the stream holds. It is left out when the device has had an error, unless
// `always`: what other devices wait for must go on.
Completion enqueue(const StreamPointer& stream, std::function<void()> work, bool always = false);

Status synchronize(const StreamPointer& stream);
Status query(const StreamPointer& stream);
Status synchronize_device(int device);

}  // namespace emulator

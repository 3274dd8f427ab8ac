// What the libraries share. Both APIs of CUDA are names for these.
#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {

// ---- errors: each is printed at once, kept until it is read, and stays with its device as CUDA's own "sticky" errors do:
// whatever is asked of the device afterwards answers with it ---------------------------------------------------------

// The numbers that the runtime API and the driver API share since CUDA 10.1.
enum Status : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kNoKernelImage = 209,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kMisalignedAddress = 716,
    kLaunchFailure = 719,
};
const char* status_text(Status status);

// Prints and keeps `text`, makes `status` the sticky answer of `device` (none where it is negative), returns it.
Status report(int device, Status status, const std::string& text);
Status sticky(int device);  // the first error of the device since the last reset

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// ---- devices -------------------------------------------------------------------------------------------------------

constexpr int kDevices = 4;
constexpr size_t kMemoryOfDevice = size_t(4) << 30;
constexpr int kDriverVersion = 11080;
inline Status good_device(int device) { return device >= 0 && device < kDevices ? kSuccess : kInvalidDevice; }

int capability();          // ten times CUDA_EMULATOR_CAPABILITY: 80 for 8.0
int attribute(int which);  // cudaDeviceAttr, CUdevice_attribute: the same numbers
std::string name(int device);

// As cudaSetDevice: each thread has its own, device 0 at first. The driver API's current context is that of the same
// device, but only once it is bound: until CUDA 12, cudaSetDevice leaves that to the thread's next call that needs one.
extern thread_local int current_device;
extern thread_local bool bound;

// What each device was asked to do, so that a test can say how much a step costs where nothing can be timed.
enum Counted { kLaunches, kToDevice, kToHost, kWithin, kWaits, kCollectives, kAllocations, kCounted };
void count(int device, Counted what);  // a device below 0 is none

// ---- device memory: pages of this process at addresses that are never handed out twice. The end of an allocation is that
// of its page, and the page behind is not accessible: nor is freed memory -----------------------------------------------

constexpr int kPinnedHost = -1;    // memory from cudaHostAlloc: any device may use it
constexpr int kPageableHost = -2;  // any other address

Status allocate(int device, size_t size, void** out);  // device may be kPinnedHost
Status release(void* pointer, bool host);
int device_of(const void* pointer);  // a device, kPinnedHost or kPageableHost
size_t bytes_in_use(int device);
// Why `device` may not read or write these bytes; empty if it may. Pageable host memory is trusted.
std::string problem(const void* pointer, size_t size, int device);

// ---- streams: a thread each, that runs what was enqueued in order ------------------------------------------------------

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

// ---- copies, and what else runs on a stream ------------------------------------------------------------------------------

struct Copy {
    void* to;
    const void* from;
    size_t size;
    // Which device must own each end, where it is device memory.
    int to_device, from_device;
};
// Pageable host memory is read before this returns, or written: CUDA promises the one and does the other.
Status copy(const Copy& what, const StreamPointer& stream);

struct Bytes {
    const void* begin;
    size_t size;
};
// Puts `work` on the stream, where its device may read and write these; else the error has this name.
Status compute(const StreamPointer& stream, const std::string& name, const std::vector<Bytes>& reads, Bytes written,
               std::function<void()> work);
Status fill(void* to, int value, size_t size, const StreamPointer& stream);

// ---- launches: the blocks one after the other, the threads of a block in turn, each on a stack of its own --------------------

// What a compiled source exports, an array that ends with a null name; shim.h makes the entries.
struct Kernel {
    const char* name;
    unsigned parameters;
    const unsigned* sizes;       // of each parameter, in bytes
    void (*run)(void** values);  // calls the kernel
};
struct Dimensions {
    unsigned x, y, z;
};
struct Launch {
    const Kernel* kernel;
    Dimensions grid, block;
    int device;
    void** arguments;
};
void run(const Launch& launch);

}  // namespace emulator

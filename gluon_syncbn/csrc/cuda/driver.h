// Wraps the CUDA driver: devices, their streams and memory, launches. Nothing is linked: the functions come from the
// libraries that MXNet is linked against.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/params.h"
#include "lock.h"
#include "mxnet_api.h"

namespace syncbn::cuda {

// Set before the first use of a GPU.
inline struct Setup {
    std::string csrc, cache;  // the folders of the sources and of compiled kernels
} setup;

// Finds a function. Throws Failure if it is missing, which means that MXNet was built without `library`.
Function need(const char* name, const char* library);

// Calls a function, with arguments of exactly its types.
template <typename... Arguments>
int call(Function function, Arguments... arguments) {
    int (*const typed)(Arguments...) = function;
    return typed(arguments...);
}
// The same of one by its name, which is looked up once. Returns its status, 0 for success.
#define SYNCBN_CALL(LIBRARY, NAME, ...)                                  \
    syncbn::cuda::call(                                                  \
        [] {                                                             \
            static const auto found = syncbn::cuda::need(NAME, LIBRARY); \
            return found;                                                \
        }(),                                                             \
        ##__VA_ARGS__)

using Stream = void*;

struct Grid {
    int64_t x = 1, y = 1, z = 1;
};

// A kernel of kernels.cu.
struct Kernel {
    std::string stem, type, activation = "identity";
};

class Device {
  public:
    const int id;  // MXNet's number

    static Device& get(int id);

    // Compiles and loads the kernel at its first use. The device has to be current.
    void* kernel(const Kernel& kernel);

  private:
    friend class Current;
    friend class Lease;
    friend class Memory;
    explicit Device(int id);

    void* context_ = nullptr;               // never released: MXNet keeps it for as long as the process lives
    Mutex mutex_;                           // guards the rest
    std::map<std::string, void*> kernels_;  // by name
    std::vector<std::pair<Stream, Status*>> streams_;  // free ones, each with its `Status`
    std::multimap<int64_t, void*> memory_;             // free memory, by its room
};

// Makes a device current on this thread while the object lives. MXNet's threads sometimes have none: cudaSetDevice,
// before CUDA 12, leaves the driver without one until the thread's next call of the runtime.
class Current {
  public:
    explicit Current(Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
};

// A stream for one user while the object lives. The device has to be current.
class Lease {
  public:
    explicit Lease(Device& device);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    Stream stream() const { return stream_; }
    // Whether all work on the stream is done; throws the error of the device.
    bool idle() const;
    Status* status() const { return status_; }

    Device& device;

  private:
    Stream stream_ = nullptr;
    Status* status_ = nullptr;
};

// Memory on a device, never given back to the driver, which would wait for all work of the device. It is kept for
// others that need at least half of it: batches of many shapes share it. Rooms are powers of two up to 1 MB, and whole
// MB beyond. No work on a stream may use it when the object ends. The device has to be current at construction.
class Memory {
  public:
    Memory() = default;
    Memory(Device& device, int64_t bytes);

    template <typename T>
    T* as() const {
        return static_cast<T*>(data_.get());
    }
    int64_t bytes() const { return bytes_; }
    // Copies to the device; the values may change or go at once.
    void upload(const void* values, const Lease& lease) const;
    // From there; they are there when this returns. It waits in the driver, so the lease should be idle.
    void download(void* values, const Lease& lease) const;

  private:
    struct Keep {
        Device* device;
        int64_t room;
        void operator()(void* data) const;
    };
    std::unique_ptr<void, Keep> data_;
    int64_t bytes_ = 0;
};

void fill(void* to, int64_t bytes, int value, Stream stream);  // of each byte

// Compiles kernels.cu and this line, "SYNCBN_KERNEL(add, identity, float32)", with NVRTC, and caches the results on disk.
// Returns intermediate code. `anew` ignores what is cached.
const std::string& compiled(const std::string& line, bool anew = false);

// Launches a kernel. `arguments` is its structure of params.h, which may end at once.
void launch(const Lease& on, const Kernel& kernel, Grid grid, const void* arguments);

}  // namespace syncbn::cuda

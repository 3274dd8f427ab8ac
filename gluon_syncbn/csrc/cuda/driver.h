// The CUDA driver: devices, their streams and memory, launches. Nothing is linked: the functions come from the libraries
// that MXNet is linked against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/params.h"

namespace syncbn {
namespace cuda {

// Of `dlopen`: MXNet. Looked into at the first use of a GPU.
void set_library(void* handle);
// A function of MXNet's or of a library that it is linked against; null where there is none.
void* find(const char* name);

// Throws what the driver says where `status` is not 0.
void check(int status, const char* function);

using Stream = void*;

struct Grid {
    int64_t x = 1, y = 1, z = 1;
};

// Threads of every block; kernels.cu is compiled for it.
constexpr int kBlock = 256;

// Numbers of float64 in a row, and the part of them that is written: from `begin`, `length` of them.
struct Extent {
    int64_t size = 0, begin = 0, length = 0;
    bool operator<(const Extent& other) const {
        return std::tie(size, begin, length) < std::tie(other.size, other.begin, other.length);
    }
};

// One of kernels.cu; `type` and `activation` are empty where it depends on none.
struct Kernel {
    std::string stem, type = "", activation = "";
};

class Device {
  public:
    const int id;  // MXNet's

    static Device& of(int id);

    int capability() const { return capability_; }  // 80 for 8.0
    // Compiled and loaded at its first use. The device has to be current.
    void* kernel(const Kernel& kernel);

  private:
    friend class Current;
    friend class Lease;
    friend class Memory;
    explicit Device(int id);

    void* context_ = nullptr;  // never released: MXNet keeps it for as long as the process lives
    int capability_ = 0;
    std::mutex mutex_;                      // guards the rest
    std::map<std::string, void*> modules_;  // by the part of kernels.cu
    std::map<std::string, void*> kernels_;
    std::vector<std::pair<Stream, Told*>> streams_;  // that nobody uses, each with what belongs to it
    std::map<Extent, std::vector<void*>> memory_;    // that nobody uses
};

// Makes a device current on this thread while the object lives. MXNet's threads have none at times: cudaSetDevice, before
// CUDA 12, leaves the driver without one until the thread's next call of the runtime.
class Current {
  public:
    explicit Current(Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
};

// A stream that nobody else uses while the object lives. The device has to be current.
class Lease {
  public:
    explicit Lease(Device& device);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    Stream stream() const { return stream_; }
    // Whether all that was put on the stream is done; throws the error of the device.
    bool idle() const;
    Told* told() const { return told_; }
    // It hangs: neither it nor the memory that it uses is of use to anybody.
    void abandon() { abandoned_ = true; }

  private:
    Device& device_;
    Stream stream_ = nullptr;
    Told* told_ = nullptr;
    bool abandoned_ = false;
};

// Numbers of float64 on a device, kept for the next one of the same extent and never given back to the driver. Nothing that
// is on a stream may use it when it goes. The device has to be current where the object is made.
class Memory {
  public:
    Memory() = default;
    Memory(Device& device, int64_t size);
    // Zero but for the part, which alone may be written: so it is made zero only where it is new, on this stream.
    Memory(Device& device, Extent extent, Stream stream);
    ~Memory();
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept;

    double* data() const { return static_cast<double*>(data_); }
    int64_t size() const { return extent_.size; }
    double* part() const { return data() + extent_.begin; }
    int64_t part_size() const { return extent_.length; }
    // To the device, and from there; `values` may change or go at once, and are there when this returns.
    void upload(const void* values, Stream stream) const;
    void download(double* values, const Lease& lease) const;
    // Something that never ends uses it.
    void abandon() { data_ = nullptr; }

  private:
    Device* device_ = nullptr;
    void* data_ = nullptr;
    Extent extent_;
};

// `arguments`: the structure of params.h that the kernel takes; it may go at once.
void launch(Device& device, Stream stream, const Kernel& kernel, Grid grid, const void* arguments);

}  // namespace cuda
}  // namespace syncbn

#include "cuda/driver.h"

#include <new>
#include <tuple>

#include "failure.h"
#include "types.h"

namespace syncbn::cuda {
namespace {

// The numbers of the driver's interface.
constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1;            // no implicit synchronisation with the default stream
constexpr int64_t kMost = 1 << 20;              // bytes of a room that is a power of two
constexpr unsigned kPortable = 1, kMapped = 2;  // memory of the host: for every device, at the same address

// Calls a function of the driver. Throws its message if it fails.
#define CUDA(NAME, ...) check(SYNCBN_CALL("CUDA", #NAME, __VA_ARGS__), #NAME)

// Throws the driver's message if `status` is not 0.
void check(int status, const char* function) {
    if (status == 0) return;
    const char* text = nullptr;
    call(need("cuGetErrorString", "CUDA"), status, &text);
    throw Failure(std::string(function) + ": " + (text != nullptr ? text : "unknown error") + " (CUDA error " +
                  std::to_string(status) + ")");
}

}  // namespace

Function need(const char* name, const char* library) {
    const Function found = find(name);
    if (found.address == nullptr)
        throw Failure(std::string(name) + " is missing: this MXNet was built without " + library);
    return found;
}

Device& Device::get(int id) {
    static Mutex mutex;
    static std::map<int, std::unique_ptr<Device>>& all = *new std::map<int, std::unique_ptr<Device>>;
    std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Device>& found = all[id];
    if (!found) found.reset(new Device(id));
    return *found;
}

Device::Device(int id) : id(id) {
    int ordinal = 0;
    CUDA(cuDeviceGet, &ordinal, id);
    CUDA(cuDevicePrimaryCtxRetain, &context_, ordinal);
}

void* Device::kernel(const Kernel& kernel) {
    const std::string name = kernel.stem + "_" + kernel.activation + "_" + kernel.type;
    std::lock_guard<std::mutex> lock(mutex_);
    void*& found = kernels_[name];
    if (found != nullptr) return found;
    const std::string line = "SYNCBN_KERNEL(" + kernel.stem + ", " + kernel.activation + ", " + kernel.type + ")";
    void* module = nullptr;
    const auto load = [&](const std::string& image) {
        return SYNCBN_CALL("CUDA", "cuModuleLoadData", &module, image.c_str());
    };
    int status = load(compiled(line));
    if (status != 0) status = load(compiled(line, true));  // the cached file may be damaged
    check(status, "cuModuleLoadData");
    CUDA(cuModuleGetFunction, &found, module, name.c_str());
    return found;
}

Current::Current(Device& device) { CUDA(cuCtxPushCurrent_v2, device.context_); }

Current::~Current() {
    void* context = nullptr;
    SYNCBN_CALL("CUDA", "cuCtxPopCurrent_v2", &context);
}

Lease::Lease(Device& device) : device(device) {
    std::unique_lock<std::mutex> lock(device.mutex_);
    if (device.streams_.empty()) {
        lock.unlock();
        CUDA(cuMemHostAlloc, &status_, sizeof(Status), kPortable | kMapped);
        CUDA(cuStreamCreate, &stream_, kNonBlocking);
    } else {
        std::tie(stream_, status_) = device.streams_.back();
        device.streams_.pop_back();
    }
    *status_ = {0, -1, 0};
}

Lease::~Lease() {
    std::lock_guard<std::mutex> lock(device.mutex_);
    try {
        device.streams_.emplace_back(stream_, status_);
    } catch (const std::bad_alloc&) {  // then the stream is lost
    }
}

bool Lease::idle() const {
    const int status = SYNCBN_CALL("CUDA", "cuStreamQuery", stream_);
    if (status == kNotReady) return false;
    check(status, "cuStreamQuery");
    return true;
}

Memory::Memory(Device& device, int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    int64_t unit = 1;
    while (unit < bytes && unit < kMost) unit *= 2;
    const int64_t room = (bytes + unit - 1) / unit * unit;
    std::unique_lock<std::mutex> lock(device.mutex_);
    const auto free = device.memory_.lower_bound(room);
    if (free != device.memory_.end() && free->first <= 2 * room) {
        data_ = {free->second, {&device, free->first}};
        device.memory_.erase(free);
    } else {
        lock.unlock();
        void* data = nullptr;
        CUDA(cuMemAlloc_v2, &data, static_cast<size_t>(room));
        data_ = {data, {&device, room}};
    }
}

void Memory::Keep::operator()(void* data) const {
    std::lock_guard<std::mutex> lock(device->mutex_);
    try {
        device->memory_.emplace(room, data);
    } catch (const std::bad_alloc&) {  // then the memory is lost
    }
}

void Memory::upload(const void* values, const Lease& lease) const {
    // From pageable memory, which is read before this returns.
    if (bytes() > 0) CUDA(cuMemcpyHtoDAsync_v2, data_.get(), values, static_cast<size_t>(bytes()), lease.stream());
}

void Memory::download(void* values, const Lease& lease) const {
    if (bytes() == 0) return;
    CUDA(cuMemcpyDtoHAsync_v2, values, data_.get(), static_cast<size_t>(bytes()), lease.stream());
    CUDA(cuStreamSynchronize, lease.stream());
}

void fill(void* to, int64_t bytes, int value, Stream stream) {
    if (bytes > 0) CUDA(cuMemsetD8Async, to, static_cast<unsigned char>(value), static_cast<size_t>(bytes), stream);
}

void launch(const Lease& on, const Kernel& kernel, Grid grid, const void* arguments) {
    void* pointers[] = {const_cast<void*>(arguments)};
    CUDA(cuLaunchKernel, on.device.kernel(kernel), static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
         static_cast<unsigned>(grid.z), kBlock, 1, 1, 0, on.stream(), pointers, nullptr);
}

}  // namespace syncbn::cuda

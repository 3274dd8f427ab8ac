#include "cuda/driver.h"

#include <new>
#include <tuple>

#include "failure.h"
#include "types.h"

namespace syncbn {
namespace cuda {
namespace {

// The numbers of the driver's interface.
constexpr int kNotReady = 600;
constexpr int kMajor = 75, kMinor = 76;
constexpr unsigned kNonBlocking = 1;            // no implicit synchronisation with the default stream
constexpr unsigned kPortable = 1, kMapped = 2;  // memory of the host: for every device, at the same address

struct Driver {
    static Function need(const char* name) { return cuda::need(name, "CUDA"); }
    int (*get_error_string)(int, const char**) = need("cuGetErrorString");
    int (*device_get)(int*, int) = need("cuDeviceGet");
    int (*device_get_attribute)(int*, int, int) = need("cuDeviceGetAttribute");
    int (*device_get_uuid)(char*, int) = need("cuDeviceGetUuid");
    int (*retain_context)(void**, int) = need("cuDevicePrimaryCtxRetain");
    int (*push_context)(void*) = need("cuCtxPushCurrent_v2");
    int (*pop_context)(void**) = need("cuCtxPopCurrent_v2");
    int (*stream_create)(Stream*, unsigned) = need("cuStreamCreate");
    int (*stream_query)(Stream) = need("cuStreamQuery");
    int (*stream_synchronize)(Stream) = need("cuStreamSynchronize");
    int (*allocate)(void**, size_t) = need("cuMemAlloc_v2");
    int (*allocate_host)(void**, size_t, unsigned) = need("cuMemHostAlloc");
    int (*set_bytes)(void*, unsigned char, size_t, Stream) = need("cuMemsetD8Async");
    int (*copy_to_device)(void*, const void*, size_t, Stream) = need("cuMemcpyHtoDAsync_v2");
    int (*copy_to_host)(void*, const void*, size_t, Stream) = need("cuMemcpyDtoHAsync_v2");
    int (*module_load)(void**, const void*) = need("cuModuleLoadData");
    int (*module_get_function)(void**, void*, const char*) = need("cuModuleGetFunction");
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                  void**) = need("cuLaunchKernel");
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

// Throws the driver's message if `status` is not 0.
void check(int status, const char* function) {
    if (status == 0) return;
    const char* text = nullptr;
    driver().get_error_string(status, &text);
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
    int ordinal = 0, major = 0, minor = 0;
    check(driver().device_get(&ordinal, id), "cuDeviceGet");
    check(driver().device_get_attribute(&major, kMajor, ordinal), "cuDeviceGetAttribute");
    check(driver().device_get_attribute(&minor, kMinor, ordinal), "cuDeviceGetAttribute");
    check(driver().device_get_uuid(&identity[0], ordinal), "cuDeviceGetUuid");
    check(driver().retain_context(&context_, ordinal), "cuDevicePrimaryCtxRetain");
    capability_ = 10 * major + minor;
}

void* Device::kernel(const Kernel& kernel) {
    const std::string name = kernel.stem + "_" + kernel.activation + "_" + kernel.type;
    std::lock_guard<std::mutex> lock(mutex_);
    void*& found = kernels_[name];
    if (found != nullptr) return found;
    const std::string line = "SYNCBN_KERNEL(" + kernel.stem + ", " + kernel.activation + ", " + kernel.type + ")";
    void* module = nullptr;
    const auto load = [&](const std::string& image) { return driver().module_load(&module, image.c_str()); };
    int status = load(compiled(capability_, line));
    if (status != 0) status = load(compiled(capability_, line, true));  // the kept file may be damaged
    check(status, "cuModuleLoadData");
    check(driver().module_get_function(&found, module, name.c_str()), "cuModuleGetFunction");
    return found;
}

Current::Current(Device& device) { check(driver().push_context(device.context_), "cuCtxPushCurrent"); }

Current::~Current() {
    void* context = nullptr;
    driver().pop_context(&context);
}

// ---- streams -----------------------------------------------------------------------------------------------------

Lease::Lease(Device& device) : device(device) {
    {
        std::lock_guard<std::mutex> lock(device.mutex_);
        if (!device.streams_.empty()) {
            std::tie(stream_, status_) = device.streams_.back();
            device.streams_.pop_back();
        }
    }
    if (stream_ == nullptr) {
        void* status = nullptr;
        check(driver().allocate_host(&status, sizeof(Status), kPortable | kMapped), "cuMemHostAlloc");
        check(driver().stream_create(&stream_, kNonBlocking), "cuStreamCreate");
        status_ = static_cast<Status*>(status);
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
    const int status = driver().stream_query(stream_);
    if (status == kNotReady) return false;
    check(status, "cuStreamQuery");
    return true;
}

// ---- memory ------------------------------------------------------------------------------------------------------

Memory::Memory(Device& device, int64_t size) : device_(&device), size_(size) {
    if (size == 0) return;
    while (room_ < size) room_ *= 2;
    {
        std::lock_guard<std::mutex> lock(device.mutex_);
        std::vector<void*>& free = device.memory_[room_];
        if (!free.empty()) {
            data_ = free.back();
            free.pop_back();
            return;
        }
    }
    check(driver().allocate(&data_, static_cast<size_t>(room_) * sizeof(double)), "cuMemAlloc");
}

Memory::~Memory() {
    if (data_ == nullptr) return;
    std::lock_guard<std::mutex> lock(device_->mutex_);
    try {
        device_->memory_[room_].push_back(data_);
    } catch (const std::bad_alloc&) {  // then the memory is lost
    }
}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(room_, other.room_);
    return *this;
}

void Memory::upload(const void* values, Stream stream) const {
    if (size() == 0) return;
    const size_t bytes = static_cast<size_t>(size()) * sizeof(double);
    // From pageable memory, which is read before this returns.
    check(driver().copy_to_device(data_, values, bytes, stream), "cuMemcpyHtoDAsync");
}

void Memory::download(double* values, const Lease& lease) const {
    if (size() == 0) return;
    const size_t bytes = static_cast<size_t>(size()) * sizeof(double);
    check(driver().copy_to_host(values, data_, bytes, lease.stream()), "cuMemcpyDtoHAsync");
    check(driver().stream_synchronize(lease.stream()), "cuStreamSynchronize");
}

void fill_with_zeros(void* to, int64_t bytes, Stream stream) {
    if (bytes > 0) check(driver().set_bytes(to, 0, static_cast<size_t>(bytes), stream), "cuMemsetD8Async");
}

// ---- launches ----------------------------------------------------------------------------------------------------

void launch(Device& device, Stream stream, const Kernel& kernel, Grid grid, const void* arguments) {
    void* pointers[] = {const_cast<void*>(arguments)};
    check(driver().launch(device.kernel(kernel), static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                          static_cast<unsigned>(grid.z), kBlock, 1, 1, 0, stream, pointers, nullptr),
          "cuLaunchKernel");
}

}  // namespace cuda
}  // namespace syncbn

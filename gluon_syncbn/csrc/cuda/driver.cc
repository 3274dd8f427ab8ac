#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstring>
#include <new>
#include <tuple>

#include "cuda/compiler.h"
#include "failure.h"
#include "types.h"

namespace syncbn {
namespace cuda {
namespace {

void* library = nullptr;

// A function of the driver, which converts to the type of its pointer.
struct Found {
    const char* name;
    template <typename F>
    operator F*() const {
        void* const function = find(name);
        if (function == nullptr) throw Failure(std::string(name) + " is missing: this MXNet was built without CUDA");
        return reinterpret_cast<F*>(function);
    }
};

// The numbers of the driver's interface.
constexpr int kNotReady = 600;
constexpr int kMajor = 75, kMinor = 76;
constexpr unsigned kNonBlocking = 1;            // no implicit synchronisation with the default stream
constexpr unsigned kPortable = 1, kMapped = 2;  // memory of the host: for every device, at the same address

struct Driver {
    int (*get_error_string)(int, const char**) = Found{"cuGetErrorString"};
    int (*device_get)(int*, int) = Found{"cuDeviceGet"};
    int (*device_get_attribute)(int*, int, int) = Found{"cuDeviceGetAttribute"};
    int (*device_get_uuid)(char*, int) = Found{"cuDeviceGetUuid"};
    int (*retain_context)(void**, int) = Found{"cuDevicePrimaryCtxRetain"};
    int (*push_context)(void*) = Found{"cuCtxPushCurrent_v2"};
    int (*pop_context)(void**) = Found{"cuCtxPopCurrent_v2"};
    int (*stream_create)(Stream*, unsigned) = Found{"cuStreamCreate"};
    int (*stream_query)(Stream) = Found{"cuStreamQuery"};
    int (*stream_synchronize)(Stream) = Found{"cuStreamSynchronize"};
    int (*allocate)(void**, size_t) = Found{"cuMemAlloc_v2"};
    int (*allocate_host)(void**, size_t, unsigned) = Found{"cuMemHostAlloc"};
    int (*set_bytes)(void*, unsigned char, size_t, Stream) = Found{"cuMemsetD8Async"};
    int (*copy_to_device)(void*, const void*, size_t, Stream) = Found{"cuMemcpyHtoDAsync_v2"};
    int (*copy_to_host)(void*, const void*, size_t, Stream) = Found{"cuMemcpyDtoHAsync_v2"};
    int (*module_load)(void**, const void*) = Found{"cuModuleLoadData"};
    int (*module_get_function)(void**, void*, const char*) = Found{"cuModuleGetFunction"};
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                  void**) = Found{"cuLaunchKernel"};
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

}  // namespace

void set_library(void* handle) { library = handle; }

void* find(const char* name) { return library == nullptr ? nullptr : dlsym(library, name); }

void check(int status, const char* function) {
    if (status == 0) return;
    const char* text = nullptr;
    driver().get_error_string(status, &text);
    throw Failure(std::string(function) + ": " + (text != nullptr ? text : "unknown error") + " (CUDA error " +
                  std::to_string(status) + ")");
}

Device& Device::get(int id) {
    static std::mutex mutex;
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
    check(driver().retain_context(&context_, ordinal), "cuDevicePrimaryCtxRetain");
    capability_ = 10 * major + minor;
}

std::string Device::identity() const {
    std::string uuid(16, 0);
    int ordinal = 0;
    check(driver().device_get(&ordinal, id), "cuDeviceGet");
    check(driver().device_get_uuid(&uuid[0], ordinal), "cuDeviceGetUuid");
    return uuid;
}

void* Device::kernel(const Kernel& kernel) {
    std::string name = kernel.stem;
    for (const std::string& end : {kernel.activation, kernel.type})
        if (!end.empty()) name += "_" + end;
    std::lock_guard<std::mutex> lock(mutex_);
    void*& found = kernels_[name];
    if (found != nullptr) return found;
    // Every part contains the kernels without a type.
    const Part part{kernel.type.empty() ? name_of(Type::kFloat32) : kernel.type,
                    kernel.stem.compare(0, std::strlen(kMasked), kMasked) == 0  ? kMasked
                    : kernel.activation == name_of(Activation::Kind::kIdentity) ? ""
                                                                                : kernel.activation};
    void*& module = modules_[part.name()];
    if (module == nullptr) {
        const auto load = [&](const std::string& image) { return driver().module_load(&module, image.c_str()); };
        int status = load(compiled(capability_, part));
        if (status != 0) status = load(compiled(capability_, part, true));  // the kept file may be damaged
        check(status, "cuModuleLoadData");
    }
    check(driver().module_get_function(&found, module, name.c_str()), "cuModuleGetFunction");
    return found;
}

Current::Current(Device& device) { check(driver().push_context(device.context_), "cuCtxPushCurrent"); }

Current::~Current() {
    void* context = nullptr;
    driver().pop_context(&context);
}

// ---- streams -----------------------------------------------------------------------------------------------------

Lease::Lease(Device& device) : device_(device) {
    {
        std::lock_guard<std::mutex> lock(device.mutex_);
        if (!device.streams_.empty()) {
            std::tie(stream_, findings_) = device.streams_.back();
            device.streams_.pop_back();
        }
    }
    if (stream_ == nullptr) {
        void* findings = nullptr;
        check(driver().allocate_host(&findings, sizeof(Findings), kPortable | kMapped), "cuMemHostAlloc");
        check(driver().stream_create(&stream_, kNonBlocking), "cuStreamCreate");
        findings_ = static_cast<Findings*>(findings);
    }
    *findings_ = {0, -1, 0};
}

Lease::~Lease() {
    if (abandoned_) return;
    std::lock_guard<std::mutex> lock(device_.mutex_);
    try {
        device_.streams_.emplace_back(stream_, findings_);
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
    {
        std::lock_guard<std::mutex> lock(device.mutex_);
        std::vector<void*>& free = device.memory_[size];
        if (!free.empty()) {
            data_ = free.back();
            free.pop_back();
            return;
        }
    }
    void* made = nullptr;
    check(driver().allocate(&made, static_cast<size_t>(size) * sizeof(double)), "cuMemAlloc");
    data_ = made;
}

Memory::~Memory() {
    if (data_ == nullptr) return;
    std::lock_guard<std::mutex> lock(device_->mutex_);
    try {
        device_->memory_[size_].push_back(data_);
    } catch (const std::bad_alloc&) {  // then the memory is lost
    }
}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void Memory::upload(const void* values, Stream stream) const {
    if (size() == 0) return;
    const size_t bytes = static_cast<size_t>(size()) * sizeof(double);
    check(driver().copy_to_device(data_, values, bytes, stream),
          "cuMemcpyHtoDAsync");  // pageable: read before it returns
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

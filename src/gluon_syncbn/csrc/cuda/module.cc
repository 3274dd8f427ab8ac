#include "cuda/module.h"

#include <dlfcn.h>

#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"

namespace syncbn {
namespace cuda {
namespace {

void check(int status) {
    if (status != 0) throw Failure(mx.last_error());
}

// MXNet's own tables of modules and kernels have no lock.
std::mutex mutex;
std::string source_path;
std::map<std::string, void*> kernels;

// The device's context, current on this thread while the object lives. MXNet loads a module after no more than
// cudaSetDevice, which before CUDA 12 leaves the driver without a context until the thread's next call of the runtime: a
// thread whose memory comes from MXNet's pool makes none.
class CurrentContext {
  public:
    explicit CurrentContext(int device) {
        int ordinal = 0;
        void* context = nullptr;
        call("cuDeviceGet", driver<int(int*, int)>("cuDeviceGet")(&ordinal, device));
        // It is never released: MXNet keeps it for as long as the process lives.
        call("cuDevicePrimaryCtxRetain", driver<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, ordinal));
        call("cuCtxPushCurrent", driver<int(void*)>("cuCtxPushCurrent_v2")(context));
    }
    ~CurrentContext() {
        void* context = nullptr;
        driver<int(void**)>("cuCtxPopCurrent_v2")(&context);
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

  private:
    template <typename F>
    static F* driver(const char* name) {
        static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        void* const function = library == nullptr ? nullptr : dlsym(library, name);
        if (function == nullptr) throw Failure(dlerror());
        return reinterpret_cast<F*>(function);
    }
    static void call(const char* name, int status) {
        if (status != 0) throw Failure(std::string(name) + " of the CUDA driver failed with " + std::to_string(status));
    }
};

// Intermediate code of the lowest capability that MXNet 1.9.1 supports: the driver makes that of the device from it.
void* module() {
    static void* compiled = nullptr;
    if (compiled != nullptr) return compiled;
    std::ifstream file(source_path);
    std::ostringstream source;
    source << file.rdbuf();
    if (!file) throw Failure("cannot read " + source_path + "; install gluon_syncbn again");
    const std::string block = "-DSYNCBN_BLOCK=" + std::to_string(kBlock);
    const char* options[] = {"--gpu-architecture=compute_50", "--std=c++14", block.c_str()};
    check(mx.rtc_module_create(source.str().c_str(), 3, options, 0, nullptr, &compiled));
    return compiled;
}

void* kernel(const std::string& name, const std::initializer_list<Argument>& arguments) {
    void*& found = kernels[name];
    if (found != nullptr) return found;
    std::vector<int> is_array, is_const, types;
    for (const Argument& argument : arguments) {
        is_array.push_back(argument.is_array);
        is_const.push_back(argument.is_const);
        types.push_back(argument.type);
    }
    check(mx.rtc_kernel_create(module(), name.c_str(), static_cast<int>(types.size()), is_array.data(), is_const.data(),
                               types.data(), &found));
    return found;
}

}  // namespace

void set_source(const std::string& path) { source_path = path; }

void launch(const std::string& name, int device, Grid grid, std::initializer_list<Argument> arguments) {
    std::vector<void*> pointers;
    for (const Argument& argument : arguments)
        pointers.push_back(argument.is_array ? argument.array : const_cast<int64_t*>(&argument.int64));
    std::lock_guard<std::mutex> lock(mutex);
    static std::set<std::pair<std::string, int>> known;  // MXNet looks a kernel up once for each device
    const std::pair<std::string, int> which(name, device);
    const auto current = known.count(which) == 0 ? std::make_unique<CurrentContext>(device) : nullptr;
    check(mx.rtc_kernel_call(kernel(name, arguments), device, pointers.data(), static_cast<uint32_t>(grid.x),
                             static_cast<uint32_t>(grid.y), static_cast<uint32_t>(grid.z), kBlock, 1, 1, 0));
    known.insert(which);
}

void read(void* array, double* values, int64_t n) { check(mx.ndarray_to_cpu(array, values, static_cast<size_t>(n))); }

Doubles::Doubles(int device, int64_t size) : size_(size) {
    constexpr int kGpu = 2;
    const uint32_t shape[] = {static_cast<uint32_t>(size)};
    check(mx.ndarray_create(shape, 1, kGpu, device, 0, static_cast<int>(Type::kFloat64), &handle_));
}

Doubles::~Doubles() {
    if (handle_ != nullptr) mx.ndarray_free(handle_);
}

Doubles& Doubles::operator=(Doubles&& other) {
    std::swap(handle_, other.handle_);
    std::swap(size_, other.size_);
    return *this;
}

void Doubles::upload(const double* values) { check(mx.ndarray_from_cpu(handle_, values, static_cast<size_t>(size_))); }

void Doubles::download(double* values) const { read(handle_, values, size_); }

}  // namespace cuda
}  // namespace syncbn

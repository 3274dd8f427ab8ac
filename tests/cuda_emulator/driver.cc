// The driver API.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <tuple>
#include <utility>

#include "emulator.h"

using namespace emulator;

namespace {

struct Module {
    int device;
    const Kernel* kernels;
};
struct Function {
    int device;
    const Kernel* kernel;
};

// The values of a launch's parameters, which the caller may change as soon as the launch is enqueued.
using Values = std::vector<std::unique_ptr<char[]>>;  // operator new[] aligns for any fundamental type

// Why a parameter holds an address that is not for this device; empty if none does.
std::string problem(const Kernel& kernel, const Values& values, int device) {
    for (unsigned i = 0; i < kernel.parameters; ++i)
        for (size_t at = 0; at + sizeof(uintptr_t) <= kernel.sizes[i]; at += sizeof(uintptr_t)) {
            uintptr_t word;
            std::memcpy(&word, values[i].get() + at, sizeof word);
            // No address: numbers are smaller, those of floating point larger, and the rest is padding.
            if (word >> 44 == 0 || word >> 47 != 0 || (word & 0xffffffff) >> 16 == 0) continue;
            const void* const pointer = reinterpret_cast<const void*>(word);
            const std::string wrong =
                device_of(pointer) == kPageableHost ? "host memory" : emulator::problem(pointer, 1, device);
            if (!wrong.empty()) return wrong;
        }
    return "";
}

// A context is a device: this many contexts, whose addresses are their handles.
char contexts[kDevices];
thread_local std::vector<std::pair<int, bool>> pushed;

}  // namespace

extern "C" {

Status cuInit(unsigned) { return kSuccess; }
Status cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return good_device(ordinal);
}
Status cuDeviceGetCount(int* count) {
    *count = kDevices;
    return kSuccess;
}
Status cuDriverGetVersion(int* version) {
    *version = kDriverVersion;
    return kSuccess;
}
Status cuDeviceGetAttribute(int* value, int which, int device) {
    *value = attribute(which);
    return good_device(device);
}
Status cuDeviceGetName(char* text, int size, int device) {
    std::snprintf(text, static_cast<size_t>(size), "%s", name(device).c_str());
    return good_device(device);
}
Status cuDevicePrimaryCtxRetain(void** context, int device) {
    if (const Status status = good_device(device)) return status;
    *context = &contexts[device];
    return kSuccess;
}
Status cuCtxSetCurrent(void* context) {
    const ptrdiff_t device = static_cast<char*>(context) - contexts;
    if (device < 0 || device >= kDevices) return kInvalidContext;
    current_device = static_cast<int>(device);
    bound = true;
    return kSuccess;
}
Status cuCtxPushCurrent_v2(void* context) {
    const std::pair<int, bool> before(current_device, bound);
    const Status status = cuCtxSetCurrent(context);
    if (status == kSuccess) pushed.push_back(before);
    return status;
}
Status cuCtxPopCurrent_v2(void** context) {
    if (pushed.empty()) return kInvalidContext;
    *context = &contexts[current_device];
    std::tie(current_device, bound) = pushed.back();
    pushed.pop_back();
    return kSuccess;
}
Status cuCtxSynchronize() { return synchronize_device(current_device); }
Status cuGetErrorString(Status status, const char** text) {
    *text = status_text(status);
    return kSuccess;
}

Status cuMemAlloc_v2(void** out, size_t size) {
    if (size == 0) return kInvalidValue;
    if (!bound) return kInvalidContext;
    if (const Status status = sticky(current_device)) return status;
    count(current_device, kAllocations);
    return allocate(current_device, size, out);
}
Status cuMemFree_v2(void* pointer) {
    synchronize_device(current_device);
    return release(pointer, false);
}
// For any device, at the address that the host has; the flags say no more than that.
Status cuMemHostAlloc(void** out, size_t size, unsigned flags) {
    if (size == 0 || flags > 7) return kInvalidValue;
    if (!bound) return kInvalidContext;
    return allocate(kPinnedHost, size, out);
}
Status cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t size, void* handle) {
    return on_stream(handle, [&](const auto& stream) {
        return copy({to, from, size, device_of(*stream), device_of(*stream)}, stream);
    });
}
Status cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t size, void* stream) {
    return cuMemcpyHtoDAsync_v2(to, from, size, stream);
}
Status cuMemsetD8Async(void* to, unsigned char value, size_t size, void* handle) {
    return on_stream(handle, [&](const auto& stream) { return fill(to, value, size, stream); });
}
Status cuStreamCreate(void** out, unsigned) {
    *out = create_stream(current_device);
    return kSuccess;
}
Status cuStreamQuery(void* handle) { return on_stream(handle, query); }
Status cuStreamSynchronize(void* handle) { return on_stream(handle, synchronize); }

// ---- modules -------------------------------------------------------------------------------------------------

Status cuModuleLoadData(Module** out, const void* image) {
    if (!bound) return kInvalidContext;
    if (const Status status = sticky(current_device)) return status;
    int architecture = 0;
    char library[4096];  // what nvrtc.cc calls PTX
    const char* const ptx = "// CUDA emulator // architecture %d // library %4095[^\n]";
    if (std::sscanf(static_cast<const char*>(image), ptx, &architecture, library) != 2) return kInvalidImage;
    // PTX runs on its architecture and on later ones.
    if (architecture > capability()) return kNoKernelImage;
    // It stays: launches may be under way, and errors are to find their lines.
    void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return report(-1, kInvalidImage, dlerror());
    *out = new Module{current_device, static_cast<const Kernel*>(dlsym(handle, "emulated_kernels"))};
    return kSuccess;
}
Status cuModuleLoadDataEx(Module** out, const void* image, unsigned, int*, void**) {
    return cuModuleLoadData(out, image);
}

Status cuModuleUnload(Module*) { return kSuccess; }
Status cuModuleGetFunction(Function** out, Module* module, const char* name) {
    if (!bound) return kInvalidContext;
    const Kernel* kernel = module->kernels;
    while (kernel->name && std::strcmp(kernel->name, name) != 0) ++kernel;
    if (!kernel->name) return kNotFound;
    *out = new Function{module->device, kernel};  // for good: there are few
    return kSuccess;
}

Status cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, void* handle, void** parameters,
                      void** extra) {
    if (!bound) return kInvalidContext;
    const StreamPointer stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    const int device = device_of(*stream);
    if (const Status status = sticky(device)) return status;
    const Kernel& kernel = *function->kernel;
    if (function->device != device)
        return report(device, kInvalidHandle,
                      format("kernel %s of a module loaded on device %d, launched in a stream of device %d",
                             kernel.name, function->device, device));
    const unsigned long threads = 1ul * block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535 || !threads ||
        threads > 1024 || block_z > 64 || shared_bytes || extra)
        return kInvalidValue;
    auto values = std::make_shared<Values>();
    for (unsigned i = 0; i < kernel.parameters; ++i) {
        values->emplace_back(new char[kernel.sizes[i]]);
        std::memcpy(values->back().get(), parameters[i], kernel.sizes[i]);
    }
    count(device, kLaunches);
    enqueue(stream,
            [=, grid = Dimensions{grid_x, grid_y, grid_z}, block = Dimensions{block_x, block_y, block_z}, &kernel] {
                const std::string wrong = problem(kernel, *values, device);
                if (!wrong.empty()) {
                    report(device, kIllegalAddress, std::string("kernel ") + kernel.name + ", an argument: " + wrong);
                    return;
                }
                std::vector<void*> arguments;
                for (const auto& value : *values) arguments.push_back(value.get());
                run({&kernel, grid, block, device, arguments.data()});
            });
    return kSuccess;
}
}

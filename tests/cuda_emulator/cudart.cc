// The runtime API, as far as MXNet calls it here.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "emulator.h"

using namespace emulator;

namespace {

Status answer(Status status) {
    bound = true;  // what the calling function did needs a context
    return status;
}

// The beginning of CUDA 11's cudaDeviceProp; what has no name of its own is 0.
struct Properties {
    char name[256], others[104];
    int major, minor;
    char more[20];
    int multiprocessors;
};

thread_local void* stream_of_launch;

// MXNet's own kernels, by the address of the function that launches them.
struct Kernels {
    std::mutex mutex;
    std::map<const void*, std::string> names;
};
Kernels& kernels = *new Kernels;

// Two of them are emulated. The first, (int n, T* out): nd.zeros and zeros_like, without which Gluon makes no gradient.
// The bytes of T, or 0.
size_t zeroed(const std::string& name) {
    const std::string zero = "mxnet_generic_kernelINS1_11op_with_reqINS1_10set_to_intILi0EEELi1EEEJP";
    const size_t found = name.find(zero);
    const std::map<char, size_t> sizes = {{'d', 8}, {'f', 4}, {'N', 2}, {'l', 8},
                                          {'i', 4}, {'h', 1}, {'a', 1}, {'b', 1}};  // N: half
    const auto size = found == std::string::npos ? sizes.end() : sizes.find(name[found + zero.size()]);
    return size == sizes.end() ? 0 : size->second;
}

// The second: a + b, a + b + c or a + b + c + d of float64 in mshadow, with which KVStore `device` adds. How many they
// are, or 0.
size_t summands(const std::string& name) {
    const std::string begin =
        "_ZN7mshadow4cuda13MapPlanKernelINS_2sv6savetoELi8ENS_4expr4PlanINS_6TensorINS_3gpuELi2EdEEdEENS5_INS4_"
        "12BinaryMapExpINS_2op4plusE";
    std::string sum = "S8_S8_dLi1EEE";
    for (size_t count = 2; count <= 4; ++count, sum = "NSA_ISC_" + sum + "S8_dLi1EEE")
        if (name == begin + sum + "dEEEEvT1_iNS_5ShapeILi2EEET2_") return count;
    return 0;
}
struct Matrix {  // mshadow's Plan of a Tensor; that of a sum holds those of its parts, from the first to the last
    double* data;
    int stride;
};
// `to` may be one of the parts.
Status add(double* to, const Matrix* parts, size_t count, size_t size, const StreamPointer& stream) {
    emulator::count(device_of(*stream), kLaunches);
    const std::vector<Matrix> from(parts, parts + count);
    std::vector<Bytes> reads;
    for (const Matrix& one : from) reads.push_back({one.data, size * sizeof(double)});
    return compute(stream, "sum", reads, {to, size * sizeof(double)}, [=] {
        for (size_t i = 0; i < size; ++i) {
            double sum = from[0].data[i];
            for (size_t j = 1; j < count; ++j) sum += from[j].data[i];
            to[i] = sum;
        }
    });
}

}  // namespace

extern "C" {

// ---- devices -------------------------------------------------------------------------------------------------

Status cudaGetDeviceCount(int* count) {
    *count = kDevices;
    return kSuccess;
}
Status cudaGetDevice(int* device) {
    *device = current_device;
    return kSuccess;
}
Status cudaSetDevice(int device) {
    if (const Status status = good_device(device)) return answer(status);
    current_device = device;
    return kSuccess;
}
Status cudaDriverGetVersion(int* version) {
    *version = kDriverVersion;
    return kSuccess;
}
Status cudaGetDeviceProperties(Properties* out, int device) {
    if (const Status status = good_device(device)) return answer(status);
    std::memset(out, 0, sizeof *out);
    std::snprintf(out->name, sizeof out->name, "%s", name(device).c_str());
    out->major = capability() / 10;
    out->minor = capability() % 10;
    out->multiprocessors = 4;
    return kSuccess;
}
Status cudaDeviceGetAttribute(int* value, int which, int device) {
    *value = attribute(which);
    return answer(good_device(device));
}
// No device sees another's memory: whatever crosses must be a copy.
Status cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return kSuccess;
}

// ---- memory --------------------------------------------------------------------------------------------------

Status cudaMalloc(void** out, size_t size) {
    if (const Status status = sticky(current_device)) return answer(status);
    return answer(allocate(current_device, size, out));
}
// Freeing succeeds after an error too: MXNet frees in destructors, where an exception ends the process.
Status cudaFree(void* pointer) {
    synchronize_device(current_device);  // as CUDA does: what runs may still use it
    return answer(release(pointer, false));
}
Status cudaHostAlloc(void** out, size_t size, unsigned) { return answer(allocate(kPinnedHost, size, out)); }
Status cudaFreeHost(void* pointer) {
    for (int device = 0; device < kDevices; ++device) synchronize_device(device);
    return answer(release(pointer, true));
}
Status cudaMemGetInfo(size_t* free, size_t* total) {
    *total = kMemoryOfDevice;
    *free = *total - bytes_in_use(current_device);
    return kSuccess;
}

// Of one row, as MXNet calls it.
Status cudaMemcpy2DAsync(void* to, size_t, const void* from, size_t, size_t width, size_t rows, int, void* handle) {
    if (rows != 1) return answer(kInvalidValue);
    return answer(on_stream(handle, [&](const auto& stream) {
        return copy({to, from, width, device_of(*stream), device_of(*stream)}, stream);
    }));
}
Status cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size, void* handle) {
    const Copy what = {to, from, size, to_device, from_device};
    return answer(on_stream(handle, [&](const auto& stream) { return copy(what, stream); }));
}

// ---- streams -------------------------------------------------------------------------------------------------

Status cudaStreamCreate(void** out) {
    *out = create_stream(current_device);
    return answer(kSuccess);
}
Status cudaStreamDestroy(void* handle) { return answer(destroy_stream(handle)); }
Status cudaStreamSynchronize(void* handle) { return answer(on_stream(handle, synchronize)); }

// ---- errors --------------------------------------------------------------------------------------------------

Status cudaPeekAtLastError() { return sticky(current_device); }
const char* cudaGetErrorString(Status status) { return status_text(status); }

// ---- MXNet's own kernels: machine code for a GPU, which nothing here can run -----------------------------------

void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
    std::lock_guard<std::mutex> lock(kernels.mutex);
    kernels.names[host] = name;
}
// Of grid, block, shared memory and stream, the emulated ones need the stream alone.
unsigned __cudaPushCallConfiguration(Dimensions, Dimensions, size_t, void* stream) {
    stream_of_launch = stream;
    return 0;
}
Status __cudaPopCallConfiguration(Dimensions*, Dimensions*, size_t*, void** stream) {
    *stream = stream_of_launch;
    return kSuccess;
}
Status cudaLaunchKernel(const void* host, Dimensions, Dimensions, void** arguments, size_t, void* stream) {
    std::unique_lock<std::mutex> lock(kernels.mutex);
    const std::string name = kernels.names[host];
    lock.unlock();
    if (const size_t size = zeroed(name))
        return answer(
            fill(*static_cast<void**>(arguments[1]), 0, size * *static_cast<int*>(arguments[0]), find_stream(stream)));
    if (const size_t count = summands(name)) {  // (Matrix to, int, int shape[2], Matrix from[count]), without gaps
        const int* const shape = static_cast<int*>(arguments[2]);
        return answer(add(static_cast<Matrix*>(arguments[0])->data, static_cast<Matrix*>(arguments[3]), count,
                          static_cast<size_t>(shape[0]) * shape[1], find_stream(stream)));
    }
    return report(current_device, kNoKernelImage, "MXNet's own kernel cannot run here: " + name.substr(0, 300));
}
}

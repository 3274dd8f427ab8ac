// The runtime API, as far as libmxnet.so imports it, and a few functions beside.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "copies.h"
#include "device.h"
#include "launch.h"
#include "memory.h"
#include "streams.h"

using namespace emulator;

namespace {

// What cudaGetLastError returns: MXNet looks at it after its launches, and never takes it away.
thread_local Status last_error = kSuccess;
thread_local int last_error_resets = 0;

Status answer(Status status) {
    bound = true;  // what the calling function did needs a context
    if (status == kSuccess || status == kNotReady) return status;
    last_error = status;
    last_error_resets = resets();
    return status;
}
Status last_error_now() {
    if (last_error_resets != resets()) last_error = kSuccess;
    return last_error ? last_error : sticky(current_device);
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
                                          {'i', 4}, {'h', 1}, {'a', 1}};  // N: half
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

}  // namespace

extern "C" {

// ---- devices -------------------------------------------------------------------------------------------------

Status cudaGetDeviceCount(int* count) {
    *count = device_count();
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
Status cudaDeviceSynchronize() { return answer(synchronize_device(current_device)); }
Status cudaDriverGetVersion(int* version) {
    *version = kDriverVersion;
    return kSuccess;
}
Status cudaRuntimeGetVersion(int* version) {
    *version = 11020;
    return kSuccess;
}
Status cudaGetDeviceProperties(Properties* out, int device) {
    if (const Status status = good_device(device)) return answer(status);
    std::memset(out, 0, sizeof *out);
    std::snprintf(out->name, sizeof out->name, "%s", name(device).c_str());
    out->major = capability_major();
    out->minor = capability_minor();
    out->multiprocessors = 4;
    return kSuccess;
}
Status cudaDeviceGetAttribute(int* value, int which, int device) {
    if (const Status status = good_device(device)) return answer(status);
    *value = attribute(which);
    return kSuccess;
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
    for (int device = 0; device < device_count(); ++device) synchronize_device(device);
    return answer(release(pointer, true));
}
Status cudaMemGetInfo(size_t* free, size_t* total) {
    *total = memory_per_device();
    *free = *total - bytes_in_use(current_device);
    return kSuccess;
}

// The kinds: 0 host to host, 1 host to device, 2 device to host, 3 device to device, 4 by the addresses
Status cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                         int kind, void* handle) {
    const StreamPointer stream = find_stream(handle);
    if (!stream) return answer(kInvalidHandle);
    const int device = device_of(*stream);
    const bool to_host = device_of(to) < 0, from_host = device_of(from) < 0;
    if (width && rows && kind != 4 && ((kind == 0 || kind == 2) != to_host || (kind == 0 || kind == 1) != from_host))
        return answer(report(device, kInvalidValue,
                             format("a copy from %p (%s) to %p (%s) is not of kind %d", from,
                                    from_host ? "host" : "device", to, to_host ? "host" : "device", kind)));
    return answer(copy({to, to_pitch, from, from_pitch, width, rows, device, device}, stream));
}
Status cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
    return cudaMemcpy2DAsync(to, size, from, size, size, 1, kind, stream);
}
Status cudaMemcpy(void* to, const void* from, size_t size, int) { return answer(copy_and_wait(to, from, size)); }
Status cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size, void* handle) {
    const Copy what = {to, size, from, size, size, 1, to_device, from_device};
    return answer(on_stream(handle, [&](const auto& stream) { return copy(what, stream); }));
}

// ---- streams and events --------------------------------------------------------------------------------------

Status cudaStreamCreate(void** out) {
    *out = create_stream(current_device, kBlocking);
    return answer(kSuccess);
}
Status cudaStreamCreateWithFlags(void** out, unsigned flags) {
    *out = create_stream(current_device, flags & 1 ? kNonBlocking : kBlocking);
    return answer(kSuccess);
}
Status cudaStreamDestroy(void* handle) { return answer(destroy_stream(handle)); }
Status cudaStreamSynchronize(void* handle) { return answer(on_stream(handle, synchronize)); }
Status cudaStreamQuery(void* handle) { return answer(on_stream(handle, query)); }
Status cudaStreamIsCapturing(void* handle, int* capturing) {
    *capturing = 0;  // there are no graphs
    return answer(find_stream(handle) ? kSuccess : kInvalidHandle);
}
Status cudaStreamWaitEvent(void* handle, void* event, unsigned) {
    return answer(on_stream(handle, [&](const auto& stream) { return wait_for_event(stream, event); }));
}
Status cudaEventCreate(void** out) {
    *out = create_event();
    return kSuccess;
}
Status cudaEventCreateWithFlags(void** out, unsigned) { return cudaEventCreate(out); }
Status cudaEventDestroy(void* event) { return answer(destroy_event(event)); }
Status cudaEventRecord(void* event, void* handle) {
    return answer(on_stream(handle, [&](const auto& stream) { return record_event(event, stream); }));
}
Status cudaEventQuery(void* event) { return answer(query_event(event)); }
Status cudaEventSynchronize(void* event) { return answer(synchronize_event(event)); }
Status cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
    return answer(elapsed(milliseconds, start, end));
}

// ---- errors --------------------------------------------------------------------------------------------------

Status cudaGetLastError() {
    const Status status = last_error_now();
    last_error = kSuccess;
    return status;
}
Status cudaPeekAtLastError() { return last_error_now(); }
const char* cudaGetErrorName(Status status) { return status_name(status); }
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
        const Matrix* const matrices = static_cast<Matrix*>(arguments[3]);
        std::vector<const double*> from;
        for (size_t i = 0; i < count; ++i) from.push_back(matrices[i].data);
        return answer(add(static_cast<Matrix*>(arguments[0])->data, from, static_cast<size_t>(shape[0]) * shape[1],
                          find_stream(stream)));
    }
    report(-1, kNoKernelImage, "MXNet's own kernel cannot run here: " + name.substr(0, 300));
    return answer(kNoKernelImage);
}
Status cudaFuncGetAttributes(void*, const void*) { return answer(kNoKernelImage); }
Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*, const void*, int, size_t, unsigned) {
    return answer(kNoKernelImage);
}
}

"""The CUDA emulator itself: what runs on it, and that it finds each kind of fault that it promises to find."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from environments import ended
from places import TESTS

OUT = os.environ.get("CUDA_EMULATOR")
if not OUT:
    pytest.skip("needs the emulator and the CUDA wheel: make test-gpu-emulated", allow_module_level=True)

import mxnet as mx  # noqa: E402
from cuda_emulator.device import Device, EmulatorError, errors  # noqa: E402

cuda = ctypes.CDLL(f"{OUT}/lib/libcuda.so.1")
cudart = ctypes.CDLL(f"{OUT}/lib/libcudart.so.11.0")
nccl = ctypes.CDLL(f"{OUT}/lib/libnccl.so.2")
GPUS = [mx.gpu(i) for i in range(4)]
NOT_READY = 600


@pytest.fixture(autouse=True)
def no_errors_left():
    cuda.cuda_emulator_reset()
    yield
    count, text = errors(cuda)
    cuda.cuda_emulator_reset()
    assert count == 0, text


def take_errors():
    _, text = errors(cuda)
    cuda.cuda_emulator_reset()
    return text


def on(gpu, values, dtype="float32"):
    return mx.nd.array(values, ctx=mx.gpu(gpu), dtype=dtype)


def python(code, **environment):
    return ended([sys.executable, "-c", code], OUT, *sys.path, **environment)


# ---- MXNet ---------------------------------------------------------------------------------------------------


def test_the_wheel_is_the_cuda_build_and_sees_four_devices():
    assert Path(mx.__file__).parent == Path(OUT).resolve() / "mxnet"
    assert mx.runtime.Features().is_enabled("CUDA")
    assert mx.context.num_gpus() == 4


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_copies(rng, dtype):
    values = (100 * rng.randn(7, 5)).astype(dtype)
    arrays = [on(i, values + i, dtype) for i in range(4)]
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array.asnumpy(), values + i)
    for source in GPUS:
        for target in GPUS:
            there = arrays[source.device_id].as_in_context(target)
            np.testing.assert_array_equal(there.asnumpy(), values + source.device_id)


AXPY = """
template <typename T> __global__ void axpy(const T* x, T* y, T alpha, int n) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n) y[i] += alpha * x[i];
}
extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }
"""


@pytest.mark.parametrize("dtype, c_type", [("float32", "float"), ("float64", "double")])
def test_kernels_of_mxnets_run_time_compiler(rng, dtype, c_type):
    module = mx.rtc.CudaModule(AXPY, options=["--gpu-architecture=compute_80"], exports=[f"axpy<{c_type}>"])
    kernel = module.get_kernel(f"axpy<{c_type}>", f"const {c_type} *x, {c_type} *y, {c_type} alpha, int n")
    x, y = rng.randn(1000).astype(dtype), rng.randn(1000).astype(dtype)
    for i, gpu in enumerate(GPUS):
        a, b = on(i, x, dtype), on(i, y, dtype)
        kernel.launch([a, b, 3.0, 1000], gpu, (8, 1, 1), (128, 1, 1))
        np.testing.assert_allclose(b.asnumpy(), y + 3 * x, rtol=1e-5)
    z = on(1, np.ones(4))
    module.get_kernel("twice", "float *x").launch([z], mx.gpu(1), (1, 1, 1), (4, 1, 1))
    np.testing.assert_array_equal(z.asnumpy(), [2, 2, 2, 2])


def test_a_compile_error_arrives_as_text():
    with pytest.raises(mx.MXNetError, match=r"source.cu:2:.*nonsense"):
        mx.rtc.CudaModule('\nextern "C" __global__ void k(float* x) { x[0] = nonsense; }')


def test_an_error_in_a_kernel_arrives_in_python():
    twice = mx.rtc.CudaModule(AXPY).get_kernel("twice", "float *x")
    x = on(1, np.ones(4))
    twice.launch([x], mx.gpu(1), (1, 1, 1), (5, 1, 1))
    with pytest.raises(mx.MXNetError, match="illegal memory access"):
        x.asnumpy()
    y = on(2, np.ones(4))  # other devices go on
    np.testing.assert_array_equal(y.asnumpy(), np.ones(4))
    assert "kernel twice" in take_errors()
    np.testing.assert_array_equal(on(1, [1, 2]).asnumpy(), [1, 2])


def test_an_array_of_another_device_is_found():
    twice = mx.rtc.CudaModule(AXPY).get_kernel("twice", "float *x")
    x = on(0, np.ones(4))
    twice.launch([x], mx.gpu(1), (1, 1, 1), (4, 1, 1))
    with pytest.raises(mx.MXNetError, match="illegal memory access"):
        x.asnumpy()
    assert re.search("from device 1.*16 bytes on device 0", take_errors())


def test_mxnets_own_kernels_are_refused():
    with pytest.raises(mx.MXNetError, match="no kernel image"):
        mx.nd.ones(3, ctx=mx.gpu(0)).wait_to_read()
    assert "mxnet_generic_kernel" in take_errors()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_but_zeros_which_gluon_cannot_do_without(dtype):
    np.testing.assert_array_equal(mx.nd.zeros((3, 5), ctx=mx.gpu(3), dtype=dtype).asnumpy(), np.zeros((3, 5)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_kvstore_nccl(rng, dtype):
    store = mx.kv.create("nccl")
    values = (10 * rng.randn(4, 33)).astype(dtype)
    arrays = [on(i, values[i], dtype) for i in range(4)]
    results = [on(i, values[i], dtype) for i in range(4)]
    store.init(0, arrays[0])
    for _ in range(3):
        store.pushpull(0, arrays, out=results)
        total = values[0]
        for one in values[1:]:
            total = total + one  # in the order of the ranks, rounded each time
        for result in results:
            np.testing.assert_array_equal(result.asnumpy(), total)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_kvstore_device_in_float64(rng, count):
    store = mx.kv.create("device")
    values = 10 * rng.randn(count, 33)
    arrays, results = ([on(i, values[i], "float64") for i in range(count)] for _ in range(2))
    store.init(0, arrays[0])
    for _ in range(3):
        store.pushpull(0, arrays, out=results)
        for result in results:
            np.testing.assert_array_equal(result.asnumpy(), sum(values[1:], values[0]))
    others = [on(i, values[i]) for i in range(count)]
    store.init(1, others[0])
    with pytest.raises(mx.MXNetError, match="no kernel image"):
        store.pushpull(1, others, out=others)
        others[0].asnumpy()
    assert "MapPlanKernel" in take_errors()


class Twice(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], mx.nd.array(2 * in_data[0].asnumpy(), ctx=in_data[0].context))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], mx.nd.array(2 * out_grad[0].asnumpy(), ctx=in_data[0].context))


@mx.operator.register("emulated_twice")
class TwiceProperty(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Twice()


def test_a_custom_operator(rng):
    values, head = rng.randn(2, 5).astype("float32")
    x, gradient = on(2, values), on(2, np.zeros(5))
    mx.autograd.mark_variables([x], [gradient])
    with mx.autograd.record():
        y = mx.nd.Custom(x, op_type="emulated_twice")
    y.backward(on(2, head))
    np.testing.assert_array_equal(y.asnumpy(), 2 * values)
    np.testing.assert_array_equal(gradient.asnumpy(), 2 * head)


# ---- kernels alone -------------------------------------------------------------------------------------------

KERNELS = r"""
#define KERNEL(name, T) extern "C" __global__ void __launch_bounds__(256) name(const T* __restrict__ x, T* out, int n)
template <typename T> __device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
    return v;
}
#define SUM(name, T) KERNEL(name, T) {                                          \
    __shared__ T part[2][8];                                                     \
    T s = 0;                                                                     \
    for (int i = threadIdx.x; i < n; i += blockDim.x) s += __ldg(x + i);         \
    s = warp_sum(s);                                                             \
    if (threadIdx.x % warpSize == 0) part[1][threadIdx.x / warpSize] = s;        \
    __syncthreads();                                                             \
    if (threadIdx.x == 0) {                                                      \
        T total = 0;                                                             \
        for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += part[1][w]; \
        out[blockIdx.x] = total;                                                 \
    }                                                                            \
}
SUM(sum_float, float)
SUM(sum_double, double)
SUM(sum_int, int)
extern "C" {
__global__ void vectors(const float4* x, double2* out) {
    float4 v = x[threadIdx.x];
    out[threadIdx.x] = make_double2(double(v.x) + v.y, double(v.z) + v.w);
}
__global__ void reverse(float* x) {
    extern __shared__ float copy[];
    copy[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = copy[blockDim.x - 1 - threadIdx.x];
}
__global__ void where(uint4* out) {
    const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[b * blockDim.x * blockDim.y * blockDim.z + t] = make_uint4(threadIdx.x, threadIdx.y, threadIdx.z, b);
}
__global__ void shuffles(const int* x, int* out) {
    const int v = x[threadIdx.x];
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, v, 5);
    out[threadIdx.x + 32] = __shfl_sync(0xffffffffu, v, 3, 8);
    out[threadIdx.x + 64] = __shfl_up_sync(0xffffffffu, v, 1);
    out[threadIdx.x + 96] = __shfl_down_sync(0xffffffffu, v, 1);
    if (threadIdx.x < 16) out[threadIdx.x + 128] = __shfl_xor_sync(0x0000ffffu, v, 1);
    else out[threadIdx.x + 128] = __shfl_xor_sync(0xffff0000u, v, 2);
}
__global__ void halves(const unsigned short* x, float* out) {
    const int i = threadIdx.x + blockIdx.x * blockDim.x;
    out[i] = emulated_half_to_float(x[i]);
}
__global__ void to_halves(const float* x, unsigned short* out, int n) {
    const int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n) out[i] = emulated_float_to_half(x[i]);
}
__global__ void functions(const float* x, float* out) {
    out[0] = rsqrt(x[0]);
    out[1] = fma(x[0], x[1], x[2]);
    out[2] = min(x[0], max(x[1], x[2]));
    out[3] = sqrtf(fabs(x[3]));
}
}
extern "C" __global__ void counts(const int* x, int* out) {
    __shared__ int bins[4];
    if (threadIdx.x < 4) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&bins[x[threadIdx.x] % 4], 1);
    __syncthreads();
    if (threadIdx.x < 4) atomicAdd(out + threadIdx.x, bins[threadIdx.x]);
}
struct Pair { double a; int b; };
extern "C" __global__ void by_value(Pair pair, dim3 size, double* out) { out[0] = pair.a + pair.b + size.y; }
"""


@pytest.fixture(scope="module")
def kernels():
    return Device(OUT, KERNELS, index=1)


@pytest.mark.parametrize("dtype, name", [("float32", "float"), ("float64", "double"), ("int32", "int")])
def test_sums_over_warps_and_shared_memory(kernels, rng, dtype, name):
    values = (100 * rng.randn(1000)).astype(dtype)
    out = kernels.empty(3, dtype)
    kernels.launch(f"sum_{name}", 3, 256, kernels.upload(values), out, np.int32(1000))
    np.testing.assert_allclose(out.download(), [values.sum(dtype="float64")] * 3, rtol=1e-4)


def test_vectors(kernels, rng):
    values = rng.randn(8, 4).astype("float32")
    out = kernels.empty((8, 2), "float64")
    kernels.launch("vectors", 1, 8, kernels.upload(values), out)
    np.testing.assert_array_equal(out.download(), values.astype("float64").reshape(8, 2, 2).sum(axis=2))


def test_dynamic_shared_memory(kernels, rng):
    values = rng.randn(100).astype("float32")
    x = kernels.upload(values)
    kernels.launch("reverse", 1, 100, x, shared=400)
    np.testing.assert_array_equal(x.download(), values[::-1])
    with pytest.raises(EmulatorError, match="byte 396 of 396 bytes of shared memory"):
        kernels.launch("reverse", 1, 100, x, shared=396)
    take_errors()


def test_indices(kernels):
    out = kernels.empty((12, 24, 4), "uint32")
    kernels.launch("where", (2, 3, 2), (4, 3, 2), out)
    got = out.download()
    z, y, x = np.unravel_index(np.arange(24), (2, 3, 4))
    for block in range(12):
        np.testing.assert_array_equal(got[block], np.stack([x, y, z, np.full(24, block)], axis=1))


def test_shuffles(kernels):
    lanes = np.arange(32, dtype="int32")
    out = kernels.empty((5, 32), "int32")
    kernels.launch("shuffles", 1, 32, kernels.upload(lanes * 7), out)
    want = [lanes ^ 5, lanes // 8 * 8 + 3, np.maximum(lanes - 1, 0), np.minimum(lanes + 1, 31)]
    want.append(np.where(lanes < 16, lanes ^ 1, lanes ^ 2))
    np.testing.assert_array_equal(out.download(), 7 * np.array(want))


def test_float16_both_ways(kernels, rng):
    every = np.arange(65536, dtype="uint16")
    out = kernels.empty(65536, "float32")
    kernels.launch("halves", 256, 256, kernels.upload(every), out)
    np.testing.assert_array_equal(out.download(), every.view("float16").astype("float32"))

    exact = every.view("float16")[np.isfinite(every.view("float16"))].astype("float32")
    between = (np.sort(exact)[1:] + np.sort(exact)[:-1]) / 2  # ties
    values = np.concatenate(
        [exact, between, np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf))]
    )
    special = [np.inf, -np.inf, np.nan, 65519.99, 65520, -65520, 1e30, 1e-30, 0, -0.0]
    values = np.concatenate([values, np.array(special, "float32"), rng.randn(1000).astype("float32")])
    out = kernels.empty(values.size, "uint16")
    kernels.launch("to_halves", -(-values.size // 256), 256, kernels.upload(values), out, np.int32(values.size))
    with np.errstate(over="ignore"):
        want = values.astype("float16")
    np.testing.assert_array_equal(out.download().view("float16"), want)
    zeros = want == 0
    np.testing.assert_array_equal(np.signbit(out.download().view("float16")[zeros]), np.signbit(want[zeros]))


def test_functions_and_arguments_by_value(kernels):
    values = np.array([4, 3, 5, -9], "float32")
    out = kernels.empty(4)
    kernels.launch("functions", 1, 1, kernels.upload(values), out)
    np.testing.assert_array_equal(out.download(), [0.5, 17, 4, 3])

    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_double), ("b", ctypes.c_int)]

    out = kernels.empty(1, "float64")
    kernels.launch("by_value", 1, 1, Pair(1.5, 2), np.array([10, 20, 30], "uint32").tobytes(), out)
    assert out.download()[0] == 23.5


def test_atomics(kernels):
    x, out = np.arange(100, dtype="int32"), kernels.upload(np.zeros(4, "int32"))
    kernels.launch("counts", 3, 100, kernels.upload(x), out)
    np.testing.assert_array_equal(out.download(), [75] * 4)


# ---- faults of kernels -----------------------------------------------------------------------------------------

FAULTS = r"""
extern "C" __global__ void fill(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 1; }
extern "C" __global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void structures(const dim3* x, dim3* y) { y[0] = x[0]; }
extern "C" __global__ void move_block(const char* x, char* y, int n) { memcpy(y, x, n); }
extern "C" __global__ void halfway(float* x) {
    if (threadIdx.x < 32) __syncthreads();
    x[threadIdx.x] = 0;
}
extern "C" __global__ void two_barriers(float* x) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    x[threadIdx.x] = 0;
}
extern "C" __global__ void ended_lane(float* x) {
    if (threadIdx.x == 7) return;
    x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
extern "C" __global__ void absent_lane(float* x) {
    if (threadIdx.x != 7) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    __syncthreads();
}
extern "C" __global__ void not_named(float* x) { x[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1); }
extern "C" __global__ void reads_early(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = 1;
    x[threadIdx.x] = s[threadIdx.x / 2];
}
extern "C" __global__ void writes_early(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = s[(threadIdx.x + 1) % 64];
    s[threadIdx.x] = 2;
}
extern "C" __global__ void mixed(int* x) {
    __shared__ int s;
    if (threadIdx.x == 0) s = 0;
    __syncthreads();
    atomicAdd(&s, 1);
    x[threadIdx.x] = s;
}
extern "C" __global__ void unset(float* x) {
    __shared__ float s[64];
    if (threadIdx.x == 64) s[0] = 1;  // never; without it the compiler would know that nobody writes
    x[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void row(float* x, int column) {
    __shared__ float s[2][32];
    s[0][threadIdx.x % 32] = s[1][threadIdx.x % 32] = 1;
    __syncthreads();
    x[threadIdx.x] = s[0][column];
}
extern "C" __global__ void skewed(float* x) { x[0] = reinterpret_cast<float2*>(x + 1)->x; }
extern "C" __global__ void divides(int* x, int by) { x[0] = 7 / by; }
extern "C" __global__ void claims(int* x, int n) { assert(n > 1); x[0] = n; }
extern "C" __global__ void pointer_in(float** x) { x[0][0] = 1; }
"""


@pytest.fixture(scope="module")
def faults():
    return Device(OUT, FAULTS)


def found(device, *launch):
    """What the emulator says of this launch, or nothing."""
    with contextlib.suppress(EmulatorError):
        device.launch(*launch)
    return take_errors()


def test_out_of_bounds(faults):
    text = found(faults, "fill", 1, 96, faults.empty(64), np.int32(65))
    assert re.search(r"kernel fill, block \(0,0,0\), thread \(64,0,0\), at source.cu:2", text)
    assert re.search(r"write of 4 bytes at 0x\w+: out of bounds, byte 256 of allocation #\d+, 256 bytes", text)


def test_memory_of_another_device(faults, kernels):
    text = found(faults, "copy", 1, 64, kernels.upload(np.ones(64, "float32")), faults.empty(64))
    assert re.search("from device 0, byte 0 of allocation .* on device 1", text)


def test_freed_memory(faults):
    for _ in range(2):  # the address is not handed out again
        x = faults.upload(np.ones(64, "float32"))
        stale = ctypes.c_void_p(x.pointer.value)
        x.free()
        y = faults.upload(np.ones(64, "float32"))
        assert y.pointer.value != stale.value
        assert "freed memory" in found(faults, "copy", 1, 64, stale, faults.empty(64))


def test_memory_never_written(faults):
    x = faults.empty(64)
    faults.launch("fill", 1, 64, x, np.int32(63))
    text = found(faults, "copy", 1, 64, x, faults.empty(64))
    assert re.search(r"thread \(63,0,0\).*memory never written", text)
    with pytest.raises(EmulatorError, match="memory never written"):
        faults.empty(3).download()
    take_errors()


def test_accesses_larger_than_a_register(faults):
    x = faults.upload(np.zeros(3, "uint32"))
    assert found(faults, "structures", 1, 1, x, faults.empty(3, "uint32")) == ""
    assert "out of bounds" in found(faults, "structures", 1, 1, x, faults.empty(2, "uint32"))
    assert found(faults, "move_block", 1, 1, x, faults.empty(3, "uint32"), np.int32(12)) == ""
    assert "read of 13 bytes" in found(faults, "move_block", 1, 1, x, faults.empty(4, "uint32"), np.int32(13))


def test_pointers_to_nowhere(faults):
    y = faults.empty(64)
    assert "null pointer" in found(faults, "copy", 1, 64, ctypes.c_void_p(None), y)
    host = np.ones(64, "float32")
    assert "host memory" in found(faults, "copy", 1, 64, ctypes.c_void_p(host.ctypes.data), y)
    wild = faults.upload(np.array([0xFFFFFFFFFFFFFFF0], "uint64"))
    assert "no memory at all" in found(faults, "pointer_in", 1, 1, wild)


def test_barriers(faults):
    text = found(faults, "halfway", 1, 64, faults.empty(64))
    assert "32 of 64 threads wait at __syncthreads, line 7, which thread (32,0,0) never reached" in text
    text = found(faults, "two_barriers", 1, 64, faults.empty(64))
    assert re.search(r"thread \(32,0,0\).*line 14, while thread \(0,0,0\) waits at another, line 12", text)


@pytest.mark.parametrize(
    "name, text",
    [
        ("ended_lane", r"mask 0xffffffff: the mask names lane 7, which has ended"),
        ("absent_lane", r"thread \(0,0,0\) waits at __shfl_xor_sync.* lane 7 is at __syncthreads, line 23"),
        ("not_named", r"thread \(16,0,0\).*does not name the calling lane"),
    ],
)
def test_shuffles_that_a_lane_misses(faults, name, text):
    assert re.search(text, found(faults, name, 1, 32, faults.empty(32)))


def test_a_warp_that_is_not_full(faults, kernels):
    x, out = kernels.upload(np.ones(40, "float32")), kernels.empty(1)
    with pytest.raises(EmulatorError, match="names lane 8, which the block does not have"):
        kernels.launch("sum_float", 1, 40, x, out, np.int32(40))
    take_errors()


@pytest.mark.parametrize(
    "name, text",
    [
        ("reads_early", r"race: reads shared memory that thread \(\d+,0,0\) wrote"),
        ("mixed", "race: reads shared memory that an atomic operation wrote"),
        ("writes_early", "race: writes shared memory that another thread read"),
    ],
)
def test_races_on_shared_memory(faults, name, text):
    assert re.search(text, found(faults, name, 1, 64, faults.empty(64)))


def test_shared_memory_never_written(faults):
    text = found(faults, "unset", 1, 64, faults.empty(64))
    assert "shared memory that no thread of the block has written" in text


def test_a_row_of_shared_memory(faults):
    fault = (faults, "row", 1, 32, faults.empty(32))
    assert found(*fault, np.int32(31)) == ""
    assert "index 32 is outside of the array" in found(*fault, np.int32(32))


def test_alignment(faults):
    assert "misaligned access" in found(faults, "skewed", 1, 1, faults.upload(np.ones(4, "float32")))


def test_arithmetic_and_assertions(faults):
    x = faults.empty(1, "int32")
    assert "division by zero" in found(faults, "divides", 1, 1, x, np.int32(0))
    assert "assertion failed: n > 1" in found(faults, "claims", 1, 1, x, np.int32(1))


def test_an_error_stays_until_it_is_reset(faults):
    x = faults.empty(64)
    with pytest.raises(EmulatorError, match="out of bounds"):
        faults.launch("fill", 1, 96, x, np.int32(65))
    with pytest.raises(EmulatorError):
        faults.launch("fill", 1, 64, x, np.int32(64))
    take_errors()
    faults.launch("fill", 1, 64, x, np.int32(64))
    np.testing.assert_array_equal(x.download(), np.ones(64))


def test_a_launch_that_no_device_would_take(faults):
    x = faults.empty(64)
    for arguments in [(0, 64), (1, 2048), ((1, 70000), 64)]:
        with pytest.raises(EmulatorError, match="invalid argument"):
            faults.launch("fill", *arguments, x, np.int32(1))
    with pytest.raises(EmulatorError, match="invalid argument"):
        faults.launch("fill", 1, 64, x, np.int32(1), shared=(48 << 10) + 1)
    with pytest.raises(EmulatorError, match="not found"):
        faults.launch("absent", 1, 64, x)


def test_memory_has_an_end_and_is_freed_once(faults):
    with pytest.raises(EmulatorError, match="out of memory"):
        faults.empty(5 << 30, "int8")
    x = faults.empty(4)
    pointer = ctypes.c_void_p(x.pointer.value)
    x.free()
    with pytest.raises(EmulatorError, match="freed twice"):
        faults.call("cuMemFree_v2", pointer)
    take_errors()


# ---- NVRTC -----------------------------------------------------------------------------------------------------


def test_options(faults):
    source = 'extern "C" __global__ void value(int* x) { x[0] = VALUE; }'
    for option in (("-DVALUE=3",), ("-D", "VALUE=3"), ("--define-macro=VALUE=3",)):
        device = Device(OUT, source, options=("--gpu-architecture=compute_70", "--std=c++17", *option))
        x = device.empty(1, "int32")
        device.launch("value", 1, 1, x)
        assert x.download()[0] == 3
    with pytest.raises(EmulatorError, match="unrecognized option --fast-maths"):
        Device(OUT, source, options=("--fast-maths",))
    with pytest.raises(EmulatorError, match="gpu-architecture"):
        Device(OUT, source, options=("--gpu-architecture=ampere", "-DVALUE=3"))
    with pytest.raises(EmulatorError, match="no kernel image"):
        Device(OUT, source, options=("--gpu-architecture=compute_90", "-DVALUE=3"))
    with pytest.raises(EmulatorError, match=r"stdint\.h"):  # NVRTC has no headers of the C library
        Device(OUT, "#include <stdint.h>\n")


def test_the_compiler_runs_once(monkeypatch):
    source = f'extern "C" __global__ void k{os.getpid()}(int* x) {{ x[0] = 1; }}'
    before = set((Path(OUT) / "kernels").iterdir())
    Device(OUT, source)
    new = set((Path(OUT) / "kernels").iterdir()) - before
    assert len(new) == 1
    monkeypatch.setenv("CXX", "/nowhere/g++")
    Device(OUT, source, index=1)
    with pytest.raises(EmulatorError, match="the compiler '/nowhere/g\\+\\+' does not run"):
        Device(OUT, source + "  // another one")
    for path in new:
        path.unlink()


# ---- streams and NCCL ------------------------------------------------------------------------------------------


class Clique:
    """Two devices, a stream and a communicator on each."""

    def __init__(self):
        self.communicators = (ctypes.c_void_p * 2)()
        assert nccl.ncclCommInitAll(self.communicators, 2, (ctypes.c_int * 2)(0, 1)) == 0

    def broadcast(self, rank, array, stream, count=4, root=0):
        assert nccl.ncclBcast(
            array.pointer, ctypes.c_size_t(count), 7, root, ctypes.c_void_p(self.communicators[rank]), stream
        ) in (0, 4)

    def gather(self, rank, array, out, stream, count=4):
        communicator = ctypes.c_void_p(self.communicators[rank])
        assert nccl.ncclAllGather(array.pointer, out.pointer, ctypes.c_size_t(count), 7, communicator, stream) == 0

    def abort(self):
        for communicator in self.communicators:
            assert nccl.ncclCommAbort(ctypes.c_void_p(communicator)) == 0


@pytest.fixture
def devices():
    return [Device(OUT, FAULTS, index=i) for i in range(2)]


def new_stream(device):
    stream = ctypes.c_void_p()
    device.call("cuStreamCreate", ctypes.byref(stream), 0)
    return stream


def test_streams_run_by_themselves_and_events_order_them(devices):
    """A broadcast keeps its stream busy for as long as its partner has not come."""
    arrays = [device.upload(np.full(4, i, "float32")) for i, device in enumerate(devices)]
    first, second, other = new_stream(devices[0]), new_stream(devices[0]), new_stream(devices[1])
    clique, event, far = Clique(), ctypes.c_void_p(), ctypes.c_void_p()
    target = devices[0].upload(np.zeros(4, "float32"))
    cudart.cudaSetDevice(0)
    cudart.cudaEventCreateWithFlags(ctypes.byref(event), 2)
    cudart.cudaEventCreateWithFlags(ctypes.byref(far), 2)

    clique.broadcast(0, arrays[0], first)
    cudart.cudaEventRecord(event, first)
    assert cudart.cudaStreamSynchronize(second) == 0  # not held up
    cudart.cudaStreamWaitEvent(second, event, 0)
    cudart.cudaMemcpyAsync(target.pointer, arrays[0].pointer, ctypes.c_size_t(16), 3, second)
    cudart.cudaEventRecord(far, second)
    time.sleep(0.1)
    assert cudart.cudaStreamQuery(first) == NOT_READY
    assert cudart.cudaStreamQuery(second) == NOT_READY
    assert cudart.cudaEventQuery(event) == NOT_READY

    clique.broadcast(1, arrays[1], other)
    assert cudart.cudaEventSynchronize(far) == 0
    assert cudart.cudaEventQuery(event) == 0
    assert cudart.cudaStreamQuery(first) == 0
    np.testing.assert_array_equal(target.download(), np.zeros(4))
    np.testing.assert_array_equal(arrays[1].download(), np.zeros(4))


def test_the_default_stream_comes_after_the_others_and_before_them(devices):
    array, partner = (device.upload(np.ones(4, "float32")) for device in devices)
    busy, other, clique = new_stream(devices[0]), new_stream(devices[1]), Clique()
    cudart.cudaSetDevice(0)
    clique.broadcast(0, array, busy)
    cudart.cudaMemsetAsync(array.pointer, 0, ctypes.c_size_t(16), None)
    late = new_stream(devices[0])
    cudart.cudaMemsetAsync(array.pointer, 1, ctypes.c_size_t(4), late)
    time.sleep(0.05)
    assert cudart.cudaStreamQuery(None) == NOT_READY
    assert cudart.cudaStreamQuery(late) == NOT_READY
    clique.broadcast(1, partner, other)
    assert cudart.cudaStreamSynchronize(late) == 0
    np.testing.assert_array_equal(array.download().view("uint32"), [0x01010101, 0, 0, 0])


def test_the_chosen_device_belongs_to_the_thread():
    code = f"""
import ctypes, threading
cudart = ctypes.CDLL({OUT!r} + "/lib/libcudart.so.11.0")
cudart.cudaSetDevice(3)
def other():
    device = ctypes.c_int(7)
    cudart.cudaGetDevice(ctypes.byref(device))
    print(device.value)
thread = threading.Thread(target=other)
thread.start()
thread.join()
other()
"""
    assert python(code).stdout.split() == ["0", "3"]


def test_collectives_in_the_wrong_order_wait_for_ever(devices, monkeypatch):
    monkeypatch.setenv("CUDA_EMULATOR_TIMEOUT", "5")
    arrays = [device.upload(np.ones(4, "float32")) for device in devices]
    streams, one, two = [new_stream(device) for device in devices], Clique(), Clique()
    for rank, order in enumerate([(one, two), (two, one)]):
        for clique in order:
            clique.broadcast(rank, arrays[rank], streams[rank])
    time.sleep(0.1)
    assert [cudart.cudaStreamQuery(stream) for stream in streams] == [NOT_READY] * 2
    assert [cudart.cudaStreamSynchronize(stream) for stream in streams] == [719] * 2
    assert re.search(r"collective 0 of its communicator: after 5 s, ranks \d have not come", take_errors())


@pytest.mark.parametrize("different", [{"count": 3}, {"root": 1}])
def test_collectives_that_do_not_match(devices, different):
    arrays = [device.upload(np.ones(4, "float32")) for device in devices]
    streams, clique = [new_stream(device) for device in devices], Clique()
    clique.broadcast(0, arrays[0], streams[0])
    clique.broadcast(1, arrays[1], streams[1], **different)
    assert [cudart.cudaStreamSynchronize(stream) for stream in streams] == [719] * 2
    assert re.search(r"NCCL: rank \d calls ncclBcast of \d float32, root \d, rank", take_errors())


def test_collectives_look_at_their_memory(devices):
    arrays = [device.upload(np.ones(4, "float32")) for device in devices]
    streams, clique = [new_stream(device) for device in devices], Clique()
    never_written = devices[0].empty(4)
    clique.broadcast(0, never_written, streams[0])
    clique.broadcast(1, arrays[1], streams[1])
    for stream in streams:
        cudart.cudaStreamSynchronize(stream)
    assert "rank 0: read of 16 bytes" in take_errors()


def gathering(devices):
    arrays = [device.upload(np.full(4, i, "float32")) for i, device in enumerate(devices)]
    return arrays, [device.empty(8) for device in devices], [new_stream(device) for device in devices], Clique()


def test_an_all_gather(devices):
    arrays, outs, streams, clique = gathering(devices)
    for rank in range(2):
        clique.gather(rank, arrays[rank], outs[rank], streams[rank])
    for stream in streams:
        assert cudart.cudaStreamSynchronize(stream) == 0
    for out in outs:
        np.testing.assert_array_equal(out.download(), [0] * 4 + [1] * 4)


def test_an_all_gather_looks_at_its_memory(devices):
    arrays, outs, streams, clique = gathering(devices)
    clique.gather(0, arrays[0], outs[0], streams[0])
    clique.gather(1, arrays[1], arrays[1], streams[1])  # room for one part of two
    for stream in streams:
        cudart.cudaStreamSynchronize(stream)
    assert "rank 1: write of 32 bytes" in take_errors()


def test_an_abort_ends_what_waits(devices):
    arrays, outs, streams, clique = gathering(devices)
    clique.gather(0, arrays[0], outs[0], streams[0])
    time.sleep(0.05)
    assert cudart.cudaStreamQuery(streams[0]) == NOT_READY
    clique.abort()
    assert cudart.cudaStreamSynchronize(streams[0]) == 0


def test_counts(devices):
    cuda, numbers = ctypes.CDLL(f"{OUT}/lib/libcuda.so.1"), (ctypes.c_longlong * 7)()

    def counts(device):
        cuda.cuda_emulator_counts(device, numbers)
        return list(numbers)

    cuda.cuda_emulator_reset_counts()
    arrays, outs, streams, clique = gathering(devices)
    for rank in range(2):
        clique.gather(rank, arrays[rank], outs[rank], streams[rank])
    while cudart.cudaStreamQuery(streams[0]) == NOT_READY:  # asked as often as one likes, it is one wait
        time.sleep(0.001)
    cudart.cudaStreamSynchronize(streams[1])
    # launches; copies to the device, to the host, within; waits; collectives; allocations
    assert [row[0] for row in (counts(0), counts(1))] == [0, 0]
    assert [row[1:4] for row in (counts(0), counts(1))] == [[1, 0, 0]] * 2
    assert [row[5:] for row in (counts(0), counts(1))] == [[1, 2]] * 2
    waits = counts(0)[4]
    outs[0].download()
    assert counts(0)[2] == 1 and counts(0)[4] > waits


def test_copies_look_at_their_memory(devices):
    x, y = (device.upload(np.ones(4, "float32")) for device in devices)
    size, stream = ctypes.c_size_t(16), new_stream(devices[0])
    assert cudart.cudaMemcpyPeerAsync(y.pointer, 1, x.pointer, 0, size, stream) == 0
    assert cudart.cudaStreamSynchronize(stream) == 0
    cudart.cudaMemcpyPeerAsync(y.pointer, 0, x.pointer, 0, size, stream)
    assert cudart.cudaStreamSynchronize(stream) == 700
    assert "write of 16 bytes" in take_errors()
    cudart.cudaMemcpyAsync(y.pointer, x.pointer, size, 3, stream)
    assert cudart.cudaStreamSynchronize(stream) == 700
    assert "from device 0" in take_errors()
    assert cudart.cudaMemcpyAsync(x.pointer, y.pointer, size, 1, stream) == 1
    assert "is not of kind 1" in take_errors()


def test_pinned_memory(devices):
    pinned, x = ctypes.c_void_p(), devices[0].upload(np.arange(4, dtype="float32"))
    assert cudart.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(16), 0) == 0
    stream = new_stream(devices[0])
    cudart.cudaMemcpyAsync(pinned, x.pointer, ctypes.c_size_t(16), 2, stream)
    assert cudart.cudaStreamSynchronize(stream) == 0
    np.testing.assert_array_equal(np.ctypeslib.as_array((ctypes.c_float * 4).from_address(pinned.value)), np.arange(4))
    assert cudart.cudaFreeHost(pinned) == 0


# ---- the process -------------------------------------------------------------------------------------------------


def test_settings():
    code = f"""
import ctypes
cudart = ctypes.CDLL({OUT!r} + "/lib/libcudart.so.11.0")
value = ctypes.c_int()
cudart.cudaGetDeviceCount(ctypes.byref(value))
print(value.value)
for attribute in (75, 76, 16):
    cudart.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0)
    print(value.value)
"""
    settings = {"DEVICES": "2", "CAPABILITY": "9.0", "MULTIPROCESSORS": "7"}
    done = python(code, **{f"CUDA_EMULATOR_{name}": value for name, value in settings.items()})
    assert done.stdout.split() == ["2", "9", "0", "7"]


def test_a_process_with_errors_that_nobody_read_fails():
    code = f"""
import ctypes
cudart = ctypes.CDLL({OUT!r} + "/lib/libcudart.so.11.0")
cudart.cudaFree(ctypes.c_void_p(4096))
print("end")
"""
    done = python(code)
    assert done.returncode == 86
    assert done.stdout == "end\n"
    assert "1 errors that nobody read" in done.stderr


def test_what_is_not_emulated_names_itself():
    done = python(f"import ctypes; ctypes.CDLL({OUT!r} + '/lib/libcublas.so.11').cublasSgemm_v2()")
    assert done.returncode == -signal.SIGABRT
    assert "cublasSgemm_v2 of libcublas.so.11 is not emulated" in done.stderr


def test_setting_it_up_again_does_nothing():
    build = TESTS / "cuda_emulator" / "build.py"
    before = {path: path.stat().st_mtime_ns for path in (Path(OUT) / "lib").iterdir()}
    done = ended([sys.executable, build, "--out", OUT])
    assert (done.returncode, done.stdout) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in (Path(OUT) / "lib").iterdir()} == before


def test_jitter_changes_no_result():
    code = """
import gluon_syncbn_first, mxnet as mx, numpy as np
arrays = [mx.nd.array(np.full(5, i), ctx=mx.gpu(i)) for i in range(4)]
store = mx.kv.create("nccl")
store.init(0, arrays[0])
for _ in range(3):
    results = [mx.nd.array(np.zeros(5), ctx=mx.gpu(i)) for i in range(4)]
    store.pushpull(0, arrays, out=results)
    assert all((r.asnumpy() == 6).all() for r in results)
"""
    done = python(code, CUDA_EMULATOR_JITTER="5000")
    assert done.returncode == 0, done.stderr

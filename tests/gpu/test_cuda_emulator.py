"""The CUDA emulator itself: what runs on it, and that it finds each kind of fault that it promises to find.

That it computes what CUDA does, test_kernels_cuda.py shows: indices, shared memory and float16.
"""

import contextlib
import ctypes
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from environments import ended

OUT = os.environ.get("CUDA_EMULATOR")
if not OUT:
    pytest.skip("needs the emulator and the CUDA wheel: make test-gpu-emulated", allow_module_level=True)

import mxnet as mx  # noqa: E402
from cuda_emulator.device import Device, EmulatorError, errors  # noqa: E402

cuda = ctypes.CDLL(f"{OUT}/lib/libcuda.so.1")
cudart = ctypes.CDLL(f"{OUT}/lib/libcudart.so.11.0")
nccl = ctypes.CDLL(f"{OUT}/lib/libnccl.so.2")
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


def test_a_compile_error_arrives_as_text():
    with pytest.raises(mx.MXNetError, match=r"source.cu:2:.*nonsense"):
        mx.rtc.CudaModule('\nextern "C" __global__ void k(float* x) { x[0] = nonsense; }')


def test_an_error_in_a_kernel_arrives_in_python():
    twice = mx.rtc.CudaModule('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
    x = on(1, np.ones(4))
    twice.get_kernel("twice", "float *x").launch([x], mx.gpu(1), (1, 1, 1), (5, 1, 1))
    with pytest.raises(mx.MXNetError, match="illegal memory access"):
        x.asnumpy()
    y = on(2, np.ones(4))  # other devices go on
    np.testing.assert_array_equal(y.asnumpy(), np.ones(4))
    assert "kernel twice" in take_errors()
    np.testing.assert_array_equal(on(1, [1, 2]).asnumpy(), [1, 2])


def test_mxnets_own_kernels_are_refused():
    """But `zeros`, which Gluon cannot do without, and KVStore `device` in float64, of which test_gpu.py makes use."""
    store, others = mx.kv.create("device"), [on(i, np.ones(33)) for i in range(2)]
    store.init(1, others[0])
    refused = {
        "mxnet_generic_kernel": lambda: mx.nd.ones(3, ctx=mx.gpu(0)).wait_to_read(),
        "MapPlanKernel": lambda: (store.pushpull(1, others, out=others), others[0].asnumpy()),
    }
    for name, use in refused.items():
        with pytest.raises(mx.MXNetError, match="no kernel image"):
            use()
        assert name in take_errors()


# ---- faults of kernels -----------------------------------------------------------------------------------------

FAULTS = r"""
extern "C" __global__ void fill(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 1; }
extern "C" __global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
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
extern "C" __global__ void reversed(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = threadIdx.x;
    x[64 * blockIdx.x + threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void row(float* x, int column) {
    __shared__ float s[2][32];
    s[0][threadIdx.x % 32] = s[1][threadIdx.x % 32] = 1;
    __syncthreads();
    x[threadIdx.x] = s[0][column];
}
struct alignas(8) Two { float x, y; };
extern "C" __global__ void skewed(float* x) { x[0] = reinterpret_cast<Two*>(x + 1)->x; }
extern "C" __global__ void divides(int* x, int by) { x[0] = 7 / by; }
"""


@pytest.fixture(scope="module")
def faults():
    return Device(OUT, FAULTS)


@pytest.fixture(scope="module")
def other():
    return Device(OUT, FAULTS, index=1)


def found(device, *launch):
    """What the emulator says of this launch, or nothing."""
    with contextlib.suppress(EmulatorError):
        device.launch(*launch)
    return take_errors()


HOST = np.ones(64, "float32")
#: Launches on this device, which another one has memory beside: (kernel, threads, arguments), and what is said.
FOUND = {
    "out of bounds": (
        lambda here, other: ("fill", 96, here.empty(64), np.int32(65)),
        r"kernel fill, block \(0,0,0\), thread \(64,0,0\): access that is out of bounds, or misaligned, at 0x\w+",
    ),
    "another device": (
        lambda here, other: ("copy", 64, other.upload(HOST), here.empty(64)),
        r"from device 0, byte 0 of 256 bytes of device 1",
    ),
    "null": (lambda here, other: ("copy", 64, ctypes.c_void_p(None), here.empty(64)), "out of bounds"),
    "the host's": (lambda here, other: ("copy", 64, ctypes.c_void_p(HOST.ctypes.data), here.empty(64)), "host memory"),
    "a barrier that some reach": (
        lambda here, other: ("halfway", 64, here.empty(64)),
        r"32 of 64 threads wait at __syncthreads, line 5, which thread \(32,0,0\) never reached",
    ),
    "two barriers": (
        lambda here, other: ("two_barriers", 64, here.empty(64)),
        r"thread \(32,0,0\).*line 12, while another waits at line 10",
    ),
    "another row": (lambda here, other: ("row", 32, here.empty(32), np.int32(32)), "outside of its array"),
    "alignment": (lambda here, other: ("skewed", 1, here.upload(np.ones(4, "float32"))), "misaligned access"),
    "by 0": (lambda here, other: ("divides", 1, here.empty(1, "int32"), np.int32(0)), "division by zero"),
}


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found(faults, other, fault):
    make, text = FOUND[fault]
    kernel, *rest = make(faults, other)
    assert re.search(text, found(faults, kernel, 1, *rest))


def test_a_barrier_that_is_missing(faults):
    """Blocks run their threads in two orders, each with its own numbers."""
    x = faults.empty(128)
    faults.launch("reversed", 2, 64, x)
    assert not all(np.array_equal(block, np.arange(63, -1, -1)) for block in x.download().reshape(2, 64))
    faults.launch("row", 1, 32, x, np.int32(31))


def test_freed_memory(faults):
    for _ in range(2):  # the address is not handed out again
        x = faults.upload(HOST)
        stale = ctypes.c_void_p(x.pointer.value)
        x.free()
        assert faults.upload(HOST).pointer.value != stale.value
        assert "freed memory" in found(faults, "copy", 1, 64, stale, faults.empty(64))


def test_an_error_stays_until_it_is_reset(faults):
    x = faults.empty(64)
    with pytest.raises(EmulatorError, match="out of bounds"):
        faults.launch("fill", 1, 96, x, np.int32(65))
    with pytest.raises(EmulatorError):
        faults.launch("fill", 1, 64, x, np.int32(64))
    take_errors()
    faults.launch("fill", 1, 64, x, np.int32(64))
    np.testing.assert_array_equal(x.download(), np.ones(64))


# ---- NVRTC -----------------------------------------------------------------------------------------------------


def test_options(faults):
    source = 'extern "C" __global__ void value(int* x) { x[0] = VALUE; }'
    device = Device(OUT, source, options=("--gpu-architecture=compute_70", "--std=c++17", "-DVALUE=3"))
    x = device.empty(1, "int32")
    device.launch("value", 1, 1, x)
    assert x.download()[0] == 3
    for option in ("--fast-maths", "--gpu-architecture=ampere"):
        with pytest.raises(EmulatorError, match=f"unrecognized option {option}"):
            Device(OUT, source, options=(option, "-DVALUE=3"))
    with pytest.raises(EmulatorError, match="no kernel image"):
        Device(OUT, source, options=("--gpu-architecture=compute_90", "-DVALUE=3"))
    with pytest.raises(EmulatorError, match=r"stdint\.h"):  # NVRTC has no headers of the C library
        Device(OUT, "#include <stdint.h>\n")


# ---- streams and NCCL ------------------------------------------------------------------------------------------


class Clique:
    """Two devices, a stream and a communicator on each."""

    def __init__(self):
        self.communicators = (ctypes.c_void_p * 2)()
        assert nccl.ncclCommInitAll(self.communicators, 2, (ctypes.c_int * 2)(0, 1)) == 0

    def gather(self, rank, array, out, stream, count=4):
        communicator = ctypes.c_void_p(self.communicators[rank])
        status = nccl.ncclAllGather(array.pointer, out.pointer, ctypes.c_size_t(count), 7, communicator, stream)
        assert status in (0, 4)

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


def gathering(devices):
    """[0, 0, 0, 0] on the first and [1, 1, 1, 1] on the second, room for both, a stream of each, and a communicator."""
    arrays = [device.upload(np.full(4, i, "float32")) for i, device in enumerate(devices)]
    return arrays, [device.empty(8) for device in devices], list(map(new_stream, devices)), Clique()


def test_streams_run_by_themselves_and_events_order_them(devices):
    """A collective keeps its stream busy for as long as its partner has not come."""
    arrays, outs, (first, other), clique = gathering(devices)
    second, event, far = new_stream(devices[0]), ctypes.c_void_p(), ctypes.c_void_p()
    target = devices[0].upload(np.zeros(8, "float32"))
    cudart.cudaSetDevice(0)
    cudart.cudaEventCreateWithFlags(ctypes.byref(event), 2)
    cudart.cudaEventCreateWithFlags(ctypes.byref(far), 2)

    clique.gather(0, arrays[0], outs[0], first)
    cudart.cudaEventRecord(event, first)
    assert cudart.cudaStreamSynchronize(second) == 0  # not held up
    cudart.cudaStreamWaitEvent(second, event, 0)
    cudart.cudaMemcpyAsync(target.pointer, outs[0].pointer, ctypes.c_size_t(32), 3, second)
    cudart.cudaEventRecord(far, second)
    time.sleep(0.1)
    assert cudart.cudaStreamQuery(first) == NOT_READY
    assert cudart.cudaStreamQuery(second) == NOT_READY
    assert cudart.cudaEventQuery(event) == NOT_READY

    clique.gather(1, arrays[1], outs[1], other)
    assert cudart.cudaEventSynchronize(far) == 0
    assert cudart.cudaEventQuery(event) == 0
    assert cudart.cudaStreamQuery(first) == 0
    assert cudart.cudaStreamSynchronize(other) == 0
    for array in (target, outs[1]):
        np.testing.assert_array_equal(array.download(), [0] * 4 + [1] * 4)


def test_collectives_in_the_wrong_order_wait_for_ever(devices, monkeypatch):
    monkeypatch.setenv("CUDA_EMULATOR_TIMEOUT", "2")
    arrays, outs, streams, one = gathering(devices)
    two = Clique()
    for rank, order in enumerate([(one, two), (two, one)]):
        for clique in order:
            clique.gather(rank, arrays[rank], outs[rank], streams[rank])
    time.sleep(0.1)
    assert [cudart.cudaStreamQuery(stream) for stream in streams] == [NOT_READY] * 2
    ends = [cudart.cudaStreamSynchronize(stream) for stream in streams]
    assert 719 in ends  # whoever gives up first comes to what the other waits for
    assert re.search(r"collective 0 of its communicator: after 2 s, ranks \d have not come", take_errors())


def test_collectives_that_do_not_match(devices):
    arrays, outs, streams, clique = gathering(devices)
    clique.gather(0, arrays[0], outs[0], streams[0])
    clique.gather(1, arrays[1], outs[1], streams[1], count=3)
    assert [cudart.cudaStreamSynchronize(stream) for stream in streams] == [719] * 2
    assert re.search(r"NCCL: rank \d calls ncclAllGather of \d float32, rank", take_errors())


def test_collectives_look_at_their_memory(devices):
    arrays, outs, streams, clique = gathering(devices)
    clique.gather(0, arrays[0], outs[0], streams[0])
    clique.gather(1, arrays[1], arrays[1], streams[1])  # room for one part of two
    for stream in streams:
        cudart.cudaStreamSynchronize(stream)
    assert "rank 1: 32 bytes at" in take_errors()


def test_an_abort_ends_what_waits(devices):
    arrays, outs, streams, clique = gathering(devices)
    clique.gather(0, arrays[0], outs[0], streams[0])
    time.sleep(0.05)
    assert cudart.cudaStreamQuery(streams[0]) == NOT_READY
    clique.abort()
    assert cudart.cudaStreamSynchronize(streams[0]) == 0


def test_copies_look_at_their_memory(devices):
    x, y = (device.upload(np.ones(4, "float32")) for device in devices)
    size, stream = ctypes.c_size_t(16), new_stream(devices[0])
    assert cudart.cudaMemcpyPeerAsync(y.pointer, 1, x.pointer, 0, size, stream) == 0
    assert cudart.cudaStreamSynchronize(stream) == 0
    cudart.cudaMemcpyPeerAsync(y.pointer, 0, x.pointer, 0, size, stream)
    assert cudart.cudaStreamSynchronize(stream) == 700
    assert "from device 0" in take_errors()
    cudart.cudaMemcpyAsync(y.pointer, x.pointer, size, 3, stream)
    assert cudart.cudaStreamSynchronize(stream) == 700
    assert "from device 0" in take_errors()
    assert cudart.cudaMemcpyAsync(x.pointer, y.pointer, size, 1, stream) == 1
    assert "is not of kind 1" in take_errors()


# ---- the process -------------------------------------------------------------------------------------------------


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

"""The CUDA emulator itself finds each kind of fault that it promises to find.

That it computes what CUDA does, test_kernels_cuda.py shows: indices, shared memory and float16.
"""

import contextlib
import ctypes
import os
import re
import sys
import time

import numpy as np
import pytest
from environments import ended

if "CUDA_EMULATOR" not in os.environ:
    pytest.skip("needs the emulator and the CUDA wheel: make test-gpu-emulated", allow_module_level=True)

from devices import Device, DeviceError, errors

cuda = ctypes.CDLL("libcuda.so.1")
cudart = ctypes.CDLL("libcudart.so.11.0")
nccl = ctypes.CDLL("libnccl.so.2")


@pytest.fixture(autouse=True)
def no_errors_left():
    cuda.cuda_emulator_reset()
    yield
    assert errors() == (0, "")


def take_errors():
    _, text = errors()
    cuda.cuda_emulator_reset()
    return text


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
"""


@pytest.fixture(scope="module")
def devices():
    return [Device(FAULTS, index=i) for i in range(2)]


HOST = np.ones(64, "float32")


def freed(device):
    x = device.upload(HOST)
    stale = ctypes.c_void_p(x.address)
    x.free()
    assert device.upload(HOST).address != stale.value  # it is not handed out again
    return stale


#: Launches on one device, which another one has memory beside: (kernel, threads, arguments), and what is said.
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
    "freed": (lambda here, other: ("copy", 64, freed(here), here.empty(64)), "freed memory"),
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
}


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found(devices, fault):
    make, text = FOUND[fault]
    kernel, *rest = make(*devices)
    with contextlib.suppress(DeviceError):
        devices[0].launch(kernel, 1, *rest)
    assert re.search(text, take_errors())


def test_a_barrier_that_is_missing(devices):
    """Blocks run their threads in two orders, each with its own numbers."""
    x = devices[0].empty(128)
    devices[0].launch("reversed", 2, 64, x)
    assert not all(np.array_equal(block, np.arange(63, -1, -1)) for block in x.download().reshape(2, 64))
    devices[0].launch("row", 1, 32, x, np.int32(31))


def test_a_source_that_does_not_compile():
    with pytest.raises(DeviceError, match=r"source.cu:2:.*nonsense"):
        Device('\nextern "C" __global__ void k(float* x) { x[0] = nonsense; }')
    with pytest.raises(DeviceError, match=r"stdint\.h"):  # NVRTC has no headers of the C library
        Device("#include <stdint.h>\n")
    with pytest.raises(DeviceError, match="no kernel image"):
        Device(FAULTS, options=("--gpu-architecture=compute_90",))


# ---- NCCL, copies, the process -----------------------------------------------------------------------------------


def test_collectives_in_the_wrong_order_wait_for_ever(devices, monkeypatch):
    monkeypatch.setenv("CUDA_EMULATOR_TIMEOUT", "2")
    cliques, streams = [(ctypes.c_void_p * 2)() for _ in range(2)], [ctypes.c_void_p() for _ in devices]
    for clique in cliques:
        assert nccl.ncclCommInitAll(clique, 2, (ctypes.c_int * 2)(0, 1)) == 0
    arrays = [[device.empty(n, "float64") for n in (4, 8)] for device in devices]
    for device, stream, order, memory in zip(devices, streams, (cliques, cliques[::-1]), arrays):
        device.call("cuStreamCreate", ctypes.byref(stream), 1)
        own, all_ = (ctypes.c_void_p(array.address) for array in memory)
        for clique in order:
            communicator = ctypes.c_void_p(clique[device is devices[1]])
            assert nccl.ncclAllGather(own, all_, ctypes.c_size_t(4), 8, communicator, stream) == 0
    time.sleep(0.1)
    assert [cuda.cuStreamQuery(stream) for stream in streams] == [600] * 2  # CUDA_ERROR_NOT_READY
    assert 719 in [cuda.cuStreamSynchronize(stream) for stream in streams]  # who gives up lets the other one go on
    assert "after 2 s, 1 of 2 ranks have come to collective 0 of the communicator" in take_errors()


def test_copies_look_at_their_memory(devices):
    x, y = (device.upload(HOST) for device in devices)
    devices[0].call("cuCtxSynchronize")
    cudart.cudaMemcpyPeerAsync(*map(ctypes.c_void_p, (y.address, 0, x.address, 0)), ctypes.c_size_t(16), None)
    assert cudart.cudaStreamSynchronize(None) == 700
    assert "from device 0" in take_errors()


def test_a_process_with_errors_that_nobody_read_fails():
    done = ended([sys.executable, "-c", "import ctypes; ctypes.CDLL('libcudart.so.11.0').cudaFree(ctypes.c_void_p(4))"])
    assert done.returncode == 86
    assert "1 errors that nobody read" in done.stderr

"""kernels.cu by itself: on the emulator (`make test-gpu-emulated`), and through CuPy, there or on any CUDA GPU."""

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from places import BENCHMARKS, SOURCES

from gluon_syncbn import _native

SOURCE = SOURCES / "cuda" / "kernels.cu"
BLOCK = _native._core.syncbn_cuda_block()
DEFINED = f"-DSYNCBN_BLOCK={BLOCK}"
TOLERANCE = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-13}  # of what is rounded to the data's type
SUMS = {"float16": 2e-6, "float32": 2e-6, "float64": 1e-12}  # of what is added up in float32 and merged in float64

# (samples, samples' extent before the channels, channels, inner): one value, rows that packs fit and do not fit, more
# than a block reads at once, one column, tiles with a rest, more slots than samples
SHAPES = [
    (1, 1, 1, 1),
    (2, 1, 3, 16),
    (3, 1, 5, 77),
    (2, 2, 3, 40),
    (1, 1, 2, 9000),
    (5, 1, 1, 1031),
    (90, 1, 7, 1),
    (7, 10, 33, 1),
    (4, 30, 70, 1),
]
HUGE = [(16, 1, 256, 120 * 120), (16, 120 * 120, 256, 1), (4, 1, 3, 1 << 26), (1 << 20, 1, 1027, 1)]


class Cupy:
    """A CUDA GPU, or the emulator as CuPy sees it. Nothing here needs a kernel of CuPy's own."""

    def __init__(self):
        self.cupy = pytest.importorskip("cupy", reason="no CuPy, so no GPU to run the kernels on")
        try:
            self.cupy.cuda.runtime.getDeviceCount()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"CuPy finds no GPU: {error}")
        self.module = self.cupy.RawModule(code=SOURCE.read_text(), options=("--std=c++14", DEFINED), backend="nvrtc")

    def upload(self, values, shift=0):
        array = self.cupy.empty(values.size + shift, values.dtype)[shift:]
        array.set(values.ravel())
        return array

    def empty(self, size, dtype, shift=0):
        return self.upload(np.full(size, np.nan, dtype), shift)

    def download(self, array):
        return self.cupy.asnumpy(array)

    def launch(self, kernel, grid, *arguments):
        self.module.get_function(kernel)(grid, (BLOCK,), arguments)


class Emulated:
    """The emulator, which also finds what reads or writes where it should not."""

    class Part:
        """An array from its `shift`-th value on."""

        def __init__(self, array, shift):
            self.array, self.size = array, int(np.prod(array.shape)) - shift
            self.pointer = ctypes.c_void_p(array.pointer.value + shift * array.dtype.itemsize)

    def __init__(self):
        if "CUDA_EMULATOR" not in os.environ:
            pytest.skip("needs the CUDA emulator: `make test-gpu-emulated`")
        from cuda_emulator.device import Device

        self.device = Device(os.environ["CUDA_EMULATOR"], SOURCE.read_text(), options=("--std=c++14", DEFINED))

    def upload(self, values, shift=0):
        padded = np.concatenate([np.zeros(shift, values.dtype), values.ravel()])
        return self.Part(self.device.upload(padded), shift)

    def empty(self, size, dtype, shift=0):
        return self.Part(self.device.empty(size + shift, dtype), shift)

    def download(self, part):
        result = np.empty(part.size, part.array.dtype)  # what is before it nobody has written
        to, size = ctypes.c_void_p(result.ctypes.data), ctypes.c_size_t(result.nbytes)
        self.device.call("cuMemcpyDtoH_v2", to, part.pointer, size)
        return result

    def launch(self, kernel, grid, *arguments):
        pointers = [a.pointer if isinstance(a, self.Part) else a for a in arguments]
        self.device.launch(kernel, grid, BLOCK, *pointers)


@pytest.fixture(scope="module", params=[Emulated, Cupy], ids=["emulated", "cupy"])
def gpu(request):
    return request.param()


class Plan(NamedTuple):
    """The grids that the layer launches in; see csrc/cuda/plan.h."""

    tiles: int
    slots: int
    chunks: int
    blocks: int
    width: int
    segment: int

    @classmethod
    def of(cls, shape, slots):
        values = (ctypes.c_int64 * 6)()
        _native._core.syncbn_cuda_plan(*map(ctypes.c_int64, (*shape, slots)), values)
        return cls(*values)


class Kernels:
    """The kernels on one tensor [samples, extent, channels, inner]. `shifts`: where x, dy and the output begin, counted
    in values from what every load is aligned to."""

    def __init__(self, gpu, x, slots=1, chunks=1, width=4, segment=512, shifts=(0, 0, 0), blocks=5):
        self.gpu, self.x, self.type, self.shifts, self.blocks = gpu, x, x.dtype.name, shifts, blocks
        self.parameter = "float64" if self.type == "float64" else "float32"
        self.slots, self.chunks, self.width, self.segment = slots, chunks, width, segment
        samples, extent, self.channels, self.inner = x.shape
        self.shape = [np.int64(n) for n in (samples, extent, self.channels, self.inner, slots)]
        self.data = self.upload(x, 0)

    def upload(self, values, role):
        return self.gpu.upload(values.astype(self.type), self.shifts[role])

    def output(self, start):
        if start is None:
            return self.gpu.empty(self.x.size, self.type, self.shifts[2])
        return self.upload(start, 2)

    def parameters(self, values):
        return self.gpu.upload(values.astype(self.parameter))

    def _grid(self):
        tiles = self.channels if self.inner > 1 else -(-self.channels // self.width)
        return tiles, self.slots, self.chunks

    def _reduce(self, kernel, quantities, *arguments):
        partial = self.gpu.empty(self.chunks * self.slots * quantities * self.channels, "float64")
        self.gpu.launch(f"{kernel}_{self.type}", self._grid(), *arguments, partial, *self.shape, np.int32(self.width))
        return self.gpu.download(partial).reshape(self.chunks, self.slots, quantities, self.channels)

    def _map(self, kernel, out, add, *arguments):
        grid = (self.blocks, 1, 1) if self.inner > 1 else self._grid()
        sizes = [*self.shape, np.int32(self.width), np.int64(self.segment)]
        self.gpu.launch(f"{kernel}_{self.type}", grid, *arguments, out, np.int32(add), *sizes)
        return self.gpu.download(out).reshape(self.x.shape)

    def moments(self):
        """Count, mean and sum of squared deviations of each slot."""
        count, mean, m2 = np.moveaxis(self._reduce("moments", 3, self.data), 2, 0)
        total = count.sum(0)
        whole = (count * mean).sum(0) / np.maximum(total, 1)
        return total, whole, (m2 + count * (mean - whole) ** 2).sum(0)

    def normalise(self, statistics, gamma, beta, fix_gamma, start=None):
        out = self.output(start)
        affine = [self.parameters(gamma), self.parameters(beta), np.int32(fix_gamma)]
        return self._map("normalise", out, start is not None, self.data, self.gpu.upload(statistics), *affine)

    def grad_sums(self, dy, statistics):
        parts = self._reduce("grad_sums", 2, self.upload(dy, 1), self.data, self.gpu.upload(statistics))
        return np.moveaxis(parts.sum(0), 1, 0)

    def grad_input(self, dy, statistics, through, gamma, fix_gamma, start=None):
        out = self.output(start)
        arrays = [self.upload(dy, 1), self.data, self.gpu.upload(statistics), self.gpu.upload(through)]
        return self._map("grad_input", out, start is not None, *arrays, self.parameters(gamma), np.int32(fix_gamma))


def case(shape, dtype, slots, offset=0.0):
    random = np.random.RandomState(sum(shape))
    scale = np.arange(1, shape[2] + 1).reshape(1, 1, -1, 1) % 5 + 0.5
    x, dy, start = (((random.randn(*shape)) * scale + offset).astype(dtype) for _ in range(3))
    statistics = np.stack([random.randn(slots, shape[2]) + offset, random.rand(slots, shape[2]) + 0.5], 1)
    through = random.randn(slots, 3, shape[2])
    through[:, 0] += offset
    gamma, beta = (random.rand(shape[2]) + 0.5).astype("float32"), random.randn(shape[2]).astype("float32")
    return x, dy, start, statistics, through, gamma, beta


def parts(x, slots):
    """The slots' parts of a tensor, in float64, with the channels last."""
    return [part.astype("float64").transpose(0, 1, 3, 2) for part in np.array_split(x, slots)]


def joined(x, slots, function):
    return np.concatenate([function(i, part).transpose(0, 1, 3, 2) for i, part in enumerate(parts(x, slots))])


def close(got, want, tolerance):
    assert np.isfinite(got).all()
    assert np.abs(got.astype("float64") - want).max(initial=0) <= tolerance * max(np.abs(want).max(initial=0), 1.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("slots, chunks, width, shift", [(1, 1, 4, 0), (3, 2, 32, 0), (2, 3, 1, 1), (8, 1, 8, 8)])
def test_against_numpy(gpu, shape, dtype, slots, chunks, width, shift):
    check(gpu, shape, dtype, slots, chunks, width, (shift, shift, shift))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 1, 400000), (3000, 1, 40, 1)], ids=str)
def test_in_the_grids_of_the_layer(gpu, shape, slots):
    plan = Plan.of(shape, slots)
    tiles = shape[2] if shape[3] > 1 else -(-shape[2] // plan.width)
    assert plan[:2] == (tiles, slots) and 1 <= plan.chunks <= 65535 and plan.segment % 8 == 0
    check(gpu, shape, "float32", slots, plan.chunks, plan.width, (0, 0, 0), plan.segment, plan.blocks)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shifts", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_one_array_in_an_odd_place(gpu, shifts, dtype):
    check(gpu, (2, 1, 3, 16), dtype, 1, 1, 4, shifts)


def check(gpu, shape, dtype, slots, chunks, width, shifts, segment=512, blocks=5):
    x, dy, start, statistics, through, gamma, beta = case(shape, dtype, slots)
    kernels = Kernels(gpu, x, slots, chunks, width, segment, shifts, blocks)

    count, mean, m2 = kernels.moments()
    for i, part in enumerate(parts(x, slots)):
        rows = part.reshape(-1, shape[2])
        assert (count[i] == len(rows)).all()
        close(mean[i], rows.mean(0) if len(rows) else 0 * mean[i], SUMS[dtype])
        close(m2[i], ((rows - rows.mean(0)) ** 2).sum(0) if len(rows) else 0 * m2[i], SUMS[dtype])

    def xhat(i, part):
        return (part - statistics[i, 0]) * statistics[i, 1]

    sum_dy, sum_dy_xhat = kernels.grad_sums(dy, statistics)
    for i, (part, head) in enumerate(zip(parts(x, slots), parts(dy, slots))):
        size = np.abs(head * xhat(i, part)).sum() + np.abs(head).sum() + 1
        close(sum_dy[i] / size, head.sum((0, 1, 2)) / size, SUMS[dtype])
        close(sum_dy_xhat[i] / size, (head * xhat(i, part)).sum((0, 1, 2)) / size, SUMS[dtype])

    for fix_gamma, base in ((False, None), (True, start)):
        weight = np.ones(shape[2]) if fix_gamma else gamma.astype("float64")
        before = 0 if base is None else base.astype("float64")
        want = joined(x, slots, lambda i, part, w=weight: xhat(i, part) * w + beta) + before
        close(kernels.normalise(statistics, gamma, beta, fix_gamma, base), want, TOLERANCE[dtype])

        heads = parts(dy, slots)

        def gradient(i, part, weight=weight):
            back = through[i, 1] + (part - through[i, 0]) * through[i, 2]
            return weight * statistics[i, 1] * (heads[i] - back)

        want = joined(x, slots, gradient) + before
        close(kernels.grad_input(dy, statistics, through, gamma, fix_gamma, base), want, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 1, 5, 77), (2, 1, 2, 4000), (90, 5, 7, 1)], ids=str)
def test_offset(gpu, shape, dtype):
    """A mean of 1e5 beside a deviation of 1, and a first value that is far from it."""
    x, _, _, statistics, _, gamma, beta = case(shape, dtype, 1, offset=1e5)
    for first in (x.reshape(-1)[0], 0):
        x.reshape(-1)[0] = first
        kernels = Kernels(gpu, x)
        rows = parts(x, 1)[0].reshape(-1, shape[2])
        _, mean, m2 = kernels.moments()
        want = ((rows - rows.mean(0)) ** 2).sum(0)
        np.testing.assert_allclose(mean[0], rows.mean(0), rtol=1e-7)
        np.testing.assert_allclose(m2[0], want, rtol=2e-3 if dtype == "float32" else 1e-9)
        if first:
            np.testing.assert_allclose(m2[0], want, rtol=2e-5)
    want = joined(x, 1, lambda i, part: (part - statistics[0, 0]) * statistics[0, 1] * gamma + beta)
    got = kernels.normalise(statistics, gamma, beta, False)
    np.testing.assert_allclose(got[1:], want[1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 1, 5, 77), (2, 1, 2, 9000), (70, 10, 33, 1)], ids=str)
def test_same_bits_every_time(gpu, shape, dtype):
    x, dy, _, statistics, *_ = case(shape, dtype, 2)
    first, again = (
        [*Kernels(gpu, x, 2, 3).moments(), *Kernels(gpu, x, 2, 3).grad_sums(dy, statistics)] for _ in range(2)
    )
    np.testing.assert_array_equal(np.array(first), np.array(again))


def test_empty_slots(gpu):
    x, dy, _, statistics, *_ = case((2, 1, 3, 16), "float32", 5)
    kernels = Kernels(gpu, x, 5)
    count, _, m2 = kernels.moments()
    np.testing.assert_array_equal(count[:, 0], [16, 16, 0, 0, 0])
    assert not m2[2:].any() and not np.array(kernels.grad_sums(dy, statistics))[:, 2:].any()


def test_every_half(gpu):
    """All 65536 of them, as y = x: each conversion is exact, or NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view("float16").reshape(1, 1, 4, -1)
    statistics = np.stack([np.zeros((1, 4)), np.ones((1, 4))], 1)
    got = Kernels(gpu, halves).normalise(statistics, np.ones(4), np.zeros(4), False)
    np.testing.assert_array_equal(got, halves)


def test_parameters(gpu):
    random = np.random.RandomState(0)
    for dtype in ("float32", "float64"):
        old, batch = random.randn(2, 300).astype(dtype), random.rand(2, 300)
        mean, var = gpu.upload(old[0]), gpu.upload(old[1] ** 2)
        gpu.launch(f"update_running_{dtype}", (2, 1, 1), gpu.upload(batch), np.float64(0.7), mean, var, np.int64(300))
        np.testing.assert_allclose(gpu.download(mean), 0.7 * old[0] + 0.3 * batch[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(gpu.download(var), 0.7 * old[1] ** 2 + 0.3 * batch[1], rtol=1e-6, atol=1e-6)

        frozen = gpu.empty(600, "float64")
        gpu.launch(f"frozen_{dtype}", (2, 1, 1), mean, var, np.float64(1e-3), frozen, np.int64(300))
        want = [gpu.download(mean).astype("float64"), 1 / np.sqrt(gpu.download(var).astype("float64") + 1e-3)]
        np.testing.assert_allclose(gpu.download(frozen).reshape(2, 300), want, rtol=1e-14)

        for add in (0, 1):
            out = gpu.upload(old[0])
            gpu.launch(f"write_{dtype}", (2, 1, 1), gpu.upload(batch[0]), out, np.int32(add), np.int64(300))
            np.testing.assert_allclose(gpu.download(out), batch[0] + add * old[0], rtol=1e-6, atol=1e-6)
    for dtype, value in (("float16", np.nan), ("float32", 2.5), ("float64", -1.0)):
        out = gpu.empty(300, dtype)
        gpu.launch(f"fill_{dtype}", (2, 1, 1), out, np.float64(value), np.int64(300))
        np.testing.assert_array_equal(gpu.download(out), np.full(300, value, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_large_tensors(gpu, shape, dtype):
    if "CUDA_EMULATOR" in os.environ:
        pytest.skip("hundreds of megabytes are for a GPU")
    check(gpu, shape, dtype, 2, 8, 32, (0, 0, 0))


def test_the_benchmark_runs(tmp_path):
    Cupy()
    script = BENCHMARKS / "gpu.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    cells = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert [(cell["layout"], cell["dtype"]) for cell in cells] == list(
        itertools.product(["NCHW", "NHWC"], ["float32", "float16"])
    )
    kernels = {"copy", "moments", "normalise", "grad_sums", "grad_input"}
    assert all(kernels <= cell["seconds"].keys() for cell in cells)
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


# ---- the compiler ------------------------------------------------------------------------------------------


def architectures():
    if shutil.which("nvcc") is None:
        return []
    listed = subprocess.run(["nvcc", "--list-gpu-arch"], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    offered = sorted(int(line.split("_")[1]) for line in listed.stdout.split() if line.startswith("compute_"))
    return sorted({offered[0], 80, 90} & set(offered))


@pytest.mark.parametrize("architecture", architectures() or [None])
def test_nvcc_has_no_complaint(architecture, tmp_path):
    if architecture is None:
        pytest.skip("no nvcc on the PATH")
    command = ["nvcc", "--std=c++14", f"-arch=sm_{architecture}", "-cubin", "-Werror", "all-warnings", DEFINED]
    command += [str(SOURCE), "-o", str(tmp_path / "kernels.cubin")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout == "", done.stdout

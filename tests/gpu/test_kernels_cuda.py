"""kernels.cu by itself: on the emulator (`make test-gpu-emulated`), or on any CUDA GPU.

Running statistics and masks of other types, random layers have (test_gpu.py).
"""

import os
import sys

import numpy as np
import pytest
from devices import Device
from kernel_cases import EPSILON, WAYS, check, drawn
from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
from _kernel_arguments import BLOCK, few, filled, plan, source

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


@pytest.fixture(scope="module")
def gpu():
    try:
        return Device(source())
    except OSError as error:
        pytest.skip(f"no GPU, and no emulator (`make test-gpu-emulated`): {error}")


def plain(value):
    """An array by its address, None as a null pointer."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return 0 if value is None else getattr(value, "address", value)


class Kernels:
    """The kernels on tensors [samples, extent, channels, inner]. `shifts`: where x, dy (and an addend) and what is
    written begin, counted in values from what every load is aligned to."""

    def __init__(self, gpu, shape, dtype, slots=1, chunks=1, width=4, segment=512, blocks=5, shifts=(0, 0, 0)):
        self.gpu, self.shape, self.dtype, self.shifts, self.blocks = gpu, shape, dtype, shifts, blocks
        self.slots, self.chunks = slots, chunks
        samples, extent, self.channels, inner = shape
        sizes = {"samples": samples, "per_sample": extent, "channels": self.channels, "inner": inner}
        self.tiling = {**sizes, "slots": slots, "segment": segment, "width": width}
        self.grid = (self.channels if inner > 1 else -(-self.channels // width)), slots, chunks
        self.each = (blocks, 1, 1) if inner > 1 else self.grid

    def upload(self, values, role):
        return None if values is None else self.gpu.upload(values.astype(self.dtype), self.shifts[role])

    def output(self, start=None):
        return self.upload(np.full(self.shape, np.nan) if start is None else start, 2)

    def parameters(self, values):
        return self.gpu.upload(values.astype("float64" if self.dtype == "float64" else "float32"))

    def lists(self, lists):
        """Of slots; those that are neighbours travel with a launch."""
        if all(one[-1] - one[0] == len(one) - 1 for one in lists):
            return few([(one[0], one[-1] + 1) for one in lists])
        ends = np.cumsum([0, *map(len, lists)])
        ranges, members = np.stack([ends[:-1], ends[1:]], 1), np.concatenate(lists)
        ranges, members = (self.gpu.upload(values.astype("int32")) for values in (ranges, members))
        return {"ranges": ranges, "members": members}

    def launch(self, kernel, grid, structure, activation="identity", **fields):
        arguments = filled(structure, **plain(fields))
        self.gpu.launch(f"{kernel}_{activation}_{self.dtype}", grid, BLOCK, arguments)

    def packed(self, kernel, merge, length, structure, **fields):
        """The packed vectors of each slot; those of chunks are merged on the device."""
        out = self.gpu.empty((self.slots, length), "float64")
        partial = out if self.chunks == 1 else self.gpu.empty((self.chunks, self.slots, length), "float64")
        self.launch(kernel, self.grid, structure, tiling=self.tiling, partial=partial, **fields)
        if self.chunks > 1:
            grid = (-(-self.slots * self.channels // (BLOCK // 32)), 1, 1)
            sizes = {"slots": self.slots, "channels": self.channels, "chunks": self.chunks}
            self.launch(merge, grid, "MergeArguments", partial=partial, out=out, **sizes)
        return out

    def moments(self, x, mask=None):
        """[slots][1 + 2C]"""
        kernel = "moments" if mask is None else "masked_moments"
        return self.packed(kernel, "merge_moments", 1 + 2 * self.channels, "MomentsArguments", x=x, mask=mask)

    def step(self, task):
        way, x, y = task.way, self.upload(task.x, 0), self.output()
        dx = self.output(task.start if way.add else None)
        dy, addend = (self.upload(values, 1) for values in (task.dy, task.addend))
        mask = None if task.mask is None else self.gpu.upload(task.mask.astype("uint8"))
        affine = dict(zip(("gamma", "beta"), map(self.parameters, (task.gamma, task.beta))))
        affine.update(fix_gamma=way.fix_gamma, slope=way.slope, ceiling=way.ceiling)
        kind = "rectifier" if way.added or (way.slope, way.ceiling) != (1.0, np.inf) else "identity"
        used, fed, users = map(self.lists, (task.used, task.fed, task.users))
        saved = self.gpu.empty((self.slots, self.channels, 5), "float64")
        gathered = self.moments(self.upload(task.hidden, 0), mask)
        self.launch(
            "normalise", self.each, "NormaliseArguments", kind, tiling=self.tiling, x=x, addend=addend, y=y,
            affine=affine, gathered=gathered, used=used, fed=fed, tracked=fed, pools=self.slots, own=gathered,
            epsilon=EPSILON, saved=saved,
        )  # fmt: skip
        head = self.output() if way.added else dy
        written = {"y": y, "dz": head} if way.added else {}
        sums = self.packed(
            "grad_sums", "merge_sums", 2 * self.channels, "GradSumsArguments", activation=kind, dy=dy, x=x,
            affine=affine, saved=saved, **written,
        )  # fmt: skip
        before = np.arange(1, self.channels + 1)
        dgamma, dbeta = (self.parameters(before) for _ in range(2))
        self.launch(
            "grad_input" if mask is None else "masked_grad_input", self.each, "GradInputArguments",
            "identity" if way.added else kind, tiling=self.tiling, dy=head, mask=mask, x=x, dx=dx, users=users,
            affine=affine, saved=saved, gathered=sums, own=sums, dgamma=dgamma, dbeta=dbeta,
            add=way.add, add_dgamma=way.add, add_dbeta=way.add,
        )  # fmt: skip
        return y.download(), dx.download(), *(one.download() - way.add * before for one in (dgamma, dbeta))


# Slots, chunks, width and shifts.
GRIDS = [
    (1, 1, 4, (0, 0, 0)),
    (3, 2, 32, (0, 0, 1)),
    (2, 3, 1, (1, 1, 1)),
    (8, 1, 8, (8, 8, 8)),
    (8, 3, 8, (0, 1, 0)),
    (2, 1, 8, (1, 0, 0)),
]
# Each shape in two grids in float32, and of the other types, which share its code, in one.
CASES = [
    (ways, shape, dtype, *GRIDS[(i + k) % len(GRIDS)])
    for ways in WAYS
    for k, dtype in enumerate(("float32", "float32", "float16", "float64"))
    for i, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize("ways, shape, dtype, slots, chunks, width, shifts", CASES, ids=str)
def test_against_the_reference(gpu, ways, shape, dtype, slots, chunks, width, shifts):
    for way in WAYS[ways]:
        check(Kernels(gpu, shape, dtype, slots, chunks, width, shifts=shifts).step, shape, dtype, slots, way)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 1, 400000), (3000, 1, 40, 1)], ids=str)
def test_in_the_grids_of_the_layer(gpu, shape, slots):
    tiles, of_slots, chunks, blocks, width, segment = plan(shape, slots)
    assert 1 <= chunks <= 65535 and segment % 8 == 0
    kernels = Kernels(gpu, shape, "float32", slots, chunks, width, segment, blocks)
    assert kernels.grid == (tiles, of_slots, chunks)
    check(kernels.step, shape, "float32", slots, WAYS["pooled"][0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_large_tensors(gpu, shape, dtype):
    if "CUDA_EMULATOR" in os.environ:
        pytest.skip("hundreds of megabytes are for a GPU")
    for way in WAYS["pooled"]:
        check(Kernels(gpu, shape, dtype, 2, 8, 32).step, shape, dtype, 2, way)


@pytest.mark.parametrize("shape", [(3, 1, 5, 77), (2, 1, 2, 4000), (90, 5, 7, 1)], ids=str)
def test_offset(gpu, shape):
    """A mean of 1e5 beside a deviation of 1, and a first value that is far from it."""
    (x,) = drawn(shape, "float32", 1, offset=1e5)
    kernels = Kernels(gpu, shape, "float32")
    for first, tolerance in ((x.flat[0], 2e-5), (0, 2e-3)):
        x.flat[0] = first
        rows = np.moveaxis(x.astype("float64"), 2, -1).reshape(-1, shape[2])
        _, mean, m2 = np.split(kernels.moments(kernels.upload(x, 0)).download()[0], [1, 1 + shape[2]])
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-7)
        np.testing.assert_allclose(m2, ((rows - rows.mean(0)) ** 2).sum(0), rtol=tolerance)


def test_every_half(gpu):
    """All 65536 of them, added to 0: each conversion is exact, or NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view("float16")
    kernels = Kernels(gpu, (1, 1, 1, halves.size), "float16")
    given, out = kernels.upload(halves, 0), kernels.output(np.zeros(halves.size))
    kernels.launch("add", (halves.size // BLOCK, 1, 1), "AddArguments", **{"from": given, "to": out, "n": halves.size})
    np.testing.assert_array_equal(out.download(), halves)

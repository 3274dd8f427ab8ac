"""The CPU kernels by themselves, in each instruction set that they are compiled for and this machine has."""

import ctypes

import kernels_library
import numpy as np
import pytest
from kernel_cases import EPSILON, TOLERANCE, WAYS, check, close, drawn
from replicas import rounded

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 12}
NOTHING, RELU, RELU6, LEAKY = (1.0, np.inf), (0.0, np.inf), (0.0, 6.0), (0.1, np.inf)  # slope and ceiling

# (outer, channels, inner): rows longer and shorter than the vectors, one column, many, tiles and blocks
SHAPES = [(3, 5, 77), (1, 1, 1), (2, 3, 16), (2, 4, 5), (900, 7, 1), (70, 513, 1), (6, 200, 4), (2, 3, 40000)]
# one position, one group of channels, several, parts that end within an image, work for several threads
IN_BLOCKS = [(3, 32, 1), (1, 16, 7), (2, 48, 7), (3, 32, 225), (3, 16, 1507), (3, 112, 225), (2, 4800, 7)]


def layouts(shapes, types, blocked):
    """For a test of these: what is plain, and of float32 and bfloat16 what is in blocks of 8 and of 16 channels."""
    values = [(shape, dtype, 1) for shape in shapes for dtype in types]
    for dtype in ("float32", "bfloat16"):
        values += [(shape, dtype, block) for shape in blocked for block in (8, 16) if dtype in types]
    return pytest.mark.parametrize("shape, dtype, block", values, ids=str)


@pytest.fixture(scope="module", params=kernels_library.SETS)
def library(request):
    if request.param not in kernels_library.here():
        pytest.skip(f"this machine has no {request.param}")
    return kernels_library.build(request.param)


class Kernels:
    """The library's functions on NumPy arrays [outer][channels][inner].

    With a `block` they work on copies in that layout, which begin `at` values after some that are aligned. Arrays of
    bfloat16 are float32 here that has no more bits.
    """

    def __init__(self, library, x, threads=1, block=1, at=0, dtype=None, mask=None):
        self.library, self.x, self.threads, self.block, self.at, self.mask = library, x, threads, block, at, mask
        self.dtype = dtype or x.dtype.name
        self.type = TYPES[self.dtype]

    def _call(self, name, *arguments):
        copies = {}
        for a in arguments:
            if isinstance(a, np.ndarray) and a.ndim == 3 and (self.block > 1 or self.dtype == "bfloat16"):
                copy = (a.view("uint32") >> 16).astype("uint16") if self.dtype == "bfloat16" else a
                copies[id(a)] = a, in_blocks(copy, self.block, self.at) if self.block > 1 else copy
        converted = [copies[id(a)][1] if id(a) in copies else a for a in arguments]
        converted = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in converted]
        self.library.take_mask(None if self.mask is None else self.mask.ctypes.data_as(ctypes.c_void_p))
        self.returned = getattr(self.library, name)(*converted)
        for a, copy in copies.values():
            values = copy.swapaxes(2, 3).reshape(a.shape) if self.block > 1 else copy
            a[...] = (values.astype("uint32") << 16).view("float32") if self.dtype == "bfloat16" else values

    def _shape(self):
        return [self.type, *map(ctypes.c_int64, (*self.x.shape, self.block)), self.threads]

    def moments(self):
        mean, m2 = np.empty(self.x.shape[1]), np.empty(self.x.shape[1])
        self._call("moments", self.x, *self._shape(), mean, m2)
        return mean, m2

    def normalise(self, mean, scale, shift, out, activation=NOTHING, addend=None):
        constants = mean, scale, shift, *map(ctypes.c_double, activation)
        self._call("normalise", self.x, *self._shape(), *constants, addend, out)
        return out

    def grad_sums(self, dy, mean, invstd, scale=None, shift=None, activation=NOTHING, y=None, dz=None):
        sums = np.empty(self.x.shape[1]), np.empty(self.x.shape[1])
        constants = mean, scale, shift, *map(ctypes.c_double, activation)
        self._call("grad_sums", dy, self.x, *self._shape(), *constants, invstd, y, dz, *sums)
        return sums

    def grad_input(self, dy, mean, scale, mean_dy, slope, out, add, shift=None, activation=NOTHING, fed_mean=None):
        constants = mean, scale, shift, *map(ctypes.c_double, activation)
        fed_mean = mean if fed_mean is None else fed_mean
        self._call("grad_input", dy, self.x, *self._shape(), *constants, fed_mean, mean_dy, slope, out, int(add))
        return out


def in_blocks(array, block, at=0):
    """[outer][channels / block][inner][block], `at` values after where memory begins."""
    outer, channels, inner = array.shape
    out = np.empty(array.size + at, array.dtype)[at:].reshape(outer, channels // block, inner, block)
    out[...] = array.reshape(outer, channels // block, block, inner).swapaxes(2, 3)
    return out


def per_channel(vector):
    return vector.reshape(1, -1, 1)


def step_of(library, dtype, block):
    """A step of `kernel_cases`: the kernels on each slot, and between them what csrc/operator/host_call.cc does."""

    def step(task):
        way, slots = task.way, len(task.used)
        masks = task.mask.astype("float32") * -0.5 if way.masked else None

        def cut(array):
            parts = [None] * slots if array is None else np.array_split(array, slots)
            return [None if p is None else p.reshape(-1, *p.shape[2:]).copy() for p in parts]

        def pooled(members):
            """Count, mean and invstd, from the moments of these slots."""
            counts, means, m2s = (np.array([moments[i][k] for i in members]) for k in range(3))
            n = counts.sum()
            if n == 0:
                return 0, np.zeros(channels), np.zeros(channels)
            mean = (counts[:, None] * means).sum(0) / n
            return n, mean, ((m2s + counts[:, None] * (means - mean) ** 2).sum(0) / n + EPSILON) ** -0.5

        channels, behind = task.x.shape[2], (way.slope, way.ceiling)
        weight = np.ones(channels) if way.fix_gamma else task.gamma.astype("float64")
        shift, again = task.beta.astype("float64"), NOTHING if way.added else behind
        of_slot, moments = [], []
        for hidden, mask in zip(cut(task.hidden), cut(masks)):
            of_slot.append(Kernels(library, hidden, 1 + way.masked, block, dtype=dtype, mask=mask))
            mean_and_m2 = of_slot[-1].moments()
            moments.append((of_slot[-1].returned, *mean_and_m2))
        used, fed = ([pooled(members) for members in lists] for lists in (task.used, task.fed))
        ys, heads, sums, dxs = [], cut(task.dy), [], cut(task.start)
        for i, (kernels, x, addend) in enumerate(zip(of_slot, cut(task.x), cut(task.addend))):
            (_, mean, invstd), dy, kernels.x = used[i], heads[i], x
            ys.append(kernels.normalise(mean, weight * invstd, shift, np.empty_like(x), behind, addend))
            if way.added:
                heads[i] = np.empty_like(x)
                sums.append(kernels.grad_sums(dy, mean, invstd, activation=behind, y=ys[i], dz=heads[i]))
            else:
                sums.append(kernels.grad_sums(dy, mean, invstd, weight * invstd, shift, behind))
        for i, kernels in enumerate(of_slot):
            (_, mean, invstd), (n, fed_mean, fed_invstd) = used[i], fed[i]
            s1, s2 = np.sum([sums[user] for user in task.users[i]], 0)
            share = fed_invstd / (n * invstd) if n else np.zeros(channels)
            constants = mean, weight * invstd, share * s1, share * fed_invstd * s2, dxs[i], way.add
            kernels.grad_input(heads[i], *constants, shift=shift, activation=again, fed_mean=fed_mean)
        dbeta, dgamma = np.sum(sums, 0)
        y, dx = (np.concatenate(parts).reshape(task.x.shape) for parts in (ys, dxs))
        return y, dx, dgamma * (not way.fix_gamma), dbeta

    return step


@layouts([*SHAPES, (70, 9, 3)], TYPES, IN_BLOCKS)
def test_against_the_reference(library, shape, dtype, block):
    """What is masked may hold anything, and the statistics of what is left lose no digits beside it."""
    pooled, masked, behind = WAYS.values()
    ways = [pooled[3], masked[0], *([pooled[1], masked[2], behind[1], behind[3]] if np.prod(shape) < 50000 else [])]
    for way in ways:
        check(step_of(library, dtype, block), (shape[0], 1, *shape[1:]), dtype, 2, way)


@layouts([(1, 1, 32), (40, 1, 1)], ["float32", "float16", "bfloat16"], [(1, 16, 5)])
def test_what_stands_behind_values_that_are_not_finite(library, shape, dtype, block):
    """An infinite one, as float16 makes it by an overflow, has the gradient of MXNet's operators."""
    x = np.resize(rounded(np.array([np.nan, -np.inf, np.inf, -1, 1]), dtype), shape)
    zero, one = np.zeros(shape[1]), np.ones(shape[1])
    wants = {RELU: [np.nan, 0, np.inf, 0, 1], RELU6: [np.nan, 0, 6, 0, 1], LEAKY: [np.nan, -np.inf, np.inf, -0.1, 1]}
    for activation, want in wants.items():
        kernels = Kernels(library, x, block=block, dtype=dtype)
        y = kernels.normalise(zero, one, zero, np.empty_like(x), activation)
        np.testing.assert_allclose(y, np.resize(want, shape), rtol=TOLERANCE[dtype])
        dz = np.empty_like(x)
        kernels.grad_sums(np.ones_like(x), zero, one, activation=activation, y=y, dz=dz)
        assert (dz[np.isposinf(x)] == (activation != RELU6)).all()


@layouts([(3, 5, 77), (900, 7, 1)], ["float32", "float64"], [(3, 16, 77), (2, 32, 1507)])
def test_offset(library, shape, dtype, block):
    x, start = (a.reshape(shape) for a in drawn((shape[0], 1, *shape[1:]), dtype, 2, offset=1e5))
    scale, shift = np.random.RandomState(0).randn(2, shape[1])
    kernels = Kernels(library, x, block=block)
    mean, m2 = kernels.moments()
    centred = x.astype("float64") - per_channel(mean)
    close(m2, (centred**2).sum((0, 2)), 1e-9)
    y = kernels.normalise(mean, scale, shift, start)
    close(y, centred * per_channel(scale) + per_channel(shift), 1e-6)


@layouts([(3, 5, 40007), (2000, 70, 1), (300, 50, 7)], TYPES, [(3, 16, 2107), (3, 1120, 35), (1, 4800, 25)])
def test_same_bits_for_any_number_of_threads_and_alignment(library, shape, dtype, block):
    x, dy, start = (a.reshape(shape) for a in drawn((shape[0], 1, *shape[1:]), dtype, 3))
    scale, shift, mean_dy, slope = np.random.RandomState(0).randn(4, shape[1])
    results = []
    for threads, at in ((1, 0), (2, 1), (3, 3)):
        moved = [np.empty(x.size + at, x.dtype)[at:].reshape(shape) for _ in range(3)]
        for to, source in zip(moved, (x, dy, start)):
            to[...] = source
        kernels = Kernels(library, moved[0], threads, block, at, dtype)
        mean, m2 = kernels.moments()
        sums = kernels.grad_sums(moved[1], mean, scale)
        y = kernels.normalise(mean, scale, shift, moved[2].copy())
        dx = kernels.grad_input(moved[1], mean, scale, mean_dy, slope, moved[2].copy(), True)
        dz = np.empty_like(dx)
        behind = kernels.grad_sums(moved[1], mean, scale, activation=RELU, y=y, dz=dz)
        results.append((mean, m2, *sums, y, dx, dz, *behind))
    for other in results[1:]:
        for got, want in zip(other, results[0]):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@np.errstate(over="ignore", invalid="ignore")
def test_rounding(library, dtype):
    """To the nearest, ties to even: each value of the type, what is halfway between two, and any other float32."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exact = bits.view(dtype).astype("float32") if dtype == "float16" else (bits.astype("uint32") << 16).view("float32")
    finite = np.sort(exact[np.isfinite(exact)]).astype("float64")
    some = np.random.RandomState(0).randint(0, 1 << 32, 200000, dtype=np.uint64).astype("uint32").view("float32")
    largest = [65519.9, 65520, 1e9, *np.finfo("float32").max * np.array([1, -1]), np.inf, -np.inf, np.nan]
    values = np.concatenate([exact, (finite[1:] + finite[:-1]) / 2, some, largest]).astype("float32")
    zero = np.zeros(values.size)
    x = zero.reshape(1, -1, 1).astype("float16" if dtype == "float16" else "float32")
    got = Kernels(library, x, dtype=dtype).normalise(zero, zero, values.astype("float64"), np.empty_like(x)).ravel()
    want = np.where(np.isfinite(values), rounded(values, dtype), values)
    np.testing.assert_array_equal(got, want)


def test_every_half(library):
    """As the mean of a channel that has no other value."""
    halves = np.arange(1 << 16, dtype=np.uint16).view("float16")
    mean, _ = Kernels(library, halves.reshape(1, -1, 1)).moments()
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(mean[finite], halves[finite])
    assert not np.isfinite(mean[~finite]).any()

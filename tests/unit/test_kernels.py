"""The CPU kernels by themselves, in each instruction set that they are compiled for and this machine has."""

import ctypes

import kernels_library
import numpy as np
import pytest
from replicas import rounded

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 12}
TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-13}

NOTHING = (1.0, np.inf)  # slope and ceiling
ACTIVATIONS = {"relu": (0.0, np.inf), "relu6": (0.0, 6.0), "leaky": (0.1, np.inf)}

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


def close(got, want, tolerance):
    assert np.abs(got.astype("float64") - want).max() <= tolerance * max(np.abs(want).max(), 1.0)


def case(shape, dtype, offset=0.0):
    random = np.random.RandomState(sum(shape))
    channels = np.arange(1, shape[1] + 1).reshape(1, -1, 1) % 5 + 0.5
    x, dy, start = (rounded(random.randn(*shape) * channels + offset, dtype) for _ in range(3))
    vectors = [random.randn(shape[1]) for _ in range(5)]
    return x, dy, start, vectors


def per_channel(vector):
    return vector.reshape(1, -1, 1)


#: What stands behind a normalisation, and whether a mask hides some of x.
WAYS = [
    (NOTHING, False),
    (NOTHING, True),
    (ACTIVATIONS["leaky"], True),
    *((one, False) for one in ACTIVATIONS.values()),
]


@layouts([*SHAPES, (70, 9, 3)], TYPES, IN_BLOCKS)
def test_against_numpy(library, shape, dtype, block):
    """What is masked may hold anything, and the statistics of what is left lose no digits beside it."""
    for activation, masked in WAYS if np.prod(shape) < 50000 else WAYS[:2]:
        check(library, shape, dtype, block, activation, masked)


def check(library, shape, dtype, block, activation, masked):
    x, dy, start, (scale, shift, mean_dz, slope, fed_mean) = case(shape, dtype, offset=8 * masked)
    addend, (slope_below, ceiling) = rounded(3 * dy[::-1] + 2, dtype), activation
    wide, wide_dy, wide_start = (a.astype("float64") for a in (x, dy, start))
    mask, counts, hidden = None, np.ones(shape, bool), x
    if masked:
        mask = (np.random.RandomState(7).rand(shape[0], 1, shape[2]) < 0.5).astype("float32") * -0.5
        mask.ravel()[0], mask.ravel()[-1] = 0, 3
        counts = np.broadcast_to(mask != 0, shape)
        hidden = np.where(counts, x, np.array(np.nan, x.dtype))
        hidden.ravel()[0] = x.ravel()[0] if counts.ravel()[0] else np.inf
    kernels = Kernels(library, hidden, threads=1 + masked, block=block, dtype=dtype, mask=mask)
    mean, m2 = kernels.moments()
    n = int(counts[:, 0].sum())
    assert kernels.returned == n
    centred = wide - per_channel(mean)
    close(mean, np.where(counts, wide, 0).sum((0, 2)) / n, 1e-13)
    close(m2, np.where(counts, centred**2, 0).sum((0, 2)), 1e-12)

    kernels.x = x
    z = centred * per_channel(scale) + per_channel(shift)

    def rectified(z):
        return np.where(z > 0, np.minimum(z, ceiling), slope_below * z)

    def through(z):
        return wide_dy * np.where(z > 0, z < ceiling, slope_below)

    def clear(z, edge=20 * TOLERANCE[dtype]):
        """Where no rounding decides on which side of a kink a value is."""
        return (np.abs(z) > edge) & (np.abs(z - ceiling) > edge) if activation != NOTHING else np.ones(shape, bool)

    close(kernels.normalise(mean, scale, shift, start.copy(), activation), rectified(z), TOLERANCE[dtype])
    y = kernels.normalise(mean, scale, shift, start.copy(), activation, addend)
    close(y, rectified(z + addend), 2 * TOLERANCE[dtype])
    for add in (False, True):
        base = wide_start * add
        of_pool = (wide - per_channel(fed_mean)) * per_channel(slope)
        want = base + per_channel(scale) * (through(z) - np.where(counts, per_channel(mean_dz) + of_pool, 0))
        constants = {"shift": shift, "activation": activation, "fed_mean": fed_mean}
        got = kernels.grad_input(dy, mean, scale, mean_dz, slope, start.copy(), add, **constants)
        close(got[clear(z)], want[clear(z)], 8 * TOLERANCE[dtype])
    kernels.mask = None

    sums = kernels.grad_sums(dy, mean, slope, scale, shift, activation)
    for got, want in zip(sums, (through(z), through(z) * centred * per_channel(slope))):
        close(got, want.sum((0, 2)), 1e-12 if activation == NOTHING else 10 * TOLERANCE[dtype])
    if activation != NOTHING:
        y, dz = kernels.normalise(mean, scale, shift, start.copy(), activation, addend), np.empty_like(dy)
        sums, wanted = kernels.grad_sums(dy, mean, slope, activation=activation, y=y, dz=dz), dz.astype("float64")
        for got, want in zip(sums, (wanted, wanted * centred * per_channel(slope))):
            close(got, want.sum((0, 2)), 1e-11)
        sure = clear(z + addend)
        close(dz[sure], through(z + addend)[sure], TOLERANCE[dtype])
    if masked:
        kernels.mask = np.ones_like(mask)
        ones = *kernels.moments(), kernels.grad_input(dy, mean, scale, mean_dz, slope, start.copy(), False)
        kernels.mask = None
        none = *kernels.moments(), kernels.grad_input(dy, mean, scale, mean_dz, slope, start.copy(), False)
        for got, want in zip(ones, none):
            close(got, want, 2 * TOLERANCE[dtype])
        kernels.mask = np.zeros_like(mask)
        assert not any(values.any() for values in kernels.moments()) and kernels.returned == 0


@layouts([(1, 1, 32), (40, 1, 1)], ["float32", "bfloat16"], [(1, 16, 5)])
def test_what_stands_behind_values_that_are_not_finite(library, shape, dtype, block):
    x = np.resize(rounded(np.array([np.nan, -np.inf, np.inf, -1, 1]), dtype), shape)
    zero, one = np.zeros(shape[1]), np.ones(shape[1])
    for activation, want in (("relu", [np.nan, 0, np.inf, 0, 1]), ("leaky", [np.nan, -np.inf, np.inf, -0.1, 1])):
        kernels = Kernels(library, x, block=block, dtype=dtype)
        y = kernels.normalise(zero, one, zero, np.empty_like(x), ACTIVATIONS[activation])
        np.testing.assert_allclose(y, np.resize(want, shape), rtol=TOLERANCE[dtype])


@layouts([(3, 5, 77), (900, 7, 1)], ["float32", "float64"], [(3, 16, 77), (2, 32, 1507)])
def test_offset(library, shape, dtype, block):
    x, _, start, (scale, shift, *_) = case(shape, dtype, offset=1e5)
    kernels = Kernels(library, x, block=block)
    mean, m2 = kernels.moments()
    centred = x.astype("float64") - per_channel(mean)
    close(m2, (centred**2).sum((0, 2)), 1e-9)
    y = kernels.normalise(mean, scale, shift, start)
    close(y, centred * per_channel(scale) + per_channel(shift), 1e-6)


@layouts([(3, 5, 40007), (2000, 70, 1), (300, 50, 7)], TYPES, [(3, 16, 2107), (3, 1120, 35), (1, 4800, 25)])
def test_same_bits_for_any_number_of_threads_and_alignment(library, shape, dtype, block):
    x, dy, start, (scale, shift, mean_dy, slope, _) = case(shape, dtype)
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
        behind = kernels.grad_sums(moved[1], mean, scale, activation=ACTIVATIONS["relu"], y=y, dz=dz)
        results.append((mean, m2, *sums, y, dx, dz, *behind))
    for other in results[1:]:
        for got, want in zip(other, results[0]):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("block", [1, 8, 16])
def test_empty(library, block):
    for shape in ((0, 16, 9), (2, 16, 0)):
        nothing = np.empty(shape, "float32")
        kernels, ones = Kernels(library, nothing, block=block), np.ones(16)
        sums = kernels.grad_sums(nothing, ones, ones)
        kernels.normalise(ones, ones, ones, nothing)
        kernels.grad_input(nothing, ones, ones, ones, ones, nothing, False)
        for values in (*kernels.moments(), *sums):
            assert not values.any()
        assert kernels.returned == 0


@pytest.mark.parametrize("block", [1, 8, 16])
def test_slots(library, block):
    shape, samples, slots = (10, 32, 49), 5, 3  # two of the outer extent are a sample
    x, *_ = case(shape, "float32")
    lies = in_blocks(x, block) if block > 1 else x
    cut = np.empty((slots, 5), np.int64)
    library.cut(*map(ctypes.c_int64, (*shape, block, samples, slots)), cut.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_array_equal(cut[:, 0], [4, 4, 2])
    for (outer, *rest, first), part in zip(cut, (x[:4], x[4:8], x[8:])):
        assert rest == [*shape[1:], block]
        got = lies.ravel()[first : first + part.size].reshape(outer, *lies.shape[1:])
        np.testing.assert_array_equal(got, in_blocks(part, block) if block > 1 else part)


def converted(function, values, dtype):
    got = np.empty(values.size, dtype)
    function(values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(got.size), got.ctypes.data_as(ctypes.c_void_p))
    return got


RANDOM = np.random.RandomState(0).randint(0, 1 << 32, 200000, dtype=np.uint64).astype(np.uint32).view(np.float32)


def test_every_half(library):
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = converted(library.from_half, halves, np.float32)
    np.testing.assert_array_equal(got, halves.view(np.float16).astype(np.float32))


def test_rounding_to_half(library):
    exact = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    middles = (np.sort(exact)[1:] + np.sort(exact)[:-1]) / 2  # ties
    named = np.array([65519.9, 65520, 1e9, np.inf, -np.inf, np.nan], np.float32)
    values = np.concatenate([exact, RANDOM, middles, named])
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(converted(library.to_half, values, np.uint16).view(np.float16), want)


def test_rounding_to_bfloat16(library):
    exact = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([exact, RANDOM, ties])
    got = (converted(library.to_bfloat16, values, np.uint16).astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)  # largest values round to infinity
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got[finite], rounded(values[finite], "bfloat16"))
    np.testing.assert_array_equal(got[~finite], values[~finite])

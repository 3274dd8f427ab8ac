"""kernels.cu by itself: on the emulator (`make test-gpu-emulated`), or on any CUDA GPU."""

import os
import sys
from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np
import pytest
from devices import Device
from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
from _kernel_arguments import BLOCK, STRUCTURES, few, filled, plan, source

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


STATUS = STRUCTURES["Status"]
SHARED, OWN, LISTS = range(3)


class Pools(NamedTuple):
    """What this replica's slots, from the `own`-th on, use: all of them begin ... end, each itself, or each a list.
    Each feeds a pool of its own where it does not share one, and the replica tracks what its slots feed."""

    kind: int
    own: int = 0
    begin: int = 0
    end: int = 0
    lists: Sequence[Sequence[int]] = ()


@pytest.fixture(scope="module")
def gpu():
    try:
        return Device(source())
    except OSError as error:
        pytest.skip(f"no GPU, and no emulator (`make test-gpu-emulated`): {error}")


def address(array):
    return 0 if array is None else array.address


def run(gpu, kernel, grid, structure, **fields):
    """What is no number and no structure is an array, or None."""
    plain = (int, float, bool, np.number, np.bool_, dict)
    arguments = {name: value if isinstance(value, plain) else address(value) for name, value in fields.items()}
    gpu.launch(kernel, grid, BLOCK, filled(structure, **arguments))


def behind(activation):
    return "rectifier" if activation else "identity"


class Kernels:
    """The kernels on one tensor [samples, extent, channels, inner]. `shifts`: where x, dy (and an addend), the output
    and an old one begin, counted in values from what every load is aligned to."""

    def __init__(self, gpu, x, slots=1, chunks=1, width=4, segment=512, shifts=(0, 0, 0, 0), blocks=5):
        self.gpu, self.x, self.type, self.shifts, self.blocks = gpu, x, x.dtype.name, shifts, blocks
        self.parameter = "float64" if self.type == "float64" else "float32"
        self.slots, self.chunks, self.width, self.segment = slots, chunks, width, segment
        samples, extent, self.channels, self.inner = x.shape
        sizes = {"samples": samples, "per_sample": extent, "channels": self.channels, "inner": self.inner}
        self.tiling = {**sizes, "slots": slots, "segment": segment, "width": width}
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

    def launch(self, kernel, grid, structure, activation="identity", **fields):
        """Arrays are given by their addresses; None is a null pointer."""
        run(self.gpu, f"{kernel}_{activation}_{self.type}", grid, structure, **fields)

    def _affine(self, gamma, beta, fix_gamma, activation):
        """Without an activation, the kernel does not look at its arguments."""
        gamma, beta = (None if values is None else self.parameters(values) for values in (gamma, beta))
        self.alive = gamma, beta
        slope, ceiling = activation or (np.nan, np.nan)
        weights = {"gamma": address(gamma), "beta": address(beta), "fix_gamma": fix_gamma}
        return {**weights, "slope": slope, "ceiling": ceiling}

    def _packed(self, kernel, merge, length, structure, **fields):
        """The packed vectors of each slot; those of chunks are merged on the device."""
        out = self.gpu.empty(self.slots * length, "float64")
        partial = out if self.chunks == 1 else self.gpu.empty(self.chunks * self.slots * length, "float64")
        self.launch(kernel, self._grid(), structure, tiling=self.tiling, x=self.data, partial=partial, **fields)
        if self.chunks > 1:
            grid = (-(-self.slots * self.channels // (BLOCK // 32)), 1, 1)
            sizes = {"slots": self.slots, "channels": self.channels, "chunks": self.chunks}
            self.launch(merge, grid, "MergeArguments", partial=partial, out=out, **sizes)
        return out.download().reshape(self.slots, length)

    def _each(self):
        return (self.blocks, 1, 1) if self.inner > 1 else self._grid()

    def _own(self, pools):
        """Which slots feed the pool that each slot feeds."""
        if pools.kind == SHARED:
            return few([(pools.begin, pools.end)] * self.slots)
        return few([(slot, slot + 1) for slot in range(pools.own, pools.own + self.slots)])

    def _lists(self, pools):
        if pools.kind != LISTS:
            return self._own(pools)
        ends = np.cumsum([0, *map(len, pools.lists)])
        ranges, members = np.stack([ends[:-1], ends[1:]], 1), np.concatenate(list(map(list, pools.lists)))
        arrays = [self.gpu.upload(values.astype("int32")) for values in (ranges, members)]
        self.lists = arrays  # while the kernel runs
        return dict(zip(("ranges", "members"), (address(array) for array in arrays)))

    def moments(self, mask=None):
        """[slots][1 + 2C]"""
        kernel, mask = ("moments", None) if mask is None else ("masked_moments", self.gpu.upload(mask.astype("uint8")))
        return self._packed(kernel, "merge_moments", 1 + 2 * self.channels, "MomentsArguments", mask=mask)

    def normalise(self, source, pools, gamma, beta, fix_gamma, running=(None, None),
                  momentum=0.9, given_up=0, unbiased=0, watch=0, activation=None, addend=None):  # fmt: skip
        """`source`: gathered moments, or None for the running statistics. Returns the output and what is saved."""
        out, saved = self.output(None), self.gpu.empty(self.slots * self.channels * 5, "float64")
        told = self.gpu.upload(np.array([(given_up, -1, 0.0)], STATUS).view("uint8"))
        own, gathered, own_moments = self._own(pools), None, None
        if source is not None:
            gathered, own_moments = self.gpu.upload(source), self.gpu.upload(source[pools.own : pools.own + self.slots])
        self.launch(
            "normalise", self._each(), "NormaliseArguments", behind(activation), tiling=self.tiling, x=self.data,
            addend=None if addend is None else self.upload(addend, 1), y=out,
            affine=self._affine(gamma, beta, fix_gamma, activation), gathered=gathered,
            used=self._lists(pools), fed=own, tracked=own, pools=1 if pools.kind == SHARED else self.slots,
            own=own_moments, epsilon=EPSILON, saved=saved, frozen=source is None,
            momentum=momentum, running_mean=running[0], running_var=running[1], unbiased=unbiased, watch=watch,
            status=told,
        )  # fmt: skip
        self.told = told.download().view(STATUS)[0]
        saved = saved.download().reshape(self.slots, self.channels, 5)
        return out.download().reshape(self.x.shape), saved

    def grad_sums(self, dy, saved, gamma=None, beta=None, fix_gamma=False, activation=None, y=None):
        """[slots][2C]; with y, whose sign counts then, and dz."""
        y, dz = (None, None) if y is None else (self.upload(y, 3), self.output(None))
        sums = self._packed(
            "grad_sums", "merge_sums", 2 * self.channels, "GradSumsArguments",
            activation=behind(activation), dy=self.upload(dy, 1), saved=self.gpu.upload(saved), y=y, dz=dz,
            affine=self._affine(gamma, beta, fix_gamma, activation),
        )  # fmt: skip
        return sums if dz is None else (sums, dz.download().reshape(self.x.shape))

    def grad_input(
        self, dy, saved, gathered, users, own, gamma, fix_gamma, start=None, beta=None, activation=None, mask=None
    ):
        """dx, dgamma, dbeta."""
        kernel, mask = ("", None) if mask is None else ("masked_", self.gpu.upload(mask.astype("uint8")))
        out = self.output(start)
        before = np.arange(1, self.channels + 1)
        parameters = [self.parameters(before) for _ in range(2)]
        add = start is not None
        self.launch(
            f"{kernel}grad_input", self._each(), "GradInputArguments", behind(activation), tiling=self.tiling,
            dy=self.upload(dy, 1), mask=mask, x=self.data, dx=out, users=self._lists(users),
            affine=self._affine(gamma, beta, fix_gamma, activation), saved=self.gpu.upload(saved),
            gathered=self.gpu.upload(gathered), own=self.gpu.upload(own), dgamma=parameters[0], dbeta=parameters[1],
            add=add, add_dgamma=add, add_dbeta=add,
        )  # fmt: skip
        dgamma, dbeta = (p.download() - (before if add else 0) for p in parameters)
        return out.download().reshape(self.x.shape), dgamma, dbeta


EPSILON = 1e-3


def case(shape, dtype, slots, offset=0.0):
    random = np.random.RandomState(sum(shape))
    scale = np.arange(1, shape[2] + 1).reshape(1, 1, -1, 1) % 5 + 0.5
    x, dy, start = (((random.randn(*shape)) * scale + offset).astype(dtype) for _ in range(3))
    gamma, beta = (random.rand(shape[2]) + 0.5).astype("float32"), random.randn(shape[2]).astype("float32")
    return x, dy, start, gamma, beta


def gathered_moments(channels, slots, empty=(), offset=0.0):
    """[slots][1 + 2C], of different counts."""
    random = np.random.RandomState(slots)
    counts = random.randint(2, 9, slots).astype("float64")
    mean, m2 = random.randn(slots, channels) + offset, counts[:, None] * (random.rand(slots, channels) + 0.5)
    packed = np.concatenate([counts[:, None], mean, m2], 1)
    packed[list(empty)] = 0
    return packed


def pooled(packed, slots, channels):
    """Count, mean and variance of all values of some slots."""
    rows = packed[list(slots)]
    count = rows[:, 0].sum()
    if count == 0:
        return 0.0, np.zeros(channels), np.zeros(channels)
    mean = (rows[:, :1] * rows[:, 1 : 1 + channels]).sum(0) / count
    apart = rows[:, 1 : 1 + channels] - mean
    return count, mean, (rows[:, 1 + channels :] + rows[:, :1] * apart**2).sum(0) / count


def parts(x, slots):
    """The slots' parts of a tensor, in float64, with the channels last."""
    return [part.astype("float64").transpose(0, 1, 3, 2) for part in np.array_split(x, slots)]


def joined(x, slots, function):
    return np.concatenate([function(i, part).transpose(0, 1, 3, 2) for i, part in enumerate(parts(x, slots))])


def close(got, want, tolerance):
    assert np.isfinite(got).all()
    assert np.abs(got.astype("float64") - want).max(initial=0) <= tolerance * max(np.abs(want).max(initial=0), 1.0)


def xhat_of(statistics):
    """Of each slot, by the statistics that it uses."""
    return lambda i, part: (part - statistics[i][1]) / np.sqrt(statistics[i][2] + EPSILON)


def gradient_of(weight, heads, of_used, of_fed, sums, ranges, counts=None):
    """dx of each slot, from the sums of those that use what it feeds."""

    def gradient(i, part):
        count, mean, variance = of_fed[i]
        s1, s2 = np.split(sums[list(ranges[i])].sum(0), 2)
        invstd = (variance + EPSILON) ** -0.5
        through = invstd / count * (s1 + (part - mean) * invstd * s2)
        through = through if counts is None else np.where(counts[i] != 0, through, 0)
        return weight * (heads[i] / np.sqrt(of_used[i][2] + EPSILON) - through)

    return gradient


def check_moments(packed, x, slots, counts=None):
    channels, dtype = x.shape[2], x.dtype.name
    counts = np.ones(x.shape) if counts is None else counts
    for own, part, counting in zip(packed, parts(x, slots), parts(counts, slots)):
        rows = part[counting[..., 0] != 0].reshape(-1, channels)
        assert own[0] == len(rows)
        mean = rows.mean(0) if len(rows) else np.zeros(channels)
        close(own[1 : 1 + channels], mean, SUMS[dtype])
        close(own[1 + channels :], ((rows - mean) ** 2).sum(0), SUMS[dtype])


def check_sums(own, x, heads, xhat):
    channels, dtype = x.shape[2], x.dtype.name
    for i, (part, head) in enumerate(zip(parts(x, len(own)), heads)):
        size = np.abs(head * xhat(i, part)).sum() + np.abs(head).sum() + 1
        close(own[i, :channels] / size, head.sum((0, 1, 2)) / size, SUMS[dtype])
        close(own[i, channels:] / size, (head * xhat(i, part)).sum((0, 1, 2)) / size, SUMS[dtype])


def cases(shapes, grids):
    """Each shape in two grids in float32, and of the other types, which share its code, in one."""
    found = []
    for k, dtype in enumerate(("float32", "float32", "float16", "float64")):
        found += [(shape, dtype, *grids[(i + k) % len(grids)]) for i, shape in enumerate(shapes)]
    return found


GRIDS = [(1, 1, 4, 0), (3, 2, 32, 0), (2, 3, 1, 1), (8, 1, 8, 8)]  # slots, chunks, width and shift


@pytest.mark.parametrize("shape, dtype, slots, chunks, width, shift", cases(SHAPES, GRIDS), ids=str)
def test_against_numpy(gpu, shape, dtype, slots, chunks, width, shift):
    check(gpu, shape, dtype, slots, chunks, width, (shift, shift, shift))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 1, 400000), (3000, 1, 40, 1)], ids=str)
def test_in_the_grids_of_the_layer(gpu, shape, slots):
    tiles, of_slots, chunks, blocks, width, segment = plan(shape, slots)
    assert tiles == (shape[2] if shape[3] > 1 else -(-shape[2] // width)) and of_slots == slots
    assert 1 <= chunks <= 65535 and segment % 8 == 0
    check(gpu, shape, "float32", slots, chunks, width, (0, 0, 0), segment, blocks)


def ones(first, count):
    """Lists of one slot each."""
    return [[i] for i in range(first, first + count)]


def some(slots):
    """Lists of several slots that are no neighbours."""
    return [[0, 2 + i] if i % 2 else [1] for i in range(slots)]


# This replica's slots begin at 2. What the kernels get, and the gathered slots that slot i uses and that feed its pool.
POOLINGS = [
    lambda slots: (Pools(SHARED, 2, 1, 4), [range(1, 4)] * slots, [range(1, 4)] * slots),
    lambda slots: (Pools(OWN, 2), ones(2, slots), ones(2, slots)),
    lambda slots: (Pools(LISTS, 2, lists=some(slots)), some(slots), ones(2, slots)),
    lambda slots: (Pools(LISTS, 2, lists=ones(1, slots)), ones(1, slots), ones(2, slots)),
]


class Way(NamedTuple):
    """Of a call: an index of POOLINGS, whether gamma counts as 1, whether results are added to what is there, what
    stands behind (slope and ceiling), whether something is added before that, and whether a mask hides x."""

    pooling: int
    fix_gamma: bool = False
    add: bool = False
    activation: Optional[Tuple[float, float]] = None
    added: bool = False
    masked: bool = False


POOLED = [Way(0), Way(1, fix_gamma=True, add=True), Way(2), Way(3)]
MASKED = [Way(1, masked=True), Way(1, add=True, masked=True), Way(1, activation=(0.25, np.inf), masked=True)]
# With other statistics than those that flow back.
BEHIND = [
    Way(3, activation=(0.0, np.inf)),
    Way(3, activation=(0.0, 0.5)),
    Way(3, fix_gamma=True, add=True, activation=(0.25, np.inf)),
    Way(3, add=True, activation=(0.0, 0.5), added=True),
    Way(3, activation=(0.25, np.inf), added=True),
    Way(3, fix_gamma=True, activation=(1.0, np.inf), added=True),
]


def check(gpu, shape, dtype, slots, chunks, width, shifts, segment=512, blocks=5, ways=POOLED):
    samples, extent, channels, inner = shape
    x, dy, start, gamma, beta = case(shape, dtype, slots, offset=3.0 * ways[0].masked)
    random = np.random.RandomState(5)
    addend, mask = (2 * random.randn(*shape)).astype(dtype), random.rand(samples, extent, 1, inner) < 0.4
    mask.ravel()[-1] = True
    counts = np.broadcast_to(mask, shape)
    grid = slots, chunks, width, segment, shifts, blocks
    kernels = Kernels(gpu, x, *grid)

    if ways[0].masked:  # what is masked may hold anything in the forward
        hidden = np.where(mask, x, np.array(np.nan, dtype))
        check_moments(Kernels(gpu, hidden, *grid).moments(mask), x, slots, counts)
    else:
        check_moments(kernels.moments(), x, slots)
    moments, sums = gathered_moments(channels, slots + 3), np.random.RandomState(1).randn(slots + 3, 2 * channels)
    for way in ways:
        pooling, used, fed = POOLINGS[way.pooling](slots)
        weight = np.ones(channels) if way.fix_gamma else gamma.astype("float64")
        base, before = (start, start.astype("float64")) if way.add else (None, 0)
        added, (slope, ceiling) = addend if way.added else None, way.activation or (1.0, np.inf)
        of_used, of_fed = ([pooled(moments, range_, channels) for range_ in ranges] for ranges in (used, fed))
        xhat = xhat_of(of_used)

        behind = {"activation": way.activation, "addend": added}
        y, saved = kernels.normalise(moments, pooling, gamma, beta, way.fix_gamma, **behind)
        want_saved = [
            np.stack([np.full(channels, 1 / f[0]), u[1], (u[2] + EPSILON) ** -0.5, f[1], (f[2] + EPSILON) ** -0.5], 1)
            for u, f in zip(of_used, of_fed)
        ]
        np.testing.assert_allclose(saved, want_saved, rtol=1e-12)
        z = joined(x, slots, xhat) * weight[:, None] + beta[:, None] + (0 if added is None else added)
        want = np.where(z > 0, np.minimum(z, ceiling), slope * z)
        close(y, want, TOLERANCE[dtype])

        seen = z if added is None else want.astype(dtype)
        dz = np.where(seen > 0, seen < ceiling, slope) * dy.astype("float64")
        heads, again = parts(dz, slots), {}
        if added is not None:
            own, head = kernels.grad_sums(dy, saved, activation=way.activation, y=want)
            np.testing.assert_array_equal(head, dz.astype(dtype))
        elif way.activation is None:
            own, head = kernels.grad_sums(dy, saved), dy
        else:
            own, head = kernels.grad_sums(dy, saved, gamma, beta, way.fix_gamma, way.activation), dy
            again = {"beta": beta, "activation": way.activation}
        check_sums(own, x, heads, xhat)

        # Who uses what is fed: the same slots, or in lists any.
        lists = some(slots)[::-1]
        users, ranges = (Pools(LISTS, 2, lists=lists), lists) if pooling.kind == LISTS else (pooling, fed)
        gradient = gradient_of(
            weight, heads, of_used, of_fed, sums, ranges, parts(counts, slots) if way.masked else None
        )
        again["mask"] = mask if way.masked else None
        dx, dgamma, dbeta = kernels.grad_input(head, saved, sums, users, own, gamma, way.fix_gamma, base, **again)
        close(dx, joined(x, slots, gradient) + before, (8 if way.masked else 4) * TOLERANCE[dtype])
        both = own.sum(0).reshape(2, channels)
        size = np.abs(both).max() + channels
        close(dbeta / size, both[0] / size, TOLERANCE["float32"])
        close(dgamma / size, 0 * both[1] if way.fix_gamma else both[1] / size, TOLERANCE["float32"])


@pytest.mark.parametrize("shape, dtype, slots, chunks, width, shift", cases(SHAPES, GRIDS[:3]), ids=str)
def test_under_a_mask(gpu, shape, dtype, slots, chunks, width, shift):
    check(gpu, shape, dtype, slots, chunks, width, (shift,) * 4, ways=MASKED)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int32", "int64"])
def test_an_expanded_mask(gpu, dtype):
    """Of extents (3, 4, 5), of which the second repeats; any bit counts, but for the sign of a 0."""
    values = np.zeros((3, 1, 5), dtype)
    values.view("uint8").reshape(15, -1)[[1, 2, 5, 9], [0, -1, 0, -1]] = 1
    if dtype.startswith("float"):
        values[2, 0, 4] = -0.0
    out, mask = gpu.empty(15, "float32"), gpu.upload(values)
    layout = {"extents": [1, 3, 4, 5], "strides": [0, 5, 0, 1], "bytes": values.itemsize}
    layout["floating"] = dtype.startswith("float")
    fields = {"mask": layout, "from": mask, "to": out, "positions": 60}
    run(gpu, "expand_mask_identity_float32", (1, 1, 1), "ExpandArguments", **fields)
    got = out.download().view("uint8").reshape(3, 4, 5)
    np.testing.assert_array_equal(got, np.broadcast_to(values != 0, (3, 4, 5)))


SOME = [(3, 1, 5, 77), (2, 2, 3, 40), (1, 1, 2, 9000), (7, 10, 33, 1)]
SHIFTED = [(1, 1, 4, (0, 0, 0, 0)), (3, 2, 32, (0, 0, 1, 0)), (8, 3, 8, (0, 1, 0, 0)), (2, 1, 8, (0, 0, 0, 1))]


@pytest.mark.parametrize("shape, dtype, slots, chunks, width, shifts", cases(SOME, SHIFTED), ids=str)
def test_an_activation(gpu, shape, dtype, slots, chunks, width, shifts):
    check(gpu, shape, dtype, slots, chunks, width, shifts, ways=BEHIND)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [(0.0, np.inf), (0.0, 2.5), (0.25, np.inf)], ids=str)
def test_an_activation_of_what_is_not_finite(gpu, activation, dtype):
    """NaN stays NaN; of minus infinity ReLU makes 0."""
    slope, ceiling = activation
    values = np.array([np.nan, np.inf, -np.inf, 0, 3, -4, 2, -1] * 2, dtype)
    for shape in ((1, 1, 1, 16), (16, 1, 1, 1)):
        kernels = Kernels(gpu, values.reshape(shape))
        running = [kernels.parameters(np.full(1, value)) for value in (0, 1 - EPSILON)]
        got, _ = kernels.normalise(
            None, Pools(OWN), np.ones(1), np.zeros(1), False, running=running, activation=activation
        )
        want = [np.nan, ceiling, -np.inf if slope else 0, 0, min(3, ceiling), -4 * slope, 2, -slope] * 2
        np.testing.assert_allclose(got.ravel(), np.array(want, dtype), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 1, 5, 77), (2, 1, 2, 4000), (90, 5, 7, 1)], ids=str)
def test_offset(gpu, shape, dtype):
    """A mean of 1e5 beside a deviation of 1, and a first value that is far from it."""
    x, _, _, gamma, beta = case(shape, dtype, 1, offset=1e5)
    channels = shape[2]
    for first in (x.reshape(-1)[0], 0):
        x.reshape(-1)[0] = first
        kernels = Kernels(gpu, x)
        rows = parts(x, 1)[0].reshape(-1, channels)
        _, mean, m2 = np.split(kernels.moments()[0], [1, 1 + channels])
        want = ((rows - rows.mean(0)) ** 2).sum(0)
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-7)
        np.testing.assert_allclose(m2, want, rtol=2e-3 if dtype == "float32" else 1e-9)
        if first:
            np.testing.assert_allclose(m2, want, rtol=2e-5)
    moments = gathered_moments(channels, 3, offset=1e5)
    _, mean, variance = pooled(moments, range(3), channels)
    want = joined(x, 1, lambda i, part: (part - mean) / np.sqrt(variance + EPSILON) * gamma + beta)
    got, _ = kernels.normalise(moments, Pools(SHARED, 0, 0, 3), gamma, beta, False)
    np.testing.assert_allclose(got[1:], want[1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 1, 5, 77), (2, 1, 2, 9000), (70, 10, 33, 1)], ids=str)
def test_same_bits_every_time(gpu, shape, dtype):
    x, dy, *_ = case(shape, dtype, 2)
    saved = np.random.RandomState(0).rand(2, shape[2], 5)
    first, again = (
        np.concatenate([Kernels(gpu, x, 2, 3).moments(), Kernels(gpu, x, 2, 3).grad_sums(dy, saved)], 1)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("chunks", [1, 2])
def test_empty_slots(gpu, chunks):
    x, dy, *_ = case((2, 1, 3, 16), "float32", 5)
    kernels = Kernels(gpu, x, 5, chunks)
    packed = kernels.moments()
    np.testing.assert_array_equal(packed[:, 0], [16, 16, 0, 0, 0])
    assert not packed[2:].any() and not kernels.grad_sums(dy, np.ones((5, 3, 5)))[2:].any()


@pytest.mark.parametrize("empty", [(0,), (1, 2), (0, 1, 2, 3)], ids=str)
def test_pools_with_empty_slots(gpu, empty):
    """Whoever has no value says nothing of the mean, wherever in the order; a pool of nobody's gives no NaN."""
    x, _, _, gamma, beta = case((2, 1, 3, 16), "float64", 1)
    moments = gathered_moments(3, 4, empty)
    kernels = Kernels(gpu, x)
    mean, var = (kernels.parameters(np.full(3, v)) for v in (5.0, 7.0))
    _, saved = kernels.normalise(moments, Pools(SHARED, 0, 0, 4), gamma, beta, False, running=(mean, var))
    count, want_mean, want_var = pooled(moments, range(4), 3)
    np.testing.assert_allclose(saved[0, :, 1], want_mean, rtol=1e-13)
    np.testing.assert_allclose(saved[0, :, 0], 1 / count if count else 0)
    moved = 0.1 if count else 0
    np.testing.assert_allclose(mean.download(), 5 + moved * (want_mean - 5), rtol=1e-13)
    np.testing.assert_allclose(var.download(), 7 + moved * (want_var - 7), rtol=1e-13)


def test_every_half(gpu):
    """All 65536 of them, as y = x: each conversion is exact, or NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view("float16").reshape(1, 1, 4, -1)
    kernels = Kernels(gpu, halves)
    running = [kernels.parameters(np.full(4, value)) for value in (0, 1 - EPSILON)]
    got, _ = kernels.normalise(None, Pools(OWN), np.ones(4), np.zeros(4), False, running=running)
    np.testing.assert_array_equal(got, halves)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(2, 1, 300, 4), (4, 1, 300, 1)], ids=str)
def test_running_statistics(gpu, shape, dtype):
    x, _, _, gamma, beta = case(shape, dtype, 2)
    channels = shape[2]
    old = np.random.RandomState(0).rand(2, channels) + 0.5
    moments = gathered_moments(channels, 4)

    def run(pooling, **settings):
        kernels = Kernels(gpu, x, 2)
        running = [kernels.parameters(values) for values in old]
        y, saved = kernels.normalise(moments, pooling, gamma, beta, False, running=running, momentum=0.7, **settings)
        return [values.download().astype("float64") for values in running], y, saved

    shared, own = pooled(moments, (1, 2), channels)[1:], [pooled(moments, [i], channels)[1:] for i in (1, 2)]
    wants = {
        "the pool": (Pools(SHARED, 1, 1, 3), shared),
        "the mean of the slots' own": (Pools(OWN, 1), np.mean(own, 0)),
        "the same, whatever is used": (Pools(LISTS, 1, lists=((3,), (0,))), np.mean(own, 0)),
    }
    for pooling, want in wants.values():
        got, _, _ = run(pooling)
        np.testing.assert_allclose(got, 0.7 * old + 0.3 * np.array(want), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(run(pooling, given_up=1)[0], old.astype(dtype))  # a failed step leaves nothing

    counts = moments[1:3, 0]
    got, _, _ = run(Pools(SHARED, 1, 1, 3), unbiased=1)
    n = counts.sum()
    np.testing.assert_allclose(got[1], 0.7 * old[1] + 0.3 * shared[1] * n / (n - 1), rtol=1e-6)
    got, _, _ = run(Pools(OWN, 1), unbiased=1)
    each = [variance * n / (n - 1) for n, (_, variance) in zip(counts, own)]
    np.testing.assert_allclose(got[1], 0.7 * old[1] + 0.3 * np.mean(each, 0), rtol=1e-6)

    kernels = Kernels(gpu, x, 1)  # frozen
    running = [kernels.parameters(values) for values in old]
    y, saved = kernels.normalise(None, Pools(OWN), gamma, beta, False, running=running)
    invstd = 1 / np.sqrt(old.astype(dtype).astype("float64")[1] + EPSILON)
    want = joined(x, 1, lambda i, part: (part - old[0]) * invstd * gamma + beta)
    close(y, want, TOLERANCE[dtype])
    np.testing.assert_allclose(saved[0, :, 0], 0)
    for values, before in zip(running, old):
        np.testing.assert_array_equal(values.download(), before.astype(dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_moments_that_are_not_finite(gpu, bad):
    """A batch is left out in every channel, by whoever tracks a pool that it feeds; its own replica is told."""
    x, _, _, gamma, beta = case((2, 1, 3, 16), "float64", 2)
    moments = gathered_moments(3, 4)
    moments[1, 5] = bad  # of slot 1, the second variance

    def moved(pooling, watch):
        kernels = Kernels(gpu, x, 2)
        running = [kernels.parameters(np.ones(3)) for _ in range(2)]
        kernels.normalise(moments, pooling, gamma, beta, False, running=running, watch=watch)
        return [values.download() for values in running], kernels.told

    for pooling, feeds, at in (
        (Pools(SHARED, 0, 0, 4), True, 12),
        (Pools(SHARED, 2, 0, 4), True, -1),
        (Pools(SHARED, 2, 2, 4), False, -1),
        (Pools(OWN, 1), True, 5),
        (Pools(OWN, 2), False, -1),
    ):
        running, told = moved(pooling, watch=0)
        assert np.isfinite(running[1]).all() != feeds and told["at"] == -1
        running, told = moved(pooling, watch=1)
        assert (np.array(running) == 1).all() == feeds
        assert told["at"] == at
        np.testing.assert_equal(told["value"], bad if at >= 0 else 0.0)


def test_small_kernels(gpu):
    random = np.random.RandomState(0)
    for dtype, value in (("float16", np.nan), ("float32", 2.5), ("float64", -1.0)):
        out = gpu.empty(300, dtype)
        run(gpu, f"copy_identity_{dtype}", (2, 1, 1), "CopyArguments", to=out, value=value, n=300)
        np.testing.assert_array_equal(out.download(), np.full(300, value, dtype))
        for add in (0, 1):
            values = random.randn(300).astype(dtype)
            out = gpu.upload(np.full(300, 2, dtype))
            arrays = {"from": gpu.upload(values), "to": out}
            run(gpu, f"copy_identity_{dtype}", (2, 1, 1), "CopyArguments", add=add, n=300, **arrays)
            np.testing.assert_allclose(out.download(), values + 2 * add, rtol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_large_tensors(gpu, shape, dtype):
    if "CUDA_EMULATOR" in os.environ:
        pytest.skip("hundreds of megabytes are for a GPU")
    check(gpu, shape, dtype, 2, 8, 32, (0, 0, 0))

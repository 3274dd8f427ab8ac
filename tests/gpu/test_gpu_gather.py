"""Rows of GPUs on each of them, against NumPy: on GPUs or on the emulator (see test_gpu.py)."""

import mxnet as mx
import numpy as np
import pytest
from gpus import EMULATED, GPUS, assert_sound, counted_step, gpus
from mxnet import autograd, nd
from mxnet.gluon import nn
from replicas import TOLERANCE, WAYS, on_devices

import gluon_syncbn
from gluon_syncbn import contrastive

if not GPUS:
    pytest.skip("MXNet finds no GPU; `make test-gpu-emulated` needs none", allow_module_level=True)

UNEVEN, EVEN = (2, 5, 0, 3), (4, 4, 4, 4)


@pytest.fixture(autouse=True)
def sound():
    """The emulator has seen no access that a GPU would not forgive."""
    yield
    assert_sound()


@pytest.fixture(autouse=True)
def empty_parts():
    with mx.util.np_shape(True):
        yield


class Gather(nn.HybridBlock):
    """MXNet's own operators do not run on the emulator, so this net has no other."""

    def __init__(self, contexts, rows, **settings):
        super().__init__()
        self.settings = {"contexts": contexts, "rows": rows, **settings}

    def hybrid_forward(self, F, x):
        return contrastive.gather(x, **self.settings)


def parts_of(rng, sizes, shape=(3,), dtype="float64"):
    return [((i + 1) * rng.randn(n, *shape) + i).astype(dtype) for i, n in enumerate(sizes)]


def variables(parts, contexts, dtype="float64", grad_req="write"):
    """Arrays whose gradients begin as 1."""
    xs = on_devices(parts, contexts, dtype)
    autograd.mark_variables(xs, on_devices([np.ones_like(part) for part in parts], contexts, dtype), grad_req)
    return xs


def assert_gathered(ys, parts):
    for y in ys:
        np.testing.assert_array_equal(y.asnumpy(), np.concatenate(parts))


def assert_summed(xs, heads, tolerance=1e-15, factor=1, start=0):
    """Each row has the sum of the gradients of its copies."""
    want = start + factor * sum(head.astype("float64") for head in heads)
    got = np.concatenate([x.grad.asnumpy() for x in xs])
    np.testing.assert_allclose(got.astype("float64"), want, rtol=tolerance, atol=tolerance)


# What is launched depends on the type, and when, on the way. What carries the rows decides over either.
CASES = [("float64", way, kvstore) for way in WAYS for kvstore in (None, "host")]
CASES += [(dtype, "static_shape", None) for dtype in TOLERANCE if dtype != "float64"]
CASES += [("float16", "eager", "host"), ("float64", "eager", "nccl"), ("float64", "eager", "device")]


@pytest.mark.parametrize("dtype, way, kvstore", CASES)
@pytest.mark.parametrize("sizes", [UNEVEN, EVEN, (3, 1), (4,), (0, 0)], ids=str)
def test_rows_and_gradients(rng, sizes, dtype, way, kvstore):
    contexts = gpus(len(sizes))
    net = Gather(contexts, sum(sizes), kvstore=kvstore, name=f"{kvstore}")
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    for _ in range(2):
        parts = parts_of(rng, sizes, (2, 3), dtype)
        xs = variables(parts, contexts, dtype)
        heads = parts_of(rng, [sum(sizes)] * len(sizes), (2, 3), dtype)
        with autograd.record():
            ys = [net(x) for x in xs]
        autograd.backward(ys, on_devices(heads, contexts, dtype))
        assert_gathered(ys, parts)
        assert [y.context for y in ys] == contexts
        assert_summed(xs, heads, {"float64": 1e-14, "float32": 1e-6, "float16": 4e-3}[dtype])
        nd.waitall()  # which raises what a read of an empty array does not


def test_the_graph_twice_and_added(rng):
    contexts, parts = gpus(4), parts_of(rng, UNEVEN)
    xs, heads = variables(parts, contexts, grad_req="add"), parts_of(rng, [10] * 4)
    with autograd.record():
        ys = contrastive.gather(xs)
    for retain_graph in (True, False):
        autograd.backward(ys, on_devices(heads, contexts, "float64"), retain_graph=retain_graph)
    assert_summed(xs, heads, 1e-14, factor=2, start=1)


def test_branches_in_another_order_on_each_gpu(rng):
    contexts, names = gpus(4), ["a", "b", "c"]
    for _ in range(5):
        parts = {name: parts_of(rng, UNEVEN) for name in names}
        xs = {name: variables(parts[name], contexts) for name in names}
        ys = {name: [None] * 4 for name in names}
        heads = {name: parts_of(rng, [10] * 4) for name in names}
        with autograd.record():
            for i in rng.permutation(4):
                for name in rng.permutation(names):
                    ys[name][i] = contrastive.gather(xs[name][i], contexts=contexts, rows=10, name=str(name))
        order = rng.permutation(names)
        on_gpus = {name: on_devices(heads[name], contexts, "float64") for name in names}
        autograd.backward([y for name in order for y in ys[name]], [h for name in order for h in on_gpus[name]])
        for name in names:
            assert_gathered(ys[name], parts[name])
            assert_summed(xs[name], heads[name], 1e-14)


def test_recomputed(rng):
    """A block that is computed again meets nobody again."""
    contexts, parts, heads = gpus(4), parts_of(rng, UNEVEN), parts_of(rng, [10] * 4)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
    layer.cast("float64")
    layer.initialize(ctx=contexts)
    net = nn.HybridSequential()
    net.add(layer, Gather(contexts, 10, name="recomputed"))
    found = []
    for active in (False, True):
        gluon_syncbn.checkpoint(net, active=active)
        xs = variables(parts, contexts)
        with autograd.record():
            ys = [net(x) for x in xs]
        autograd.backward(ys, on_devices(heads, contexts, "float64"))
        found.append([array.asnumpy() for array in [*ys, *(x.grad for x in xs)]])
    for got, want in zip(found[1], found[0]):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes, collectives", [(EVEN, 1), (UNEVEN, 3)], ids=str)
def test_what_it_costs(rng, sizes, collectives):
    """No copy to the host. Of unequal parts, each GPU with rows sends its own to all, in one group."""
    if not EMULATED:
        pytest.skip("counts are the emulator's")
    contexts, heads = gpus(4), parts_of(rng, [sum(sizes)] * 4)
    xs = variables(parts_of(rng, sizes), contexts)
    forwards, backwards = counted_step(lambda: contrastive.gather(xs), on_devices(heads, contexts, "float64"), 3)
    for each, expected in ((forwards, collectives), (backwards, 1)):
        for numbers in each:
            assert (numbers["collectives"], numbers["waits"]) == (expected, 1)
            assert numbers["to host"] == numbers["to device"] == numbers["allocations"] == 0


@pytest.mark.parametrize("kvstore", ["nccl", "host"])
@pytest.mark.parametrize(
    "shapes, rows, text",
    [
        ([(5, 3), (2, 3)], 8, "the parts have 5, 2 rows, 7 in all, where 8 were expected"),
        ([(2, 3), (2, 4)], 4, r"came with \d channels of float32"),
    ],
)
def test_rows_that_do_not_fit(shapes, rows, text, kvstore):
    contexts = gpus(2)
    with autograd.record():
        ys = [
            contrastive.gather(x, contexts=contexts, rows=rows, name="unfit", kvstore=kvstore)
            for x in on_devices([np.ones(shape, "float32") for shape in shapes], contexts, "float32")
        ]
    with pytest.raises(mx.MXNetError, match=text) as error:
        for y in ys:
            y.asnumpy()
    assert "gather 'unfit'" in str(error.value)
    gluon_syncbn.reset()


def test_a_missing_gpu():
    contexts = gpus(2)
    gluon_syncbn.configure(timeout=1)
    try:
        with autograd.record():
            alone = contrastive.gather(
                nd.array(np.ones((2, 3)), ctx=contexts[1]), contexts=contexts, rows=4, name="alone"
            )
        with pytest.raises(mx.MXNetError, match=r"gather 'alone', forward of call 1: .*gpu\(0\)"):
            alone.asnumpy()
    finally:
        gluon_syncbn.configure(timeout=300)
        gluon_syncbn.reset()

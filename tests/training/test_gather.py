"""The rows of all devices on each of them, against NumPy and against one device that has all rows."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from replicas import TOLERANCE, WAYS

import gluon_syncbn
from gluon_syncbn import contrastive

CONTEXTS = [mx.cpu(i) for i in range(4)]
SIZES = (2, 5, 0, 3)
TRANSFORM = np.random.RandomState(9).randn(3, 3)


def relative_error(got, want):
    return np.abs(got.astype("float64") - want).max() / np.abs(want).max()


def shards(rng, sizes=SIZES, shape=(3,), dtype="float64"):
    parts = [((i + 1) * rng.randn(n, *shape) + i).astype(dtype) for i, n in enumerate(sizes)]
    arrays = [nd.array(part, ctx=context, dtype=dtype) for part, context in zip(parts, CONTEXTS)]
    for array in arrays:
        array.attach_grad()
    return parts, arrays


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)])
def test_rows_and_gradients_of_uneven_parts(dtype, shape):
    """Each replica has another head gradient, and one has no row."""
    rng = np.random.RandomState(0)
    with mx.util.np_shape(True):
        parts, arrays = shards(rng, shape=shape, dtype=dtype)
        heads = [rng.randn(sum(SIZES), *shape).astype(dtype) for _ in CONTEXTS]
        for _ in range(2):
            with autograd.record():
                gathered = contrastive.gather(arrays)
            autograd.backward(gathered, [nd.array(h, ctx=c, dtype=dtype) for h, c in zip(heads, CONTEXTS)])
            want = np.concatenate(parts)
            for rows, context in zip(gathered, CONTEXTS):
                assert rows.context == context and np.dtype(rows.dtype) == dtype
                np.testing.assert_array_equal(rows.asnumpy(), want)
            total = np.concatenate([array.grad.asnumpy() for array in arrays])
            wanted = sum(head.astype("float64") for head in heads)
            assert relative_error(total, wanted) < {"float64": 1e-15, "float32": 1e-7, "float16": 1e-3}[dtype]


@pytest.mark.parametrize("kvstore", [None, "device", "local"])
def test_no_rows_at_all(kvstore):
    with mx.util.np_shape(True):
        _, arrays = shards(np.random.RandomState(0), (0, 0))
        with autograd.record():
            gathered = contrastive.gather(arrays, kvstore=kvstore)
        autograd.backward(gathered)
        nd.waitall()  # which raises what a read of an empty array does not
        assert [rows.shape for rows in gathered] == [(0, 3)] * 2


class Branches(gluon.HybridBlock):
    """Gathers in two branches, one of them twice; each context calls the branches in an order of its own."""

    def __init__(self):
        super().__init__()
        self.transform = gluon.nn.Dense(3, use_bias=False, in_units=3)

    def hybrid_forward(self, F, x):
        y = self.transform(x)
        parts = {"contexts": CONTEXTS, "rows": sum(SIZES)}
        first = contrastive.gather(F.tanh(y), name="first", **parts)
        second = contrastive.gather(y * y, name="second", **parts)
        third = contrastive.gather(y, name="second", **parts)
        return F.dot(y, F.concat(first, second, third, dim=0), transpose_b=True)


@pytest.mark.parametrize("way", WAYS)
def test_branches_equal_one_context_with_all_rows(way):
    """In float64, the gradients of the data and of a weight in front of the gathers."""
    rng = np.random.RandomState(1)
    net = Branches()
    net.cast("float64")
    net.initialize(ctx=CONTEXTS)
    net.transform.weight.set_data(nd.array(TRANSFORM, dtype="float64"))
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    with mx.util.np_shape(True):
        for _ in range(3):
            parts, arrays = shards(rng)
            head = rng.randn(sum(SIZES), 3 * sum(SIZES))
            heads = np.split(head, np.cumsum(SIZES)[:-1])
            with autograd.record():
                outputs = [net(array) for array in arrays]
            autograd.backward(outputs, [nd.array(h, ctx=c, dtype="float64") for h, c in zip(heads, CONTEXTS)])
            x, weight = (nd.array(value, dtype="float64") for value in (np.concatenate(parts), TRANSFORM))
            for array in (x, weight):
                array.attach_grad()
            with autograd.record():
                y = nd.dot(x, weight, transpose_b=True)
                wanted = nd.dot(y, nd.concat(nd.tanh(y), y * y, y, dim=0), transpose_b=True)
            wanted.backward(nd.array(head, dtype="float64"))
            got = np.concatenate([output.asnumpy() for output in outputs])
            assert relative_error(got, wanted.asnumpy()) < 1e-12
            assert relative_error(np.concatenate([a.grad.asnumpy() for a in arrays]), x.grad.asnumpy()) < 1e-12
            of_weight = sum(net.transform.weight.grad(context).asnumpy() for context in CONTEXTS)
            assert relative_error(of_weight, weight.grad.asnumpy()) < 1e-12


def test_branches_in_another_order_on_each_context():
    rng = np.random.RandomState(2)
    names = ["a", "b", "c"]
    for _ in range(10):
        inputs = {name: shards(rng, (2, 1, 4, 3)) for name in names}
        outputs = {name: [None] * 4 for name in names}
        with autograd.record():
            for i in rng.permutation(4):
                for name in rng.permutation(names):
                    x = inputs[name][1][i]
                    outputs[name][i] = contrastive.gather(x, contexts=CONTEXTS, rows=10, name=str(name))
        heads = {name: [nd.array(rng.randn(10, 3), ctx=c, dtype="float64") for c in CONTEXTS] for name in names}
        order = rng.permutation(names)
        autograd.backward([y for n in order for y in outputs[n]], [h for n in order for h in heads[n]])
        for name, (parts, arrays) in inputs.items():
            for y in outputs[name]:
                np.testing.assert_array_equal(y.asnumpy(), np.concatenate(parts))
            total = sum(head.asnumpy() for head in heads[name])
            assert relative_error(np.concatenate([a.grad.asnumpy() for a in arrays]), total) < 1e-15


@pytest.mark.parametrize("kvstore", ["device", "local", "host"])
def test_calls_of_one_replica_each_meet_over_a_named_store(kvstore):
    rng = np.random.RandomState(3)
    parts, arrays = shards(rng, (2, 1, 4, 3))
    heads = [rng.randn(10, 3) for _ in CONTEXTS]
    for _ in range(2):
        with autograd.record():
            outputs = [contrastive.gather(x, contexts=CONTEXTS, rows=10, name="named", kvstore=kvstore) for x in arrays]
        autograd.backward(outputs, [nd.array(h, ctx=c, dtype="float64") for h, c in zip(heads, CONTEXTS)])
        for y in outputs:
            np.testing.assert_array_equal(y.asnumpy(), np.concatenate(parts))
        got = np.concatenate([array.grad.asnumpy() for array in arrays])
        assert relative_error(got, sum(heads)) < 1e-15


def test_the_graph_twice_and_added():
    rng = np.random.RandomState(3)
    _, arrays = shards(rng, (1, 2, 3, 1))
    for array in arrays:
        array.attach_grad("add")
    heads = [nd.array(rng.randn(7, 3), ctx=c, dtype="float64") for c in CONTEXTS]
    with autograd.record():
        gathered = contrastive.gather(arrays)
    autograd.backward(gathered, heads, retain_graph=True)
    autograd.backward(gathered, heads)
    got = np.concatenate([array.grad.asnumpy() for array in arrays])
    assert relative_error(got, 2 * sum(head.asnumpy() for head in heads)) < 1e-15


def test_recomputed():
    """A block that is computed again meets nobody again."""
    results = []
    for again in (False, True):
        net = Branches()
        net.cast("float64")
        net.initialize(ctx=CONTEXTS)
        net.transform.weight.set_data(nd.array(TRANSFORM, dtype="float64"))
        if again:
            net = gluon_syncbn.checkpoint(net)
        _, arrays = shards(np.random.RandomState(4), (2, 5, 1, 2))
        with autograd.record():
            outputs = [net(array) for array in arrays]
        autograd.backward(outputs)
        results.append([array.grad.asnumpy() for array in arrays])
    for got, want in zip(*results):
        np.testing.assert_array_equal(got, want)


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "features, settings, expected",
    [
        (3, {}, "features: 3 was given, expected an NDArray with rows or a Symbol, or a list of NDArrays"),
        ([], {}, "features: [] was given"),
        (0, {"name": ""}, "name: '' was given, expected a text"),
        (0, {"rows": -1}, "rows: -1 was given"),
        (
            0,
            {"contexts": [CONTEXTS[1]]},
            "contexts: [cpu(1)] was given, expected a list with the context of features, cpu(0)",
        ),
        (0, {"contexts": CONTEXTS[:1] * 2}, "expected each once, all CPUs or all GPUs"),
        (0, {"kvstore": "dist_sync"}, "kvstore: 'dist_sync' was given"),
        ([0], {"contexts": CONTEXTS[:2]}, "features: [cpu(0)] was given, expected one on each of [cpu(0), cpu(1)]"),
    ],
)
def test_bad_arguments(features, settings, expected):
    if features == 0:
        features = nd.ones((2, 3))
    elif features == [0]:
        features = [nd.ones((2, 3))]
    with autograd.record(), pytest.raises(ValueError, match=re.escape(expected)):
        contrastive.gather(features, **settings)


def test_contexts_that_only_the_caller_knows():
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
    layer.initialize(ctx=CONTEXTS[:2])
    with autograd.record(), pytest.raises(ValueError, match=re.escape("layers are on [cpu(0), cpu(1)")):
        contrastive.gather(nd.ones((2, 3)))
    with pytest.raises(ValueError, match="contexts: None was given, expected the contexts of the net"):
        contrastive.gather(mx.sym.var("x"))


@pytest.mark.parametrize("hybrid", [False, True])
def test_outside_of_a_step(hybrid):
    class Net(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return contrastive.gather(x, contexts=CONTEXTS[:1], name="outside")

    net = Net()
    net.hybridize(hybrid)
    with pytest.raises(mx.MXNetError, match=r"gather works only within autograd\.record"):
        net(nd.ones((2, 3))).asnumpy()
    with autograd.train_mode():
        np.testing.assert_array_equal(net(nd.ones((2, 3))).asnumpy(), np.ones((2, 3)))


def test_other_numbers_of_rows_than_were_expected():
    with autograd.record():
        outputs = [
            contrastive.gather(nd.ones((n, 3), ctx=c), contexts=CONTEXTS[:2], rows=8, name="short")
            for n, c in zip((5, 2), CONTEXTS)
        ]
    with pytest.raises(mx.MXNetError, match="the parts have 5, 2 rows, 7 in all, where 8 were expected") as error:
        for output in outputs:
            output.asnumpy()
    assert "gather 'short' on cpu(" in str(error.value)
    assert "Give gather(..., rows=7)" in str(error.value)


def test_rows_that_are_not_alike():
    with autograd.record():
        outputs = [
            contrastive.gather(nd.ones((2, n), ctx=c), contexts=CONTEXTS[:2], name="other")
            for n, c in zip((3, 4), CONTEXTS)
        ]
    with pytest.raises(mx.MXNetError, match=r"gather 'other': cpu\(.\) came with . channels of float32"):
        for output in outputs:
            output.asnumpy()


def test_who_is_missing():
    gluon_syncbn.configure(timeout=1)
    try:
        with autograd.record():
            alone = contrastive.gather(nd.ones((2, 3), ctx=CONTEXTS[1]), contexts=CONTEXTS[:2], name="alone")
        with pytest.raises(mx.MXNetError, match=r"gather 'alone', forward of call 1: .*cpu\(0\)"):
            alone.asnumpy()
    finally:
        gluon_syncbn.configure(timeout=300)

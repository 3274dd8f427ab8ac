"""The ways in which nets and training loops use the layer."""

import functools
import time

import mxnet as mx
import numpy as np
import pytest
from gate import Gate
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import filled
from poolings import specification
from replicas import (
    WAYS,
    assert_same,
    assert_whole,
    make_batch,
    on_devices,
    prepare,
    step,
    truth,
)

from gluon_syncbn import SyncBatchNorm


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", [5, 0])
@pytest.mark.parametrize(
    "places, settings, said, fitting",
    [
        ((0, 0), {}, r"^ctx: .*'bn' are on \w+\(0\), \w+\(0\), expected each .* virtual_devices has", (0, 1)),
        ((0,), {"num_devices": 2}, "^num_devices: 2 .*expected None or 1, .*'bn'.* contrib's .* would wait", (0, 1)),
        ((0, 1), {"num_devices": 1}, r"^num_devices: 1 .*expected None or 2, .* on \w+\(0\), \w+\(1\)\.$", (1,)),
        ((0, 1, 2), {"group_size": 2}, "^group_size: 2 was given, expected", (0, 1)),
        ((0, 1, 2), {"groups": [[0, 3], [1, 2]]}, "^groups: 4 replicas were given, expected", (0, 1, 2, 3)),
        ((0,), {"mode": "shuffle"}, "^virtual_devices: 1 was given, expected at least 2", (0, 1)),
    ],
    ids=str,
)
def test_contexts_that_do_not_fit(contexts, rng, way, channels, places, settings, said, fitting):
    """The thread that trains gets the error. The layer predicts, and trains after it was moved."""
    batch, places, fitting = make_batch(rng, len(fitting)), *([contexts[i] for i in some] for some in (places, fitting))
    layer = SyncBatchNorm(in_channels=channels, prefix="bn_", **settings)
    layer.initialize(ctx=places)
    if WAYS[way] is not None:
        layer.hybridize(**WAYS[way])
    x = nd.array(batch.shards[0], ctx=contexts[0])
    for _ in range(2):  # also with a graph that has predicted
        with pytest.raises(ValueError, match=said), autograd.record():
            layer(x)
        np.testing.assert_allclose(layer(x).asnumpy(), x.asnumpy(), rtol=1e-5, atol=1e-5)
    layer.collect_params().reset_ctx(fitting)
    prepare(layer, batch, fitting, "float64", WAYS[way])
    draw = {"node": -1 if way == "eager" else 0}
    assert_same(step(layer, batch, fitting, "float64"), specification(layer, batch, **draw), 1e-11)
    layer.collect_params().reset_ctx(places)
    with pytest.raises((ValueError, mx.MXNetError), match=said.strip("^$")), autograd.record():
        layer(x.astype("float64")).asnumpy()  # a graph that has trained calls no Python code


def make_convolutional(norm):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for channels, strides in ((3, 1), (16, 2)):
            net.add(nn.Conv2D(16, 3, strides, 1, in_channels=channels, use_bias=False), norm(in_channels=16))
            net.add(nn.Activation("tanh"))
        net.add(nn.Conv2D(8, 1, in_channels=16, use_bias=False), norm(in_channels=8))
    return net


def twins(contexts, norm=SyncBatchNorm):
    nets = (make_convolutional(norm), contexts), (make_convolutional(nn.BatchNorm), contexts[:1])
    return [filled(net, places, "float32") for net, places in nets]


@pytest.mark.parametrize("way", WAYS)
def test_a_convolutional_net_is_right_every_time(contexts, rng, way):
    """Convolutions hand over arrays in oneDNN's layout, whose plain copies MXNet frees too early: 25 runs for each way,
    100 in all, each with new data."""
    net, plain = twins(contexts[:4])
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    for _ in range(25):
        sizes = [2, 1, 3, 2]
        shards = [(i + 1) * rng.randn(n, 3, 16, 16) + i for i, n in enumerate(sizes)]
        assert_whole(net, plain, shards, [rng.randn(n, 8, 8, 8) for n in sizes], contexts, 3e-4)


def test_parameters_are_put_where_they_are(rng, contexts):
    """While a step is on its way, as by a `DataParallelModel` made behind one: who has come still meets who comes."""
    batch, contexts = make_batch(rng, 2), contexts[:2]
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64")
    xs, gate = on_devices(batch.shards, contexts, "float64"), Gate()
    with autograd.record():
        ys = [layer(gate.behind(xs[0])), layer(xs[1])]
        time.sleep(0.2)  # until the second waits
        layer.collect_params().reset_ctx(contexts)
        gate.open()
    for y, expected in zip(ys, truth(batch).outputs):
        np.testing.assert_allclose(y.asnumpy(), expected, rtol=0, atol=1e-11)


def test_one_kvstore_for_gradients_and_statistics(contexts, rng):
    store = mx.kv.create("device")
    norm = functools.partial(SyncBatchNorm, kvstore=store)
    net, plain = twins(contexts[:2], norm)
    settings = {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1}}
    trainers = [
        gluon.Trainer(net.collect_params(), kvstore=store, update_on_kvstore=False, **settings),
        gluon.Trainer(plain.collect_params(), **settings),
    ]
    for _ in range(3):
        shards, heads = ([rng.randn(n, *shape) for n in (1, 3)] for shape in ((3, 8, 8), (8, 4, 4)))
        assert_whole(net, plain, shards, heads, contexts, 1e-3)
        for trainer in trainers:
            trainer.step(4)
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        np.testing.assert_allclose(p.data(contexts[1]).asnumpy(), q.data().asnumpy(), rtol=0, atol=1e-3)


class Twice(nn.HybridBlock):
    """One layer behind two convolutions that nothing puts in order."""

    def __init__(self, wide):
        super().__init__()
        with self.name_scope():
            self.convs = [nn.Conv2D(wide, 1, groups=32, in_channels=wide, use_bias=False) for _ in range(2)]
            self.norm = SyncBatchNorm(in_channels=wide)
            for conv in self.convs:
                self.register_child(conv)

    def hybrid_forward(self, F, *xs):
        return sum(self.norm(conv(x)) for conv, x in zip(self.convs, xs))


def test_a_graph_that_uses_a_layer_twice(contexts, rng):
    """The engine does not know that the operators which MXNet keeps write running statistics."""
    places, data = contexts[:2], [rng.normal(mean, mean + 1, (4, 4096, 1, 1)) for mean in (0, 5)]
    net = Twice(4096)
    net.initialize(mx.init.Normal(1), ctx=places)
    first, second = (conv(nd.array(x)).asnumpy().var((0, 2, 3)) for conv, x in zip(net.convs, data))
    net.hybridize(static_alloc=True, static_shape=True)
    parts = list(zip(*(gluon.utils.split_and_load(x, places) for x in data)))
    for turn in range(60):
        net.norm.running_var.set_data(nd.ones(4096))
        with autograd.record():
            ys = [net(*part) for part in parts]
        autograd.backward(ys)
        got = [array.asnumpy() for array in net.norm.running_var.list_data()]  # without a wait for the step
        np.testing.assert_allclose(got[0], 0.9 * (0.9 + 0.1 * first) + 0.1 * second, rtol=1e-4)
        assert np.array_equal(*got), turn


@pytest.mark.parametrize("way", ["eager", "hybrid"])  # MXNet itself refuses static_alloc
def test_a_second_derivative(contexts, rng, way):
    """A gradient penalty is MXNet's error. One derivative is right, and so is the next step."""
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:2], "float64", WAYS[way])
    xs, heads = on_devices(batch.shards, contexts, "float64"), on_devices(batch.heads, contexts, "float64")
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = [layer(x) for x in xs]
        dxs = autograd.grad(ys, xs, heads, create_graph=True, retain_graph=True)
        penalties = [(dx**2).sum() for dx in dxs]
    want = truth(batch)
    for got, dx in zip(dxs, want.dxs):
        np.testing.assert_allclose(got.asnumpy(), dx, atol=1e-11 * np.abs(dx).max())
    with pytest.raises(mx.MXNetError, match="_backward_Custom is non-differentiable"):
        autograd.backward(penalties)
    assert_same(step(layer, batch, contexts, "float64"), truth(batch, steps=2), 1e-10)


@pytest.mark.parametrize("stype", ["csr", "row_sparse"])
@pytest.mark.parametrize("way", WAYS)
def test_sparse_inputs(contexts, rng, way, stype):
    """MXNet makes them dense for plain BatchNorm. Gradients come to those that MXNet has a gradient for."""
    shards, heads = ([rng.randn(n, 5) * (rng.rand(n, 5) > 0.5) for n in (4, 3)] for _ in range(2))
    layer, plain = SyncBatchNorm(in_channels=5), nn.BatchNorm(in_channels=5)
    for one, places in ((layer, contexts[:2]), (plain, contexts[:1])):
        one.initialize(ctx=places)
        one.gamma.set_data(nd.arange(1, 6))
        one.cast("float64")
    if WAYS[way] is not None:
        layer.hybridize(**WAYS[way])
    xs = [nd.array(x, ctx=place, dtype="float64").tostype(stype) for x, place in zip(shards, contexts)]
    whole = nd.array(np.concatenate(shards), dtype="float64")
    for x in [whole, *xs][: 3 if stype == "row_sparse" else 1]:
        x.attach_grad()
    with autograd.record():
        ys, want = [layer(x) for x in xs], plain(whole)
    autograd.backward(ys, on_devices(heads, contexts, "float64"))
    want.backward(nd.array(np.concatenate(heads), dtype="float64"))
    pairs = [(ys, want), ([sum(g.as_in_context(mx.cpu()) for g in layer.gamma.list_grad())], plain.gamma.grad())]
    if stype == "row_sparse":
        pairs.append(([x.grad for x in xs], whole.grad))
    for got, expected in pairs:
        got = np.concatenate([array.asnumpy() for array in got])
        np.testing.assert_allclose(got, expected.asnumpy(), rtol=0, atol=1e-10)
    y, want = layer(xs[1]), plain(nd.array(shards[1], dtype="float64"))
    np.testing.assert_allclose(y.asnumpy(), want.asnumpy(), rtol=0, atol=1e-10)

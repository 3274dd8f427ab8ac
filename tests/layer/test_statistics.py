"""Running statistics of all devices together."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import make_batch, on_devices, prepare, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, average_running_stats, reference

LAYERS = {
    "plain": lambda **kwargs: nn.BatchNorm(**kwargs),
    "local": lambda **kwargs: SyncBatchNorm(mode="local", **kwargs),
    "shuffle": lambda **kwargs: SyncBatchNorm(mode="shuffle", virtual_devices=2, **kwargs),
    "groups": lambda **kwargs: SyncBatchNorm(group_size=1, **kwargs),
    "contrib": lambda **kwargs: gluon.contrib.nn.SyncBatchNorm(num_devices=1, **kwargs),
}


# Of blocks in a list, which these tests are about.
unregistered = pytest.mark.filterwarnings('ignore:"Net.hidden" is an unregistered container:UserWarning')


def make_net(kind="plain", dtype="float64"):
    """Two layers of batch normalisation, one of which no child holds, on unlike statistics."""

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.conv = nn.Conv2D(4, 3, in_channels=3, use_bias=False)
                self.first = LAYERS[kind](in_channels=4)
                self.hidden = [LAYERS[kind](in_channels=4)]

        def forward(self, x):
            return self.hidden[0](nd.tanh(self.first(self.conv(x))))

    net = Net()
    net.cast(dtype)
    net.hidden[0].cast(dtype)
    return net


def differ(layer, contexts, rng):
    """Statistics of its own on each context."""
    values = []
    for context in contexts:
        mean, var = rng.randn(*layer.running_mean.shape) * 3, rng.rand(*layer.running_var.shape) + 0.5
        for parameter, value in ((layer.running_mean, mean), (layer.running_var, var)):
            parameter.data(context)[:] = value
        values.append([parameter.data(context).asnumpy() for parameter in (layer.running_mean, layer.running_var)])
    return values


def together(values, weights=None):
    means, variances = (np.array(part, np.float64) for part in zip(*values))
    mean = np.average(means, axis=0, weights=weights)
    return mean, np.average(variances + (means - mean) ** 2, axis=0, weights=weights)


def assert_statistics(layer, contexts, want, tolerance=1e-12):
    for parameter, value in zip((layer.running_mean, layer.running_var), want):
        got = [parameter.data(context).asnumpy() for context in contexts]
        for one in got:
            np.testing.assert_array_equal(one, got[0])
        np.testing.assert_allclose(got[0], value, rtol=tolerance, atol=tolerance)


# ---- average_running_stats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "local", "shuffle"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_weighted_by_samples_they_are_those_of_the_whole_batch(contexts, rng, devices, kind):
    """With momentum 0, after a step on shards of unlike size and distribution."""
    batch = make_batch(rng, devices)
    settings = {"in_channels": 5, "momentum": 0.0}
    layer = SyncBatchNorm(mode="local", **settings) if kind == "local" else nn.BatchNorm(**settings)
    if kind == "shuffle":  # two slots of each device have one count here: the mean over them is of equal weight
        sizes = [2, 4, 6, 8][:devices]
        batch = batch._replace(
            shards=[rng.randn(n, 5, 4, 6) * (i + 1) + i for i, n in enumerate(sizes)],
            heads=[rng.randn(n, 5, 4, 6) for n in sizes],
        )
        layer = SyncBatchNorm(mode="shuffle", virtual_devices=2, **settings)
    prepare(layer, batch, contexts[:devices], "float64")
    step(layer, batch, contexts, "float64")
    before = [
        [p.data(context).asnumpy() for p in (layer.running_mean, layer.running_var)] for context in contexts[:devices]
    ]
    weights = [len(shard) for shard in batch.shards]
    average_running_stats(layer, weights=weights)
    want = together(before, weights)
    if kind != "shuffle":
        mean, var, _ = reference.moments(batch.shards)
        np.testing.assert_allclose(want, (mean, var), rtol=1e-11, atol=1e-11)
        want = (mean, var)
    assert_statistics(layer, contexts[:devices], want, 1e-11)


@unregistered
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_wherever_a_net_holds_them(contexts, rng, kind, devices, dtype):
    net = make_net(kind, dtype)
    layers = [net.first, net.hidden[0]]
    for block in (net, net.hidden[0]):
        block.initialize(ctx=contexts[:devices])
    layers[1]._kwargs["use_global_stats"] = True
    values = [differ(layer, contexts[:devices], rng) for layer in layers]
    parameters = [layer.collect_params() for layer in layers]
    for weights in (None, list(range(devices)) if devices > 1 else [3.5]):
        kept = [[p.list_data() for p in params.values()] for params in parameters]
        average_running_stats(net, weights)
        for layer, value in zip(layers, values):
            assert_statistics(
                layer, contexts[:devices], together(value, weights), 1e-6 if dtype == "float32" else 1e-12
            )
        assert all(
            a is b
            for old, params in zip(kept, parameters)
            for arrays, p in zip(old, params.values())
            for a, b in zip(arrays, p.list_data())
        )
        for layer, value in zip(layers, values):
            for context, (mean, var) in zip(contexts, value):
                layer.running_mean.data(context)[:], layer.running_var.data(context)[:] = mean, var


@pytest.mark.parametrize("opened", [False, True])
def test_nodes_of_a_recorded_graph(contexts, rng, opened):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.BatchNormReLU(in_channels=4))
    data = mx.sym.var("data", dtype="float32")
    block = gluon.SymbolBlock(net(data), data)
    block.initialize(ctx=contexts[:2])
    x = nd.array(rng.randn(2, 3, 6, 6))
    block(x)
    if opened:
        gluon_syncbn.convert(block, mode="local")
    graph = block._cached_graph
    params = block.collect_params()
    values = {}
    for name in ("net_batchnorm0_", "net_batchnormrelu0_"):
        arrays = zip(params[name + "running_mean"].list_data(), params[name + "running_var"].list_data())
        values[name] = []
        for mean, var in arrays:
            mean[:], var[:] = rng.randn(4), rng.rand(4) + 0.5
            values[name].append([mean.asnumpy(), var.asnumpy()])
    average_running_stats(block)
    for name, value in values.items():
        for parameter, want in zip(("running_mean", "running_var"), together(value)):
            for got in params[name + parameter].list_data():
                np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-6, atol=1e-6)
    assert block._cached_graph is graph
    np.testing.assert_array_equal(block(x).asnumpy(), block(x.as_in_context(contexts[1])).asnumpy())


def test_a_checkpoint_is_what_each_device_predicts_with(contexts, rng, tmp_path):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=3), SyncBatchNorm(mode="local", in_channels=4))
    net.initialize(mx.init.Xavier(), ctx=contexts[:2])
    net.hybridize(static_alloc=True, static_shape=True)
    for _ in range(3):
        xs = on_devices([rng.randn(4, 3, 6, 6), 5 * rng.randn(2, 3, 6, 6) + 3], contexts, "float32")
        with autograd.record():
            ys = [net(x) for x in xs]
        autograd.backward(ys)
    x = rng.randn(2, 3, 6, 6)

    def predictions():
        here = [net(part).asnumpy() for part in on_devices([x, x], contexts, "float32")]
        net.save_parameters(str(tmp_path / "net.params"))
        other = nn.HybridSequential()
        other.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4))
        other.load_parameters(str(tmp_path / "net.params"), ctx=contexts[0])
        return here, other(nd.array(x)).asnumpy()

    here, loaded = predictions()
    assert all(np.abs(y - loaded).max() > 0.1 for y in here)
    average_running_stats(net)
    here, loaded = predictions()
    for y in here:
        np.testing.assert_allclose(y, loaded, rtol=0, atol=1e-6)


def test_the_same_once_more_changes_nothing(contexts, rng):
    layer = nn.BatchNorm(in_channels=5)
    layer.initialize(ctx=contexts[:3])
    differ(layer, contexts[:3], rng)
    average_running_stats(layer)
    before = [a.asnumpy() for p in (layer.running_mean, layer.running_var) for a in p.list_data()]
    average_running_stats(layer, [1, 5, 0.3])
    after = [a.asnumpy() for p in (layer.running_mean, layer.running_var) for a in p.list_data()]
    np.testing.assert_array_equal(before, after)


def test_replicas_that_share_a_context(contexts, rng):
    layer = SyncBatchNorm(mode="local", in_channels=5)
    layer.initialize(ctx=[contexts[0], contexts[0], contexts[1]])
    values = differ(layer, contexts[:2], rng)
    average_running_stats(layer, [1, 3])
    assert_statistics(layer, contexts[:2], together(values, [1, 3]), 1e-6)
    for array in layer.running_mean.list_data():  # the mean of which is saved
        np.testing.assert_array_equal(array.asnumpy(), layer.running_mean.data(contexts[0]).asnumpy())


@pytest.mark.parametrize(
    "weights, message",
    [
        ([1, 2, 3], "weights: [1, 2, 3] was given, expected one for each of the 2 contexts of 'norm'"),
        ([0, 0.0], "weights: [0, 0.0] was given, expected at least one above 0"),
        ([1, -1], "weights: -1 was given, expected numbers from 0 to 2**53"),
    ],
)
def test_weights_that_do_not_fit(contexts, weights, message):
    layer = nn.BatchNorm(in_channels=5, prefix="norm_")
    layer.initialize(ctx=contexts[:2])
    with pytest.raises(ValueError, match=re.escape(message)):
        average_running_stats(layer, weights)


def test_without_values(contexts):
    layer = nn.BatchNorm(prefix="norm_")
    layer.initialize(ctx=contexts[:2])
    with pytest.raises(ValueError, match=r"^net: layer 'norm' without running statistics was given, expected"):
        average_running_stats(layer)

"""Running statistics of all devices together, and of a population."""

import mxnet as mx
import numpy as np
import pytest
from moments import moments
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import WAYS, forward_and_backward, make_batch, on_devices, prepare, short_waits, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, average_running_stats, update_bn_stats

LAYERS = {
    "plain": lambda **kwargs: nn.BatchNorm(**kwargs),
    "local": lambda **kwargs: SyncBatchNorm(mode="local", **kwargs),
    "shuffle": lambda **kwargs: SyncBatchNorm(mode="shuffle", virtual_devices=2, **kwargs),
    "groups": lambda **kwargs: SyncBatchNorm(group_size=1, **kwargs),
    "contrib": lambda **kwargs: gluon.contrib.nn.SyncBatchNorm(num_devices=1, **kwargs),
}


# Of blocks in a list, which these tests are about.
unregistered = pytest.mark.filterwarnings('ignore:"Net.hidden" is an unregistered container:UserWarning')


def make_net(kind, contexts, dtype="float64"):
    """Two layers of batch normalisation, one of which no child holds, on unlike statistics."""

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.first, self.hidden = LAYERS[kind](in_channels=4), [LAYERS[kind](in_channels=4)]

    net = Net()
    for layer in (net.first, net.hidden[0]):
        layer.cast(dtype)
        layer.initialize(ctx=contexts)
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


@pytest.mark.parametrize("kind", ["plain", "local"])
@pytest.mark.parametrize("devices", [1, 4])
def test_weighted_by_samples_they_are_those_of_the_whole_batch(contexts, rng, devices, kind):
    """With momentum 0, after a step on shards of unlike size and distribution."""
    batch = make_batch(rng, devices)
    settings = {"in_channels": 5, "momentum": 0.0}
    layer = SyncBatchNorm(mode="local", **settings) if kind == "local" else nn.BatchNorm(**settings)
    prepare(layer, batch, contexts[:devices], "float64")
    step(layer, batch, contexts, "float64")
    average_running_stats(layer, weights=[len(shard) for shard in batch.shards])
    mean, var, _ = moments(batch.shards)
    assert_statistics(layer, contexts[:devices], (mean, var), 1e-11)


@unregistered
@pytest.mark.parametrize("devices, dtype", [(1, "float64"), (2, "float32"), (4, "float64")])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_wherever_a_net_holds_them(contexts, rng, kind, devices, dtype):
    net = make_net(kind, contexts[:devices], dtype)
    layers = [net.first, net.hidden[0]]
    layers[1]._kwargs["use_global_stats"] = True
    for weights in (None, list(range(devices)) if devices > 1 else [3.5]):
        values = [differ(layer, contexts[:devices], rng) for layer in layers]
        kept = [[id(array) for p in layer.collect_params().values() for array in p.list_data()] for layer in layers]
        average_running_stats(net, weights)
        for layer, value in zip(layers, values):
            tolerance = 1e-6 if dtype == "float32" else 1e-12
            assert_statistics(layer, contexts[:devices], together(value, weights), tolerance)
        once = statistics(layers[1])
        average_running_stats(net)  # of what is the same everywhere
        assert statistics(layers[1]) == once
        assert kept == [[id(a) for p in layer.collect_params().values() for a in p.list_data()] for layer in layers]


@pytest.mark.parametrize("opened", [False, True])
def test_nodes_of_a_recorded_graph(contexts, rng, opened):
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.BatchNormReLU(in_channels=4))
    net.initialize(ctx=contexts[:2])
    data = mx.sym.var("data", dtype="float32")
    block = gluon.SymbolBlock(net(data), data, params=net.collect_params())
    x = nd.array(rng.randn(2, 3, 6, 6))
    block(x)
    if opened:
        gluon_syncbn.convert(block, mode="local")
    graph, values = block._cached_graph, [differ(layer, contexts[:2], rng) for layer in net[1:]]
    average_running_stats(block)
    for layer, value in zip(net[1:], values):
        assert_statistics(layer, contexts[:2], together(value), 1e-6)
    assert block._cached_graph is graph
    np.testing.assert_array_equal(block(x).asnumpy(), block(x.as_in_context(contexts[1])).asnumpy())


def test_without_values(contexts):
    layer = nn.BatchNorm(prefix="norm_")
    layer.initialize(ctx=contexts[:2])
    with pytest.raises(ValueError, match=r"^net: 'norm_running_mean' without a value was given, expected"):
        average_running_stats(layer)


# ---- update_bn_stats -----------------------------------------------------------------------------------------


def convolutional(norm, contexts, **settings):
    """Two layers of batch normalisation, the second of which sees what the first one normalises."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4, **settings), nn.Activation("tanh"))
        net.add(nn.Conv2D(5, 2, in_channels=4), norm(in_channels=5, **settings), nn.Dense(2, in_units=5 * 9))
    net.initialize(ctx=contexts)
    net.cast("float64")
    values = np.random.RandomState(3)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            shift = 1.5 if parameter.name.endswith("gamma") else 0
            parameter.set_data(nd.array(values.randn(*parameter.shape) * 0.3 + shift, dtype="float64"))
    for layer in (net[1], net[4]):
        for array in [*layer.running_mean.list_data(), *layer.running_var.list_data()]:
            array[:] = values.rand(*array.shape) + 0.5
    return net


def population(rng, devices, batches=3):
    """Batches of uneven shards, each of a size and a distribution of its own."""
    sizes = rng.randint(1, 5, (batches, devices)) + 1
    return [[rng.randn(n, 3, 6, 6) * (1 + b + k) + 2 * k - b for k, n in enumerate(row)] for b, row in enumerate(sizes)]


def inputs_of_layers(plain, shards):
    """What both layers see where each of these is normalised by itself."""
    first, second = [], []
    for shard in shards:
        with autograd.train_mode():
            first.append(plain[0](nd.array(shard, dtype="float64")))
            second.append(plain[3](plain[2](plain[1](first[-1]))))
    return [[x.asnumpy() for x in xs] for xs in (first, second)]


def state(net):
    """All that a net is, but the running statistics."""
    layers = [net[1], net[4]]
    return (
        [a.asnumpy().tolist() for p in net.collect_params().values() if "running" not in p.name for a in p.list_data()],
        [a.asnumpy().tolist() for p in net.collect_params().values() if p.grad_req != "null" for a in p.list_grad()],
        [(dict(layer._kwargs), dict(layer._forward_pre_hooks), dict(layer._forward_hooks)) for layer in layers],
        [(block._active, id(block._cached_op), id(block._cached_graph)) for block in [net, *net]],
        [[id(a) for a in p.list_data()] for p in net.collect_params().values()],
        autograd.is_training(),
    )


def statistics(net):
    return [a.asnumpy().tolist() for p in net.collect_params(".*running").values() for a in p.list_data()]


@pytest.mark.parametrize(
    "kind, devices, way",
    [("plain", 2, "static_alloc"), ("sync", 2, "static_shape"), ("sync", 4, "eager"), ("local", 1, "hybrid")],
)
def test_they_are_those_of_the_population(contexts, rng, kind, devices, way):
    settings = {} if kind == "plain" else {"mode": kind}
    net = convolutional(nn.BatchNorm if kind == "plain" else SyncBatchNorm, contexts[:devices], **settings)
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    batches = population(rng, devices)
    xs = on_devices(batches[0], contexts, "float64")
    forward_and_backward(net, xs)  # so that there are gradients and graphs
    nd.waitall()
    before = state(net)
    assert (before[3][0][1] != id(None)) == (way != "eager")
    update_bn_stats(net, [on_devices(batch, contexts, "float64") for batch in batches])
    assert state(net) == before
    together = [[np.concatenate(batch)] for batch in batches] if kind == "sync" else batches
    seen = [inputs_of_layers(convolutional(nn.BatchNorm, [mx.cpu(0)]), batch) for batch in together]
    for i, layer in enumerate((net[1], net[4])):
        mean, var, _ = moments([x for inputs in seen for x in inputs[i]])
        assert_statistics(layer, contexts[:devices], (mean, var), 1e-10)
    ys = forward_and_backward(net, xs)  # and it trains on
    assert all(np.isfinite(y.asnumpy()).all() for y in ys)


@pytest.mark.parametrize("kind", [*LAYERS, "reused", "axis"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_of_one_layer(contexts, rng, kind, dtype):
    """All modes; float64 on the host for every type; a channel axis at the end; a layer that is called twice."""
    if kind == "contrib" and dtype != "float32":
        pytest.skip("contrib's layer takes float32 only")
    make = LAYERS.get(kind, LAYERS["plain"])
    layer = make(in_channels=5, **({"axis": -1} if kind == "axis" else {}))
    layer.cast(dtype)
    layer.initialize(ctx=contexts[:2])
    net = layer
    if kind == "reused":
        net = nn.Sequential()
        net.add(layer, nn.Activation("relu"), layer)
    batches = [make_batch(rng, 2, axis=-1 if kind == "axis" else 1, dtype=dtype, offset=30).shards for _ in range(3)]
    update_bn_stats(net, (on_devices(batch, contexts, dtype) for batch in batches))
    seen = [shard for batch in batches for shard in batch]
    if kind == "reused":
        for shard in list(seen):
            with autograd.train_mode():
                seen.append(nd.relu(layer(nd.array(shard, dtype=dtype))).asnumpy())
    mean, var, _ = moments(seen, layer._kwargs.get("axis", 1))
    assert_statistics(layer, contexts[:2], (mean, var), 1e-11 if dtype == "float64" else 1e-6)


def test_a_net_that_overwrites(contexts, rng, monkeypatch):
    """And no input is copied to the host: the moments of a batch are 2C numbers, which the layer's operator computes
    where the input is.
    """

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.norm = SyncBatchNorm(in_channels=5)

        def hybrid_forward(self, F, x):
            x, mask = x + 1, F.ones((len(x), 1, 1, 1), ctx=x.context)
            y = self.norm(x, mask)
            x[:], mask[:] = 0, 0
            return y

    net = Net()
    net.initialize(ctx=contexts[:2])
    shards = [make_batch(rng, 2).shards for _ in range(2)]
    batches, read, original = [on_devices(each, contexts, "float32") for each in shards], [], nd.NDArray.asnumpy
    with monkeypatch.context() as patched:
        patched.setattr(nd.NDArray, "asnumpy", lambda array: read.append(array.size) or original(array))
        update_bn_stats(net, batches)
    assert max(read) == 5
    mean, var, _ = moments([shard for each in shards for shard in each])
    assert_statistics(net.norm, contexts[:2], (mean + 1, var), 1e-5)


def test_a_batch_that_is_not_finite(contexts, rng):
    layer = nn.BatchNorm(in_channels=5)
    layer.initialize(ctx=contexts[:2])
    shards = make_batch(rng, 2, dtype="float32").shards
    faulty = np.where(np.arange(5)[:, None, None] == 3, np.nan, shards[1])
    batches = [on_devices([shards[0], faulty], contexts, "float32")]
    update_bn_stats(layer, batches)
    assert np.isnan(layer.running_mean.data(contexts[0]).asnumpy()).tolist() == [False] * 3 + [True, False]
    gluon_syncbn.configure(nonfinite="skip")
    update_bn_stats(layer, batches)
    assert_statistics(layer, contexts[:2], moments(shards[:1])[:2], 1e-5)


def test_batches_are_taken_as_far_as_asked(contexts, rng):
    layer = nn.BatchNorm(in_channels=5)
    layer.initialize(ctx=contexts[:2])
    batches = [make_batch(rng, 2).shards for _ in range(4)]
    left = iter([on_devices(batch, contexts, "float32") for batch in batches])
    update_bn_stats(layer, left, num_iters=3)
    assert len(list(left)) == 1
    mean, var, _ = moments([shard for batch in batches[:3] for shard in batch])
    assert_statistics(layer, contexts[:2], (mean, var), 1e-5)
    update_bn_stats(layer, [on_devices(batches[3][:1], contexts, "float32")])  # a shard less
    assert_statistics(layer, contexts[:2], moments(batches[3][:1])[:2], 1e-5)
    with pytest.raises(ValueError, match=r"^batches: .* was given, expected at least one batch"):
        update_bn_stats(layer, left)


FAILURES = [(SyncBatchNorm, fault) for fault in ("iterator", "batch", "block", "operator", "replica")]
FAILURES.append((nn.BatchNorm, "operator"))


@pytest.mark.parametrize("norm, fault", FAILURES)
def test_nothing_has_changed_after_a_failure(contexts, rng, norm, fault):
    """In the second batch: a shard of another shape, a block that raises after the first of two replicas, a replica
    that is missing. The error comes when results are read, while layers before it have moved their statistics."""
    net = convolutional(norm, contexts[:2])
    net.hybridize()
    batches = [on_devices(batch, contexts, "float64") for batch in population(rng, 2)]
    forward_and_backward(net, batches[0])
    nd.waitall()
    before, values = state(net), statistics(net)

    def faulty():
        yield batches[0]
        if fault == "iterator":
            raise KeyError("of the user's")
        if fault == "block":
            net[3].register_forward_pre_hook(raising)
        if fault == "operator":
            yield [batches[1][0], nd.ones((2, 7, 6, 6), ctx=contexts[1], dtype="float64")]
        if fault == "replica":
            yield batches[1][:1]
        yield batches[1] if fault == "block" else [batches[1][0]] * 2

    def raising(_, args):
        if args[0].context == contexts[1]:
            raise KeyError("of the user's")

    expected = {"iterator": KeyError, "block": KeyError, "batch": ValueError}.get(fault, mx.MXNetError)
    said = {"replica": r"1 of 2 replicas arrived \(cpu\(0\)\), missing cpu\(1\)"}.get(fault, "")
    with short_waits(2), pytest.raises(expected, match=said):
        update_bn_stats(net, faulty())
    net[3]._forward_pre_hooks.clear()
    assert state(net) == before
    assert statistics(net) == values
    update_bn_stats(net, batches)
    assert statistics(net) != values


def test_frozen_layers_stay_and_others_are_named(contexts, rng):
    class Halved(nn.BatchNorm):
        def hybrid_forward(self, F, x, *args, **kwargs):
            return super().hybrid_forward(F, x / 2, *args, **kwargs)

    net = nn.Sequential()
    net.add(SyncBatchNorm(in_channels=5), SyncBatchNorm(in_channels=5, use_global_stats=True))
    net.add(Halved(in_channels=5, prefix="halved_"))
    (unused,) = net.__held__ = [nn.BatchNorm(in_channels=5, prefix="unused_")]
    for block in (net, unused):
        block.initialize(ctx=contexts[:2])
    before = [statistics(layer) for layer in (net[1], net[2], unused)]
    batches = [on_devices(make_batch(rng, 2).shards, contexts, "float32")]
    with pytest.warns(UserWarning, match=r"left as it was: halved \(Halved: .*; unused \(the net gave it no value\)$"):
        update_bn_stats(net, batches)
    assert [statistics(layer) for layer in (net[1], net[2], unused)] == before
    assert (net[0].running_var.data(contexts[0]).asnumpy() != 1).all()


@pytest.mark.parametrize("opened", [False, True])
def test_recorded_graphs_are_refused(contexts, rng, opened):
    data = mx.sym.var("data", dtype="float64")
    net = gluon.SymbolBlock(convolutional(nn.BatchNorm, contexts[:1])(data), data)
    net.initialize(ctx=contexts[:1])
    net.cast("float64")
    batches = [on_devices(batch, contexts, "float64") for batch in population(rng, 1)]
    net(batches[0][0])
    if opened:
        gluon_syncbn.convert(net)
    with pytest.raises(
        ValueError, match=r"SymbolBlock \(net_batchnorm0.*, net_batchnorm1.*\) was given, expected layers"
    ):
        update_bn_stats(net, batches)
    gluon_syncbn.freeze(net)
    around = nn.HybridSequential()
    around.add(net, nn.BatchNorm(in_channels=2))
    around[1].initialize(ctx=contexts[:1])
    around.cast("float64")
    before = statistics(net)
    update_bn_stats(around, batches)
    assert statistics(net) == before
    seen = [net(x).asnumpy() for batch in batches for x in batch]
    assert_statistics(around[1], contexts[:1], moments(seen)[:2], 1e-10)

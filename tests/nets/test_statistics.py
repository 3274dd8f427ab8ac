"""Running statistics of all devices together, and of a population."""

import functools
import itertools

import mxnet as mx
import numpy as np
import pytest
from moments import moments
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import NETS, SAMPLE, as_it_is, body, filled, made, recorded
from replicas import WAYS, forward_and_backward, make_batch, on_devices, ready, short_waits

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, average_running_stats, convert, freeze, update_bn_stats
from gluon_syncbn.mxnet_side.blocks import is_batch_norm


def assert_statistics(layer, contexts, want, tolerance=1e-12):
    for parameter, value in zip((layer.running_mean, layer.running_var), want):
        got = [parameter.data(context).asnumpy() for context in contexts]
        for one in got:
            np.testing.assert_array_equal(one, got[0])
        np.testing.assert_allclose(got[0], value, rtol=tolerance, atol=tolerance)


# ---- average_running_stats -----------------------------------------------------------------------------------


def frozen(net):
    return freeze(convert(net))


@pytest.mark.parametrize(
    "kind, change", [*((kind, as_it_is) for kind in NETS), *((kind, frozen) for kind in ("a model", "a graph"))]
)
def test_the_average_is_that_of_the_whole_batch(kind, change, contexts, rng):
    """Of batches of unlike distributions, of which each context has the moments. Whatever holds the layer."""
    net, tolerance = made(kind, contexts[:3]), 1e-10 if NETS[kind].dtype == "float64" else 1e-5
    change(net)
    running = {name: p for name, p in net.collect_params().items() if p.name.endswith(("mean", "var"))}
    arrays = [id(array) for p in running.values() for array in p.list_data()]
    batches = [rng.randn(4, 8) * (1 + i) + i for i in range(3)]
    for name, p in running.items():
        for array, batch in zip(p.list_data(), batches):
            array[:] = (batch.mean(0) if name.endswith("mean") else batch.var(0))[: p.shape[0]]
    average_running_stats(net)
    mean, var, _ = moments(batches)
    for name, p in running.items():
        want = (mean if name.endswith("mean") else var)[: p.shape[0]]
        found = [array.asnumpy() for array in p.list_data()]
        np.testing.assert_allclose(found[0], want, rtol=tolerance, atol=tolerance, err_msg=name)
        np.testing.assert_array_equal(found[1:], [found[0]] * 2)
    assert arrays == [id(array) for p in running.values() for array in p.list_data()]


# ---- update_bn_stats -----------------------------------------------------------------------------------------


def population(rng, devices, batches=3):
    """Batches of uneven shards, each of a size and a distribution of its own."""
    sizes = rng.randint(1, 5, (batches, devices)) + 1
    return [[rng.randn(n, *SAMPLE) * (1 + b + k) + 2 * k - b for k, n in enumerate(row)] for b, row in enumerate(sizes)]


def norms_of(net):
    return list(dict.fromkeys(block for block in net if is_batch_norm(block)))


def moments_of_inputs(net, batches):
    """What each layer gets in training has."""
    seen = {norm: [] for norm in norms_of(net)}
    for norm in seen:
        norm.register_forward_pre_hook(lambda one, args: seen[one].append(args[0].copy()))
    for batch in batches:
        with autograd.train_mode():
            [net(x) for x in batch]
        nd.waitall()
    return [moments([x.asnumpy() for x in xs], norm._kwargs.get("axis", 1))[:2] for norm, xs in seen.items()]


def state(net):
    """All that a net is, but the running statistics."""
    parameters = net.collect_params().values()
    return (
        [a.asnumpy().tolist() for p in parameters if "running" not in p.name for a in p.list_data()],
        [a.asnumpy().tolist() for p in parameters if p.grad_req != "null" for a in p.list_grad()],
        [(dict(one._kwargs), dict(one._forward_pre_hooks), dict(one._forward_hooks)) for one in norms_of(net)],
        [(block._active, id(block._cached_op), id(block._cached_graph)) for block in [net, *net]],
        [[id(a) for a in p.list_data()] for p in parameters],
        autograd.is_training(),
    )


def statistics(net):
    return [a.asnumpy().tolist() for p in net.collect_params(".*running").values() for a in p.list_data()]


def twice(norm):
    net, layer = nn.HybridSequential(), norm(in_channels=7, axis=-1)
    net.add(layer, nn.Activation("relu"), layer)
    return net


POPULATIONS = {
    "plain": (body, nn.BatchNorm, 2, "float64", "static_alloc"),
    "plain, twice": (twice, nn.BatchNorm, 2, "float16", "eager"),
    "sync": (body, SyncBatchNorm, 2, "float64", "static_shape"),
    "sync, twice": (twice, SyncBatchNorm, 4, "float32", "eager"),
    "local": (body, functools.partial(SyncBatchNorm, mode="local"), 1, "float64", "hybrid"),
    "shuffle": (twice, functools.partial(SyncBatchNorm, mode="shuffle", virtual_devices=2), 2, "float64", "eager"),
    "groups": (body, functools.partial(SyncBatchNorm, group_size=1), 2, "float32", "eager"),
    "contrib's": (body, functools.partial(gluon.contrib.nn.SyncBatchNorm, num_devices=1), 2, "float32", "eager"),
}


@pytest.mark.parametrize("name", POPULATIONS)
def test_they_are_those_of_the_population(contexts, rng, name):
    """In float64 on the host for every type of data."""
    make, norm, devices, dtype, way = POPULATIONS[name]
    net = filled(make(norm), contexts[:devices], dtype)
    net.hybridize(**WAYS[way])
    batches = [on_devices([x + 30 for x in batch], contexts, dtype) for batch in population(rng, devices)]
    forward_and_backward(net, batches[0])  # so that there are gradients and graphs
    nd.waitall()
    before = state(net)
    gluon_syncbn.configure(seed=3)  # of permutations
    update_bn_stats(net, batches)
    assert state(net) == before
    got = [[norm.running_mean.list_data(), norm.running_var.list_data()] for norm in norms_of(net)]
    got = [[[array.asnumpy() for array in arrays] for arrays in each] for each in got]
    net.hybridize(False)
    gluon_syncbn.configure(seed=3)
    want = moments_of_inputs(net, batches)
    for arrays, value in zip(itertools.chain(*got), itertools.chain(*want)):
        np.testing.assert_array_equal(arrays[1:], arrays[:1] * (devices - 1))
        np.testing.assert_allclose(arrays[0], value, rtol=1e-10 if dtype == "float64" else 1e-6)


def test_a_net_that_overwrites(contexts, rng, monkeypatch):
    """Of what a mask lets count; of one shard it hides all. And no input is copied to the host: the moments of a batch
    are 2C numbers, which the layer's operator computes where the input is.
    """

    class Net(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            x, mask = x + 1, F.mean(x, axis=0, exclude=True, keepdims=True) > 0
            y = self.norm(x, mask) + self.adds(x, x, mask)
            x[:], mask[:] = 0, 0
            return y

    net, read, original = Net(), [], nd.NDArray.asnumpy
    net.norm, net.adds = SyncBatchNorm(in_channels=5), SyncBatchNormAdd(in_channels=5)
    net.initialize(ctx=contexts[:2])
    shards = [make_batch(rng, 2).shards for _ in range(2)]
    shards[1][0] -= 100
    with monkeypatch.context() as patched:
        patched.setattr(nd.NDArray, "asnumpy", lambda array: read.append(array.size) or original(array))
        update_bn_stats(net, [on_devices(each, contexts, "float32") for each in shards])
    assert max(read) == 5
    counting = [shard[shard.mean((1, 2, 3)) > 0] + 1 for each in shards for shard in each]
    for layer in (net.norm, net.adds):
        assert_statistics(layer, contexts[:2], moments(counting)[:2], 1e-5)


def test_a_batch_that_is_not_finite(contexts, rng):
    layer = ready(nn.BatchNorm(in_channels=5), contexts=contexts[:2])
    shards = make_batch(rng, 2, dtype="float32").shards
    faulty = np.where(np.arange(5)[:, None, None] == 3, np.nan, shards[1])
    batches = [on_devices([shards[0], faulty], contexts, "float32")]
    update_bn_stats(layer, batches)
    assert np.isnan(layer.running_mean.data(contexts[0]).asnumpy()).tolist() == [False] * 3 + [True, False]
    gluon_syncbn.configure(nonfinite="skip")
    update_bn_stats(layer, batches)
    assert_statistics(layer, contexts[:2], moments(shards[:1])[:2], 1e-5)


def test_batches_are_taken_to_the_end(contexts, rng):
    layer = ready(nn.BatchNorm(in_channels=5), contexts=contexts[:2])
    batches = [make_batch(rng, 2).shards for _ in range(4)]
    left = iter([on_devices(batch, contexts, "float32") for batch in batches])
    update_bn_stats(layer, left)
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
    net = filled(body(norm), contexts[:2])
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
            net[5].register_forward_pre_hook(raising)
        if fault == "operator":
            yield [batches[1][0], nd.ones((2, 4, 7, 7), ctx=contexts[1], dtype="float64")]
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
    net[5]._forward_pre_hooks.clear()
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
    """But for frozen ones, in a net with a layer."""
    net = filled(recorded(), contexts[:1])
    batches = [on_devices(batch, contexts, "float64") for batch in population(rng, 1)]
    if opened:
        convert(net)
    with pytest.raises(ValueError, match=r"SymbolBlock \(net_one.*, net_two.*\) was given, expected layers"):
        update_bn_stats(net, batches)
    around = nn.HybridSequential()
    around.add(freeze(net), nn.BatchNorm(in_channels=5))
    around[1].initialize(ctx=contexts[:1])
    around.cast("float64")
    before = statistics(net)
    update_bn_stats(around, batches)
    assert statistics(net) == before
    seen = [net(x).asnumpy() for batch in batches for x in batch]
    assert_statistics(around[1], contexts[:1], moments(seen)[:2], 1e-10)

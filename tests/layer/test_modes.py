"""Modes and slots: virtual devices, groups, local and shuffled statistics, against the specification."""

import sys
import time

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from internals import WHY_CUSTOM
from mxnet import autograd, nd
from mxnet.gluon import nn
from poolings import POOLINGS, specification
from replicas import (
    WAYS,
    assert_same,
    assert_same_bits,
    collect,
    forward_and_backward,
    make_batch,
    on_devices,
    prepare,
    step,
)

import gluon_syncbn
from gluon_syncbn import ShuffleBatchNorm, SyncBatchNorm

# ---- the permutation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["sync", "local, 2 slots", "shuffle, 2 slots", "groups of 2"])
def test_same_bits_whatever_the_order_of_arrival(contexts, rng, pooling):
    batch = make_batch(rng, 4, dtype="float32", spatial=(9, 7))
    layer = prepare(SyncBatchNorm(in_channels=5, **POOLINGS[pooling]), batch, contexts[:4], "float32")

    def run(order):
        gluon_syncbn.configure(seed=3)
        xs, heads = (on_devices(arrays, contexts, "float32") for arrays in (batch.shards, batch.heads))
        for x in xs:
            x.attach_grad()
        ys = [None] * 4
        with autograd.record():
            for i in order:
                ys[i] = layer(xs[i])
                time.sleep(0.01)
        autograd.backward(ys, heads)
        result = collect(layer, ys, [x.grad for x in xs], contexts[:4])
        return result._replace(running_mean=[], running_var=[])

    first = run(range(4))
    for _ in range(4):
        assert_same_bits(run(rng.permutation(4)), first)


# ---- slots without a sample --------------------------------------------------------------------------------


def test_too_few_slots_with_samples(contexts, rng):
    layer = prepare(ShuffleBatchNorm(in_channels=5, virtual_devices=4), make_batch(rng, 1), contexts[:1], "float64")
    with autograd.record():
        y = layer(nd.ones((1, 5, 4), dtype="float64"))
    with pytest.raises(mx.MXNetError, match="had 1 slot with values in this step, expected at least two"):
        y.asnumpy()
    y = step(layer, make_batch(rng, 1), contexts, "float64")
    assert np.isfinite(y.outputs[0]).all()


# ---- arguments ---------------------------------------------------------------------------------------------


def test_a_channel_axis_that_turns_out_to_be_the_first(contexts, rng):
    layer = SyncBatchNorm(axis=-2, in_channels=5, mode="local", virtual_devices=2)
    layer.initialize()
    with pytest.raises(mx.MXNetError, match="along axis 0, but here that is the channel axis"), autograd.record():
        layer(nd.ones((5, 4))).asnumpy()


# ---- everything that works for sync --------------------------------------------------------------------------


class Twice(nn.HybridBlock):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F, x):
        return self.norm(F.tanh(self.norm(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pooling", ["sync", "local, 2 slots", "shuffle, 2 slots", "groups of 2"])
def test_a_layer_used_twice_in_one_forward(contexts, rng, pooling, way):
    batch = make_batch(rng, 4)
    layer = prepare(SyncBatchNorm(in_channels=5, **POOLINGS[pooling]), batch, contexts[:4], "float64")
    net = Twice(layer)
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    xs, heads = (on_devices(arrays, contexts, "float64") for arrays in (batch.shards, batch.heads))
    ys = forward_and_backward(net, xs, heads)

    def draw(use):
        return {"call": use, "node": -1} if way == "eager" else {"node": use}

    between = batch._replace(shards=[np.tanh(y) for y in specification(layer, batch, **draw(0)).outputs])
    second = specification(layer, between, **draw(1))
    heads = [dx * (1 - t**2) for dx, t in zip(second.dxs, between.shards)]
    first = specification(layer, batch._replace(heads=heads), **draw(0))
    for y, want in zip(ys, second.outputs):
        np.testing.assert_allclose(y.asnumpy(), want, rtol=0, atol=1e-10)
    for x, dx in zip(xs, first.dxs):
        np.testing.assert_allclose(x.grad.asnumpy(), dx, rtol=0, atol=1e-9)
    dgamma = sum(g.asnumpy() for g in layer.gamma.list_grad())
    np.testing.assert_allclose(dgamma, first.dgamma + second.dgamma, rtol=1e-9)


@pytest.mark.parametrize("replica_by_replica", [True, False])
@pytest.mark.parametrize("way", ["eager", "hybrid", "static_alloc"])
@pytest.mark.parametrize("pooling", ["sync", "local, 2 slots", "shuffle, 2 slots"])
def test_two_forwards_before_one_backward(contexts, rng, pooling, way, replica_by_replica):
    first, second = make_batch(rng, 3), make_batch(rng, 3, spatial=(3, 7))
    layer = SyncBatchNorm(in_channels=5, **POOLINGS[pooling])
    prepare(layer, first, contexts[:3], "float64", WAYS[way])
    second = second._replace(gamma=first.gamma, beta=first.beta)
    xs, heads = ([on_devices(b[k], contexts, "float64") for b in (first, second)] for k in (0, 1))
    order = [(call, i) for call in range(2) for i in range(3)]
    if replica_by_replica:
        order.sort(key=lambda place: place[1])
    for call, i in order:
        xs[call][i].attach_grad()
    with autograd.record():
        ys = [layer(xs[call][i]) for call, i in order]
    autograd.backward(ys, [heads[call][i] for call, i in order])
    for call, batch in enumerate((first, second)):
        want = specification(layer, batch, call=call, node=-1 if way == "eager" else 0)
        for i, y in enumerate(ys[order.index((call, i))] for i in range(3)):
            np.testing.assert_allclose(y.asnumpy(), want.outputs[i], rtol=0, atol=1e-11)
            np.testing.assert_allclose(xs[call][i].grad.asnumpy(), want.dxs[i], rtol=0, atol=1e-10)


def test_named_groups_and_fewer_devices(contexts, rng):
    batch = make_batch(rng, 4)
    layer = prepare(SyncBatchNorm(in_channels=5, groups=[[0, 2], [1, 3]]), batch, contexts[:4], "float64")
    with pytest.raises(mx.MXNetError, match="groups name 4 replicas, but 2 take part in this step"):
        with gluon_syncbn.only_on(contexts[:2]):
            step(layer, make_batch(rng, 2), contexts, "float64")
    assert_same(step(layer, batch, contexts, "float64"), specification(layer, batch), 1e-11)


MEMORY = """
import gluon_syncbn
gluon_syncbn.cpu_devices(1)
from mxnet import autograd, nd
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
xs = [nd.random.normal(shape=(8, 64, 32, 32)) for _ in range(20)]
for x in xs:
    x.attach_grad()
for settings in ({}, {"mode": "local", "virtual_devices": 8}, {"mode": "shuffle", "virtual_devices": 8}):
    layer = gluon_syncbn.SyncBatchNorm(in_channels=64, **settings)
    layer.initialize()
    nd.waitall()
    with autograd.record():
        layer(xs[0]).wait_to_read()
        before, kept = resident(), []
        for x in xs:
            kept.append(layer(x).sum())
            nd.waitall()
    print((resident() - before) / (20 * xs[0].size * 4))
    del kept
"""


def test_no_mode_keeps_more_than_its_input():
    """What a call leaves for its backward beside that, in multiples of it, measured on the process: nothing or,
    through MXNet's `Custom`, the copy that guards it."""
    guards = 1 if WHY_CUSTOM else 0
    # From this size on glibc returns what is freed to the system; by itself it raises the limit above an array's.
    run = ended([sys.executable, "-W", "ignore", "-c", MEMORY], MALLOC_MMAP_THRESHOLD_=65536)
    assert run.returncode == 0, run.stderr
    kept = [float(line) for line in run.stdout.splitlines()]
    assert len(kept) == 3
    assert all(guards - 0.5 < multiple < guards + 0.5 for multiple in kept), kept


# ---- failures ----------------------------------------------------------------------------------------------


def test_fewer_devices_for_a_step(contexts, rng):
    batch = make_batch(rng, 4)
    layer = prepare(ShuffleBatchNorm(in_channels=5), batch, contexts[:4], "float64")
    part = batch._replace(shards=batch.shards[:3], heads=batch.heads[:3])
    with gluon_syncbn.only_on(contexts[:3]):
        got = step(layer, part, contexts, "float64")
    assert_same(got, specification(layer, part), 1e-11)

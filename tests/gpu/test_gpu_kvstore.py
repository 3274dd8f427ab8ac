"""KVStores of MXNet on GPU contexts: they add the arrays that the GPUs have, and the layer copies nothing to the host.

`device` adds on a GPU, `local` on the CPU, to which MXNet itself brings what it is given.
"""

import gc
import itertools
import queue
import threading
from contextlib import suppress

import mxnet as mx
import numpy as np
import pytest
from gpus import EMULATED, GPUS, assert_sound, counted_step, gpus
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from poolings import POOLINGS, fits, specification
from replicas import (
    WAYS,
    assert_same,
    assert_same_bits,
    collect,
    make_batch,
    on_devices,
    prepare,
    step,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

if not GPUS:
    pytest.skip("MXNet finds no GPU; `make test-gpu-emulated` needs none", allow_module_level=True)


@pytest.fixture(autouse=True)
def sound(monkeypatch):
    monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", "0")  # else the store says that the emulator has none
    gluon_syncbn.configure(seed=0)
    yield
    with suppress(mx.MXNetError):  # what the test of a failure has left
        mx.nd.waitall()
    assert_sound()


class Store(mx.kvstore.KVStoreBase):
    """MXNet's `device`, which remembers what it was given and can be made to fail."""

    type = "device"

    def __init__(self):
        self.store = mx.kv.create("device")
        self.given = []  # (values, out) of each sum
        self.before = self.after = lambda: None

    def broadcast(self, key, value, out, priority=0):
        self.store.broadcast(key, value, out, priority)

    def pushpull(self, key, value, out=None, priority=0):
        self.before()
        self.given.append((value, out))
        self.store.pushpull(key, value, out, priority)
        self.after()


def a_layer(batch, contexts, way="eager", **settings):
    return prepare(SyncBatchNorm(in_channels=5, **settings), batch, contexts, "float64", WAYS[way])


def fresh(layer):
    """As before its first step."""
    gluon_syncbn.configure(seed=0)
    layer.running_mean.set_data(nd.zeros(5, dtype="float64"))
    layer.running_var.set_data(nd.ones(5, dtype="float64"))


# ---- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["sync", *(name for name in POOLINGS if not name.startswith("local"))])
@pytest.mark.parametrize("replicas", [2, 4])
def test_has_the_bits_of_nccl(rng, pooling, replicas):
    settings = POOLINGS.get(pooling, {})
    if not fits(settings, replicas):
        pytest.skip("not with so few replicas")
    batch, contexts = make_batch(rng, replicas), gpus(replicas)
    for way in ("eager", "static_shape"):
        layer = a_layer(batch, contexts, way, **settings)
        gluon_syncbn.configure(kvstore="nccl")
        want = step(layer, batch, contexts, "float64")
        gluon_syncbn.configure(kvstore="device")
        fresh(layer)
        got = step(layer, batch, contexts, "float64")
        assert_same(got, specification(layer, batch, node=-1 if way == "eager" else 0), 1e-11)
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype, spatial", [("float16", (4, 6)), ("float32", (180, 190))], ids=["whole", "in chunks"])
def test_other_types(rng, dtype, spatial):
    batch, contexts, found = make_batch(rng, 2, spatial=spatial, dtype=dtype), gpus(2), []
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, dtype)
    for kvstore in ("nccl", "device"):
        gluon_syncbn.configure(kvstore=kvstore)
        layer.running_mean.set_data(nd.zeros(5))
        layer.running_var.set_data(nd.ones(5))
        found.append(step(layer, batch, contexts, dtype))
    assert_same_bits(found[1], found[0])


def test_sets_of_gpus_that_change(rng):
    """A GPU has another place in each, so that another part of its vector is its own."""
    contexts, batch = gpus(4), make_batch(rng, 4)
    layer = a_layer(batch, contexts, kvstore="device")
    for chosen in 2 * [(0, 1), (1, 3), (0, 1, 2, 3), (1, 2), (0, 2, 3), (2, 3)]:
        places = [contexts[i] for i in chosen]
        part = batch._replace(shards=[batch.shards[i] for i in chosen], heads=[batch.heads[i] for i in chosen])
        layer.collect_params().zero_grad()
        with gluon_syncbn.devices(places):
            got = step(layer, part, places, "float64")
        want = specification(layer, part)
        assert_same(got._replace(running_mean=[], running_var=[]), want, 1e-11)


@pytest.mark.parametrize("values", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_channel(rng, values):
    batch, contexts = make_batch(rng, 4), gpus(4)
    batch.shards[1][2, 3, 0, 1] = values
    layer = a_layer(batch, contexts, kvstore="device", group_size=2)
    for i, y in enumerate(step(layer, batch, contexts, "float64").outputs):
        assert [bool(np.isfinite(y[:, c]).all()) for c in range(5)] == [True, True, True, i > 1, True]
    clean = make_batch(rng, 4)._replace(gamma=batch.gamma, beta=batch.beta)  # and in its step
    got = step(layer, clean, contexts, "float64")
    assert_same(got._replace(running_mean=[], running_var=[]), specification(layer, clean), 1e-11)


def test_an_empty_shard(rng):
    batch, contexts = make_batch(rng, 2), gpus(2)
    layer = a_layer(batch, contexts, kvstore="device")
    step(layer, batch, contexts, "float64")  # which leaves something where the empty one has zeros
    fresh(layer)
    layer.collect_params().zero_grad()
    batch.shards[1], batch.heads[1] = np.zeros((0, 5, 4, 6)), np.zeros((0, 5, 4, 6))
    with mx.util.np_shape(True):
        assert_same(step(layer, batch, contexts, "float64"), specification(layer, batch), 1e-11)


def test_a_block_that_is_recomputed(rng):
    batch, contexts, found = make_batch(rng, 4), gpus(4), []
    layers = [a_layer(batch, contexts, kvstore="device", **settings) for settings in ({}, {"group_size": 2})]
    net = nn.HybridSequential()
    net.add(*layers)
    for recomputed in (False, True):
        for layer in layers:
            fresh(layer)
        gluon_syncbn.checkpoint(net, active=recomputed)
        xs, heads = (on_devices(arrays, contexts, "float64") for arrays in (batch.shards, batch.heads))
        autograd.mark_variables(xs, on_devices(batch.shards, contexts, "float64"))
        with autograd.record():
            ys = [net(x) for x in xs]
        autograd.backward(ys, heads)
        found.append([collect(layer, ys, [x.grad for x in xs], contexts) for layer in layers])
    for got, want in zip(*found):
        assert_same_bits(got, want)


def test_a_store_that_a_trainer_has_too(rng):
    contexts, batch, store = gpus(2), make_batch(rng, 2), mx.kv.create("device")
    layer = a_layer(batch, contexts, kvstore=store)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    for _ in range(3):
        fresh(layer)
        got = step(layer, batch, contexts, "float64")
        want = specification(layer, batch)
        assert_same(got, want, 1e-11)
        trainer.allreduce_grads()
        for parameter, total in ((layer.gamma, want.dgamma), (layer.beta, want.dbeta)):
            for context in contexts:
                np.testing.assert_allclose(parameter.grad(context).asnumpy(), total, rtol=1e-10)


@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_several_replicas_on_a_gpu(rng, kvstore):
    """Go over the host."""
    contexts, batch = gpus(2), make_batch(rng, 4)
    layer = a_layer(batch, contexts, kvstore=kvstore, num_devices=4)
    xs = on_devices(batch.shards, [contexts[0], contexts[0], contexts[1], contexts[1]], "float64")
    with autograd.record():
        ys = [layer(x) for x in xs]
    for y, want in zip(ys, specification(layer, batch).outputs):
        np.testing.assert_allclose(y.asnumpy(), want, rtol=1e-10, atol=1e-10)


# ---- what a step asks for ----------------------------------------------------------------------------------


def test_the_store_gets_the_arrays_of_the_gpus(rng):
    """In float64, where they are, zero but for the GPU's own; from the second step on the same ones."""
    contexts, batch, store, seen = gpus(4), make_batch(rng, 4), Store(), []
    layer = a_layer(batch, contexts, "static_shape", kvstore=store)
    store.after = lambda: seen.append([value.asnumpy() for value in store.given[-1][0]])
    for _ in range(3):
        step(layer, batch, contexts, "float64")
    lengths = [11, 10] * 3  # 1 + 2C and 2C
    for (values, out), rows, length in zip(store.given, seen, lengths):
        assert [value.context for value in values] == [array.context for array in out] == contexts
        assert {array.dtype for array in values + out} == {np.float64}
        for i, row in enumerate(rows):
            assert row.shape == (4 * length,)
            assert np.flatnonzero(row).min() // length == np.flatnonzero(row).max() // length == i
    for direction in (0, 1):
        kept = [{id(array) for arrays in given for array in arrays} for given in store.given[direction::2]]
        assert len(kept) == 3 and kept[1] == kept[2]
    assert len(store.given) == len(seen) == 6


@pytest.mark.parametrize(
    "pooling, way",
    [("sync", "eager"), ("sync", "static_shape"), ("groups of 2", "hybrid"), ("shuffle, 2 slots", "eager"),
     ("local", "eager")],
)  # fmt: skip
@pytest.mark.parametrize("kvstore", ["device", "local"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_what_a_step_costs(rng, replicas, kvstore, pooling, way):
    """Two launches and two waits of the layer's own, and what MXNet does with an array that each GPU gives it: with
    `local` a copy to the host and one back, with `device` copies between GPUs and, on one of them, a launch. For each
    of its operations it waits."""
    if not EMULATED:
        pytest.skip("counts are the emulator's")
    gc.collect()  # a layer with several replicas on a GPU, of another test, has MXNet copy gradients
    batch, contexts, shared = make_batch(rng, replicas), gpus(replicas), pooling != "local"
    layer = a_layer(batch, contexts, way, kvstore=kvstore, **POOLINGS.get(pooling, {}))
    xs, heads = (on_devices(arrays, contexts, "float64") for arrays in (batch.shards, batch.heads))
    for x in xs:
        x.attach_grad()

    none = {"launches": 2, "to device": 0, "to host": 0, "within": 0, "waits": 1, "collectives": 0}
    through_cpu = {**none, "to device": 1, "to host": 1, "waits": 2 + 2}
    others = {**none, "within": 1, "waits": 2 + 1}
    one = {**none, "launches": 2 + 1, "within": replicas + 1, "waits": 2 + replicas + 2}
    for numbers in counted_step(lambda: [layer(x) for x in xs], heads, 3):
        for each in numbers:
            del each["allocations"]
        if not shared:
            want = [none] * replicas
        elif kvstore == "local":
            want = [through_cpu] * replicas
        else:
            want = [others] * (replicas - 1) + [one]
        assert sorted(numbers[:replicas], key=lambda each: each["launches"]) == want
        assert not any(itertools.chain(*(each.values() for each in numbers[replicas:])))


# ---- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_store_that_raises(rng, replicas, phase, when):
    """Instead of adding, or with the sums on their way: the step of all ends, and no running statistics change."""
    contexts, batch, store = gpus(replicas), make_batch(rng, replicas), Store()
    layer = a_layer(batch, contexts, kvstore=store)
    step(layer, batch, contexts, "float64")
    before = [layer.running_mean.data(context).asnumpy() for context in contexts]
    xs, heads = (on_devices(arrays, contexts, "float64") for arrays in (batch.shards, batch.heads))
    for x in xs:
        x.attach_grad()

    def fail():
        if len(store.given) >= (3 if when == "after" else 2) + (phase == "backward"):
            raise ConnectionError("the link is down")

    setattr(store, when, fail)
    with autograd.record():
        ys = [layer(x) for x in xs]
    if phase == "backward":
        mx.nd.waitall()
        autograd.backward(ys, heads)
        ys = [x.grad for x in xs]
    text = (
        r"SyncBatchNorm 'batchnorm\d+'.*: the KVStore could not add the statistics: ConnectionError: the link is down"
    )
    for y in ys:
        with pytest.raises(mx.MXNetError, match=text):
            y.asnumpy()
    setattr(store, when, lambda: None)
    gluon_syncbn.reset()
    if phase == "forward":
        for context, values in zip(contexts, before):
            np.testing.assert_array_equal(layer.running_mean.data(context).asnumpy(), values)
    layer.collect_params().zero_grad()
    got = step(layer, batch, contexts, "float64")
    assert_same(got._replace(running_mean=[], running_var=[]), specification(layer, batch), 1e-11)


def test_a_store_that_does_not_answer(rng):
    """What it may still write to serves nobody any more."""
    contexts, batch, store, go_on = gpus(2), make_batch(rng, 2), Store(), threading.Event()
    layer = a_layer(batch, contexts, kvstore=store, timeout=0.2)
    step(layer, batch, contexts, "float64")
    (values, _), _ = store.given
    store.before = lambda: go_on.wait(60)
    xs = on_devices(batch.shards, contexts, "float64")
    with autograd.record():
        ys = [layer(x) for x in xs]
    errors = queue.Queue()
    for y in ys:  # one of the two is in the store
        threading.Thread(target=lambda y=y: errors.put(error_of(y)), daemon=True).start()
    assert "The KVStore has not answered for 2 s." in errors.get(timeout=30)
    go_on.set()
    gluon_syncbn.reset()
    del ys, y  # and with them the call, whose memory would serve again
    store.before = lambda: None
    got = step(layer, batch, contexts, "float64")
    assert_same(got._replace(running_mean=[], running_var=[]), specification(layer, batch), 1e-11)
    given = {id(value) for value in values}
    assert not given & {id(value) for value in store.given[-2][0]}


def error_of(array):
    try:
        array.wait_to_read()
    except mx.MXNetError as error:
        return str(error)


def test_a_store_that_runs_an_optimizer(rng):
    contexts, batch, store = gpus(2), make_batch(rng, 2), mx.kv.create("device")
    layer = a_layer(batch, contexts, kvstore=store)
    store.set_optimizer(mx.optimizer.SGD())
    xs = on_devices(batch.shards, contexts, "float64")
    with autograd.record():
        ys = [layer(x) for x in xs]
    for y in ys:
        with pytest.raises(mx.MXNetError, match=r"has an optimizer set.*update_on_kvstore=False"):
            y.asnumpy()
    gluon_syncbn.reset()


def test_a_gpu_that_has_not_finished(rng):
    """Its own time limit ends it: nothing is given to the store before."""
    if not EMULATED:
        pytest.skip("no GPU can be kept busy for so long")
    contexts, batch, store = gpus(2), make_batch(rng, 2, spatial=(500, 500)), Store()
    layer = a_layer(batch, contexts, kvstore=store, timeout=0.01)
    xs = on_devices(batch.shards, contexts, "float64")
    with autograd.record():
        ys = [layer(x) for x in xs]
    for y in ys:
        with pytest.raises(mx.MXNetError, match=r"on gpu\(\d\): the GPU has not finished for 0.01 s"):
            y.asnumpy()
    assert store.given == []
    gluon_syncbn.reset()

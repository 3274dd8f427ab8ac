"""KVStores of MXNet on GPU contexts, to which the layer gives its statistics by way of the host.

`device` adds on a GPU, `local` on the CPU. tests/gpu/test_gpu.py compares their numbers with those of other ways.
"""

import queue
import threading

import mxnet as mx
import numpy as np
import pytest
from gpus import GPUS, gpus
from mxnet import autograd
from poolings import specification
from replicas import WAYS, assert_same, make_batch, on_devices, prepare, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

if not GPUS:
    pytest.skip("MXNet finds no GPU; `make test-gpu-emulated` needs none", allow_module_level=True)
pytestmark = pytest.mark.on_gpus


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", "0")  # else the store says that the emulator has none


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


def test_what_the_store_gets(rng):
    """A row of each GPU, in float64, on that GPU; nothing where the statistics are not combined by sums."""
    contexts, batch, store, seen = gpus(4), make_batch(rng, 4), Store(), []
    layer = a_layer(batch, contexts, "static_shape", kvstore=store)
    store.after = lambda: seen.append([value.asnumpy() for value in store.given[-1][0]])
    step(layer, batch, contexts, "float64")
    step(a_layer(batch, contexts, kvstore=store, group_size=2), batch, contexts, "float64")
    for (values, out), rows, length in zip(store.given, seen, (44, 40)):  # 1 + 2C, and 2C, of each GPU apart
        assert [value.context for value in values] == [array.context for array in out] == contexts
        assert {array.dtype for array in values + out} == {np.float64}
        assert {row.shape for row in rows} == {(length,)}
    assert len(store.given) == len(seen) == 2


def test_a_store_that_does_not_answer(rng):
    contexts, batch, store, go_on = gpus(2), make_batch(rng, 2), Store(), threading.Event()
    layer = a_layer(batch, contexts, kvstore=store, timeout=3)
    step(layer, batch, contexts, "float64")
    store.before = lambda: go_on.wait(60)
    xs = on_devices(batch.shards, contexts, "float64")
    with autograd.record():
        ys = [layer(x) for x in xs]
    errors = queue.Queue()
    for y in ys:  # one of the two is in the store
        threading.Thread(target=lambda y=y: errors.put(error_of(y)), daemon=True).start()
    assert "The KVStore has not answered after" in errors.get(timeout=30)
    go_on.set()
    gluon_syncbn.reset()
    store.before = lambda: None
    got = step(layer, batch, contexts, "float64")
    assert_same(got._replace(running_mean=[], running_var=[]), specification(layer, batch), 1e-11)


def error_of(array):
    try:
        array.wait_to_read()
    except mx.MXNetError as error:
        return str(error)

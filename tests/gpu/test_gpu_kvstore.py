"""KVStores of MXNet on GPU contexts, to which the layer gives its statistics by way of the host.

`device` adds on a GPU, `local` on the CPU. tests/gpu/test_gpu.py compares their numbers with those of other ways.
"""

import mxnet as mx
import numpy as np
import pytest
from gpus import GPUS, gpus
from replicas import WAYS, make_batch, prepare, step

from gluon_syncbn import SyncBatchNorm

if not GPUS:
    pytest.skip("MXNet finds no GPU; `make test-gpu-emulated` needs none", allow_module_level=True)
pytestmark = pytest.mark.on_gpus


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", "0")  # else the store says that the emulator has none


class Store(mx.kvstore.KVStoreBase):
    """MXNet's `device`, which remembers what it was given."""

    type = "device"

    def __init__(self):
        self.store = mx.kv.create("device")
        self.given = []  # (values, out) of each sum, and the values after it

    def broadcast(self, key, value, out, priority=0):
        self.store.broadcast(key, value, out, priority)

    def pushpull(self, key, value, out=None, priority=0):
        self.store.pushpull(key, value, out, priority)
        self.given.append((value, out, [row.asnumpy() for row in value]))


def test_what_the_store_gets(rng):
    """A row of each GPU, in float64, on that GPU; nothing where the statistics are not combined by sums."""
    contexts, batch, store = gpus(4), make_batch(rng, 4), Store()
    for settings, way in (({}, "static_shape"), ({"group_size": 2}, "eager")):
        layer = SyncBatchNorm(in_channels=5, kvstore=store, **settings)
        step(prepare(layer, batch, contexts, "float64", WAYS[way]), batch, contexts, "float64")
    for (values, out, rows), length in zip(store.given, (44, 40)):  # 1 + 2C, and 2C, of each GPU apart
        assert [value.context for value in values] == [array.context for array in out] == contexts
        assert {array.dtype for array in values + out} == {np.float64}
        assert {row.shape for row in rows} == {(length,)}
    assert len(store.given) == 2

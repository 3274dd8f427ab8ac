"""Parameters that are the same everywhere; between processes: tests/processes/test_mpi.py."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from nets import made

from gluon_syncbn import broadcast_parameters


@pytest.mark.parametrize("kind", ["a model", "a graph", "shared layers"])
@pytest.mark.parametrize("given", ["a net", "one that holds it", "parameters", "a dict"])
def test_all_contexts_get_those_of_the_first(contexts, kind, given):
    net, holder = made(kind, contexts[:3]), nn.Sequential()
    holder.__held__ = [net]
    params = net.collect_params()
    arrays = [p.list_data() for p in params.values()]
    want = [first.asnumpy() for first, *_ in arrays]
    for one in arrays:
        for k, array in enumerate(one):
            array += k
    ways = {"a net": net, "one that holds it": holder, "parameters": params, "a dict": dict(params.items())}
    broadcast_parameters(ways[given])
    for p, before, value in zip(params.values(), arrays, want):
        for now, array in zip(p.list_data(), before):
            assert now is array
            np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize("store", ["local", "device", mx.kv.create("local")], ids=["local", "device", "own"])
def test_a_trainer_that_has_begun_takes_them(store, contexts):
    """One whose store updates the parameters has weights of its own. The momentum stays."""
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=3, use_bias=False), nn.BatchNorm(in_channels=2))
    net.initialize(mx.init.Zero(), ctx=contexts[:2])
    settings = {"learning_rate": 0.25, "momentum": 0.5}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=store, update_on_kvstore=True)

    def step():
        for array in net[0].weight.list_grad():
            array[:] = 1
        trainer.step(2, ignore_stale_grad=True)

    step()
    first, second = net[0].weight.list_data()
    first[:], second[:] = 7, 3
    broadcast_parameters(net)
    assert all((array.asnumpy() == 7).all() for array in net[0].weight.list_data())
    step()
    assert all((array.asnumpy() == 7 - 0.25 * (1 + 0.5)).all() for array in net[0].weight.list_data())

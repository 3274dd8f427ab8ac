"""Parameters that are the same everywhere; between processes: tests/processes/test_mpi.py."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, broadcast_parameters


def make_net(contexts):
    """On each context other values."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 1, in_channels=2), SyncBatchNorm(in_channels=3, mode="local"), nn.Dense(2, in_units=3))
    net.initialize(ctx=contexts)
    for parameter in net.collect_params().values():
        for k, array in enumerate(parameter.list_data()):
            array[:] = np.random.RandomState(k).rand(*array.shape) + 0.5
    return net


@pytest.mark.parametrize("given", ["net", "parameters", "dict"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_all_contexts_get_those_of_the_first(contexts, devices, given):
    net = make_net(contexts[:devices])
    params = net.collect_params()
    arrays = [array for p in params.values() for array in p.list_data()]
    want = [p.list_data()[0].asnumpy() for p in params.values()]
    broadcast_parameters({"net": net, "parameters": params, "dict": dict(params.items())}[given])
    for parameter, value in zip(params.values(), want):
        for array in parameter.list_data():
            np.testing.assert_array_equal(array.asnumpy(), value)
    assert all(a is b for a, b in zip(arrays, (array for p in params.values() for array in p.list_data())))


def test_blocks_that_gluon_does_not_know(contexts):
    net = nn.Sequential()
    net.__held__ = [make_net(contexts[:2])]
    broadcast_parameters(net)
    for parameter in net.__held__[0].collect_params().values():
        np.testing.assert_array_equal(*(array.asnumpy() for array in parameter.list_data()))


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


def test_without_values(contexts):
    net = nn.Dense(2, prefix="net_")
    net.initialize(ctx=contexts[:2])
    with pytest.raises(ValueError, match=re.escape("params: 'net_weight' without a value was given, expected")):
        broadcast_parameters(net)
    net(nd.ones((1, 3)))
    broadcast_parameters(net)

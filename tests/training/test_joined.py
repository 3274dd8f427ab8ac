"""Losses that join devices, in all ways of running, against plain BatchNorm on one context with the whole batch.

An operator that waits for another replica must hold nothing that this replica needs.
"""

import sys
import time

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from places import SUPPORT, TESTS
from replicas import WAYS, assert_near

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.contrastive import gather


def a_net(contexts, norm, way):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Conv2D(6, 3, padding=1, in_channels=6, use_bias=False), norm(in_channels=6))
            net.add(nn.Activation("tanh"), nn.HybridLambda(lambda F, x: x + 0 * F.Dropout(x, p=0.1)))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(4, in_units=6))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net(nd.zeros((1, 6, 8, 8), ctx=contexts[0]))
    net.hybridize(**WAYS[way])
    return net


def rows_of(zs):
    """All rows on each device, and the numbers of its own."""
    starts = np.cumsum([0, *(len(z) for z in zs)])
    return [nd.arange(start, start + len(z), ctx=z.context) for start, z in zip(starts, zs)]


def agreement(own, others, rows):
    return -nd.pick(nd.log_softmax(nd.dot(own, others, transpose_b=True)), rows).sum()


def two_forwards(net, xs):
    """SimCLR."""
    first, second = [net(x) for x in xs], [net(1 - x) for x in xs]
    pairs = zip(first, second, gather(first), gather(second), rows_of(first))
    return [agreement(a, bs, rows) + agreement(b, a_s, rows) for a, b, a_s, bs, rows in pairs]


def across_devices(net, xs):
    """The loss of each device needs what the others have."""
    ys = [net(x) for x in xs]
    sums = [sum(z.sum(axis=0).as_in_context(y.context) for z in ys) for y in ys]
    return [nd.square(y - total.expand_dims(0) / 8).sum() for y, total in zip(ys, sums)]


class Reading(gluon.HybridBlock):
    """A loss with a parameter, which reads its labels."""

    def __init__(self):
        super().__init__(prefix="loss_")
        self.scale = self.params.get("scale", shape=(1,), init="ones")

    def forward(self, y, label):
        label = nd.topk(nd.concat(label, 1 - label, dim=1), axis=1, k=1)
        assert label.sum().asscalar() >= 0
        return super().forward(y, label)

    def hybrid_forward(self, F, y, label, scale):
        return F.broadcast_mul(F.broadcast_sub(y, label), scale).square().sum()


def label_reading(net, xs):
    loss = Reading()
    loss.initialize(ctx=[x.context for x in xs])
    return [loss(net(x), x[:, :1, 0, 0]) for x in xs]


def largest(x):
    """Of each sample, by an operator that needs temporary space."""
    return nd.topk(x.reshape((0, -1)), axis=1, k=2, ret_typ="value").mean(axis=1, keepdims=True)


class Pausing(gluon.Block):
    """Finds its targets as detectors do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        found = 0
        for layer in self.net:
            x = layer(x)
            with autograd.pause():
                found = found + largest(x)
        return x * found


def paused(net, xs):
    return [Pausing(net)(x).square().sum() for x in xs]


METRIC = nn.HybridLambda(lambda F, y: F.topk(y, axis=1, k=2, ret_typ="value").mean() + F.square(y).mean())
METRIC.hybridize(static_alloc=True, static_shape=True)


def between(net, xs):
    """Data that are changed, and a static graph of no replica, which waits for one. More operators need temporary space
    or random numbers than MXNet has copies of these."""
    losses = []
    for x in xs:
        place, kernel = x.context, nd.ones((6, 6, 3, 3)) / 54
        for _ in range(3):
            x = nd.Convolution(x.as_in_context(mx.cpu()), kernel, kernel=(3, 3), pad=(1, 1), num_filter=6, no_bias=True)
            x = x + 0 * nd.random.normal(shape=x.shape)
        y = net(x.as_in_context(place))
        losses.append(sum((largest(y) * y).sum() for _ in range(3)))
        with autograd.pause():
            METRIC(y.as_in_context(mx.cpu()))
    return losses


ALONE = [label_reading, paused, between]  # the loss of a device is that of its own outputs
GRAPHS = [two_forwards, across_devices, *ALONE]


def gradients_of(graph, net, shards, contexts, count):
    """The gradients of the last of these steps, summed over the contexts. Plain running statistics come in the order of
    the backwards.
    """
    for _ in range(count):
        xs = [nd.array(shard, ctx=context) for shard, context in zip(shards, contexts)]
        with autograd.record():
            losses = graph(net, xs)
        for some in [[loss] for loss in losses] if graph in ALONE else [losses]:
            autograd.backward(some)
            time.sleep(0.02 * (graph in ALONE))  # until the operators before the layer have run
    trained = net.collect_params("(?!.*running).*").items()
    return {name: sum(array.asnumpy() for array in parameter.list_grad()) for name, parameter in trained}


@pytest.mark.filterwarnings("ignore:Gradient of Parameter")
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("way", WAYS)
def test_as_one_device(contexts, rng, graph, way):
    gluon_syncbn.configure(timeout=15)
    places, shards = contexts[:2], [rng.rand(2 + i, 6, 8, 8) for i in range(2)]
    net, plain = a_net(places, SyncBatchNorm, way), a_net(places[:1], nn.BatchNorm, "eager")
    for p, q in zip(plain.collect_params().values(), net.collect_params().values()):
        q.set_data(p.data())
    whole = gradients_of(graph, plain, [np.concatenate(shards)], places[:1], 4)
    assert_near(gradients_of(graph, net, shards, places, 4), whole, 2e-4)


#: What changes who runs an operator, and when.
ENGINES = {
    "one thread": {"MXNET_CPU_WORKER_NTHREADS": 1, "MXNET_CPU_PRIORITY_NTHREADS": 1},
    "eight threads, through Custom": {"MXNET_CPU_WORKER_NTHREADS": 8, "GLUON_SYNCBN_OPERATOR": "custom"},
    "one pool, no bundles": {"MXNET_ENGINE_TYPE": "ThreadedEngine", "MXNET_EXEC_BULK_EXEC_TRAIN": 0},
}
PROGRAM = """
import light, gluon_syncbn, itertools, numpy, test_joined
for graph, way in itertools.product(test_joined.GRAPHS, ("eager", "static_alloc")):
    test_joined.test_as_one_device(gluon_syncbn.cpu_devices(2), numpy.random.RandomState(0), graph, way)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_in_other_engines(engine):
    ended([sys.executable, "-c", PROGRAM], SUPPORT, TESTS / "training", code=0, **ENGINES[engine])

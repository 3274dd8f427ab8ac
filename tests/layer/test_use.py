"""The ways in which nets and training loops use the layer."""

import gc
import sys
import time

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from gate import Gate
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from places import SUPPORT
from replicas import (
    TOLERANCE,
    WAYS,
    Batch,
    Result,
    assert_same,
    assert_same_bits,
    forward_and_backward,
    in_threads,
    make_batch,
    on_devices,
    prepare,
    step,
    truth,
)

from gluon_syncbn import SyncBatchNorm, configure, convert, reference
from gluon_syncbn.mxnet_side.nodes import json_of


class Twice(nn.HybridBlock):
    """One normalisation layer at two places of a net."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F, x):
        y = self.norm(x)
        return self.norm(y * y + x)


def train(net, shards, heads, contexts, dtype="float64"):
    """One step; returns outputs, dx and the summed gradient of every parameter."""
    xs, dys = on_devices(shards, contexts, dtype), on_devices(heads, contexts, dtype)
    ys = forward_and_backward(net, xs, dys)
    gradients = {
        name: sum(g.asnumpy() for g in p.list_grad())
        for name, p in net.collect_params().items()
        if p.grad_req != "null"
    }
    running = {
        name: p.data(contexts[0]).asnumpy()
        for name, p in net.collect_params().items()
        if name.endswith(("running_mean", "running_var"))
    }
    return [y.asnumpy() for y in ys], [x.grad.asnumpy() for x in xs], gradients, running


def assert_equal_nets(net, plain, batch, contexts, dtype, tolerance):
    """`net` on the shards against `plain` on their concatenation, on one device."""
    ys, dxs, gradients, running = train(net, batch.shards, batch.heads, contexts, dtype)
    whole = train(plain, [np.concatenate(batch.shards)], [np.concatenate(batch.heads)], contexts, dtype)
    np.testing.assert_allclose(np.concatenate(ys), whole[0][0], rtol=0, atol=tolerance * np.abs(whole[0][0]).max())
    np.testing.assert_allclose(np.concatenate(dxs), whole[1][0], rtol=0, atol=tolerance * np.abs(whole[1][0]).max())
    for got, want in ((gradients, whole[2]), (running, whole[3])):
        for g, w in zip(got.values(), want.values()):
            np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * np.abs(w).max())


class Branches(nn.HybridBlock):
    """One normalisation layer in two branches that nothing puts in order."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F, x):
        return F.concat(self.norm(F.tanh(x)), self.norm(F.tanh(0.5 * x)), dim=1)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_parallel_branches(contexts, rng, way):
    batch = make_batch(rng, 3)
    net = Branches(prepare(SyncBatchNorm(in_channels=5), batch, contexts[:3], "float64"))
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    plain = Branches(prepare(nn.BatchNorm(in_channels=5), batch, contexts[:1], "float64"))
    with autograd.record():
        want = plain(nd.array(np.concatenate(batch.shards), dtype="float64")).asnumpy()
    for _ in range(20):
        with autograd.record():
            ys = [net(x) for x in on_devices(batch.shards, contexts, "float64")]
        np.testing.assert_allclose(np.concatenate([y.asnumpy() for y in ys]), want, rtol=0, atol=1e-10)


def test_nodes_of_one_layer_meet_themselves_only():
    """In a static graph MXNet may run two nodes of one layer in either order."""
    layer = SyncBatchNorm(in_channels=5)
    graph = json_of(Branches(layer)(mx.sym.var("x")))
    assert [node["attrs"]["node"] for node in graph["nodes"] if node["op"] == "Custom"] == ["0", "1"]


@pytest.mark.parametrize("reverse", [False, True])
def test_one_backward_per_loss(contexts, rng, reverse):
    batch = make_batch(rng, 3)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:3], "float64")
    xs, dys = on_devices(batch.shards, contexts, "float64"), on_devices(batch.heads, contexts, "float64")
    for x in xs:
        x.attach_grad()
    with autograd.record():
        losses = [(layer(x) * dy).sum() for x, dy in zip(xs, dys)]
    for loss in losses[::-1] if reverse else losses:
        loss.backward()
    want = truth(batch)
    for x, dx in zip(xs, want.dxs):
        np.testing.assert_allclose(x.grad.asnumpy(), dx, rtol=0, atol=1e-11)


#: In which several replicas of one context can meet.
SHARING = ("eager", "hybrid", "static_alloc")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", SHARING)
@pytest.mark.parametrize("contexts_of, num_devices", [((0, 0), 2), ((0, 0, 0), 3), ((1, 1, 0, 0), 4)], ids=str)
def test_several_replicas_on_one_context(contexts, rng, contexts_of, num_devices, way, dtype):
    batch, places = make_batch(rng, num_devices, dtype=dtype), [contexts[i] for i in contexts_of]
    unique = list(dict.fromkeys(places))
    layer = prepare(SyncBatchNorm(in_channels=5, num_devices=num_devices), batch, unique, dtype, WAYS[way])
    for steps in range(1, 4):
        got = step(layer, batch, places, dtype)
        assert_same(got, truth(batch, steps=steps), TOLERANCE[dtype])


@pytest.mark.parametrize("way", SHARING)
@pytest.mark.parametrize("given", [True, False], ids=["channels", "deferred"])
def test_a_net_with_several_replicas_on_one_context(contexts, rng, way, given):
    """Where the channels are taken from the first batch, the graph is recorded before there are parameters."""

    def make(norm, places, inputs, channels):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Conv2D(6, 3, in_channels=inputs, use_bias=False), norm(in_channels=channels))
            net.add(nn.Activation("tanh"), nn.Conv2D(4, 3, in_channels=channels, use_bias=False))
            net.add(norm(in_channels=4 if channels else 0))
        net.initialize(mx.init.Xavier(), ctx=places)
        return net

    places = [contexts[0]] * 2
    net, plain = make(SyncBatchNorm, places, *((3, 6) if given else (0, 0))), make(nn.BatchNorm, places[:1], 3, 6)
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    shards = [rng.randn(n, 3, 8, 8) * (n + 1) for n in (1, 3)]
    heads = [rng.randn(n, 4, 4, 4) for n in (1, 3)]
    if not given:
        net(nd.array(shards[0]))
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        p.set_data(q.data())
    for _ in range(2):
        got = train(net, shards, heads, places, "float32")
        want = train(plain, [np.concatenate(shards)], [np.concatenate(heads)], places, "float32")
    np.testing.assert_allclose(np.concatenate(got[0]), want[0][0], rtol=0, atol=1e-4)
    for g, w in zip(got[2:], want[2:]):  # gradients of the parameters, running statistics
        for name in w:
            np.testing.assert_allclose(g[name], w[name], rtol=0, atol=1e-3 * np.abs(w[name]).max(), err_msg=name)


@pytest.mark.parametrize("way", SHARING)
@pytest.mark.parametrize("per_context", [2, 3])
def test_running_statistics_of_several_replicas_on_one_context(contexts, rng, way, per_context):
    """Many calls in flight at once: their updates come in the order of the calls, and prediction sees all before it."""
    channels, momentum = 4, 0.6
    for _turn in range(10):
        layer = SyncBatchNorm(in_channels=channels, num_devices=2 * per_context, momentum=momentum)
        layer.initialize(ctx=contexts[:2])
        if WAYS[way] is not None:
            layer.hybridize(**WAYS[way])
        layer(nd.ones((1, channels, 2)))
        mean, var, predicted, kept = np.zeros(channels), np.ones(channels), [], []
        for call in range(8):
            shards = [
                rng.randn(2, channels, 3 + 40 * (i == call % 2)) * (call + 1) + 10 * call
                for i in range(2 * per_context)
            ]
            with autograd.record():  # outputs are kept, and nobody waits for them
                kept.append([layer(nd.array(x, ctx=contexts[i % 2])) for i, x in enumerate(shards)])
            values = np.concatenate([np.moveaxis(x, 1, 0).reshape(channels, -1) for x in shards], axis=1)
            mean = momentum * mean + (1 - momentum) * values.mean(axis=1)
            var = momentum * var + (1 - momentum) * values.var(axis=1)
            predicted.append((layer(nd.zeros((1, channels, 1), ctx=contexts[call % 2])), -mean / np.sqrt(var + 1e-5)))
        for c in contexts[:2]:
            np.testing.assert_allclose(layer.running_mean.data(c).asnumpy(), mean, rtol=1e-4)
            np.testing.assert_allclose(layer.running_var.data(c).asnumpy(), var, rtol=1e-4)
        for y, want in predicted:
            np.testing.assert_allclose(y.asnumpy().ravel(), want, rtol=1e-3, atol=1e-4)


def test_replicas_of_one_context_in_the_same_memory(contexts, rng):
    """MXNet gives calls of a static_alloc graph that are not recorded the same memory, one after the other."""
    batch = make_batch(rng, 2)
    layer = SyncBatchNorm(in_channels=5, num_devices=2, timeout=9)
    prepare(layer, batch, contexts[:1], "float32", WAYS["static_alloc"])
    with pytest.raises(mx.MXNetError) as error, autograd.train_mode():
        ys = [layer(x) for x in on_devices(batch.shards, [contexts[0]] * 2, "float32")]
        ys[0].asnumpy()
    assert f"SyncBatchNorm '{layer.name}'" in str(error.value)
    assert "call hybridize() without static_alloc" in str(error.value)


MANY_ON_ONE_CONTEXT = """
import sys
sys.path.insert(0, {tests!r})
import gluon_syncbn
import numpy as np
from gluoncv.utils.parallel import DataParallelModel
from mxnet import autograd, cpu, nd
from replicas import WAYS, assert_same, make_batch, on_devices, prepare, step, truth

gluon_syncbn.configure(timeout=60)
places = [cpu(0)] * 8
batch = make_batch(np.random.RandomState(0), 8)
for way in ("eager", "hybrid", "static_alloc"):
    layer = prepare(gluon_syncbn.SyncBatchNorm(in_channels=5), batch, places, "float64", WAYS[way])
    assert_same(step(layer, batch, places, "float64"), truth(batch), 1e-11)
layer = prepare(gluon_syncbn.SyncBatchNorm(in_channels=5, num_devices=2), batch, places[:1], "float64")
model = DataParallelModel(layer, places[:2], sync=True)
x = nd.array(np.concatenate(batch.shards), dtype="float64")
with autograd.record():
    ys = [y for y, in model(x)]
autograd.backward(ys, on_devices(np.split(np.concatenate(batch.heads), [len(ys[0])]), places, "float64"))
np.testing.assert_allclose(layer.gamma.grad().asnumpy(), truth(batch).dgamma, rtol=1e-11)
"""


@pytest.mark.parametrize("bundles", ["0", "1"])
def test_many_replicas_on_one_context(bundles):
    """Whether MXNet may bundle operators, or may not. From eight gradients on it adds them up in another way."""
    script = MANY_ON_ONE_CONTEXT.format(tests=str(SUPPORT))
    run = ended([sys.executable, "-W", "ignore", "-c", script], MXNET_EXEC_BULK_EXEC_TRAIN=bundles)
    assert run.returncode == 0, run.stderr


def test_twice_with_threads_on_one_context(contexts, rng):
    """Each thread is one replica, however often it comes."""
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5, num_devices=2), batch, contexts[:1], "float64")
    net = Twice(layer)
    plain = Twice(prepare(nn.BatchNorm(in_channels=5), batch, contexts[:1], "float64"))
    outputs = {}

    def replica(i):
        with autograd.record():
            outputs[i] = net(xs[i]).asnumpy()

    for _ in range(5):
        outputs.clear()
        xs = on_devices(batch.shards, contexts[:1] * 2, "float64")
        in_threads(replica, 2)
        with autograd.record():
            want = plain(nd.array(np.concatenate(batch.shards), dtype="float64")).asnumpy()
        np.testing.assert_allclose(np.concatenate([outputs[0], outputs[1]]), want, rtol=0, atol=1e-10)


def make_convolutional(norm, dtype="float64"):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.Conv2D(16, 3, padding=1, in_channels=3, use_bias=False),
            norm(in_channels=16),
            nn.Activation("tanh"),
            nn.Conv2D(16, 3, padding=1, strides=2, in_channels=16, use_bias=False),
            norm(in_channels=16),
            nn.Activation("tanh"),
            nn.Conv2D(8, 1, in_channels=16, use_bias=False),
            norm(in_channels=8),
        )
    return net


def twins(contexts, rng, dtype, way):
    net, plain = make_convolutional(SyncBatchNorm), make_convolutional(nn.BatchNorm)
    plain.initialize(mx.init.Xavier(), ctx=contexts[:1])
    net.initialize(ctx=contexts)
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        if p.name.endswith("gamma"):
            q.set_data(nd.array(rng.rand(*q.shape) + 0.5))
        p.set_data(q.data())
    net.cast(dtype)
    plain.cast(dtype)
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    return net, plain


@pytest.mark.parametrize("way", WAYS)
def test_a_convolutional_net_is_right_every_time(contexts, rng, way):
    """Convolutions hand over arrays in oneDNN's layout, whose plain copies MXNet frees too early: 25 runs for each way,
    100 in all, each with new data."""
    gc.collect()  # layers of other tests with several replicas on a context, where static_shape is not for them
    net, plain = twins(contexts[:4], rng, "float32", way)
    for _ in range(25):
        sizes = [2, 1, 3, 2]
        shards = [((i + 1) * rng.randn(n, 3, 16, 16) + i).astype("float32") for i, n in enumerate(sizes)]
        heads = [rng.randn(n, 8, 8, 8).astype("float32") for n in sizes]
        batch = Batch(shards, heads, None, None)
        assert_equal_nets(net, plain, batch, contexts[:4], "float32", tolerance=3e-4)


def test_parameters_are_put_where_they_are(rng, contexts):
    """While a step is on its way, as by a `DataParallelModel` made behind one: who has come still meets who comes."""
    batch, contexts = make_batch(rng, 2), contexts[:2]
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64")
    xs, gate = on_devices(batch.shards, contexts, "float64"), Gate()
    with autograd.record():
        ys = [layer(gate.behind(xs[0])), layer(xs[1])]
        time.sleep(0.2)  # until the second waits
        layer.collect_params().reset_ctx(contexts)
        gate.open()
    for y, expected in zip(ys, truth(batch).outputs):
        np.testing.assert_allclose(y.asnumpy(), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kvstore", ["device", "local", "object", "configured"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_kvstore_gives_the_same_numbers(contexts, rng, replicas, kvstore):
    batch = make_batch(rng, replicas)
    store = mx.kv.create("device") if kvstore == "object" else kvstore
    if kvstore == "configured":
        configure(kvstore="device")
        store = None
    through_store = prepare(SyncBatchNorm(in_channels=5, kvstore=store), batch, contexts[:replicas], "float64")
    seen = []
    if replicas > 1 and kvstore != "configured":
        exchange = through_store._replicas.exchange
        add = exchange.add
        exchange.add = lambda *arguments: seen.append(arguments[1].shape) or add(*arguments)
    for _ in range(2):
        result = step(through_store, batch, contexts, "float64")
    assert_same(result, truth(batch, steps=2), 1e-11)
    if replicas > 1 and kvstore != "configured":
        assert seen == [(replicas, 1 + 2 * 5), (replicas, 2 * 5)] * 2  # forward, backward; one call each
    first = step(through_store, batch, contexts, "float64")
    assert_same_bits(
        step(through_store, batch, contexts, "float64")._replace(
            running_mean=first.running_mean, running_var=first.running_var
        ),
        first,
    )


@pytest.mark.parametrize("kvstore", ["device", "local"])
@pytest.mark.parametrize("offset", [1e4, 1e7])
def test_kvstore_with_large_offset(contexts, rng, kvstore, offset):
    """What goes through a store loses no more digits than the data has lost: 16 of the value, some of the deviation."""
    batch = make_batch(rng, 3, offset=offset)
    layer = prepare(SyncBatchNorm(in_channels=5, kvstore=kvstore, momentum=0), batch, contexts[:3], "float64")
    result = step(layer, batch, contexts, "float64")
    want = reference.forward(batch.shards, batch.gamma, batch.beta, np.zeros(5), np.ones(5), momentum=0)
    gradients = reference.backward(batch.shards, batch.heads, batch.gamma, want)
    assert_same(
        result,
        Result(
            *(want.outputs, gradients.dxs, sum(gradients.dgammas), sum(gradients.dbetas)),
            *(want.running_mean, want.running_var),
        ),
        1e-14 * offset,
    )


@pytest.mark.parametrize("values", [np.inf, np.nan, 1e308])
def test_kvstore_with_values_that_are_not_finite(contexts, rng, values):
    """One replica's bad value reaches every replica of its channel, and no other channel."""
    batch = make_batch(rng, 3)
    batch.shards[1][2, 3, 0, 1] = values
    layer = prepare(SyncBatchNorm(in_channels=5, kvstore="local"), batch, contexts[:3], "float64")
    for y in step(layer, batch, contexts, "float64").outputs:
        assert [bool(np.isfinite(y[:, c]).all()) for c in range(5)] == [True, True, True, False, True]


def test_one_kvstore_for_gradients_and_statistics(contexts, rng):
    store = mx.kv.create("device")
    plain = make_convolutional(nn.BatchNorm)
    plain.initialize(mx.init.Xavier(), ctx=contexts[0])
    net = convert(make_convolutional(nn.BatchNorm), kvstore=store)
    net.initialize(ctx=contexts[:2])
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        p.set_data(q.data())
    settings = {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1}}
    trainers = [
        gluon.Trainer(net.collect_params(), kvstore=store, update_on_kvstore=False, **settings),
        gluon.Trainer(plain.collect_params(), **settings),
    ]
    for _ in range(3):
        shards = [rng.randn(n, 3, 8, 8).astype("float32") for n in (1, 3)]
        heads = [rng.randn(n, 8, 4, 4).astype("float32") for n in (1, 3)]
        train(net, shards, heads, contexts, "float32")
        train(plain, [np.concatenate(shards)], [np.concatenate(heads)], contexts, "float32")
        for trainer in trainers:
            trainer.step(4)
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        np.testing.assert_allclose(p.data(contexts[1]).asnumpy(), q.data().asnumpy(), rtol=0, atol=1e-3)


def test_several_calls_of_a_static_graph(contexts, rng):
    """Each call of a replica meets the same call of the other, although the engine may run them in another order."""
    places, nets = contexts[:2], []
    for norm in (SyncBatchNorm, nn.BatchNorm):
        nets.append(nn.HybridSequential())
        for _ in range(2):
            nets[-1].add(nn.Dense(6, in_units=6), norm(in_channels=6))
        nets[-1].initialize(mx.init.Xavier(), ctx=places)
    net, plain = nets
    for own, parameter in zip(net.collect_params().values(), plain.collect_params().values()):
        parameter.set_data(own.data(places[0]))
    net.hybridize(static_alloc=True, static_shape=True)

    def on(place, arrays):
        return [nd.array(array, ctx=place) for array in arrays]

    for _ in range(40):
        batches, heads = [[rng.randn(2, 64, 6) * (k + 1) + 3 * k for k in range(3)] for _ in range(2)]
        given = [
            (on(place, [x[k] for x in batches]), on(place, [x[k] for x in heads])) for k, place in enumerate(places)
        ]
        wholes = on(places[0], [x.reshape(-1, 6) for x in batches])
        with autograd.record():
            ys = []
            for shards, _ in given:
                for x in shards:
                    x.attach_grad()
                ys += [net(x) for x in shards]
            for x in wholes:
                x.attach_grad()
            wants = [plain(x) for x in wholes]
        autograd.backward(ys, [head for _, of_place in given for head in of_place])
        autograd.backward(wants, on(places[0], [x.reshape(-1, 6) for x in heads]))
        for k, (x, want) in enumerate(zip(wholes, wants)):
            for got, expected in ((ys[k::3], want), ([shards[k].grad for shards, _ in given], x.grad)):
                np.testing.assert_allclose(
                    np.concatenate([one.asnumpy() for one in got]), expected.asnumpy(), rtol=0, atol=2e-3
                )


@pytest.mark.parametrize("way", ["eager", "hybrid"])  # MXNet itself refuses static_alloc
@pytest.mark.parametrize("through", ["method", "function", "grad"])
def test_a_second_derivative(contexts, rng, way, through):
    """A gradient penalty: the error names the layer. One derivative is right, and so is the next step."""
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5, prefix="critic_"), batch, contexts[:2], "float64", WAYS[way])
    xs, heads = on_devices(batch.shards, contexts, "float64"), on_devices(batch.heads, contexts, "float64")
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = [layer(x) for x in xs]
        dxs = autograd.grad(ys, xs, heads, create_graph=True, retain_graph=True)
        penalties = [(dx**2).sum() for dx in dxs]
    want = truth(batch)
    for got, dx in zip(dxs, want.dxs):
        np.testing.assert_allclose(got.asnumpy(), dx, atol=1e-11 * np.abs(dx).max())
    with pytest.raises(mx.MXNetError, match=r"SyncBatchNorm has no second derivative .*: critic\)"):
        if through == "grad":
            autograd.grad(penalties, xs)
        elif through == "function":
            autograd.backward(penalties)
        else:
            penalties[0].backward()
    assert_same(step(layer, batch, contexts, "float64"), truth(batch, steps=2), 1e-10)

"""Nets and a training under ``npx.set_np()``. The layer by itself is in test_cases.py."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from replicas import TOLERANCE, WAYS, assert_near, step_of_net

import gluon_syncbn

F32 = TOLERANCE["float32"]


# Gluon's split_and_load, and its import of a graph with arrays of mx.np.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed"),
    pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments"),
]


@pytest.fixture(autouse=True)
def set_np():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


def put(arrays, contexts, dtype="float32"):
    return [mx.np.array(a, ctx=c, dtype=dtype) for a, c in zip(arrays, contexts)]


def near(got, want, tolerance=F32):
    assert type(got) is mx.np.ndarray
    want = want.asnumpy() if isinstance(want, mx.nd.NDArray) else want
    assert np.abs(got.asnumpy() - want).max() <= tolerance * np.abs(want).max()


# ---- nets ------------------------------------------------------------------------------------------------------


class Residual(nn.HybridBlock):
    """What is added has the shape of what is normalised, or not."""

    def __init__(self, broadcast=False):
        super().__init__(prefix="residual_")
        self.broadcast = broadcast
        with self.name_scope():
            self.first, self.norm = nn.Conv2D(6, 3, padding=1, use_bias=False), nn.BatchNorm()
            self.second, self.last = nn.Conv2D(6, 3, padding=1, use_bias=False), nn.BatchNorm()

    def hybrid_forward(self, F, x):
        y = F.np.clip(self.norm(self.first(x)), 0, 6)
        z = self.last(self.second(y))
        return F.npx.relu(z + (F.np.mean(y, axis=(2, 3), keepdims=True) if self.broadcast else y))


def ready(net, contexts, x):
    net.initialize(ctx=contexts)
    with autograd.pause():
        net(x)
    return given(net)


def given(net):
    values = np.random.RandomState(1)
    for parameter in net.collect_params().values():
        parameter.set_data(0.3 * values.randn(*parameter.shape) + 2 * parameter.name.endswith(("gamma", "var")))
    return net


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_of_a_net(contexts, rng, capsys, tmp_path, broadcast, way):
    """It is converted, fused, computed again, given other statistics, exported, imported, and reverted."""
    shapes = [(2, 3, 6, 6), (3, 3, 6, 6)]
    images = [rng.randn(*s) * (i + 1) + i for i, s in enumerate(shapes)], [rng.randn(s[0], 6, 6, 6) for s in shapes]
    xs, heads = (put(arrays, contexts) for arrays in images)
    whole = [put([np.concatenate(arrays)], contexts) for arrays in images]
    want = step_of_net(ready(Residual(broadcast), contexts[:1], whole[0][0]), *whole)

    net = ready(Residual(broadcast), contexts[:2], xs[0])
    before = net(xs[0]).asnumpy()
    assert gluon_syncbn.convert(net, fuse=way != "eager") is net
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    for recomputed in (False, *([True] if way in ("eager", "hybrid") else [])):
        assert_near(step_of_net(gluon_syncbn.recompute(given(net), recomputed), xs, heads), want, 10 * F32)
    gluon_syncbn.recompute(net, False)
    gluon_syncbn.summary(net)
    rows = capsys.readouterr().out
    assert rows.count("synchronised: 2") == 1
    if way != "eager":
        assert "ReLU6" in rows and ("addition, ReLU" in rows) is not broadcast

    gluon_syncbn.update_bn_stats(net, [xs, xs[::-1]])
    values = np.concatenate([net.first(x).asnumpy() for x in xs])
    near(net.norm.running_mean.data(contexts[1]), values.mean((0, 2, 3)))
    near(net.norm.running_var.data(contexts[0]), values.var((0, 2, 3)))
    own, other = (net.norm.running_mean.data(c) for c in contexts[:2])
    other[:] = own + 2
    gluon_syncbn.average_running_stats(net)
    near(other, values.mean((0, 2, 3)) + 1)
    own[:] = 3
    gluon_syncbn.broadcast_parameters(net)
    near(other, np.full(6, 3.0), 0)

    given(net).hybridize()
    near(net(xs[0]), before)
    net.export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    imported = gluon_syncbn.convert(gluon.SymbolBlock.imports(*files, ctx=contexts[:2]))
    near(imported(xs[0]), before)
    dx = step_of_net(imported, xs, heads)["dx"]
    assert np.abs(dx - want["dx"]).max() <= 10 * F32 * np.abs(want["dx"]).max()
    near(gluon_syncbn.revert(imported)(xs[0]), imported(xs[0]))
    gluon_syncbn.revert(net)
    assert type(net.norm) is nn.BatchNorm
    near(net(xs[0]), before)


DRAWS = {
    "dropout": lambda F, x: F.npx.dropout(x, p=0.5),
    "uniform": lambda F, x: x * F.np.random.uniform(0.5, 1.5, size=(4, 6)),
}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
def test_recompute_draws_the_same_numbers(rng, draw, hybrid):
    block = gluon_syncbn.recompute(nn.HybridLambda(DRAWS[draw]))
    block.hybridize(hybrid)
    x, head = (mx.np.array(rng.randn(4, 6), dtype="float32") for _ in range(2))
    for _ in range(3):  # generators of other threads stand elsewhere
        mx.np.random.uniform(size=(4, 6))
    x.attach_grad()
    with autograd.record():
        y = block(x)
    y.backward(head)
    factors = y.asnumpy() / x.asnumpy()
    assert np.unique(factors.round(3)).size > 1
    near(x.grad, factors * head.asnumpy())


# ---- a book's training -----------------------------------------------------------------------------------------


def test_the_training_of_a_book(contexts, rng):
    """*Dive into Deep Learning* on two devices: a loader, split_and_load, a backward for each loss, and a Trainer."""
    images, labels = rng.randn(22, 1, 16, 16), rng.randint(0, 10, 22).astype("int32")
    images += labels.reshape(-1, 1, 1, 1)
    values = {}

    def train(devices):
        net = nn.Sequential()
        for channels, strides in ((4, 1), (6, 2)):
            net.add(nn.Conv2D(channels, 3, strides, 1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
        net.initialize(mx.init.Normal(0.01), ctx=devices)  # which MXNet's generators of mx.np do in float32 alone
        with autograd.pause():
            net(mx.np.array(images[:2], ctx=devices[0], dtype="float32"))
        net.cast("float64")
        for number, parameter in enumerate(net.collect_params().values()):
            value = values.setdefault(number, parameter.data(devices[0]).asnumpy() * 20)
            parameter.set_data(np.ones_like(value) if parameter.name.endswith(("gamma", "var")) else value)
        if len(devices) > 1:
            gluon_syncbn.convert(net)
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels), batch_size=8)  # and a batch of 6
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        losses = []
        for _ in range(2):
            for x, y in loader:
                parts = [gluon.utils.split_and_load(a, devices, even_split=False) for a in (x, y)]
                with autograd.record():
                    parts = [loss(net(a), b) for a, b in zip(*parts)]
                for part in parts:
                    part.backward()
                trainer.step(len(y), ignore_stale_grad=True)
                losses.append(float(sum(part.as_in_ctx(devices[0]).sum() for part in parts)))
        predicted = [net(a) for a in gluon.utils.split_and_load(mx.np.array(images), devices)]
        return losses, np.concatenate([a.asnumpy() for a in predicted]), net

    losses, predicted, net = train(contexts[:2])
    one_losses, one_predicted, one = train(contexts[:1])
    np.testing.assert_allclose(losses, one_losses, rtol=1e-8)
    np.testing.assert_allclose(predicted, one_predicted, rtol=0, atol=1e-8 * np.abs(one_predicted).max())
    assert abs(one_losses[0] - one_losses[-3]) > 1e-2
    for many, single in zip(net.collect_params().values(), one.collect_params().values()):
        for context in contexts[:2]:
            assert np.abs(many.data(context).asnumpy() - single.data().asnumpy()).max() < 1e-9

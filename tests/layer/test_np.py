"""A net under ``npx.set_np()``. The layer by itself is in test_cases.py."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from nets import filled
from replicas import TOLERANCE, WAYS, assert_near, step_of_net

import gluon_syncbn

F32 = TOLERANCE["float32"]


# Gluon's import of a graph with arrays of mx.np.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")


@pytest.fixture(autouse=True)
def set_np():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


def put(arrays, contexts):
    return [mx.np.array(a, ctx=c, dtype="float32") for a, c in zip(arrays, contexts)]


def near(got, want, tolerance=F32):
    assert type(got) is mx.np.ndarray
    want = want.asnumpy() if isinstance(want, mx.nd.NDArray) else want
    assert np.abs(got.asnumpy() - want).max() <= tolerance * np.abs(want).max()


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


def given(net, contexts):
    return filled(net, contexts, "float32", (3, 6, 6))


def updated(net):
    """By a Trainer of its own: parameters as the last context has them."""
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}).step(5)
    return {name: parameter.list_data()[-1].asnumpy() for name, parameter in net.collect_params().items()}


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_of_a_net(contexts, rng, capsys, tmp_path, broadcast, way):
    """It is converted, fused, computed again, given other statistics, exported, imported, and reverted."""
    shapes = [(2, 3, 6, 6), (3, 3, 6, 6)]
    images = [rng.randn(*s) * (i + 1) + i for i, s in enumerate(shapes)], [rng.randn(s[0], 6, 6, 6) for s in shapes]
    xs, heads = (put(arrays, contexts) for arrays in images)
    whole = [put([np.concatenate(arrays)], contexts) for arrays in images]
    plain = given(Residual(broadcast), contexts[:1])
    want, trained = step_of_net(plain, *whole), updated(plain)

    net = given(Residual(broadcast), contexts[:2])
    before = net(xs[0]).asnumpy()
    assert gluon_syncbn.convert(net, fuse=way != "eager") is net
    net.hybridize(**WAYS[way])
    for recomputed in (False, *([True] if way in ("eager", "hybrid") else [])):
        gluon_syncbn.recompute(given(net, contexts[:2]), recomputed)
        assert_near(step_of_net(net, xs, heads), want, 10 * F32)
        assert_near(updated(net), trained, 10 * F32)
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

    given(net, contexts[:2]).hybridize()
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

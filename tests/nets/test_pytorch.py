"""A net takes over the state of a PyTorch module and gives it back. The module is a stand-in; test_torch.py has one."""

import sys
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn
from pytorch_module import Module

from gluon_syncbn import SyncBatchNorm, convert, from_torch, revert, to_torch

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
SHAPES = {
    "body.0.weight": (4, 3, 1, 1),
    **{f"body.1.{name}": (4,) for name in ("weight", "bias", "running_mean", "running_var")},
    "body.1.num_batches_tracked": (),
    "head.weight": (2, 4),
    "head.bias": (2,),
}


def drawn(rng):
    return {name: np.float32(rng.rand(*shape) + 0.5) for name, shape in SHAPES.items()}


def net(norm=SyncBatchNorm, initialised=True, **settings):
    made, body = nn.HybridSequential(), nn.HybridSequential()
    body.add(nn.Conv2D(4, 1, use_bias=False), norm(**settings))
    made.add(body, nn.GlobalAvgPool2D(), nn.Dense(2))
    if initialised:
        made.initialize(ctx=CONTEXTS)
    made.hybridize()
    return made


def predicted(state, x, eps):
    y = np.einsum("nchw,oc->nohw", x, state["body.0.weight"][:, :, 0, 0])
    weight, bias, mean, var = (
        state[f"body.1.{n}"].reshape(4, 1, 1) for n in ("weight", "bias", "running_mean", "running_var")
    )
    y = ((y - mean) / np.sqrt(var + eps) * weight + bias).mean(axis=(2, 3))
    return y @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize("norm", [SyncBatchNorm, nn.BatchNorm])
def test_there_and_back(norm, rng, monkeypatch):
    x = rng.randn(2, 3, 5, 5).astype("float32")
    one, state = net(norm), drawn(rng)
    assert from_torch(one, state) is one
    got = [one(nd.array(x, ctx=context)).asnumpy() for context in CONTEXTS]
    np.testing.assert_allclose(got[0], predicted(state, x, 1e-5), rtol=1e-4)
    np.testing.assert_array_equal(*got)

    module = Module(drawn(rng))
    from_torch(one, module)  # the graph of the first eps is gone
    np.testing.assert_allclose(one(nd.array(x)).asnumpy(), predicted(module.state, x, 0.25), rtol=1e-4)
    layer = one[0][1]
    assert layer._kwargs["momentum"] == pytest.approx(0.7)
    assert norm is nn.BatchNorm or layer.running_variance == "unbiased"

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda array: array))
    other = Module(drawn(rng), momentum=0.1)
    counter = other.state["body.1.num_batches_tracked"]
    assert to_torch(one, other) is other
    assert other.norm.eps == 0.25 and other.norm.momentum == pytest.approx(0.3)
    for name, value in other.state.items():
        np.testing.assert_array_equal(value, counter if name.endswith("tracked") else module.state[name])


def test_a_layer_keeps_what_it_got_after_convert(rng):
    one = convert(net(nn.BatchNorm))
    from_torch(one, Module(drawn(rng)))
    assert revert(one)[0][1]._kwargs["eps"] == 0.25


def test_without_affine(rng, monkeypatch):
    """PyTorch has no weight and no bias there. Gluon's gamma does not count, whatever it holds."""
    state = {name: value for name, value in drawn(rng).items() if name not in ("body.1.weight", "body.1.bias")}
    one = net(scale=False, center=False)
    one(nd.ones((1, 3, 5, 5)))
    for name in ("gamma", "beta"):
        getattr(one[0][1], name).set_data(nd.full(4, 7))
    from_torch(one, state)
    assert one[0][1].gamma.data(CONTEXTS[1]).asnumpy().tolist() == [1] * 4
    assert one[0][1].beta.data(CONTEXTS[1]).asnumpy().tolist() == [0] * 4
    one[0][1].gamma.set_data(nd.full(4, 7))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda array: array))
    assert to_torch(one, Module(drawn(rng))).state["body.1.weight"].tolist() == [1] * 4

    deferred, x = net(scale=False, center=False), nd.array(rng.randn(2, 3, 5, 5))
    from_torch(deferred, state)  # before the shapes of gamma and beta are known
    np.testing.assert_allclose(deferred(x).asnumpy(), from_torch(one, state)(x).asnumpy(), rtol=1e-5)


def renamed(state, old, new):
    return {name.replace(old, new): value for name, value in state.items()}


def linear_in_the_place_of_the_norm(state):
    module = Module({n: v for n, v in {**state, "body.1.weight": np.ones((4, 4))}.items() if "running" not in n})
    module.norm = SimpleNamespace()  # which has no momentum
    return module


@pytest.mark.parametrize(
    "message, change, settings",
    [
        ("4 layers with parameters were given, expected the 3", lambda s: renamed(s, "head.bias", "more.bias"), {}),
        (r"head.weight \(2, 4\), head.gamma \(2,\) were given", lambda s: renamed(s, "head.bias", "head.gamma"), {}),
        (r"head.weight \(3, 4\), head.bias \(2,\) were given", lambda s: {**s, "head.weight": np.ones((3, 4))}, {}),
        (r"expected gamma \(4,\), beta", lambda s: {n: v for n, v in s.items() if n != "body.1.bias"}, {}),
        ("with scale=False was given, expected scale=True for body.1.weight", dict, {"scale": False}),
        ("a cumulative mean, or none, has no counterpart", lambda s: Module(s, momentum=None), {}),
        ("a cumulative mean, or none, has no counterpart", lambda s: Module(s, running_mean=None), {}),
        (r"weight \(4, 4\), body.1.bias \(4,\) were given, expected gamma", linear_in_the_place_of_the_norm, {}),
        ("without parameters was given, expected a net after initialize", dict, {"initialised": False}),
    ],
)
def test_what_does_not_fit_changes_nothing(message, change, settings, rng):
    one, state = net(**settings), drawn(rng)
    if one[0][0].weight._deferred_init:
        one(nd.ones((1, 3, 5, 5)))
        before = {name: p.data().asnumpy() for name, p in one.collect_params().items()}
    with pytest.raises(ValueError, match=message):
        from_torch(one, change(state))
    if one[0][0].weight._data is not None:
        for name, parameter in one.collect_params().items():
            np.testing.assert_array_equal(parameter.data().asnumpy(), before[name])


def test_channels_in_another_place(rng):
    """A kernel of 3 x 3 pixels for 3 channels has the same shape in both layouts."""
    layer = nn.Conv2D(2, 3, layout="NHWC", in_channels=3, use_bias=False)
    layer.initialize()
    with pytest.raises(ValueError, match="with channels on axis 1"):
        from_torch(layer, {"weight": rng.rand(2, 3, 3, 3)})

"""A net takes over the state of a PyTorch module and gives it back. GluonCV does not import beside PyTorch 2.0."""

import copy
import sys
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from pytorch_module import Module
from replicas import forward_and_backward, on_devices, ready

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert, from_torch, revert, to_torch

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
SHAPES = {
    "body.0.weight": (4, 3, 1, 1),
    **{f"body.1.{name}": (4,) for name in ("weight", "bias", "running_mean", "running_var")},
    "head.weight": (2, 4),
    "head.bias": (2,),
    "body.1.num_batches_tracked": (),
}


@pytest.fixture
def numpys_tensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda array: array))


def drawn(rng):
    return {name: np.float32(rng.rand(*shape) + 0.5) for name, shape in SHAPES.items()}


def net_of(norm=SyncBatchNorm, initialised=True, **settings):
    net, body = nn.HybridSequential(), nn.HybridSequential()
    body.add(nn.Conv2D(4, 1, use_bias=False), norm(**settings))
    net.add(body, nn.GlobalAvgPool2D(), nn.Dense(2))
    if initialised:
        net.initialize(ctx=CONTEXTS)
    net.hybridize()
    return net


@pytest.mark.parametrize("norm", [SyncBatchNorm, nn.BatchNorm])
@pytest.mark.parametrize("change", [convert, revert])
def test_there_and_back(norm, change, rng, numpys_tensors):
    net, x, module, state = change(net_of(norm)), nd.array(rng.randn(2, 3, 5, 5)), Module(drawn(rng)), drawn(rng)
    assert from_torch(net, state) is net
    net(x)
    from_torch(net, module)
    y, layer = net(x).asnumpy(), net[0][1]
    assert not isinstance(layer, SyncBatchNorm) or layer.running_variance == "unbiased"
    revert(net).hybridize(False)  # the graph of the first eps is gone, and a layer keeps the new one
    np.testing.assert_allclose(y, net(x).asnumpy(), rtol=1e-5)
    for context in CONTEXTS:
        for parameter, value in zip(net._collect_params_with_prefix().values(), module.state.values()):
            np.testing.assert_array_equal(parameter.data(context).asnumpy(), value)

    other = Module(state, momentum=0.1)
    assert to_torch(net, other) is other
    assert other.norm.eps == 0.25 and other.norm.momentum == pytest.approx(0.3)
    want = {**module.state, "body.1.num_batches_tracked": state["body.1.num_batches_tracked"]}
    for name, value in other.state.items():
        np.testing.assert_array_equal(value, want[name])


def test_without_affine(rng, numpys_tensors):
    """PyTorch has no weight and no bias there. Gluon's gamma does not count, whatever it holds."""
    state = {name: value for name, value in drawn(rng).items() if name not in ("body.1.weight", "body.1.bias")}
    for is_known in (True, False):  # the shapes of gamma and beta
        net = net_of(scale=False, center=False)
        gamma, beta = net[0][1].gamma, net[0][1].beta
        if is_known:
            net(nd.ones((1, 3, 5, 5)))
            gamma.set_data(nd.full(4, 7))
            beta.set_data(nd.full(4, 7))
        from_torch(net, state)(nd.ones((1, 3, 5, 5)))
        assert (gamma.data(CONTEXTS[1]).asnumpy() == 1).all() and (beta.data(CONTEXTS[1]).asnumpy() == 0).all()
    gamma.set_data(nd.full(4, 7))
    assert (to_torch(net, Module(drawn(rng))).state["body.1.weight"] == 1).all()


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
    net, state = net_of(**settings), drawn(rng)
    if settings.get("initialised", True):
        net(nd.ones((1, 3, 5, 5)))
    before = [p.data().asnumpy().tolist() for p in net.collect_params().values() if p._data is not None]
    with pytest.raises(ValueError, match=message):
        from_torch(net, change(state))
    assert [p.data().asnumpy().tolist() for p in net.collect_params().values() if p._data is not None] == before


def test_channels_in_another_place(rng):
    """A kernel of 3 x 3 pixels for 3 channels has the same shape in both layouts."""
    layer = ready(nn.Conv2D(2, 3, layout="NHWC", in_channels=3, use_bias=False))
    with pytest.raises(ValueError, match="with channels on axis 1"):
        from_torch(layer, {"weight": rng.rand(2, 3, 3, 3)})


def hand_over(net):
    return to_torch(net, Module({name: np.ones(3) for name in ("weight", "bias", "running_mean", "running_var")}))


@pytest.mark.parametrize("call", [gluon_syncbn.broadcast_parameters, gluon_syncbn.average_running_stats, hand_over])
def test_without_values(call, numpys_tensors):
    net = ready(nn.BatchNorm(prefix="net_"), contexts=CONTEXTS)
    with pytest.raises(ValueError, match=r"^(params|net): 'net_\w+' without a value was given, expected initialised"):
        call(net)
    net(nd.ones((1, 3)))
    call(net)


def test_each_goes_on_as_the_other_one_would(rng):
    """PyTorch on the whole batch, and ours on three uneven shards, with gradients of a sum over all samples."""
    torch = pytest.importorskip("torch", reason="needs `make test-torch`, without GluonCV")
    body = [torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8, eps=1e-3, momentum=0.3)]
    rest = [torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 1, bias=False), torch.nn.BatchNorm2d(16, affine=False)]
    rest += [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 5)]
    module, contexts = torch.nn.Sequential(torch.nn.Sequential(*body), *rest), [mx.cpu(i) for i in range(3)]

    def state_of(module):
        return {n: v.numpy().copy() for n, v in module.state_dict().items() if not n.endswith("num_batches_tracked")}

    def taken_over(module):
        net, body = nn.HybridSequential(), nn.HybridSequential()
        body.add(nn.Conv2D(8, 3, 2, 1, use_bias=False), SyncBatchNorm())
        net.add(body, nn.Activation("relu"), nn.Conv2D(16, 1, use_bias=False))
        net.add(SyncBatchNorm(scale=False, center=False), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(5))
        net.initialize(ctx=contexts)
        return from_torch(net, module)

    net = taken_over(module)
    for _ in range(3):
        before = state_of(module)
        shards = [((1 + i) * rng.randn(n, 3, 12, 12) + i).astype("float32") for i, n in enumerate((5, 2, 4))]
        heads = [rng.randn(len(shard), 5).astype("float32") for shard in shards]
        module(torch.from_numpy(np.concatenate(shards))).backward(torch.from_numpy(np.concatenate(heads)))
        optimizer = torch.optim.SGD(module.parameters(), 0.01, weight_decay=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "wd": 1e-3})
        forward_and_backward(net, *(on_devices(arrays, contexts, "float32") for arrays in (shards, heads)))
        trainer.step(1)

        twin = copy.deepcopy(module)
        for layer in twin.modules():
            vars(layer).update(eps=1, momentum=1)  # until it gets those of the net
        got, want = state_of(to_torch(net, twin)), state_of(module)
        for name, value in want.items():
            error, moved = (np.abs(value - other).max() / np.abs(value).max() for other in (got[name], before[name]))
            assert error < 1e-5 < 1e-4 < moved, (name, error, moved)
        net, module = taken_over(module), twin

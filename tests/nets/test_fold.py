"""`fold`: the copy for prediction computes what the net computes, without the BatchNorm that went into the weights."""

import re
import sys
import warnings

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from places import SUPPORT

from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, convert, fold
from gluon_syncbn.mxnet_side.nodes import json_of

IMAGE, CUBE, ROWS = (2, 4, 7, 6), (2, 4, 5, 6, 4), (5, 4)


def sequence(*layers):
    net = nn.HybridSequential(prefix="net_")
    net.add(*layers)
    return net


def randomised(net, contexts, xs, dtype="float64"):
    """After a forward that tells the shapes: parameters unlike their initial values, the same for the same names."""
    net.initialize(ctx=contexts)
    net.cast(dtype)
    with autograd.pause():
        net(*xs)
    rng = np.random.RandomState(1)
    for name, parameter in sorted(net.collect_params().items()):
        positive = name.endswith(("gamma", "var"))
        value = rng.rand(*parameter.shape) + 0.5 if positive else rng.randn(*parameter.shape)
        if name.endswith("gamma"):
            value *= rng.choice([-1, 1], parameter.shape)
        fixed = any(name.startswith(f"{end}_") and name.endswith("gamma") for end in FIXED)
        parameter.set_data(nd.array(np.ones(parameter.shape) if fixed else value, dtype=parameter.dtype))
    return net


FIXED = ["fixed"]  # prefixes of layers whose gamma counts as 1


def drawn(rng, *shapes, dtype="float64"):
    return [nd.array(rng.randn(*shape) * 2 + 1, dtype=dtype) for shape in shapes]


def heard(function, *args):
    """What it returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        return function(*args), caught


def operators(block):
    return [node["op"] for node in json_of(block._cached_graph[1])["nodes"] if node["op"] != "null"]


def assert_same(got, want, tolerance=1e-11):
    got, want = (ys if isinstance(ys, (list, tuple)) else [ys] for ys in (got, want))
    assert len(got) == len(want) > 0
    for y, other in zip(got, want):
        assert y.dtype == other.dtype and other.asnumpy().std() > 1e-3
        np.testing.assert_allclose(y.asnumpy(), other.asnumpy(), rtol=0, atol=tolerance * np.abs(other.asnumpy()).max())


class Residual(nn.HybridBlock):
    """Its layer takes two inputs."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.conv, self.bn = nn.Conv2D(4, 3, padding=1), SyncBatchNormAdd(activation="relu")

    def hybrid_forward(self, F, x):
        return self.bn(self.conv(x), x)


KINDS = {
    "convolution": (lambda: sequence(nn.Conv2D(6, 3, padding=1), nn.BatchNorm()), IMAGE),
    "of one dimension": (lambda: sequence(nn.Conv1D(6, 3), nn.BatchNorm()), (2, 4, 9)),
    "of three dimensions": (lambda: sequence(nn.Conv3D(6, 2), nn.BatchNorm()), CUBE),
    "no bias": (lambda: sequence(nn.Conv2D(6, 3, use_bias=False), nn.BatchNorm()), IMAGE),
    "groups": (lambda: sequence(nn.Conv2D(6, 3, groups=2), nn.BatchNorm()), IMAGE),
    "depthwise": (lambda: sequence(nn.Conv2D(8, 3, groups=4, use_bias=False), nn.BatchNorm()), IMAGE),
    "dilated": (lambda: sequence(nn.Conv2D(6, 2, strides=2, dilation=2), nn.BatchNorm(epsilon=0.5)), IMAGE),
    "transposed": (lambda: sequence(nn.Conv2DTranspose(6, 3, strides=2, in_channels=4), nn.BatchNorm()), IMAGE),
    "transposed, groups, no bias": (
        lambda: sequence(nn.Conv2DTranspose(6, 3, groups=2, in_channels=4, use_bias=False), nn.BatchNorm()),
        IMAGE,
    ),
    "transposed, one dimension": (lambda: sequence(nn.Conv1DTranspose(6, 3, in_channels=4), nn.BatchNorm()), (2, 4, 9)),
    "dense": (lambda: sequence(nn.Dense(6), nn.BatchNorm()), IMAGE),
    "dense, last axis": (lambda: sequence(nn.Dense(6, use_bias=False), nn.BatchNorm(axis=-1)), ROWS),
    "dense, not flat": (lambda: sequence(nn.Dense(6, flatten=False), nn.BatchNorm(axis=-1)), (2, 3, 4)),
    "no scale": (lambda: sequence(nn.Conv2D(6, 3), nn.BatchNorm(scale=False, prefix="fixed_")), IMAGE),
    "no center": (lambda: sequence(nn.Conv2D(6, 3), nn.BatchNorm(center=False)), IMAGE),
    "global statistics": (lambda: sequence(nn.Conv2D(6, 3), nn.BatchNorm(use_global_stats=True)), IMAGE),
    "two behind each other": (lambda: sequence(nn.Conv2D(6, 3), nn.BatchNorm(), nn.BatchNorm(epsilon=0.1)), IMAGE),
    "with ReLU": (lambda: sequence(nn.Conv2D(6, 3), nn.BatchNormReLU()), IMAGE),
    "contrib's": (lambda: sequence(nn.Conv2D(6, 3), gluon.contrib.nn.SyncBatchNorm(num_devices=1)), IMAGE),
    "synchronised": (lambda: sequence(nn.Conv2D(6, 3), SyncBatchNorm()), IMAGE),
    "leaky, in place": (lambda: sequence(nn.Conv2D(6, 3), SyncBatchNorm(activation="leaky", inplace=True)), IMAGE),
    "with an addition": (Residual, IMAGE),
    "fused": (
        lambda: convert(sequence(nn.Conv2D(6, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(5, 2)), fuse=True),
        IMAGE,
    ),
}
FLOAT32 = ("with ReLU", "contrib's", "leaky, in place")  # all that MXNet's operators compute in


@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_net(kind, hybrid, contexts, rng):
    make, shape = KINDS[kind]
    dtype, tolerance = ("float32", 1e-6) if kind in FLOAT32 else ("float64", 1e-11)
    (x,) = drawn(rng, shape, dtype=dtype)
    net = randomised(make(), contexts[:1], [x], dtype)
    net.hybridize(hybrid)
    want = net(x)
    copy = fold(net)
    assert not {"BatchNorm", "_contrib_BatchNormWithReLU", "Custom"} & set(operators(copy))
    assert not any(name.endswith(("gamma", "running_var")) for name in copy.collect_params())
    assert_same(copy(x), want, tolerance)
    with autograd.record():
        assert_same(copy(x), want, tolerance)  # in training, too


def channels_last(operator, **settings):
    """MXNet's CPU build has no convolution of this layout, so that its weights are compared and not its outputs."""
    data = mx.sym.var("data", dtype="float64")
    y = operator(data, kernel=(3, 2), layout="NHWC", name="conv", **settings)
    y = mx.sym.BatchNorm(y, axis=3, fix_gamma=False, name="bn")
    return gluon.SymbolBlock(y, data)


@pytest.mark.parametrize("operator, shape", [("Convolution", (6, 3, 2, 2)), ("Deconvolution", (4, 3, 2, 3))])
def test_channels_last(operator, shape, rng):
    block = channels_last(getattr(mx.sym, operator), num_filter=6, num_group=2, no_bias=True)
    values = {name: rng.rand(6) + 0.5 for name in ("bn_gamma", "bn_beta", "bn_moving_mean", "bn_moving_var")}
    values["conv_weight"] = rng.randn(*shape)
    block.collect_params().load_dict({k: nd.array(v, dtype="float64") for k, v in values.items()}, mx.cpu())
    copy = fold(block)
    assert operators(copy) == [operator]
    got = {name: parameter.data().asnumpy() for name, parameter in copy.collect_params().items()}
    scale = values["bn_gamma"] / np.sqrt(values["bn_moving_var"] + 1e-3)
    np.testing.assert_allclose(got["conv_bias"], values["bn_beta"] - scale * values["bn_moving_mean"], rtol=1e-12)
    for channel in range(6):
        at = (
            (channel,)
            if operator == "Convolution"
            else (slice(channel // 3 * 2, channel // 3 * 2 + 2), ..., channel % 3)
        )
        expected = values["conv_weight"][at] * scale[channel]
        np.testing.assert_allclose(got["conv_weight"][at], expected, rtol=1e-12)


@pytest.mark.parametrize("operator, extra", [("DeformableConvolution", 1), ("ModulatedDeformableConvolution", 2)])
def test_deformable(operator, extra, rng):
    data = [mx.sym.var(name, dtype="float32") for name in ("data", "offset", "mask")[: 1 + extra]]
    y = getattr(mx.sym.contrib, operator)(*data, kernel=(2, 2), num_filter=6, no_bias=True, name="conv")
    block = gluon.SymbolBlock(mx.sym.BatchNorm(y, fix_gamma=False, name="bn"), data)
    xs = drawn(rng, *[(2, 4, 5, 5), (2, 8, 4, 4), (2, 4, 4, 4)][: 1 + extra], dtype="float32")
    randomised(block, [mx.cpu()], xs, "float32")
    copy = fold(block)
    assert "BatchNorm" not in operators(copy)
    assert_same(copy(*xs), block(*xs), 1e-6)


class Net(nn.HybridBlock):
    """A convolution and a layer or two, put together by a function."""

    def __init__(self, forward, layers=1):
        super().__init__(prefix="net_")
        self._forward = forward
        with self.name_scope():
            self.conv, self.bn = nn.Conv2D(4, 3, padding=1), nn.BatchNorm()
            if layers > 1:
                self.other = nn.BatchNorm()

    def hybrid_forward(self, F, *xs):
        return self._forward(self, F, *xs)


def used_elsewhere(net, F, x):
    y = net.conv(x)
    return net.bn(y) + y


def an_output(net, F, x):
    y = net.conv(x)
    return net.bn(y), y


def between(net, F, x):
    y = net.bn(net.conv(x))
    return net.other(y) * y


def of_a_computed_gamma(net, F, x):
    y, (gamma, *others) = net.conv(x), parameters(net, F)
    return F.BatchNorm(y, gamma * 2, *others, fix_gamma=False, name="bn")


def parameters(net, F):
    net.bn(net.conv(F.zeros((1, 4, 4, 7), dtype="float64")))  # Gluon's shapes
    given = [getattr(net.bn, name) for name in ("gamma", "beta", "running_mean", "running_var")]
    return [one.var() if F is mx.sym else one.data() for one in given]


def a_used_mean(net, F, x):
    y, mean, _ = F.BatchNorm(
        net.conv(x), *parameters(net, F), output_mean_var=True, fix_gamma=False, use_global_stats=True, name="bn"
    )
    return F.broadcast_add(y, F.reshape(mean, (1, -1, 1, 1)))


def of_another_axis(net, F, x):
    net.bn._kwargs["axis"] = 2
    return net.bn(net.conv(x))


STAY = {
    "the input": (lambda net, F, x: net.conv(net.bn(x)), "net_batchnorm0_fwd", "it stands behind the variable data"),
    "ReLU": (lambda net, F, x: net.bn(F.relu(net.conv(x))), "net_batchnorm0_fwd", "it stands behind net_relu0 (relu)"),
    "an addition": (
        lambda net, F, x: net.bn(F.elemwise_add(net.conv(x), x, name="sum")),
        "net_batchnorm0_fwd",
        "it stands behind net_sum (elemwise_add)",
    ),
    "used elsewhere": (used_elsewhere, "net_batchnorm0_fwd", "the output of net_conv0_fwd is used elsewhere, too"),
    "an output": (an_output, "net_batchnorm0_fwd", "the output of net_conv0_fwd is used elsewhere, too"),
    "between": (between, "net_batchnorm1_fwd", "the output of net_batchnorm0_fwd is used elsewhere, too"),
    "a computed gamma": (
        of_a_computed_gamma,
        "net_bn",
        "its gamma, beta or running statistics are not parameters of the graph",
    ),
    "a used mean": (a_used_mean, "net_bn", "the graph uses its mean or variance"),
    "another axis": (
        of_another_axis,
        "net_batchnorm0_fwd",
        "its axis is not, or may not be, the channel axis of net_conv0_fwd",
    ),
}


@pytest.mark.parametrize("where", STAY)
def test_what_stays_is_named(where, contexts, rng):
    forward, name, reason = STAY[where]
    (x,) = drawn(rng, (2, 4, 4, 7))
    net = randomised(Net(forward, 1 + (forward is between)), contexts[:1], [x])
    net.hybridize()
    want = net(x)
    copy, caught = heard(fold, net)
    assert [str(one.message) for one in caught] == [f"fold left as it was: {name} (BatchNorm: {reason})"]
    assert caught[0].filename == __file__
    assert operators(copy).count("BatchNorm") == 1
    assert_same(copy(x), want)
    with autograd.record():
        assert_same(copy(x), want)  # with its running statistics


def test_weights_that_would_not_be_finite_stay(contexts, rng):
    xs = drawn(rng, IMAGE, dtype="float32")
    net = randomised(sequence(nn.Conv2D(6, 3), nn.BatchNorm(epsilon=0)), contexts[:1], xs, "float32")
    net[1].running_var.set_data(nd.array([1, 1, 0, 1, 1, 1]))
    copy, (warning,) = heard(fold, net)
    assert re.search(r"with it, the weight or bias of \w+ would not be finite", str(warning.message))
    assert "BatchNorm" in operators(copy)


def test_a_shared_convolution(contexts, rng):
    """As in a head over the levels of a pyramid: one convolution, a layer for each level, and one level twice."""

    def forward(net, F, x, other):
        return net.bn(net.conv(x)), net.other(net.conv(other)), net.bn(net.conv(x * 2)), net.conv(other)

    xs = drawn(rng, IMAGE, IMAGE)
    net = randomised(Net(forward, 2), contexts[:1], xs)
    net.hybridize()
    want = net(*xs)
    copy = fold(net)
    assert "BatchNorm" not in operators(copy)
    assert sorted(copy.collect_params()) == [
        "net_conv0_bias",
        "net_conv0_bias_folded1",
        "net_conv0_bias_folded2",
        "net_conv0_weight",
        "net_conv0_weight_folded1",
        "net_conv0_weight_folded2",
    ]
    assert_same(copy(*xs), want)


def test_names_of_weights_stay_where_they_can(contexts, rng):
    xs = drawn(rng, IMAGE)
    net = randomised(sequence(nn.Conv2D(6, 3, use_bias=False), nn.BatchNorm()), contexts[:1], xs)
    weight = net[0].weight.name
    assert sorted(fold(net).collect_params()) == [weight.replace("weight", "bias"), weight]


def test_lists_of_inputs_and_outputs(contexts, rng):
    def forward(net, F, x, others, none, z):
        assert none is None
        return [net.bn(net.conv(x)), [others[0] + z]], others[1]

    x, y, other, z = drawn(rng, IMAGE, IMAGE, IMAGE, IMAGE)
    given = [x, [y, other], None, z]
    net = randomised(Net(forward), contexts[:1], given)
    with pytest.raises(ValueError, match=r"net: Net 'net' cannot be traced .*call the net once, hybridized"):
        fold(net)
    net.hybridize()
    (normalised, (total,)), same = net(*given)
    (got, (got_total,)), got_same = fold(net)(*given)
    assert_same([got, got_total, got_same], [normalised, total, same])


def test_a_list_as_the_first_input(contexts, rng):
    xs = drawn(rng, IMAGE, IMAGE)
    net = randomised(Net(lambda net, F, xs: net.bn(net.conv(xs[0] + xs[1]))), contexts[:1], [xs])
    net.hybridize()
    net(xs)
    with pytest.raises(ValueError, match=r"^net: the first input of 'net' is not an array, but a SymbolBlock"):
        fold(net)


def test_a_net_that_asks_whether_it_trains(contexts, rng):
    """GluonCV's detectors do: what they have recorded in training is not what they predict."""

    def forward(net, F, x):
        y = net.bn(net.conv(x))
        return y if autograd.is_training() else F.relu(y)

    xs = drawn(rng, IMAGE)
    net = randomised(Net(forward), contexts[:1], xs)
    want = net(*xs)
    net.hybridize()
    with autograd.record():
        net(*xs)
    copy = fold(net)
    assert operators(copy) == ["Convolution", "relu"]
    assert_same(copy(*xs), want)


def test_a_recorded_graph(contexts, rng, tmp_path):
    xs = drawn(rng, IMAGE, dtype="float32")
    net = randomised(sequence(nn.Conv2D(6, 3), nn.BatchNorm(), nn.Conv2D(3, 2)), contexts[:1], xs, "float32")
    net.hybridize()
    want = net(*xs)
    net.export(str(tmp_path / "net"))
    data = mx.sym.var("data", dtype="float32")
    block = gluon.SymbolBlock(mx.sym.load(str(tmp_path / "net-symbol.json")), data)
    block.collect_params().load(str(tmp_path / "net-0000.params"), contexts[0])
    for one in (block, convert(block)):
        copy = fold(one)
        assert operators(copy) == ["Convolution", "Convolution"]
        assert_same(copy(*xs), want, 1e-6)


#: Without this package: predicts with a file what the arrays beside it say.
STRANGER = """
import sys
import gluon_syncbn_first
import mxnet as mx
import numpy as np
x, want = mx.nd.load("arrays")
net = mx.gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params")
np.testing.assert_allclose(net(x).asnumpy(), want.asnumpy(), rtol=1e-5, atol=1e-5)
assert "gluon_syncbn" not in sys.modules
"""


def test_its_files_need_nothing_of_this_package(contexts, rng, tmp_path):
    xs = drawn(rng, IMAGE, dtype="float32")
    net = sequence(nn.Conv2D(6, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(6, 3, padding=1), nn.BatchNorm())
    net = randomised(convert(net, fuse=True), contexts[:1], xs, "float32")
    copy = fold(net)
    nd.save(str(tmp_path / "arrays"), [xs[0], net(*xs)])
    copy(*xs)
    copy.export(str(tmp_path / "net"))
    command = [sys.executable, "-W", "ignore", "-c", STRANGER]
    ran = ended(command, SUPPORT, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_the_net_stays_as_it_is(contexts, rng):
    """Another process of the job may not fold: nodes are numbered alike in all of them."""
    xs = [drawn(rng, IMAGE)[0].as_in_context(context) for context in contexts[:2]]
    inner = mx.sym.var("data", dtype="float64")
    inner = gluon.SymbolBlock(sequence(nn.Conv2D(4, 1, in_channels=4), nn.BatchNorm(in_channels=4))(inner), inner)
    net = randomised(sequence(nn.Conv2D(4, 3), SyncBatchNorm(), convert(inner)), contexts[:2], xs[:1])
    net.hybridize()
    for x in xs:
        net(x)
    recorded = inner._cached_graph
    (layer,) = inner.__layers__.values()
    before = {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}
    graph, numbers = net._cached_graph, (net[1]._nodes, layer._nodes)
    copy = fold(net)
    assert (net[1]._nodes, layer._nodes) == numbers
    assert net._cached_graph is graph
    assert inner._cached_graph is recorded
    copy.collect_params().setattr("lr_mult", 7)
    for parameter in copy.collect_params().values():
        assert parameter.list_ctx() == contexts[:2] and parameter.grad_req == "null"
        parameter.set_data(nd.zeros(parameter.shape))
    for name, parameter in net.collect_params().items():
        assert (parameter.data().asnumpy() == before[name]).all() and parameter.lr_mult == 1
    with autograd.record():
        ys = [net(x) for x in xs]
    autograd.backward(ys)
    nd.waitall()


def test_statistics_that_differ_between_contexts_are_averaged(contexts, rng):
    xs = drawn(rng, IMAGE)
    net = randomised(sequence(nn.Conv2D(6, 3), SyncBatchNorm(mode="local")), contexts[:2], xs)
    running = net[1].running_mean
    for shift, context in enumerate(contexts[:2]):
        running.data(context)[:] = running.data(context) + 2 * shift
    (got,) = (p.data() for name, p in fold(net).collect_params().items() if name.endswith("bias"))
    scale = net[1].gamma.data() / (net[1].running_var.data() + 1e-5).sqrt()
    want = scale * (net[0].bias.data() - running.data(contexts[0]) - 1) + net[1].beta.data()
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-12)


def test_a_net_in_half_precision(contexts, rng):
    xs = drawn(rng, IMAGE, dtype="float16")
    net = sequence(nn.Conv2D(6, 3), nn.BatchNorm())
    randomised(net, contexts[:1], drawn(rng, IMAGE, dtype="float32"), "float32")
    want = net(xs[0].astype("float32"))
    net.cast("float16")
    copy = fold(net)
    assert {parameter.dtype for parameter in copy.collect_params().values()} == {np.float16}
    got = {name: p.data().asnumpy() for name, p in copy.collect_params().items()}
    net.cast("float32")
    for name, parameter in fold(net).collect_params().items():
        np.testing.assert_allclose(got[name], parameter.data().asnumpy(), rtol=5e-3, atol=5e-3)
    assert want.shape == (2, 6, 5, 4)


class Untraceable(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return x.reshape((x.shape[0], -1))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^net: 3 was given, expected a gluon.HybridBlock; in another block, fold"):
        fold(3)
    with pytest.raises(ValueError, match=r"^net: Sequential\("):
        fold(nn.Sequential())
    with pytest.raises(ValueError, match=r"^net: Untraceable 'untraceable0' cannot be traced .AttributeError: "):
        fold(Untraceable(prefix="untraceable0_"))
    net = sequence(nn.Conv2D(4, 3), nn.BatchNorm())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^net: 'net' has no values for .*weight, .* called once if its"):
            fold(net)
        net.initialize()

"""Converted networks: what must be the same object, what must be the same number, what must be left alone."""

import copy
import functools
import gc
import pickle
import re
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from gluoncv.nn.block import BatchNormCudnnOff
from internals import replicas_of
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from replicas import WAYS, assert_near, on_devices, step_of_net

import gluon_syncbn
from gluon_syncbn import ShuffleBatchNorm, SyncBatchNorm, SyncBatchNormAdd, convert, freeze, revert
from gluon_syncbn.activation import RELU
from gluon_syncbn.command import replacements
from gluon_syncbn.mxnet_side import blocks
from gluon_syncbn.mxnet_side.nodes import json_of
from gluon_syncbn.training.replicas import Replicas

BATCH_NORM = nn.BatchNorm
CONTEXTS = [mx.cpu(0), mx.cpu(1)]


class Residual(nn.HybridBlock):
    """A model as people write them: attributes, nested blocks, lists and dicts of its own children."""

    def __init__(self, channels=4, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(nn.Conv2D(channels, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=channels))
            self.conv = nn.Conv2D(channels, 3, padding=1, in_channels=channels)
            self.norm = nn.BatchNorm(epsilon=1e-3, momentum=0.75, in_channels=channels)
            self.branches = []
            for _ in range(2):
                branch = nn.HybridSequential()
                branch.add(nn.BatchNorm(in_channels=channels, scale=False), nn.Conv2D(2, 1, in_channels=4))
                self.register_child(branch)
                self.branches.append(branch)
            self.by_name = {"norm": self.norm, "all": (self.norm, [self.norm])}

    def hybrid_forward(self, F, x):
        x = self.stem(x)
        x = x + self.by_name["norm"](self.conv(x))
        return F.concat(*[branch(x) for branch in self.branches], dim=1)


def layers(net, cls):
    found = []
    net.apply(lambda block: found.append(block) if type(block) is cls and block not in found else None)
    return found


def randomise(net, seed=0):
    """Parameters unlike their initial values, gammas unlike 1; the same for the same seed."""
    rng = np.random.default_rng(seed)
    for name, parameter in net._collect_params_with_prefix().items():
        positive = name.endswith(("gamma", "running_var"))
        value = rng.uniform(0.5, 2, parameter.shape) if positive else rng.normal(0, 0.5, parameter.shape)
        parameter.set_data(mx.nd.array(value, dtype=parameter.dtype))
    return net


def shards(shape=(3, 6, 6), sizes=(2, 3), dtype="float64", seed=1):
    """Different batch size and different distribution on each device."""
    rng = np.random.default_rng(seed)
    return [rng.normal(k, 1 + k, (size, *shape)).astype(dtype) for k, size in enumerate(sizes)]


def step(net, inputs, contexts):
    """Of one with a random head gradient, all but the running statistics."""

    def heads(ys):
        whole = np.random.default_rng(2).normal(0.3, 1, (sum(map(len, inputs)), *ys[0].shape[1:]))
        return on_devices(np.split(whole, np.cumsum([len(x) for x in inputs])[:-1]), contexts, ys[0].dtype)

    found = step_of_net(net, on_devices(inputs, contexts, inputs[0].dtype), heads)
    return {name: value for name, value in found.items() if "running" not in name}


def assert_one_device_equals(net, plain, inputs):
    """`net` on two devices against `plain`, built the same way, on one with the concatenated batch."""
    assert_near(step(net, inputs, CONTEXTS), step(plain, [np.concatenate(inputs)], CONTEXTS[:1]), 1e-9)


def pair(make=Residual):
    """Two networks with the same parameters: one on both devices, one on the first of them alone."""
    nets = []
    for ctx in (CONTEXTS, CONTEXTS[:1]):
        net = make(prefix="net_")
        net.initialize(ctx=ctx)
        net.cast("float64")
        nets.append(randomise(net))
    return nets


def state(net):
    """All that a conversion promises to keep of the parameters, by full name and by structure, in order."""
    return [
        (name, id(p), p.name, p.grad_req, p.lr_mult, p.wd_mult, p.init, p.shape, p.dtype, p._deferred_init)
        for view in (net.collect_params(), net._collect_params_with_prefix())
        for name, p in view.items()
    ]


def symbol_ops(symbol):
    return [node["op"] for node in json_of(symbol)["nodes"] if node["op"] != "null"]


def test_parameters_are_the_same_objects_in_the_same_order():
    net = Residual()
    net.initialize(ctx=CONTEXTS)
    params = net.collect_params()
    params[net.norm.gamma.name].grad_req = "add"
    params[net.norm.beta.name].grad_req = "null"
    params[net.stem[1].gamma.name].lr_mult = 0.1
    params[net.stem[1].beta.name].wd_mult = 0.0
    before, values = state(net), {k: p.list_data() for k, p in params.items()}
    assert convert(net) is net
    assert len(layers(net, SyncBatchNorm)) == 4
    assert not layers(net, nn.BatchNorm)
    assert state(net) == before
    for name, parameter in net.collect_params().items():
        assert parameter.list_ctx() == CONTEXTS
        assert all(now is then for now, then in zip(parameter.list_data(), values[name]))
    assert revert(net) is net
    assert len(layers(net, nn.BatchNorm)) == 4
    assert not layers(net, SyncBatchNorm)
    assert state(net) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_network_on_two_devices_is_the_plain_one_on_one(way):
    """Its flags stay."""
    net, plain = pair()
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    for ctx in CONTEXTS:  # a graph with plain layers is recorded here
        net(mx.nd.ones((2, 3, 6, 6), ctx=ctx, dtype="float64"))
    before = [(block, block._active, list(block._flags)) for block in blocks.iterate(net)]
    convert(net)
    assert [(block, block._active, list(block._flags)) for block in blocks.iterate(net)] == before
    assert_one_device_equals(net, plain, shards())
    assert way == "eager" or "BatchNorm" not in symbol_ops(net._cached_graph[1])


def test_a_part_of_a_hybridized_network_that_has_run():
    net, plain = pair()
    net.hybridize()
    inputs = shards()
    apart = step(net, inputs, CONTEXTS)["y"]
    for part in (net.stem, net.norm, *net.branches):
        convert(part)
    assert_one_device_equals(net, plain, inputs)
    for part in (net.stem[1], net.norm, *net.branches):
        revert(part)
    np.testing.assert_allclose(step(net, inputs, CONTEXTS)["y"], apart)
    convert(net)
    assert_one_device_equals(net, plain, inputs)
    for one in (net, plain):
        freeze(one.norm)
        one.norm.running_mean.set_data(mx.nd.array([1, 2, 3, 4]))
        one.norm.running_var.set_data(mx.nd.array([5, 2, 1, 3]))
    assert_one_device_equals(net, plain, inputs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 0.5, "axis": 3, "prefix": "a_name_of_its_own_"},
        {"epsilon": 1e-3, "axis": -1, "prefix": ""},
        {"scale": False, "center": False, "in_channels": 5},
        {"use_global_stats": True},
        {"gamma_initializer": mx.init.Constant(3), "running_variance_initializer": "zeros"},
    ],
)
def test_settings_are_kept(arguments):
    layer = nn.BatchNorm(**arguments)
    attributes, text = vars(layer).keys(), repr(layer)
    layer._kwargs["use_global_stats"] = True  # GluonCV's freeze_bn writes it after construction
    settings = dict(layer._kwargs)

    def kept():
        own = {name: layer._kwargs[name] for name in settings}
        return own, layer.name, layer.prefix, getattr(layer, "in_channels", 0), state(layer)

    before = kept()
    assert convert(layer) is layer and type(layer) is SyncBatchNorm and kept() == before
    layer._kwargs["use_global_stats"] = settings["use_global_stats"] = arguments.get("use_global_stats", False)
    before = kept()
    assert revert(layer) is layer and type(layer) is nn.BatchNorm and kept() == before
    assert repr(layer) == text
    assert vars(layer).keys() == attributes, "nothing of the layer is left"


def test_blocks_and_parameters_that_are_shared_stay_shared():
    def make(**kwargs):
        net = nn.HybridSequential(**kwargs)
        with net.name_scope():
            shared = nn.BatchNorm(in_channels=3)
            net.add(shared, nn.HybridSequential(), nn.Conv2D(3, 1, in_channels=3), shared)
            net.add(nn.Conv2D(3, 1, in_channels=3), nn.BatchNorm(in_channels=3, params=shared.collect_params()))
        net[1].add(shared)
        return net

    net, plain = pair(make)
    shared, other = net[0], net[5]
    for change, cls in ((convert, SyncBatchNorm), (revert, nn.BatchNorm), (convert, SyncBatchNorm)):
        change(net)
        assert net[0] is net[3] is net[1][0] is shared
        assert type(shared) is type(other) is cls
        assert all(shared._reg_params[name] is other._reg_params[name] for name in blocks.PARAMETERS)
    assert_one_device_equals(net, plain, shards())
    revert(shared)
    assert type(other) is SyncBatchNorm
    revert(net)
    assert type(other) is nn.BatchNorm and type(other.running_mean) is gluon.Parameter


class Scaled(nn.BatchNorm):
    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return super().hybrid_forward(F, x, gamma * 2, beta, running_mean, running_var)


class FromScaled(Scaled):
    pass


class Bound(nn.BatchNorm):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hybrid_forward = lambda F, x, *args, **parameters: x


class WithForward(nn.BatchNorm):
    flag = False

    def forward(self, x, *args):
        return super().forward(x * 2 if self.flag else x, *args)  # what it computes today is BatchNorm


class Final(nn.BatchNorm):
    def __init_subclass__(cls):
        raise TypeError("it is final")


class ByAnotherName(nn.BatchNorm):
    """Takes other arguments, holds something of its own, also in a slot, and computes the same."""

    __slots__ = ("casts",)

    def __init__(self, channels, **kwargs):
        super().__init__(in_channels=channels, **kwargs)
        self.note, self.casts = "mine", []

    def cast(self, dtype):
        self.casts.append(dtype)
        super().cast("float64")

    def set_momentum(self, momentum):
        self._kwargs["momentum"] = momentum


class WithoutCudnn(BatchNormCudnnOff):
    pass


class WithState(nn.BatchNorm):
    """Says itself what a copy has."""

    note = "mine"

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "cache"}


class WithWholeState(WithState):
    def __getstate__(self):
        return [super().__getstate__()]

    def __setstate__(self, state):
        vars(self).update(*state)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: BatchNormCudnnOff(in_channels=3, epsilon=1e-3, scale=False, **kwargs),
        lambda **kwargs: WithoutCudnn(in_channels=3, momentum=0.75, **kwargs),
        lambda **kwargs: ByAnotherName(3, momentum=0.75, **kwargs),
        lambda **kwargs: WithState(in_channels=3, **kwargs),
        lambda **kwargs: WithWholeState(in_channels=3, **kwargs),
    ],
)
def test_subclasses_that_compute_the_same_are_converted(make):
    net, plain = pair(make)
    cls, settings, note = type(net), dict(net._kwargs), getattr(net, "note", None)
    assert_one_device_equals(convert(net), plain, shards())
    assert isinstance(net, SyncBatchNorm) and isinstance(net, cls) == (cls is not BatchNormCudnnOff)
    for one in (net, pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert "gluon_syncbn" in one(mx.sym.var("x")).tojson()
    if cls is ByAnotherName:
        for one in (net, pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
            one.casts = []
            one.cast("float16")
            one.set_momentum(0.5)
            assert one.casts == ["float16"] and one.gamma.dtype == "float64" and isinstance(one, SyncBatchNorm)
            assert replicas_of(one).settings.momentum == 0.5
        net.set_momentum(0.75)
    revert(net)
    assert (type(net), net._kwargs, getattr(net, "note", None)) == (cls, settings, note)
    assert type(net.running_mean) is gluon.Parameter
    x = mx.nd.array(shards()[0], dtype="float64")
    with autograd.train_mode():
        np.testing.assert_allclose(net(x).asnumpy(), plain(x).asnumpy(), rtol=1e-12, atol=1e-12)


def test_contribs_layer_and_one_with_a_relu_are_converted():
    def make(cls=ContribSyncBatchNorm, **kwargs):
        return cls(in_channels=3, epsilon=1e-3, momentum=0.75, **kwargs)

    layer, _ = pair(functools.partial(make, num_devices=2))
    before = state(layer)
    assert type(convert(layer)) is SyncBatchNorm and state(layer) == before
    assert not layer._kwargs.keys() & {"key", "ndev"}
    assert_one_device_equals(layer, pair(functools.partial(make, nn.BatchNorm))[1], shards())
    assert type(revert(layer)) is nn.BatchNorm
    assert layer._kwargs["axis"] == 1
    layer = convert(nn.BatchNormReLU())
    assert type(layer) is SyncBatchNorm and replicas_of(layer).settings.activation == RELU
    assert type(revert(layer)) is nn.BatchNormReLU


def test_subclasses_of_the_layer():
    class Mine(SyncBatchNorm):
        pass

    net = convert(Residual(), norm_layer=Mine)
    assert len(layers(net, Mine)) == 4
    convert(net)
    assert len(layers(net, Mine)) == 4, "synchronised already"
    revert(net)
    assert len(layers(net, nn.BatchNorm)) == 4


@pytest.mark.parametrize("base", [SyncBatchNorm, SyncBatchNormAdd])
@pytest.mark.parametrize("masks", [False, True])
def test_a_forward_that_names_no_parameter(base, masks, rng):
    """As forwards call that of ``nn.BatchNorm``: by position, or by name in any order."""

    def calling(by_position, by_name):
        class Calls(base):
            def hybrid_forward(self, F, x, *data, **given):
                places = [given[name] for name in by_position]
                return super().hybrid_forward(F, x, *data, *places, **{name: given[name] for name in by_name})

        return Calls

    gamma, beta, mean, var = blocks.PARAMETERS
    forwards = (
        calling((gamma, beta, mean, var), ()),
        calling((gamma, beta), (var, mean)),
        calling((), (var, beta, mean, gamma)),
    )
    values = [mx.nd.array(rng.rand(3)) for _ in range(4)]
    data = [mx.nd.array(rng.randn(6, 3)) for _ in range(1 + issubclass(base, SyncBatchNormAdd))]
    data += [mx.nd.array(rng.rand(6, 1) > 0.5)] * masks
    results = []
    for cls in (base, *forwards):
        layer = cls(in_channels=3)
        layer.initialize()
        for hybrid in (False, True):
            for parameter, value in zip(layer._reg_params.values(), values):
                parameter.set_data(value)
            layer.hybridize(hybrid)
            with autograd.record():
                y = layer(*data)
            results.append([y.asnumpy(), layer(*data).asnumpy()])
    for got in results[1:]:
        np.testing.assert_allclose(got, results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "cls, reason",
    [
        (Scaled, "it has a hybrid_forward of its own"),
        (FromScaled, "it has a hybrid_forward of its own"),
        (Bound, "it has a hybrid_forward of its own"),
        (WithForward, "it has a forward of its own"),
        (Final, "no class can be derived from its own: it is final"),
    ],
)
def test_a_subclass_that_computes_something_else_is_left_and_named(cls, reason):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.BatchNorm(), *(cls() for _ in range(6)), nn.GroupNorm(), nn.LayerNorm(), nn.InstanceNorm(), nn.Dense(3)
        )
    before = [(type(block), dict(vars(block))) for block in net[1:]]
    with pytest.warns(UserWarning, match="convert left as it was: ") as warned:
        convert(net)
    (warning,) = warned
    said = str(warning.message)
    assert said.count(reason) == 5 and said.endswith("; and 1 more")
    assert all(f"{bn.name} ({cls.__name__}: " in said for bn in net[1:6])
    assert warning.filename == __file__
    assert type(net[0]) is SyncBatchNorm
    revert(net)
    assert [(type(block), dict(vars(block))) for block in net[1:]] == before


class Held(nn.HybridBlock):
    """No layer but the first is a child; no block holds the last."""

    __slots__ = ("kept",)

    def __init__(self):
        super().__init__()
        inner = nn.HybridSequential()
        inner.add(nn.BatchNorm(in_channels=3))
        self.first, self.kept = nn.BatchNorm(in_channels=3), [nn.BatchNorm(in_channels=3)]
        self.plain = [(nn.BatchNorm(in_channels=3), {"deep": nn.BatchNorm(in_channels=3)})]
        self.named = {"one": nn.BatchNorm(in_channels=3), "net": {"inner": inner}}
        self.named["itself"] = self.named
        self.holder = SimpleNamespace(norm=nn.BatchNorm(in_channels=3, prefix="held_"))

    def within(self):
        ((second, deep),) = self.plain
        return [self.first, *self.kept, second, deep["deep"], self.named["one"], self.named["net"]["inner"][0]]

    def forward(self, x):
        for layer in (*self.within(), self.holder.norm):
            x = layer(x)
        return x


@pytest.mark.filterwarnings('ignore:"Held.* is an unregistered container:UserWarning')
def test_layers_that_gluon_does_not_register():
    net = Held()
    for layer in (*net.within(), net.holder.norm):
        layer.initialize(ctx=CONTEXTS)
    for change, cls in ((convert, SyncBatchNorm), (revert, nn.BatchNorm), (convert, SyncBatchNorm)):
        change(net)
        assert {type(layer) for layer in net.within()} == {cls}
    assert type(net.holder.norm) is nn.BatchNorm  # nothing tells of it but its parameters
    trainer = gluon.Trainer({**net.collect_params(), **net.holder.norm.collect_params()}, "sgd")
    with autograd.record():
        losses = [net(mx.nd.random.normal(shape=(4, 3), ctx=context)).sum() for context in CONTEXTS]
    autograd.backward(losses)
    with pytest.warns(UserWarning, match="these are not: held. gluon_syncbn.convert") as warned:
        trainer.step(8)
    assert len(warned) == 1
    assert type(convert(net.holder.norm)) is SyncBatchNorm


def test_a_selection_by_name():
    net = convert(Residual(prefix="net_"), select=".*batchnorm0")
    assert layers(net, SyncBatchNorm) == [net.stem[1]]
    convert(net, select=".*norm1_gamma$")  # of a parameter
    assert set(layers(net, SyncBatchNorm)) == {net.stem[1], net.norm}
    freeze(convert(net), select="net_batchnorm0_gamma")
    assert [one for one in layers(net, SyncBatchNorm) if one._kwargs["use_global_stats"]] == [net.stem[1]]
    assert net.norm.gamma.grad_req == "write" and net.stem[1].beta.grad_req == "null"


@pytest.mark.parametrize("converted", [True, False])
def test_frozen_layers(converted):
    net, plain = pair()
    for model in (net, plain):
        freeze(model, select=".*")
        for branch in model.branches:
            branch[0]._kwargs["fix_gamma"] = False  # which writes 1
    parameters = list(net.collect_params(".*(gamma|beta|running).*").values())
    before = [p.data(CONTEXTS[0]).asnumpy() for p in parameters]
    if converted:
        convert(net)
    assert_one_device_equals(net, plain, shards())
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "wd": 0.1}).step(1)
    for one, parameter in zip(before, parameters):
        np.testing.assert_array_equal(one, parameter.data(CONTEXTS[0]).asnumpy())
        assert parameter.grad_req == "null"


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_five_dimensions(hybridized, training):
    """MXNet's own BatchNorm fails behind a convolution there: frozen, and in an eager prediction."""
    net = nn.HybridSequential()
    net.add(nn.Conv3D(16, 3, in_channels=4), nn.BatchNorm(in_channels=16, epsilon=1e-2))
    net.initialize(ctx=CONTEXTS[0])
    randomise(freeze(convert(net)))
    net.hybridize(hybridized)
    x, head = (mx.nd.random.normal(shape=shape) for shape in ((2, 4, 5, 6, 7), (2, 16, 3, 4, 5)))
    x.attach_grad()
    gamma, beta, mean, var = (net[1]._reg_params[name].data().reshape((1, -1, 1, 1, 1)) for name in blocks.PARAMETERS)
    found = []
    for F in (net, lambda x: (net[0](x) - mean) / (var + 1e-2).sqrt() * gamma + beta):
        with autograd.record(train_mode=training):
            y = F(x)
        y.backward(head)
        found.append((y.asnumpy(), x.grad.asnumpy(), net[0].weight.grad().asnumpy()))
    for got, want in zip(*found):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("converted", [True, False])
def test_freezing_is_undone(converted):
    """Twice frozen; a gamma that was not trained before, and gradients that add, are so again."""
    net, plain = pair()
    for model in (net, plain):
        model.norm.gamma.grad_req, model.stem[1].beta.grad_req = "null", "add"
    net = convert(net) if converted else net
    assert freeze(freeze(freeze(net)), active=False) is net
    assert_one_device_equals(net, plain, shards()) if converted else None
    assert [p.grad_req for p in net.collect_params().values()] == [p.grad_req for p in plain.collect_params().values()]
    assert not net.norm._kwargs["use_global_stats"] and not net.stem[1]._kwargs["use_global_stats"]
    net.norm.gamma.grad_req = "add"
    assert freeze(freeze(net), active=False).norm.gamma.grad_req == "add"


def test_freezing_nodes_of_a_graph_is_undone():
    """No layer stands for them between the calls."""
    data = mx.sym.var("data", dtype="float32")
    net = mx.sym.BatchNorm(mx.sym.BatchNorm(data, name="one"), name="two", use_global_stats=True)
    block = gluon.SymbolBlock(net, data)
    block.collect_params()["one_gamma"].grad_req = "add"
    freeze(block)
    assert [node.frozen for node in blocks.recorded(block)] == [True, True]
    with pytest.warns(UserWarning, match="freeze left as it was: two "):
        freeze(block, active=False)
    assert [node.frozen for node in blocks.recorded(block)] == [False, True]
    assert block.collect_params()["one_gamma"].grad_req == "add"


def test_what_something_else_has_frozen_or_thawed_stays():
    layer, other = nn.BatchNorm(in_channels=3, use_global_stats=True), nn.BatchNorm(in_channels=3)
    layer.gamma.grad_req, other.beta.grad_req = "null", "add"
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"freeze left as it was: {layer.name} .*freeze has not frozen it"):
            freeze(layer, active=False)
        freeze(other, active=False)  # which was never frozen
        assert layer._kwargs["use_global_stats"] and layer.gamma.grad_req == "null" and layer.beta.grad_req == "write"
        assert not other._kwargs["use_global_stats"] and other.beta.grad_req == "add"
        for one in (layer, other):
            freeze(one)
            one.gamma.grad_req = "write" if one is other else "null"  # after freeze, by the user
        freeze(other, active=False)
        assert other.gamma.grad_req == "write"
        freeze(other)
        other._kwargs["use_global_stats"], other.gamma.grad_req = False, "add"
        freeze(other, active=False)
        assert other.gamma.grad_req == other.beta.grad_req == "add" and not other._kwargs["use_global_stats"]


@pytest.fixture
def ours_as_mxnets(monkeypatch):
    """A script may put ours into the places of MXNet's classes, where our functions may not look when called."""
    for module in (nn, gluon.contrib.nn):
        monkeypatch.setattr(module, "SyncBatchNorm", SyncBatchNorm, raising=False)
    monkeypatch.setattr(nn, "BatchNorm", SyncBatchNorm)
    monkeypatch.setattr(nn, "BatchNormReLU", functools.partial(SyncBatchNorm, activation="relu"))


@pytest.mark.parametrize("hybridized", [False, True])
def test_classes_of_ours_in_the_places_of_mxnets(ours_as_mxnets, hybridized):
    net, alone = pair()
    plain = revert(alone)
    assert type(net.norm) is SyncBatchNorm and type(plain.norm) is BATCH_NORM
    net.hybridize(hybridized)
    assert_one_device_equals(net, plain, shards())
    assert type(revert(net).norm) is BATCH_NORM and type(convert(net).norm) is SyncBatchNorm
    assert type(revert(freeze(net)).norm) is BATCH_NORM
    assert "Custom" not in symbol_ops(net(mx.sym.var("data")))


@pytest.mark.parametrize("cls", [SyncBatchNormAdd, ShuffleBatchNorm, SyncBatchNorm, replacements.SyncBatchNorm])
def test_operators_of_ours_in_the_places_of_mxnets(ours_as_mxnets, monkeypatch, cls):
    layer = cls(in_channels=3, prefix="bn_")
    layer.initialize(ctx=CONTEXTS)
    inputs = [mx.nd.random.normal(shape=(2, 3))] * (1 + issubclass(cls, SyncBatchNormAdd))
    want = layer(*inputs).asnumpy()
    for F in (mx.sym, mx.nd):
        monkeypatch.setattr(F, "BatchNorm", gluon_syncbn.symbol.SyncBatchNorm)
        monkeypatch.setattr(F.contrib, "SyncBatchNorm", gluon_syncbn.symbol.SyncBatchNorm)
    layer._kwargs["use_global_stats"] = True  # BatchNorm in a graph too
    for hybridized in (False, True):
        layer.hybridize(hybridized)
        np.testing.assert_allclose(layer(*inputs).asnumpy(), want, rtol=1e-5)
    assert type(convert(BatchNormCudnnOff(in_channels=3))) is SyncBatchNorm


def test_initialisation_that_is_still_pending():
    """The number of channels is unknown and the contexts are given: both must survive."""

    def make(**kwargs):
        net = nn.HybridSequential(**kwargs)
        with net.name_scope():
            net.add(nn.BatchNorm(gamma_initializer=mx.init.Constant(1.5)), nn.Dense(4), nn.BatchNorm())
        return net

    net = make(prefix="net_")
    net.initialize(ctx=CONTEXTS, init=mx.init.Constant(0.25))
    before = state(net)
    assert [entry[-1] != () for entry in before].count(False) == 2, "all but the bias of Dense are pending"
    convert(net)
    assert state(net) == before
    inputs = shards(dtype="float32")
    output = step(net, inputs, CONTEXTS)["y"]
    assert net[0].gamma.list_ctx() == CONTEXTS
    assert net[0].gamma.data(CONTEXTS[1]).asnumpy().max() == 1.5

    plain = make(prefix="net_")
    plain.initialize(init=mx.init.Constant(0.25))
    np.testing.assert_allclose(output, step(plain, [np.concatenate(inputs)], [mx.cpu()])["y"], atol=1e-5)


def test_nothing_else_has_a_name_or_is_a_layer_to_come():
    """Processes that agree on their layers would wait for a layer that only helped to convert."""

    def number(layer):
        return int(re.search(r"(\d+)_$", layer.prefix).group(1))

    first = number(nn.BatchNorm())
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3), nn.BatchNorm(in_channels=3))
    net.initialize(ctx=CONTEXTS)
    gc.collect()
    before = [layer for layer in Replicas.by_id.values() if not layer.contexts]
    gc.disable()
    try:
        convert(net)
        assert [layer for layer in Replicas.by_id.values() if not layer.contexts] == before
    finally:
        gc.enable()
    revert(net)
    assert number(nn.BatchNorm()) == first + 3


class Picky(SyncBatchNorm):
    def __init__(self, axis=1, **kwargs):
        if axis == 3:
            raise RuntimeError("not this axis")
        super().__init__(axis=axis, **kwargs)


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        (
            {"momentum": 0.5},
            ValueError,
            r"momentum: 0.5 was given, but each layer keeps its own; expected .*num_devices",
        ),
        ({"params": None}, ValueError, "params: None was given"),
        ({"devices": 2}, ValueError, r"kwargs: {'devices': 2} was given, expected .*num_devices"),
        ({"num_devices": 0}, ValueError, "num_devices.*0"),
        ({"num_devices": "two"}, ValueError, "num_devices.*two"),
        ({"norm_layer": Picky}, RuntimeError, "not this axis"),
    ],
)
def test_an_error_leaves_the_net_as_it_was(kwargs, error, message):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), nn.BatchNorm(axis=3, in_channels=2))
    before = [(type(layer), dict(vars(layer))) for layer in net]
    with pytest.raises(error, match=message):
        convert(net, **kwargs)
    assert [(type(layer), dict(vars(layer))) for layer in net] == before


def test_arguments_reach_every_layer():
    net, _ = pair()
    convert(net, num_devices=3, timeout=20)
    assert {(layer.num_devices, layer.timeout) for layer in layers(net, SyncBatchNorm)} == {(3, 20)}
    with pytest.raises(ValueError, match="num_devices: 3 was given, expected None or 2"), mx.autograd.record():
        net(mx.nd.array(shards()[0], dtype="float64"))


LOCAL = r"convert left as it was: b \(SyncBatchNorm: it has mode='local' already; call revert"


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda: convert(nn.Dense(1, prefix="d_")),
            "convert changed nothing: Dense 'd' has no layer of batch no.*F.Ba",
        ),
        (lambda: convert(Residual(prefix="r_"), select="norm"), "convert changed .*='norm' matches no .*r_batchnorm"),
        (lambda: freeze(Residual(prefix="r_"), select="norm"), "freeze changed nothing: select='norm' matches no"),
        (lambda: convert(convert(nn.BatchNorm(prefix="b_"), mode="local"), mode="sync"), LOCAL),
        (lambda: convert(SyncBatchNorm(group_size=2), ShuffleBatchNorm), "it has mode='sync' already; call revert"),
        (lambda: convert(SyncBatchNorm(), group_size=2), "it has group_size=None already; call revert"),
    ],
)
def test_what_changes_nothing_is_said_once(change, said):
    with pytest.warns(UserWarning, match=said) as warned:
        change()
    assert len(warned) == 1 and warned[0].filename == __file__


@pytest.mark.parametrize(
    "change",
    [
        lambda: convert(convert(Residual())),
        lambda: convert(convert(Residual(), mode="shuffle"), fuse=True),
        lambda: convert(convert(Residual(), mode="shuffle", virtual_devices=2), ShuffleBatchNorm, virtual_devices=2),
        lambda: convert(SyncBatchNorm(), mode="sync"),
        lambda: freeze(nn.Dense(1)),
        lambda: revert(nn.Dense(1)),
    ],
)
def test_nothing_is_said_of_what_was_asked_for(change):
    change()  # a warning is an error

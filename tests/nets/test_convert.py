"""Converted networks: what must be the same object, what must be the same number, what must be left alone."""

import copy
import functools
import gc
import pickle
import re
from types import SimpleNamespace

import mxnet as mx
import nets
import numpy as np
import pytest
from gluoncv.nn.block import BatchNormCudnnOff
from internals import replicas_of
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import NETS, Residual, an_input, assert_as_plain, assert_one_device, contrib, filled, made, operators
from replicas import WAYS, forward_and_backward, ready

import gluon_syncbn
from gluon_syncbn import ShuffleBatchNorm, SyncBatchNorm, SyncBatchNormAdd, convert, freeze, revert
from gluon_syncbn.command import replacements
from gluon_syncbn.mxnet_side import blocks
from gluon_syncbn.training.replicas import Replicas

BATCH_NORM = nn.BatchNorm
OTHERS = (contrib, SyncBatchNorm, gluon_syncbn.symbol.SyncBatchNorm)  # which `revert` makes MXNet's own
HOW = {
    **{way: lambda net, way=way: net.hybridize(**WAYS[way]) or net for way in WAYS},
    "in an eager net": lambda net: nets.within(net, False),
    "in a graph": lambda net: nets.within(net, True),
}
WAYS_OF_EACH = [(kind, "hybrid") for kind in NETS if kind not in ("a model", "a graph")]
WAYS_OF_EACH += [(kind, way) for kind in ("a model", "a graph") for way in HOW]


def state(net, within):
    """All that a conversion promises to keep: of the parameters by full name and by structure, in order; of blocks."""
    parameters = [
        (name, id(p), p.name, p.grad_req, p.lr_mult, p.wd_mult, p.init, p.shape, p.dtype, p._deferred_init)
        for view in (net.collect_params(), net._collect_params_with_prefix())
        for name, p in view.items()
    ]
    arrays = [id(array) for p in net.collect_params().values() if p._data for array in p.list_data()]
    return parameters, arrays, [(id(one), one.name, one.prefix, one._active, list(one._flags)) for one in within]


def look(net, within):
    """What `revert` gives back."""
    layers = [one for one in within if blocks.is_batch_norm(one)]
    kinds = [(type(one), sorted(vars(one)), repr(one), dict(one._kwargs)) for one in layers]
    graphs = [one._cached_graph[1].tojson() for one in within if isinstance(one, gluon.SymbolBlock)]
    return type(net), kinds, [type(p) for one in layers for p in one._reg_params.values()], graphs


@pytest.mark.parametrize("kind, way", WAYS_OF_EACH)
def test_on_two_devices_it_is_the_plain_net_on_one(kind, way, contexts):
    """Also where graphs with plain layers were recorded before."""
    net = HOW[way](made(kind, contexts[:2]))
    for context in contexts[:2]:
        net(an_input(kind, context))
    convert(net)
    assert_as_plain(net, kind, contexts)
    assert "eager" in way or "BatchNorm" not in operators(net)
    revert(net)(an_input(kind, contexts[0]))
    assert "eager" in way or not {"Custom", "SwapAxis"} & set(operators(net))


@pytest.mark.parametrize("kind", [kind for kind, (_, norm, *_) in NETS.items() if norm not in OTHERS])
def test_there_and_back(kind, contexts):
    """All stays, and `revert` leaves nothing."""
    net = HOW["static_shape"](made(kind, contexts[:2]))
    inside = list(blocks.iterate(net))
    for parameter, request in zip(net.collect_params().values(), ("add", "null", "write") * 9):
        parameter.grad_req, parameter.lr_mult, parameter.wd_mult = request, 0.1, 0.5
    x = an_input(kind, contexts[0])
    y, kept, before = net(x).asnumpy(), state(net, inside), look(net, inside)
    assert convert(net) is net and state(net, inside) == kept
    assert all(isinstance(block, SyncBatchNorm) for block in inside if blocks.is_batch_norm(block))
    np.testing.assert_allclose(net(x).asnumpy(), y, rtol=1e-5, atol=1e-5)
    assert revert(net) is net and state(net, inside) == kept and look(net, inside) == before
    np.testing.assert_array_equal(net(x).asnumpy(), y)


@pytest.mark.parametrize("kind", NETS)
def test_a_copy_trains_by_itself(kind, contexts):
    net = convert(made(kind, contexts[:2]))
    net.hybridize()  # MXNet cannot copy the operator that it makes of a graph
    twin = pickle.loads(pickle.dumps(net)) if isinstance(net, nn.BatchNorm) else copy.deepcopy(net)
    twin.collect_params().reset_ctx(contexts[:2])  # MXNet copies all to the first
    assert_as_plain(twin, kind, contexts)
    if kind in ("a model", "a graph"):
        assert_as_plain(net, kind, contexts)


FROZEN_FIRST = [("a model", freeze), ("a graph", freeze), ("a graph of ours", freeze)]


@pytest.mark.parametrize("kind, first", [*((kind, convert) for kind in NETS), *FROZEN_FIRST])
def test_frozen_and_thawed(kind, first, contexts):
    """It normalises with the running statistics, which stay, and so do gamma and beta. Then it trains as before."""
    net = made(kind, contexts[:2])
    parameters = list(net.collect_params().values())
    requests = [parameter.grad_req for parameter in parameters]
    for change in (first, convert, freeze, freeze):
        change(net)
    assert_as_plain(net, kind, contexts, freeze)
    assert all(p.grad_req == "null" for p in parameters if re.search("gamma|beta|mean|var", p.name))
    assert freeze(net, active=False) is net and [p.grad_req for p in parameters] == requests
    assert_as_plain(net, kind, contexts)


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
@pytest.mark.parametrize("kind", [kind for kind in NETS if NETS[kind].make is not nets.single])
def test_a_file_has_operators_of_mxnet_that_predict_the_same(kind, contexts, tmp_path):
    """Of a net that has trained. What is in memory stays synchronised."""
    net = convert(made(kind, contexts[:2]))
    net.hybridize()
    forward_and_backward(net, [an_input(kind, context) for context in contexts[:2]])
    x, graph = an_input(kind, contexts[0]), net._cached_graph
    y = net(x).asnumpy()
    net.export(str(tmp_path / "net"), epoch=7)
    assert net._cached_graph is graph
    loaded = nets.imported(tmp_path / "net", 7)
    written = set(operators(loaded))
    assert "BatchNorm" in written and not {"Custom", "SwapAxis"} & written
    loaded.cast(x.dtype)
    np.testing.assert_allclose(loaded(x).asnumpy(), y, rtol=1e-5, atol=1e-5)


# ---- some kinds ------------------------------------------------------------------------------------------------


def layers(net, cls):
    return [block for block in blocks.iterate(net) if type(block) is cls]


def test_a_part_of_a_hybridized_network_that_has_run(contexts):
    net, x = made("a model", contexts[:2]), an_input("a model", contexts[0])
    net.hybridize()
    net(x)
    for part in (net.stem, net.norm, *net.branches):
        convert(part)
    assert_as_plain(net, "a model", contexts)
    for part in (net.stem[1], net.norm, *net.branches):
        revert(part)
    net(x)
    assert operators(net).count("BatchNorm") == 4


def test_what_a_subclass_does_itself_it_does_after_convert():
    net = convert(nets.ByAnotherName(3))
    for one in (net, pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        one.casts = []
        one.cast("float16")
        one.set_momentum(0.5)
        assert one.casts == ["float16"] and one.gamma.dtype == "float64" and one.note == "mine"
        assert isinstance(one, SyncBatchNorm) and replicas_of(one).settings.momentum == 0.5


def test_contribs_layer_and_a_class_of_ones_own():
    class Mine(SyncBatchNorm):
        pass

    layer = convert(convert(contrib(), norm_layer=Mine))
    assert type(layer) is Mine and not layer._kwargs.keys() & {"key", "ndev"}
    assert type(revert(layer)) is nn.BatchNorm and layer._kwargs["axis"] == 1


@pytest.mark.parametrize("base", [SyncBatchNorm, SyncBatchNormAdd])
@pytest.mark.parametrize("by_position", [4, 2, 0])
def test_a_forward_that_names_no_parameter(base, by_position, rng):
    """As forwards call that of ``nn.BatchNorm``: by position, or by name in any order; with a mask, too."""

    class Calls(base):
        def hybrid_forward(self, F, x, *data, **given):
            names = blocks.PARAMETERS[:by_position]
            places = [given.pop(name) for name in names]
            return super().hybrid_forward(F, x, *data, *places, **dict(reversed(list(given.items()))))

    arrays = [nd.array(rng.randn(6, 3)) for _ in range(1 + issubclass(base, SyncBatchNormAdd))]
    values = [nd.array(rng.rand(3)) for _ in blocks.PARAMETERS]
    for data in (arrays, [*arrays, nd.array(rng.rand(6, 1) > 0.5)]):
        results = []
        for cls, way in ((base, "eager"), (Calls, "eager"), (Calls, "hybrid")):
            layer = ready(cls(in_channels=3), way=way)
            for parameter, value in zip(layer._reg_params.values(), values):
                parameter.set_data(value)
            with autograd.record():
                y = layer(*data)
            results.append([y.asnumpy(), layer(*data).asnumpy()])
        np.testing.assert_allclose(results[1:], [results[0]] * 2, rtol=1e-6, atol=1e-6)


# ---- what stays ------------------------------------------------------------------------------------------------


class Scaled(nn.BatchNorm):
    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return super().hybrid_forward(F, x, gamma * 2, beta, running_mean, running_var)


class Bound(nn.BatchNorm):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hybrid_forward = lambda F, x, *args, **parameters: x


class WithForward(nn.BatchNorm):
    def forward(self, x, *args):
        return super().forward(x, *args)  # what it computes today is BatchNorm


def test_a_subclass_that_computes_something_else_is_left_and_named():
    own = "it has a hybrid_forward of its own"
    reasons = {type("FromScaled", (Scaled,), {}): own, Bound: own, WithForward: "it has a forward of its own"}
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.BatchNorm(), *(cls() for cls in reasons))
        net.add(nn.GroupNorm(), nn.LayerNorm(), nn.InstanceNorm(), nn.Dense(3))
    before = [(type(block), dict(vars(block))) for block in net[1:]]
    with pytest.warns(UserWarning, match="convert left as it was: ") as warned:
        convert(net)
    (warning,) = warned
    named = "; ".join(f"{bn.name} ({cls.__name__}: {reasons[cls]})" for bn, cls in zip(net[1:], reasons))
    assert str(warning.message) == f"convert left as it was: {named}"
    assert warning.filename == __file__ and type(net[0]) is SyncBatchNorm
    revert(net)
    assert [(type(block), dict(vars(block))) for block in net[1:]] == before


@pytest.mark.filterwarnings('ignore:"HybridBlock.* is an unregistered container:UserWarning')
def test_layers_that_gluon_does_not_register():
    """No layer but the first is a child; no block holds the last."""
    net, inner, last = nn.HybridBlock(), nn.HybridSequential(), nn.BatchNorm(in_channels=3, prefix="held_")
    within = [nn.BatchNorm(in_channels=3) for _ in range(6)]
    net.first, net.kept, *others = within[0], within[1:2], *within[2:]
    net.plain = [(others[0], {"deep": others[1]})]
    inner.add(others[2])
    net.named = {"one": others[3], "net": {"inner": inner}}
    net.named["itself"] = net.named
    net.holder = SimpleNamespace(norm=last)
    for change, cls in ((convert, SyncBatchNorm), (revert, nn.BatchNorm), (convert, SyncBatchNorm)):
        change(net)
        assert {type(layer) for layer in within} == {cls}
    assert type(last) is nn.BatchNorm  # nothing tells of it but its parameters

    assert type(convert(last)) is SyncBatchNorm


def test_a_selection_by_name():
    net = convert(Residual(prefix="net_"), select=".*batchnorm0")
    assert layers(net, SyncBatchNorm) == [net.stem[1]]
    convert(net, select=".*norm1_gamma$")  # of a parameter
    assert set(layers(net, SyncBatchNorm)) == {net.stem[1], net.norm}
    freeze(convert(net), select="net_batchnorm0_gamma")
    assert [one for one in layers(net, SyncBatchNorm) if one._kwargs["use_global_stats"]] == [net.stem[1]]
    assert net.norm.gamma.grad_req == "write" and net.stem[1].beta.grad_req == "null"


# ---- ours in the places of MXNet's -----------------------------------------------------------------------------


@pytest.fixture
def ours_as_mxnets(monkeypatch):
    """A script may put ours into the places of MXNet's classes, where our functions may not look when called."""
    for module in (nn, gluon.contrib.nn):
        monkeypatch.setattr(module, "SyncBatchNorm", SyncBatchNorm, raising=False)
    monkeypatch.setattr(nn, "BatchNorm", SyncBatchNorm)
    monkeypatch.setattr(nn, "BatchNormReLU", functools.partial(SyncBatchNorm, activation="relu"))


def test_classes_of_ours_in_the_places_of_mxnets(ours_as_mxnets, contexts):
    net, plain = (filled(Residual(nn.BatchNorm, prefix="net_"), contexts[:n]) for n in (2, 1))
    revert(plain)
    assert type(net.norm) is SyncBatchNorm and type(plain.norm) is BATCH_NORM
    assert_one_device(net, plain, contexts)
    assert type(revert(net).norm) is BATCH_NORM and type(convert(net).norm) is SyncBatchNorm
    assert type(revert(freeze(net)).norm) is BATCH_NORM
    assert "Custom" not in operators(net(mx.sym.var("data")))


@pytest.mark.parametrize("cls", [SyncBatchNormAdd, ShuffleBatchNorm, SyncBatchNorm, replacements.SyncBatchNorm])
def test_operators_of_ours_in_the_places_of_mxnets(ours_as_mxnets, contexts, monkeypatch, cls):
    layer = ready(cls(in_channels=3, prefix="bn_"), contexts=contexts[:2])
    inputs = [nd.random.normal(shape=(2, 3))] * (1 + issubclass(cls, SyncBatchNormAdd))
    want = layer(*inputs).asnumpy()
    for F in (mx.sym, mx.nd):
        monkeypatch.setattr(F, "BatchNorm", gluon_syncbn.symbol.SyncBatchNorm)
        monkeypatch.setattr(F.contrib, "SyncBatchNorm", gluon_syncbn.symbol.SyncBatchNorm)
    layer._kwargs["use_global_stats"] = True  # BatchNorm in a graph too
    for hybridized in (False, True):
        layer.hybridize(hybridized)
        np.testing.assert_allclose(layer(*inputs).asnumpy(), want, rtol=1e-5)
    assert operators(mx.sym.BatchNorm(mx.sym.var("data"))).count("Custom") == 1
    assert type(convert(BatchNormCudnnOff(in_channels=3))) is SyncBatchNorm


# ---- when, and what is said ------------------------------------------------------------------------------------


def test_initialisation_that_is_still_pending(contexts):
    """The number of channels is unknown and the contexts are given: both must survive."""
    both = []
    for places in (contexts[:2], contexts[:1]):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.BatchNorm(gamma_initializer=mx.init.Constant(1.5)), nn.Dense(4), nn.BatchNorm())
        net.initialize(ctx=places, init=mx.init.Constant(0.25))
        net.cast("float64")
        both.append(net)
    net, plain = both
    before = state(net, [])
    assert sum(p._deferred_init != () for p in net.collect_params().values()) == 9, "all but the bias of Dense"
    assert state(convert(net), []) == before
    assert_one_device(net, plain, contexts)
    assert net[0].gamma.list_ctx() == contexts[:2] and (net[0].gamma.data(contexts[1]) == 1.5).asnumpy().all()


def test_nothing_else_has_a_name_or_is_a_layer_to_come(contexts):
    """Processes that agree on their layers would wait for a layer that only helped to convert."""

    def number(layer):
        return int(re.search(r"(\d+)_$", layer.prefix).group(1))

    def to_come():
        return [layer for layer in Replicas.by_id.values() if not layer.contexts]

    first = number(nn.BatchNorm())
    net = ready(nn.BatchNorm(in_channels=3), nn.BatchNorm(in_channels=3), contexts=contexts[:2])
    gc.collect()
    before = to_come()
    gc.disable()
    try:
        convert(net)
        assert to_come() == before
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
        ({"params": None}, ValueError, "params: None was given, but each layer keeps its own; expected .*num_devices"),
        ({"devices": 2}, ValueError, r"kwargs: {'devices': 2} was given, expected .*num_devices"),
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
        # What was asked for, of which nothing is said:
        (lambda: convert(convert(Residual())), ""),
        (lambda: convert(convert(Residual(), mode="shuffle"), fuse=True), ""),
        (lambda: convert(convert(Residual(), mode="shuffle", virtual_devices=2), ShuffleBatchNorm), ""),
        (lambda: convert(SyncBatchNorm(), mode="sync"), ""),
        (lambda: freeze(nn.Dense(1)), ""),
        (lambda: revert(nn.Dense(1)), ""),
    ],
)
def test_what_changes_nothing_is_said_once(change, said, recwarn):
    change()
    assert len(recwarn) == bool(said)
    for warning in recwarn:
        assert re.search(said, str(warning.message)) and warning.filename == __file__

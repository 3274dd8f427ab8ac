"""Layers in recorded graphs: nodes of a SymbolBlock become synchronised and plain again; symbol.SyncBatchNorm."""

import copy
import functools
import gc
import time
import warnings

import mxnet as mx
import numpy as np
import pytest
from internals import WHY_CUSTOM
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import assert_near, in_threads, on_devices, step_of_net

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert, freeze, revert
from gluon_syncbn.mxnet_side.export import with_layers
from gluon_syncbn.mxnet_side.nodes import is_ours, json_of
from gluon_syncbn.nets.graphs import Opened

SIZES = (3, 2)
CONTRIB = functools.partial(gluon.contrib.nn.SyncBatchNorm, num_devices=2)
RECORDERS = {"BatchNorm": nn.BatchNorm, "BatchNormReLU": nn.BatchNormReLU, "contrib": CONTRIB}

# For a Symbol without a type, as GluonCV makes its inputs, SymbolBlock asks MXNet, which cannot know it yet.
untyped_symbol = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments:UserWarning")


def body(norm=nn.BatchNorm):
    """Three layers, of which one has no gamma and two stand side by side."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3, use_bias=False), norm(in_channels=4), nn.Activation("relu"))
        net.add(norm(in_channels=4, epsilon=1e-3, momentum=0.75), nn.Activation("relu"))
        net.add(nn.Conv2D(5, 2, in_channels=4, use_bias=False))
        net.add(norm(in_channels=5, scale=False))
    return net


def recorded(net, contexts, dtype="float64", data="data"):
    """Its graph on parameters of its own."""
    data = mx.sym.var(data, dtype=dtype)
    block = gluon.SymbolBlock(net(data), data)
    return prepared(block, contexts, dtype)


def prepared(net, contexts, dtype="float64"):
    """Parameters unlike their initial values, the same for the same names."""
    net.initialize(ctx=contexts, force_reinit=True)
    net.cast(dtype)
    for x in on_devices([np.zeros((1, 3, 7, 7))] * len(contexts), contexts, dtype):
        net(x)
    rng = np.random.RandomState(0)
    for name, parameter in sorted((own(name), parameter) for name, parameter in net.collect_params().items()):
        positive = name.endswith(("gamma", "var"))
        value = rng.rand(*parameter.shape) + 0.5 if positive else rng.randn(*parameter.shape)
        value = np.ones_like(value) if name.endswith("batchnorm2_gamma") else value  # it does not count
        parameter.set_data(nd.array(value, dtype=parameter.dtype))
    return net


def own(name):
    """Of a parameter, where contrib calls its layer otherwise."""
    return name.replace("syncbatchnorm", "batchnorm")


def shards(rng, shape=(3, 7, 7), sizes=SIZES):
    return [rng.randn(size, *shape) * (1 + k) + k for k, size in enumerate(sizes)]


def step(net, arrays, heads, contexts, dtype="float64"):
    found = step_of_net(net, *(on_devices(values, contexts, dtype) for values in (arrays, heads)))
    return {own(name): value for name, value in found.items()}


def operators(block):
    return [node["op"] for node in json_of(block._cached_graph[1])["nodes"]]


def data_of(rng):
    arrays = shards(rng)
    return arrays, [rng.randn(len(x), 5, 4, 4) for x in arrays]


def whole(net, arrays, heads, dtype="float64"):
    return step(net, [np.concatenate(arrays)], [np.concatenate(heads)], [mx.cpu(0)], dtype)


WAYS = {
    "by itself": lambda block: block,
    "static": lambda block: block.hybridize(static_alloc=True, static_shape=True) or block,
    "in an eager net": lambda block: within(block),
    "in a graph": lambda block: within(block, True),
}
EACH = [("BatchNorm", way) for way in WAYS] + [("BatchNormReLU", "by itself"), ("contrib", "in a graph")]


def within(block, hybrid=False):
    net = nn.HybridSequential()
    net.add(block)
    net.hybridize(hybrid)
    return net


@pytest.mark.parametrize("norm, way", EACH)
def test_equals_one_device(norm, way, contexts, rng):
    recorder = RECORDERS[norm]
    dtype, tolerance = ("float64", 1e-9) if norm == "BatchNorm" else ("float32", 1e-4)  # all that MXNet's others take
    plain = nn.BatchNormReLU if norm == "BatchNormReLU" else nn.BatchNorm
    net = WAYS[way](recorded(body(recorder), contexts[:2], dtype))
    convert(net)
    arrays, heads = data_of(rng)
    want = whole(recorded(body(plain), contexts[:1], dtype), arrays, heads, dtype)
    assert_near(step(net, arrays, heads, contexts, dtype), want, tolerance)
    alone = whole(recorded(body(plain), contexts[:1], dtype), arrays[:1], heads[:1], dtype)
    assert np.abs(alone["y"] - want["y"][: SIZES[0]]).max() > 0.1, "the statistics matter here"


def test_twice_in_one_graph(contexts, rng):
    """Each use is a node of its own."""

    class Twice(nn.HybridBlock):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def hybrid_forward(self, F, x):
            return self.block(x) + self.block(2 * x * x)

    def net(contexts):
        twice = Twice(recorded(body(), contexts))
        twice.hybridize()
        return twice

    arrays, heads = data_of(rng)
    got = step(convert(net(contexts[:2])), arrays, heads, contexts)
    want = whole(net(contexts[:1]), arrays, heads)
    for one in (got, want):  # whose update comes first is not said
        for name in [name for name in one if "running" in name]:
            del one[name]
    assert_near(got, want, 1e-9)


@untyped_symbol
def test_there_and_back_and_in_a_file(contexts, rng, tmp_path):
    net = recorded(body(), contexts[:2])
    text, parameters = net._cached_graph[1].tojson(), net.collect_params()
    values = {name: parameter.data(contexts[0]).asnumpy() for name, parameter in parameters.items()}
    (x,) = on_devices([rng.randn(2, 3, 7, 7)], contexts, "float64")
    before = net(x).asnumpy()
    assert convert(net) is net and isinstance(net, gluon.SymbolBlock)
    np.testing.assert_allclose(net(x).asnumpy(), before, atol=1e-12)
    assert operators(net).count("Custom") == 3 and "BatchNorm" not in operators(net)
    assert all(net.collect_params()[name] is parameter for name, parameter in parameters.items())
    assert revert(net) is net and type(net) is gluon.SymbolBlock
    assert net._cached_graph[1].tojson() == text
    np.testing.assert_array_equal(net(x).asnumpy(), before)
    for name, parameter in net.collect_params().items():
        np.testing.assert_array_equal(parameter.data(contexts[1]).asnumpy(), values[name])
    net.export(str(tmp_path / "net"))

    def imported(contexts):
        files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
        net = gluon.SymbolBlock.imports(*files, ctx=contexts)
        net.cast("float64")
        return net

    arrays, heads = data_of(rng)
    got = step(convert(imported(contexts[:2])), arrays, heads, contexts)
    assert_near(got, whole(imported(contexts[:1]), arrays, heads), 1e-9)


def test_a_copy_trains_by_itself(contexts, rng):
    """MXNet cannot copy the operator that it made of the graph, and its error leaves half an operator behind."""
    net = recorded(body(SyncBatchNorm), contexts[:2])
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: call net\.hybridize\(\) before"):
        copy.deepcopy(net)
    net.hybridize()
    convert(net)
    twin = copy.deepcopy(net)
    twin.collect_params().reset_ctx(contexts[:2])  # MXNet copies all to the first
    arrays, heads = data_of(rng)
    want = whole(recorded(body(), contexts[:1]), arrays, heads)
    for one in (twin, net):
        assert_near(step(one, arrays, heads, contexts), want, 1e-9)


def test_a_selection(contexts, capsys):
    net = recorded(body(), contexts[:2])
    convert(net, select=".*batchnorm1_", mode="local", virtual_devices=2)
    net(nd.ones((2, 3, 7, 7), dtype="float64"))
    assert operators(net).count("Custom") == 1 and operators(net).count("BatchNorm") == 2
    gluon_syncbn.summary(net)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "batchnorm" in line}
    assert "local  2" in lines["net_batchnorm1"] and "plain, because it is BatchNorm" in lines["net_batchnorm0"]
    for one, kind in ((net, Opened), (recorded(body(), contexts[:2]), gluon.SymbolBlock)):
        with pytest.warns(UserWarning, match="select='nothing' matches no layer"):
            convert(one, select="nothing")
        assert isinstance(one, kind) and kind in (type(one), Opened)


@pytest.mark.parametrize("first", [convert, lambda net: net])
def test_frozen(first, contexts, rng):
    """Normalised with the running statistics, which stay; no gradient for gamma and beta; nobody waits."""
    net = freeze(first(recorded(body(), contexts[:2])))
    (x,) = on_devices([rng.randn(2, 3, 7, 7)], contexts, "float64")
    want = net(x).asnumpy()
    with autograd.record():
        got = net(x)
    got.backward()
    np.testing.assert_allclose(got.asnumpy(), want, atol=1e-12)
    norms = [p for name, p in net.collect_params().items() if "batchnorm" in name]
    assert len(norms) == 12 and all(p.grad_req == "null" for p in norms)


@untyped_symbol
def test_a_graph_that_was_recorded_with_the_layer(contexts, rng):
    """As GluonCV's SSD has its features; it goes back too."""
    source = prepared(body(SyncBatchNorm), contexts[:2])
    data = mx.sym.var("data", dtype="float64")
    net = gluon.SymbolBlock(source(data), data, params=source.collect_params())
    arrays, heads = data_of(rng)
    want = whole(prepared(body(), contexts[:1]), arrays, heads)
    want["net_batchnorm2_gamma"] = source[-1].gamma.data().asnumpy()  # which plain BatchNorm sets to 1
    values = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
    assert_near(step(net, arrays, heads, contexts), want, 1e-9)
    for name, parameter in net.collect_params().items():
        parameter.set_data(nd.array(values[name], dtype="float64"))
    convert(net)
    assert_near(step(net, arrays, heads, contexts), want, 1e-9)
    assert type(revert(net)) is gluon.SymbolBlock
    assert operators(net).count("BatchNorm") == 3 and not {"Custom", "SwapAxis"} & set(operators(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revert(net)


def test_what_stays_is_named(contexts, capsys):
    data = mx.sym.var("data", dtype="float64")
    y, mean, _ = mx.sym.BatchNorm(data, output_mean_var=True, name="watched")
    scaled = mx.sym.BatchNorm(y, gamma=2 * mx.sym.var("g"), name="scaled")
    net = gluon.SymbolBlock(mx.sym.Group([mx.sym.BatchNorm(scaled, name="usual"), mean]), data)
    reasons = (
        r"watched \(BatchNorm: the graph uses its mean or variance.*scaled \(BatchNorm: its gamma, beta or running stat"
    )
    with pytest.warns(UserWarning, match=reasons):
        convert(net)
    assert operators(net).count("BatchNorm") == 2
    gluon_syncbn.summary(net)
    said = capsys.readouterr().out
    assert "usual (SyncBatchNorm)" in said and "plain, because the graph uses its mean or variance" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(net, select="usual")


def test_a_node_whose_layer_is_gone_stays():
    data, source = mx.sym.var("data", dtype="float64"), body(SyncBatchNorm)
    net = gluon.SymbolBlock(source(data), data)  # on parameters of its own
    del source
    gc.collect()
    with pytest.warns(
        UserWarning, match=r"revert left as it was: net_.*\(gluon_syncbn: the layer that recorded it no longer exists"
    ):
        revert(net)


# ---- symbol.SyncBatchNorm --------------------------------------------------------------------------------


def written(norm, **settings):
    data = mx.sym.var("data", dtype="float64")
    y = mx.sym.Convolution(data, num_filter=4, kernel=(3, 3), no_bias=True, name="conv0")
    y = norm(y, name="bn0", eps=1e-4, momentum=0.7, fix_gamma=False, **settings)
    y = mx.sym.Convolution(mx.sym.relu(y), num_filter=5, kernel=(2, 2), no_bias=True, name="conv1")
    return gluon.SymbolBlock(norm(y, name="bn1", **settings), data)


@pytest.mark.parametrize("way", WAYS)
def test_a_symbol(way, contexts, rng, monkeypatch):
    """In the place of MXNet's, too."""
    arrays, heads = data_of(rng)
    plain = written(mx.sym.BatchNorm)
    want = whole(prepared(plain, contexts[:1]), arrays, heads)
    if way == "by itself":
        monkeypatch.setattr(mx.sym, "BatchNorm", gluon_syncbn.symbol.SyncBatchNorm)
    block = written(gluon_syncbn.symbol.SyncBatchNorm, key="k", ndev=2)
    assert [f"bn0_{name}" in block.collect_params() for name in ("gamma", "beta", "moving_mean", "moving_var")] == [
        True
    ] * 4
    net = prepared(WAYS[way](block), contexts[:2])
    assert_near(step(net, arrays, heads, contexts), want, 1e-9)
    assert operators(freeze(block)).count("BatchNorm") == 0
    assert operators(revert(block)) == operators(plain) and type(block) is gluon.SymbolBlock
    freeze(block, active=False)
    (x,) = on_devices(arrays[:1], contexts, "float64")
    np.testing.assert_allclose(net(x).asnumpy(), plain(x).asnumpy(), atol=1e-12)
    assert operators(convert(plain)).count("Custom") == 2


def test_threads_that_call_a_symbol_first(contexts, monkeypatch):
    """One makes layers of its nodes, and the others take them."""
    data = mx.sym.var("data", dtype="float32")
    net = gluon.SymbolBlock(gluon_syncbn.symbol.SyncBatchNorm(data, name="bn"), data)
    for parameter in net.collect_params().values():
        parameter.shape = (3,)
    net.initialize(ctx=contexts[:2])
    opened, open_graph = [], gluon_syncbn.symbol.open_graph

    def slowly(block):
        opened.append(block)
        time.sleep(0.3)
        return open_graph(block)

    monkeypatch.setattr(gluon_syncbn.symbol, "open_graph", slowly)
    in_threads(lambda i: net(nd.ones((2, 3), ctx=contexts[i])), 2)
    assert opened == [net]


def test_attributes_of_a_symbol():
    given = dict(lr_mult=2.0, wd_mult="0.5", attr={"__mine__": "x"}, __lr__="3", ctx_group="left", cudnn_off=True)
    numbers = dict(eps="1e-4", momentum="0.8", fix_gamma="False", use_global_stats=0, axis="1")
    ours, mxnets = (
        make(mx.sym.var("data"), name="bn", **given, **numbers)
        for make in (gluon_syncbn.symbol.SyncBatchNorm, mx.sym.BatchNorm)
    )
    of_any = [
        {
            name: {key: value for key, value in attributes.items() if key.startswith("__")}
            for name, attributes in symbol.attr_dict().items()
            if name in mxnets.attr_dict() or not WHY_CUSTOM  # where our layer is several nodes
        }
        for symbol in (ours, mxnets)
    ]
    assert of_any[0] == of_any[1] and of_any[0]["bn_gamma"]["__lr_mult__"] == "2.0"
    (node,) = (each for each in ours.attr_dict().values() if "eps" in each)
    assert (node["eps"], node["fix_gamma"], np.float32(node["momentum"])) == ("0.0001", "0", np.float32(0.8))
    stays = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), name="bn", fix_gamma=True).attr_dict()
    assert stays["bn_gamma"]["__wd_mult__"] == "0"  # a gamma that does not count has no decay


def test_a_node_beside_a_replaced_one_keeps_what_serves_it():
    """The copies that guard it through Custom."""
    net = nn.HybridSequential()
    net.add(*[SyncBatchNorm(in_channels=3) for _ in range(2)])
    net.initialize()
    graph = json_of(net(mx.sym.var("data")))
    last = [n for n, node in enumerate(graph["nodes"]) if is_ours(node)][-1]
    before, after = (
        [node["op"] for node in one["nodes"] if node["op"] != "null"]
        for one in (graph, json_of(with_layers(graph, {last: nn.BatchNorm(in_channels=3)})))
    )
    assert after == [*before[: len(before) // 2], "BatchNorm"] and after.count("Custom") == 1


@untyped_symbol
def test_gluoncvs_feature_pyramid(contexts, rng):
    """`sym_norm_layer` of its detectors, on a backbone of ours: all of it is synchronised."""
    feature = pytest.importorskip("gluoncv.nn.feature", reason="GluonCV is not installed")

    def pyramid(norm):
        return feature.FPNFeatureExpander(
            network="resnet18_v1b",
            outputs=["layers1_relu3_fwd", "layers2_relu3_fwd"],
            num_filters=[8] * 2,
            pretrained=False,
            norm_layer=norm,
            norm_kwargs={"fix_gamma": False},
        )

    net, plain = convert(pyramid(gluon_syncbn.symbol.SyncBatchNorm)), pyramid(mx.sym.BatchNorm)
    for one, places in ((net, contexts[:2]), (plain, contexts[:1])):
        one.initialize(ctx=places)
        for context in places:
            one(nd.zeros((1, 3, 64, 64), ctx=context))
    for ours, theirs in zip(net.collect_params().values(), plain.collect_params().values()):
        theirs.set_data(nd.array(rng.randn(*ours.shape) * 0.1 + ours.name.endswith(("gamma", "var"))))
        ours.set_data(theirs.data())
    assert operators(net).count("Custom") == 14 and "BatchNorm" not in operators(net)
    images = shards(rng, (3, 64, 64))
    with autograd.record():
        got = [net(x) for x in on_devices(images, contexts, "float32")]
        want = plain(nd.array(np.concatenate(images)))
    for level in range(2):
        whole = want[level].asnumpy()
        parts = np.concatenate([outputs[level].asnumpy() for outputs in got])
        np.testing.assert_allclose(parts, whole, atol=1e-3 * np.abs(whole).max())

"""Layers in recorded graphs: what becomes of their nodes; symbol.SyncBatchNorm. Steps: test_convert.py."""

import copy
import gc
import time
import warnings

import mxnet as mx
import numpy as np
import pytest
from internals import WHY_CUSTOM
from mxnet import gluon, nd
from mxnet.gluon import nn
from nets import SAMPLE, assert_one_device, body, filled, operators, recorded, written
from replicas import in_threads

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert, freeze, revert
from gluon_syncbn.mxnet_side.export import with_layers
from gluon_syncbn.mxnet_side.nodes import is_ours, json_of
from gluon_syncbn.nets.graphs import Opened


def test_a_graph_that_has_run_is_not_copied(contexts):
    """MXNet cannot copy the operator that it made of the graph, and its error leaves half an operator behind."""
    net = filled(recorded(SyncBatchNorm), contexts[:2])
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: call net\.hybridize\(\) before"):
        copy.deepcopy(net)
    net.hybridize()
    assert_one_device(convert(net), filled(recorded(), contexts[:1]), contexts)


def test_a_selection(contexts, capsys):
    net = filled(recorded(), contexts[:2])
    convert(net, select=".*two_", mode="local", virtual_devices=2)
    net(nd.ones((2, *SAMPLE), dtype="float64"))
    assert operators(net).count("Custom") == 1 and operators(net).count("BatchNorm") == 2
    gluon_syncbn.summary(net)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("net_")}
    assert "local  2" in lines["net_two"] and "plain, because it is BatchNorm" in lines["net_one"]
    for one, kind in ((net, Opened), (recorded(), gluon.SymbolBlock)):
        with pytest.warns(UserWarning, match="select='nothing' matches no layer"):
            convert(one, select="nothing")
        assert isinstance(one, kind) and kind in (type(one), Opened)


def test_a_graph_that_was_recorded_with_the_layer(contexts):
    """As GluonCV's SSD has its features, on the layer's own parameters; it goes back too."""
    source = filled(body(SyncBatchNorm), contexts[:2])
    data = mx.sym.var("data", dtype="float64")
    net = gluon.SymbolBlock(source(data), data, params=source.collect_params())
    assert_one_device(net, filled(body(), contexts[:1]), contexts)
    filled(source, contexts[:2])
    convert(net)
    assert_one_device(net, filled(body(), contexts[:1]), contexts)
    assert type(revert(net)) is gluon.SymbolBlock
    assert operators(net).count("BatchNorm") == 3 and not {"Custom", "SwapAxis"} & set(operators(net))
    revert(net)  # and says nothing


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


def test_a_symbol(contexts, monkeypatch):
    """It takes contrib's arguments, may stand in the place of MXNet's, and becomes MXNet's."""
    plain = filled(written(), contexts[:1])
    monkeypatch.setattr(mx.sym, "BatchNorm", gluon_syncbn.symbol.SyncBatchNorm)
    block = filled(written(gluon_syncbn.symbol.SyncBatchNorm, key="k", ndev=2), contexts[:2])
    assert_one_device(block, plain, contexts)
    assert operators(freeze(block)).count("BatchNorm") == 0
    assert operators(revert(block)) == operators(plain) and type(block) is gluon.SymbolBlock
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

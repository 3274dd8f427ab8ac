"""Layers in recorded graphs: what becomes of their nodes; symbol.SyncBatchNorm. Steps: test_convert.py."""

import copy
import gc
import warnings

import mxnet as mx
import numpy as np
import pytest
from internals import WHY_CUSTOM
from mxnet import gluon
from mxnet.gluon import nn
from nets import assert_one_device, filled, operators, recorded, step_on
from replicas import assert_near

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert, revert
from gluon_syncbn.nets.graphs import Opened


def test_a_graph_that_has_run_is_not_copied(contexts):
    """MXNet cannot copy the operator that it made of the graph, and its error leaves half an operator behind."""
    net = filled(recorded(SyncBatchNorm), contexts[:2])
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: call net\.hybridize\(\) before"):
        copy.deepcopy(net)
    net.hybridize()
    assert_one_device(convert(net), filled(recorded(), contexts[:1]), contexts)


def test_a_selection():
    net = convert(recorded(), select=".*two_")
    assert [type(layer) for layer in net.__layers__.values()] == [nn.BatchNorm, SyncBatchNorm, nn.BatchNorm]
    for one, kind in ((net, Opened), (recorded(), gluon.SymbolBlock)):
        with pytest.warns(UserWarning, match="select='nothing' matches no layer"):
            convert(one, select="nothing")
        assert isinstance(one, kind) and kind in (type(one), Opened)


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


@pytest.mark.parametrize("change", [revert, convert])
def test_a_node_whose_layer_is_gone(change, contexts):
    """It is a layer again, beside one whose layer is there."""
    data = mx.sym.var("data", dtype="float64")
    there = SyncBatchNorm(in_channels=3, prefix="two_")
    nets = [
        gluon.SymbolBlock(second(norm(in_channels=3, epsilon=0.1, prefix="one_")(data)), data)
        for norm, second in ((SyncBatchNorm, there), (nn.BatchNorm, nn.BatchNorm(in_channels=3, prefix="two_")))
    ]
    gc.collect()
    rows = gluon_syncbn.summary(nets[0], show=False)
    assert [row.statistics.partition(",")[0] for row in rows] == ["plain", "synchronised"]
    assert rows[0].statistics.endswith("because its layer no longer exists")
    with pytest.warns(UserWarning, match="the layers that recorded one_fwd no longer exist"):
        change(nets[0])
    assert operators(nets[0]).count("BatchNorm") == (2 if change is revert else 0)
    places = contexts[: 1 if change is revert else 2]
    assert_near(step_on(filled(nets[0], places), places), step_on(filled(nets[1], contexts[:1]), contexts[:1]), 1e-9)


# ---- symbol.SyncBatchNorm --------------------------------------------------------------------------------


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

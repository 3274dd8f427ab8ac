"""`convert(net, fuse=True)`: in graphs, layers take in the activation behind them, and the addition before that."""

import functools
from collections import Counter

import mxnet as mx
import pytest
from internals import WHY_CUSTOM
from mxnet import autograd, nd
from mxnet.base import _LIB
from mxnet.gluon import SymbolBlock, nn
from nets import assert_as_plain, assert_one_device, filled, made
from replicas import WAYS, ready

from gluon_syncbn import convert, revert, summary
from gluon_syncbn.mxnet_side.nodes import json_of
from gluon_syncbn.mxnet_side.recording import running_graph


class Residual(nn.HybridBlock):
    """Two branches are added, of which the first ends in a normalisation, and the second as `side` says."""

    def __init__(self, activation, side="both", **kwargs):
        super().__init__(**kwargs)
        self.activation = activation
        with self.name_scope():
            self.body, self.side = nn.HybridSequential(), nn.HybridSequential()
            self.body.add(nn.Conv2D(3, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=3))
            self.side.add(nn.Conv2D(3, 1, in_channels=3))
            if side == "both":
                self.side.add(nn.BatchNorm(in_channels=3))

    def hybrid_forward(self, F, x):
        return self.activation(F, self.body(x) + self.side(x))


ACTIVATIONS = {
    "relu": lambda F, x: F.relu(x),
    "Activation": lambda F, x: F.Activation(x, act_type="relu"),
    "clip": lambda F, x: F.clip(x, 0, 6),
    "LeakyReLU": lambda F, x: F.LeakyReLU(x, slope=0.1),
}


def chain(behind, **kwargs):
    """Convolution, normalisation, and what stands behind it."""
    net = nn.HybridSequential(**kwargs)
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.HybridLambda(behind))
    return net


def operators(symbol):
    """Our own as such."""
    nodes = json_of(symbol)["nodes"]
    return Counter(node.get("attrs", {}).get("op_type", node["op"]) for node in nodes if node["op"] != "null")


def recorded(net, *inputs):
    """Operators of the graph that runs."""
    return operators(running_graph(net, *inputs)[1])


def left(net):
    """What may be taken in."""
    found = recorded(net)
    return {name: found[name] for name in (*ACTIVATIONS, "elemwise_add") if found[name]}


def case(make, behind, stays=None, **settings):
    return functools.partial(make, behind, prefix="net_", **settings), stays or {}


#: A net, and what is not taken in there.
CASES = {
    **{name: case(chain, behind) for name, behind in ACTIVATIONS.items()},
    **{f"{name} of a sum": case(Residual, behind) for name, behind in ACTIVATIONS.items()},
    **{f"{name} of a half": case(Residual, behind, side="convolution") for name, behind in ACTIVATIONS.items()},
    "an input that is used twice": case(chain, lambda F, x: F.relu(x) + x, {"relu": 1, "elemwise_add": 1}),
    "another slope": case(chain, lambda F, x: F.LeakyReLU(x, slope=1.5), {"LeakyReLU": 1}),
    "another activation": case(chain, lambda F, x: F.Activation(x, act_type="tanh"), {"Activation": 1}),
    "another clip": case(chain, lambda F, x: F.clip(x, -1, 6), {"clip": 1}),
    "another activation behind": case(
        chain, lambda F, x: F.Activation(F.LeakyReLU(x, slope=0.5), act_type="relu"), {"Activation": 1}
    ),
    "another operator between": case(chain, lambda F, x: F.relu(x + 1), {"relu": 1}),
}


@pytest.mark.parametrize("name, way", [(name, list(WAYS)[1 + i % 3]) for i, name in enumerate(CASES)])
def test_it_computes_the_same(name, way, contexts):
    make, stays = CASES[name]
    net = filled(convert(make(), fuse=True), contexts[:2])
    net.hybridize(**WAYS[way])
    assert_one_device(net, filled(make(), contexts[:1]), contexts, tolerance=1e-6)
    assert left(net) == stays and recorded(net)["gluon_syncbn"] == 1 + name.endswith("of a sum")
    # Through MXNet's Custom, an addend is guarded (op.py), unless it is what guards another layer.
    guards = 4 if name.endswith("of a sum") else 3
    assert "of a" not in name or recorded(net)["SwapAxis"] == (guards if WHY_CUSTOM else 0)


def test_without_being_asked_nothing_is_taken_in(contexts):
    """Of a graph neither. A layer that is synchronised already takes in what it is asked to, until it is plain."""
    fusing = functools.partial(convert, fuse=True)
    for changes, stays in ([convert], 2), ([convert, fusing], 0), ([fusing, revert, convert], 2):
        net = made("a graph", contexts[:2])
        for change in changes:
            change(net)
        net.hybridize()
        assert_as_plain(net, "a graph", contexts)
        assert recorded(net)["Activation"] == stays


@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_no_copy_of_a_graph_stays(monkeypatch):
    """MXNet's `tojson` makes one that it never frees, so that each net that is made would take more memory."""
    copy_graph, copies = _LIB.MXSymbolRemoveAmpCast, []
    monkeypatch.setattr(_LIB, "MXSymbolRemoveAmpCast", lambda *args: copies.append(args) or copy_graph(*args))
    x = nd.random.normal(shape=(2, 3, 6, 6))
    blocks = Residual(ACTIVATIONS["relu"]), nn.BatchNorm(in_channels=3), nn.Activation("relu")
    net = convert(ready(*blocks, way="hybrid"), fuse=True)
    with autograd.record():
        net(x).backward()
    summary(net)
    data = mx.sym.var("data")
    convert(SymbolBlock(net(data), data, params=net.collect_params()))
    revert(net)(x)
    assert not copies

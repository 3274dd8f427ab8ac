"""`convert(net, fuse=True)`: in graphs, layers take in the activation behind them, and the addition before that."""

import copy
import json
from collections import Counter

import mxnet as mx
import numpy as np
import pytest
from internals import WHY_CUSTOM
from mxnet import autograd, nd
from mxnet.base import _LIB
from mxnet.gluon import SymbolBlock, model_zoo, nn
from replicas import WAYS, forward_and_backward, step_of_net

from gluon_syncbn import convert, revert, summary
from gluon_syncbn.mxnet_side.fusion import fuse
from gluon_syncbn.mxnet_side.nodes import json_of, symbol_of
from gluon_syncbn.mxnet_side.recording import running_graph


class Residual(nn.HybridBlock):
    """Two branches are added, of which the first ends in a normalisation, and the second as `side` says."""

    def __init__(self, activation, side="both", **kwargs):
        super().__init__(**kwargs)
        self.activation = activation
        with self.name_scope():
            self.body, self.side = nn.HybridSequential(), nn.HybridSequential()
            if side != "none":
                self.body.add(nn.Conv2D(3, 3, padding=1, in_channels=3))
                self.side.add(nn.Conv2D(3, 1, in_channels=3))
            self.body.add(nn.BatchNorm(in_channels=3))
            if side == "both":
                self.side.add(nn.BatchNorm(in_channels=3))

    def hybrid_forward(self, F, x):
        return self.activation(F, self.body(x) + self.side(x))


def relu(F, x):
    return F.relu(x)


def relu_activation(F, x):
    return F.Activation(x, act_type="relu")


def relu6(F, x):
    return F.clip(x, 0, 6)


def leaky(F, x):
    return F.LeakyReLU(x, slope=0.1)


def chain(*behind, norm=nn.BatchNorm):
    """Convolution, normalisation, and what stands behind it."""
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4), *behind)
    return net


def operators(symbol):
    """Our own as such."""
    nodes = json_of(symbol)["nodes"]
    return Counter(node.get("attrs", {}).get("op_type", node["op"]) for node in nodes if node["op"] != "null")


def recorded(net, *inputs):
    """Operators of the graph that runs."""
    return operators(running_graph(net, *inputs)[1])


def train(net, contexts, seed=0, way="hybrid", size=8):
    """Outputs and gradients of a step, and what is predicted then. Initialises what is not initialised yet."""
    random = np.random.RandomState(seed)
    for parameter in net.collect_params().values():
        if parameter._data is None and not parameter._deferred_init:
            parameter.initialize(ctx=contexts, default_init=mx.init.Xavier())
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    xs = [nd.array(random.randn(2 + k, 3, size, size), ctx=context) for k, context in enumerate(contexts)]
    found = step_of_net(net, xs, lambda ys: [nd.array(random.randn(*y.shape), ctx=y.ctx) for y in ys])
    return [found[name] for name in found if "running" not in name] + [net(x).asnumpy() for x in xs]


def twins(make, contexts, way="hybrid", size=8, **settings):
    """The same net without and with `fuse`, after the same step."""
    plain = make()
    fused = copy.deepcopy(plain)
    convert(plain, **settings)
    convert(fused, fuse=True, **settings)
    mx.random.seed(5)
    plain.initialize(mx.init.Xavier(), ctx=contexts)
    plain(nd.zeros((1, 3, size, size), ctx=contexts[0]))
    fused.initialize(ctx=contexts)
    fused(nd.zeros((1, 3, size, size), ctx=contexts[0]))
    for one, other in zip(plain.collect_params().values(), fused.collect_params().values()):
        other.set_data(one.data(contexts[0]))
    got, want = train(fused, contexts, 1, way, size), train(plain, contexts, 1, way, size)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=3e-6 * max(1, np.abs(b).max()))
    return plain, fused


@pytest.mark.parametrize(
    "activation, gone, way",
    [
        (relu_activation, "Activation", "hybrid"),
        (leaky, "LeakyReLU", "static_alloc"),
        (relu6, "clip", "static_shape"),
        (relu, "relu", "hybrid"),
    ],
)
def test_an_activation_is_taken_in(contexts, activation, gone, way):
    plain, fused = twins(lambda: chain(nn.HybridLambda(activation)), contexts[:2], way)
    assert recorded(plain)[gone] == 1 and recorded(fused)[gone] == 0
    assert recorded(fused)["gluon_syncbn"] == 1


@pytest.mark.parametrize("side", ["both", "convolution"])
@pytest.mark.parametrize("activation", [relu_activation, relu6, leaky])
def test_an_addition_is_taken_in(contexts, activation, side):
    plain, fused = twins(lambda: Residual(activation, side), contexts[:2])
    assert recorded(plain)["elemwise_add"] == 1
    assert sum(recorded(fused)[name] for name in ("elemwise_add", "Activation", "clip", "LeakyReLU")) == 0
    # Through MXNet's Custom, an addend is guarded (op.py), unless it is what guards another layer.
    guards = 4 if side == "both" else 3
    assert recorded(fused)["SwapAxis"] == (guards if WHY_CUSTOM else 0)


def test_what_was_taken_in_is_not_taken_for_less(contexts):
    """Whoever looks at a graph a second time finds nothing more to take in: the first activation would be lost."""
    net = convert(chain(nn.LeakyReLU(0.5), nn.Activation("relu")), fuse=True)
    net.initialize(ctx=contexts[:1])
    _, symbol, graph = running_graph(net, nd.zeros((1, 3, 5, 5)))
    fuse(symbol, graph, {})
    for again in (symbol, symbol_of(graph)):
        assert operators(again)["Activation"] == 1 and operators(again)["LeakyReLU"] == 0


@pytest.mark.parametrize("activation, way", [(relu, "hybrid"), (relu6, "static_alloc"), (leaky, "static_shape")])
def test_an_empty_shard(contexts, activation, way):
    """The others' results are those without it."""
    results = []
    with mx.util.np_shape(True):
        for sizes in ([2, 0, 3], [2, 3]):
            random = np.random.RandomState(0)
            net = convert(Residual(activation, "none"), fuse=True)
            net.initialize(ctx=contexts[: len(sizes)])
            net.hybridize(**WAYS[way])
            xs, heads = (
                [nd.array(random.randn(n, 3, 4), ctx=context) for n, context in zip(sizes, contexts)] for _ in "xy"
            )
            ys = forward_and_backward(net, xs, heads)
            assert recorded(net)["elemwise_add"] == 0
            arrays = [array.asnumpy() for pair in zip(ys, (x.grad for x in xs)) for array in pair]
            results.append([array for array in arrays if array.size])
    for got, want in zip(*results):
        np.testing.assert_allclose(got, want, atol=1e-6)


def used_twice(F, x):
    return F.relu(x) + x


@pytest.mark.parametrize(
    "behind, stays",
    [
        (used_twice, "relu"),
        (lambda F, x: F.LeakyReLU(x, slope=1.5), "LeakyReLU"),
        (lambda F, x: F.Activation(x, act_type="sigmoid"), "Activation"),
        (lambda F, x: F.clip(x, -1, 6), "clip"),
        (lambda F, x: F.relu(x + 1), "relu"),
    ],
)
def test_what_cannot_be_taken_in_stays(contexts, behind, stays):
    _, fused = twins(lambda: chain(nn.HybridLambda(behind)), contexts[:2])
    assert recorded(fused)[stays] == 1


def test_without_being_asked_nothing_is_taken_in(contexts):
    net = convert(chain(nn.Activation("relu")))
    train(net, contexts[:2])
    assert recorded(net)["Activation"] == 1
    convert(net, fuse=True)  # a layer that is synchronised already
    train(net, contexts[:2])
    assert recorded(net)["Activation"] == 0


@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_files_are_those_of_the_net_as_it_was(contexts, tmp_path):
    nets = twins(lambda: Residual(leaky, prefix="net_"), contexts[:2])
    files = []
    for net in nets:
        net.export(str(tmp_path / "net"))
        files.append((tmp_path / "net-symbol.json").read_text())
    graphs = [[(node["name"], node["op"]) for node in json.loads(file)["nodes"]] for file in files]
    assert sorted(graphs[0]) == sorted(graphs[1])
    x = nd.random.normal(shape=(1, 3, 8, 8))
    loaded = SymbolBlock(mx.sym.load_json(files[1]), mx.sym.var("data"))
    loaded.load_parameters(str(tmp_path / "net-0000.params"), ctx=mx.cpu(), cast_dtype=True, dtype_source="saved")
    np.testing.assert_allclose(loaded(x).asnumpy(), nets[1](x).asnumpy(), atol=1e-5)


def test_a_recorded_graph(contexts):
    data = mx.sym.var("data", dtype="float32")
    net = Residual(relu)
    block = SymbolBlock(net(data), data, params=net.collect_params())
    convert(block, fuse=True)
    want = train(block, contexts[:2])
    assert recorded(block)["relu"] == recorded(block)["elemwise_add"] == 0
    revert(block)
    block.hybridize()
    convert(block)
    for a, b in list(zip(train(block, contexts[:2]), want))[:-2]:  # what is predicted has seen two steps
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert recorded(block)["relu"] == 1


def test_a_gluon_model(contexts):
    """All activations of a residual net, and all its additions."""
    plain, fused = twins(lambda: model_zoo.vision.resnet18_v1(classes=7), contexts[:2], size=32)
    assert recorded(plain)["Activation"] == 17 and recorded(plain)["elemwise_add"] == 8
    assert recorded(fused)["Activation"] == recorded(fused)["elemwise_add"] == 0


@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_no_copy_of_a_graph_stays(monkeypatch):
    """MXNet's `tojson` makes one that it never frees, so that each net that is made would take more memory."""
    copy_graph, copies = _LIB.MXSymbolRemoveAmpCast, []
    monkeypatch.setattr(_LIB, "MXSymbolRemoveAmpCast", lambda *args: copies.append(args) or copy_graph(*args))
    x = nd.random.normal(shape=(2, 3, 6, 6))
    net = nn.HybridSequential()
    net.add(Residual(relu), nn.BatchNorm(in_channels=3), nn.Activation("relu"))
    convert(net, fuse=True)
    net.initialize()
    net.hybridize()
    with autograd.record():
        net(x).backward()
    summary(net)
    data = mx.sym.var("data")
    convert(SymbolBlock(net(data), data, params=net.collect_params()))
    revert(net)(x)
    assert not copies

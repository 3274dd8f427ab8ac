"""Layers in the bodies of F.contrib.foreach, while_loop and cond, and the attributes of MXNet's graphs."""

import json

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn
from nets import filled, imported
from replicas import forward_and_backward, ready

from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, assert_synchronised, convert, revert, summary
from gluon_syncbn.mxnet_side.nodes import is_ours, json_of, walk
from gluon_syncbn.mxnet_side.recording import running_graph
from gluon_syncbn.system.arguments import value_of

LOOPS = {
    "foreach": lambda F, run, x: F.contrib.foreach(lambda row, state: (run(row), state + 1), x, F.zeros((1,)))[0],
    "while_loop": lambda F, run, x: F.contrib.while_loop(
        lambda i, _: i < 2, lambda i, y: (run(y), (i + 1, 2 * y)), (F.zeros((1,)), x), max_iterations=2
    )[0][0],
    "cond": lambda F, run, x: F.contrib.cond(F.sum(x) > -1e9, lambda: run(x), lambda: 2 * x),
}
IMAGE = (3, 3, 4, 4)  # a foreach runs over the first axis of several

# A loop hands its arrays on without a type.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments:UserWarning")


class Loop(nn.HybridBlock):
    """A layer outside of the body, and twice the same in it."""

    def __init__(self, kind):
        super().__init__()
        self._kind = kind
        with self.name_scope():
            self.before, self.within = SyncBatchNorm(in_channels=3), SyncBatchNorm(in_channels=3, scale=False)

    def hybrid_forward(self, F, x):
        x = self.before(x)
        return LOOPS[self._kind](F, lambda y: self.within(self.within(y) * 3 + 1), x)


def data(kind, contexts):
    shape = (2, *IMAGE) if kind == "foreach" else IMAGE
    return [nd.random.normal(2, 3, shape=shape, ctx=context) for context in contexts]


def operators(symbol):
    return [node["op"] for _, _, node in walk(json_of(symbol)) if node["op"] in ("BatchNorm", "Custom")]


@pytest.mark.parametrize("kind", LOOPS)
def test_a_file_has_plain_operators_of_which_layers_become(kind, contexts, tmp_path):
    net, (x,) = filled(Loop(kind), contexts[:2], "float32"), data(kind, contexts[:1])
    net.hybridize()
    y = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    assert operators(net._cached_graph[1]) == ["Custom"] * 3
    if kind == "foreach":  # nodes are numbered in the whole graph
        nodes = [node["attrs"] for _, _, node in walk(running_graph(net, x)[2]) if is_ours(node)]
        numbers = [[of["node"] for of in nodes if of["layer"] == layer] for layer in {of["layer"] for of in nodes}]
        assert sorted(numbers) == [["0"], ["0", "1"]]

    graph = imported(tmp_path / "net", ctx=contexts[:2])
    text = graph._cached_graph[1].tojson()
    for one in (text, net._cached_graph[1].tojson()):
        assert "Custom" not in one and "gluon_syncbn" not in one.replace("__gluon_syncbn__", "")
        assert operators(mx.sym.load_json(one)) == ["BatchNorm"] * 3
    with pytest.raises(AssertionError, match="3 of 3 layers of batch normalisation are not synchronised"):
        assert_synchronised(graph)
    assert_synchronised(convert(graph))
    nodes = [node["attrs"] for _, _, node in walk(running_graph(graph, x)[2]) if is_ours(node)]
    assert sorted((of["layer"], of["node"]) for of in nodes) == sorted((of["layer"], "0") for of in nodes)
    assert "3, synchronised: 3" in repr(summary(graph, show=False))
    np.testing.assert_allclose(graph(x).asnumpy(), y, rtol=1e-5, atol=1e-5)
    assert operators(revert(graph)._cached_graph[1]) == ["BatchNorm"] * 3
    assert json.loads(graph._cached_graph[1].tojson()) == json.loads(text)
    np.testing.assert_allclose(graph(x).asnumpy(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [SyncBatchNorm, SyncBatchNormAdd])
def test_no_file_of_a_second_input_in_a_body(contexts, norm):
    class Net(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return LOOPS["foreach"](F, lambda y: self.norm(y, F.ones(IMAGE[norm is SyncBatchNorm :])), x)

    net = Net()
    net.norm = norm(in_channels=3)
    ready(net, contexts=contexts[:1], way="hybrid")(*data("foreach", contexts[:1]))
    with pytest.raises(ValueError, match=r"batchnorm\w*_fwd: a mask or an addend was given in the body of"):
        net._cached_graph[1].tojson()


@pytest.mark.parametrize("kind", LOOPS)
def test_no_gradient_of_a_body(kind, contexts):
    """MXNet has none for any BatchNorm there. On two contexts, a loop waits for its condition before the second one is
    called.
    """
    net, xs = filled(Loop(kind), contexts[:2], "float32"), data(kind, contexts[:2])
    net.hybridize()
    with pytest.raises(mx.MXNetError, match=r"batchnorm1: MXNet cannot compute the gradient of"):
        with autograd.record():
            [net(x) for x in xs]
    if kind == "foreach":  # the others read their conditions, and one thread cannot call both contexts
        net.hybridize(False)
        forward_and_backward(net, xs)
        assert all(np.isfinite(net.within.beta.grad(context).asnumpy()).all() for context in contexts[:2])


def test_a_body_updates_the_running_statistics_in_each_run(contexts):
    """MXNet does not order the operators of a static graph that write them."""
    found = []
    for flags in ({"active": False}, {"static_alloc": True, "static_shape": True}):
        net = filled(Loop("foreach"), contexts[:2], "float32")
        net.hybridize(**flags)
        mx.random.seed(3)
        for xs in (data("foreach", contexts[:2]) for _ in range(2)):
            with autograd.train_mode():
                ys = [net(x * nd.array([1, 9], ctx=x.ctx).reshape((2, 1, 1, 1, 1))) for x in xs]
            [y.wait_to_read() for y in ys]
        found += [net.within.running_mean.data(ctx).asnumpy() for ctx in contexts[:2]]
    np.testing.assert_allclose(found, found[:1] * 4, rtol=1e-5)


# ---- attributes ------------------------------------------------------------------------------------------------


def test_values():
    values = {"1": 1, "True": True, "true": True, " TRUE ": True, "false": False, "0": 0}
    values.update({"(3, 3)": (3, 3), "None": None, "1e-05": 1e-5, "-1": -1, "relu": "relu", "": "", "f,x": "f,x"})
    assert {text: value_of(text) for text in values} == values

"""Nets for the tests of what changes nets: a table, values that follow from names, and what a graph and a file hold."""

import functools
import weakref
import zlib
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from gluoncv.nn.block import BatchNormCudnnOff
from mxnet import gluon, nd
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from replicas import assert_near, on_devices, step_of_net

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side.blocks import PARAMETERS
from gluon_syncbn.mxnet_side.nodes import json_of

#: Nets whose layers have recorded a graph that lives.
SOURCES = weakref.WeakKeyDictionary()
SAMPLE = (3, 7, 7)  # the shape of one, which all of these nets take


class Residual(nn.HybridBlock):
    """A model as people write them: attributes, nested blocks, lists and dicts of its own children."""

    def __init__(self, norm=nn.BatchNorm, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(nn.Conv2D(4, 3, padding=1, in_channels=3), norm(in_channels=4))
            self.conv = nn.Conv2D(4, 3, padding=1, in_channels=4)
            self.norm = norm(epsilon=1e-3, momentum=0.75, in_channels=4)
            self.branches = []
            for _ in range(2):
                branch = nn.HybridSequential()
                branch.add(norm(in_channels=4, scale=False), nn.Conv2D(2, 1, in_channels=4))
                self.register_child(branch)
                self.branches.append(branch)
            self.by_name = {"norm": self.norm, "all": (self.norm, [self.norm])}

    def hybrid_forward(self, F, x):
        x = self.stem(x)
        x = x + self.by_name["norm"](self.conv(x))
        return F.concat(*[branch(x) for branch in self.branches], dim=1)


def shared(norm=nn.BatchNorm, **kwargs):
    """One layer in several places, and another one on its parameters."""
    net = nn.HybridSequential(**kwargs)
    with net.name_scope():
        one = norm(in_channels=3)
        net.add(one, nn.HybridSequential(), nn.Conv2D(3, 1, in_channels=3), one)
        net.add(nn.Conv2D(3, 1, in_channels=3), norm(in_channels=3, params=one.collect_params()))
    net[1].add(one)
    return net


def body(norm=nn.BatchNorm, **kwargs):
    """Three layers, of which one has no gamma and two stand side by side."""
    net = nn.HybridSequential(**{"prefix": "net_", **kwargs})
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3, use_bias=False), norm(in_channels=4, prefix="one_"))
        net.add(nn.Activation("relu"), norm(in_channels=4, epsilon=1e-3, momentum=0.75, prefix="two_"))
        net.add(nn.Activation("relu"), nn.Conv2D(5, 2, in_channels=4, use_bias=False))
        net.add(norm(in_channels=5, scale=False, prefix="three_"))
    return net


def recorded(norm=nn.BatchNorm, dtype="float64", **kwargs):
    """The graph of `body`, on parameters of its own."""
    data, source = mx.sym.var("data", dtype=dtype), body(norm, **kwargs)
    graph = gluon.SymbolBlock(source(data), data)
    SOURCES[graph] = source
    return graph


def symbols(norm=mx.sym.BatchNorm, **settings):
    """As somebody writes them. The gamma of the second layer does not count."""
    y = mx.sym.Convolution(mx.sym.var("data"), num_filter=4, kernel=(3, 3), no_bias=True, name="conv0")
    y = norm(y, name="bn0", eps=1e-4, momentum=0.7, fix_gamma=False, **settings)
    y = mx.sym.Convolution(mx.sym.relu(y), num_filter=5, kernel=(2, 2), no_bias=True, name="conv1")
    return norm(y, name="bn1", fix_gamma=True, **settings)


def written(norm=mx.sym.BatchNorm, prefix="", **settings):
    """A graph of symbols, which have no prefix."""
    return gluon.SymbolBlock(symbols(norm, **settings), mx.sym.var("data", dtype="float64"))


class Twice(nn.HybridBlock):
    """Each use of the graph is a node of its own."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def hybrid_forward(self, F, x):
        return self.block(x) + self.block(2 * x * x)


class Operates(nn.HybridBlock):
    """Calls MXNet's operator on parameters of its own, and holds no layer."""

    def __init__(self, names=PARAMETERS, **kwargs):
        super().__init__(**kwargs)
        for attribute, name in zip(PARAMETERS, names):
            given = {"shape": (3,), "init": "ones", "differentiable": not attribute.startswith("running")}
            setattr(self, attribute, self.params.get(name, **given))

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return F.BatchNorm(x, gamma, beta, running_mean, running_var, fix_gamma=False, name="called")


def within(block, hybrid):
    net = nn.HybridSequential()
    net.add(block)
    net.hybridize(hybrid)
    return net


def contrib(**kwargs):
    return ContribSyncBatchNorm(num_devices=2, **kwargs)


def filled(net, contexts, dtype="float64", sample=SAMPLE):
    """Parameters unlike their initial values, the same for the same places in a net, and gammas unlike 1."""
    net.initialize(ctx=contexts, force_reinit=True)
    net.cast(dtype)
    if any(parameter._deferred_init for parameter in net.collect_params().values()):
        zeros = (mx.np if mx.util.is_np_array() else nd).zeros
        net(zeros((1, *sample), ctx=contexts[0], dtype=dtype))
    for name, parameter in net._collect_params_with_prefix().items():
        parameter.set_data(drawn(name, parameter.shape))
    return net


def drawn(name, shape):
    """The values of a parameter."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    return rng.rand(*shape) + 0.5 if name.endswith(("gamma", "var")) else rng.randn(*shape) * 0.5


def shards(sizes=(2, 3), shape=SAMPLE):
    """Of different size and distribution on each device."""
    rng = np.random.RandomState(1)
    return [rng.randn(size, *shape) * (1 + k) + k for k, size in enumerate(sizes)]


def step_on(net, contexts, dtype="float64"):
    """Outputs, gradients and running statistics of a step with the same whole batch, on one context or on two."""
    xs, cuts = shards(), [len(shards()[0])] if len(contexts) > 1 else []
    whole = np.concatenate(xs)

    def heads(ys):
        drawn = np.random.RandomState(2).randn(len(whole), *ys[0].shape[1:]) + 0.3
        return on_devices(np.split(drawn, cuts), contexts, dtype)

    found = step_of_net(net, on_devices(np.split(whole, cuts), contexts, dtype), heads)
    fixed = {name for name, p in net.collect_params().items() if name.endswith("gamma") and p.grad_req == "null"}
    return {name: value for name, value in found.items() if name not in fixed}


def assert_one_device(net, plain, contexts, tolerance=1e-9):
    """A step of `net` on two contexts is that of `plain` on the first, with the whole batch."""
    assert_near(step_on(net, contexts[:2]), step_on(plain, contexts[:1]), tolerance)


# ---- the table -------------------------------------------------------------------------------------------------


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

    def __getstate__(self):
        return [vars(self)]

    def __setstate__(self, state):
        vars(self).update(*state)


def single(norm=nn.BatchNorm, **kwargs):
    return norm(in_channels=3, epsilon=1e-3, momentum=0.75, **kwargs)


def by_pixel(in_channels, **kwargs):
    return nn.BatchNorm(in_channels=7, axis=-1, center=False, **kwargs)


def graph_used_twice(norm=nn.BatchNorm, **kwargs):
    return Twice(recorded(norm, **kwargs))


class Kind(NamedTuple):
    """Of a net: with `norm` it is converted, and with `plain` it is what that is compared with."""

    make: Callable[..., Any]
    norm: Any = nn.BatchNorm
    plain: Any = nn.BatchNorm
    dtype: str = "float64"  # contrib's layer and that with a ReLU take float32 alone


NETS = {
    "a model": Kind(Residual),
    "shared layers": Kind(shared),
    "without cuDNN": Kind(
        single, functools.partial(BatchNormCudnnOff, scale=False), functools.partial(nn.BatchNorm, scale=False)
    ),
    "a subclass of that": Kind(single, WithoutCudnn),
    "by another name": Kind(single, lambda in_channels, **kwargs: ByAnotherName(in_channels, **kwargs)),
    "other settings": Kind(single, by_pixel, by_pixel),
    "a ReLU": Kind(single, nn.BatchNormReLU, nn.BatchNormReLU, "float32"),
    "with a state": Kind(single, WithState),
    "contrib's": Kind(single, contrib, dtype="float32"),
    "a graph": Kind(recorded),
    "a graph of ReLUs": Kind(
        functools.partial(recorded, dtype="float32"), nn.BatchNormReLU, nn.BatchNormReLU, "float32"
    ),
    "a graph of contrib's": Kind(functools.partial(recorded, dtype="float32"), contrib, dtype="float32"),
    "a graph of ours": Kind(recorded, SyncBatchNorm),
    "a graph used twice": Kind(graph_used_twice),
    "symbols": Kind(written, gluon_syncbn.symbol.SyncBatchNorm, mx.sym.BatchNorm),
}


def made(kind, contexts, plain=False):
    """Two of a kind have the same names and values."""
    make, norm, other, dtype = NETS[kind]
    with mx.name.NameManager():
        return filled(make(other if plain else norm, prefix="net_"), contexts, dtype)


def as_it_is(net):
    return net


@functools.lru_cache(maxsize=None)
def plain_step(kind, context, change):
    return step_on(change(made(kind, [context], plain=True)), [context], NETS[kind].dtype)


def assert_as_plain(net, kind, contexts, change=as_it_is):
    """A step of a net on two contexts is that of the plain one of its kind on one of them."""
    got, want = step_on(net, contexts[:2], NETS[kind].dtype), plain_step(kind, contexts[0], change)
    if kind in ("shared layers", "a graph used twice"):  # whose update of running statistics comes first is not said
        got, want = ({n: v for n, v in one.items() if "running" not in n} for one in (got, want))
    assert_near(got, want, 1e-9 if NETS[kind].dtype == "float64" else 1e-4)


def an_input(kind, context, size=2):
    return nd.random.normal(1, 2, shape=(size, *SAMPLE), ctx=context).astype(NETS[kind].dtype)


def operators(net):
    """Of a symbol, or of the graph of a block."""
    symbol = net if isinstance(net, mx.sym.Symbol) else net._cached_graph[1]
    return [node["op"] for node in json_of(symbol)["nodes"] if node["op"] != "null"]


def imported(path, epoch=0, **kwargs):
    return gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-{epoch:04d}.params", **kwargs)

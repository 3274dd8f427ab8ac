"""Blocks that are recomputed: the same step, with the statistics of the first forward."""

import copy
import functools
import gc
import re
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import NETS, Operates, assert_as_plain, filled, made
from replicas import forward_and_backward, in_threads, make_batch, on_devices, ready

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert, recompute, revert
from gluon_syncbn.mxnet_side.blocks import iterate

SHAPE = (3, 5, 3)  # of a sample
recompute_no_more = functools.partial(recompute, active=False)


def make_net(contexts, **settings):
    """Two blocks of layers whose order matters; outputs of convolutions are in oneDNN's layout."""
    net = nn.Sequential()
    for _ in range(2):
        inner, unit = nn.HybridSequential(), nn.HybridSequential()
        inner.add(nn.Conv2D(3, 3, padding=1, in_channels=3), SyncBatchNorm(in_channels=3, **settings))
        unit.add(inner, nn.Activation("tanh"), nn.Conv2D(3, 1, in_channels=3), SyncBatchNorm(in_channels=3, **settings))
        net.add(unit)
    return filled(net, contexts, "float32", SHAPE)


class Calls(Operates):
    """Of which no trace with symbols tells."""

    def forward(self, x):
        return self.hybrid_forward(nd, x, *[one.data() for one in self._reg_params.values()])


def make_data(contexts):
    batch = make_batch(np.random.RandomState(2), len(contexts), channels=3, spatial=SHAPE[1:])
    return [on_devices(arrays, contexts, "float32") for arrays in (batch.shards, batch.heads)]


def assert_close(got, want):
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5 * np.abs(b).max())


# ---- steps -------------------------------------------------------------------------------------------------


def one_thread_each(net, xs, heads):
    """As GluonCV calls a net."""
    ys = [None] * len(xs)

    def call(i):
        with autograd.record():
            ys[i] = net(xs[i])

    for x in xs:
        x.attach_grad()
    in_threads(call, len(xs))
    autograd.backward(ys, heads)
    return ys


def used_twice(net, xs, heads):
    """Parameters that others use too: MXNet adds their gradients."""
    return forward_and_backward(lambda x: net(net(x)), xs, heads)


def predicted(net, xs, heads):
    """The block is called as it is, but for the gradient with running statistics."""
    unrecorded = [net(x) for x in xs]
    for x in xs:
        x.attach_grad()
    with autograd.record(train_mode=False):
        ys = [net(x) for x in xs]
    autograd.backward(ys, heads, train_mode=False)
    return unrecorded + ys


def meanwhile(happens):
    """What is issued before the second forward is nothing that it may see."""

    def step(net, xs, heads):
        def heads_of(ys):
            nd.waitall()
            if "forward" in vars(net[0]):
                happens(net, xs, ys, heads)
            return heads

        return forward_and_backward(net, xs, heads_of)

    return step


def another_batch(net, xs, ys, heads):
    xs[0][:] = 7


def other_layers(net, xs, ys, heads):
    convert(revert(net))
    gc.collect()


def frozen_weights(net, xs, ys, heads):
    net.collect_params(".*weight").setattr("grad_req", "null")


#: The number of replicas and of steps, the step, and settings of layers.
STEPS = {
    "one, hybrid": (1, 3, forward_and_backward),
    "two": (2, 3, forward_and_backward),
    "four, hybrid": (4, 3, forward_and_backward),
    "within each other": (2, 3, forward_and_backward),
    "a copy": (2, 1, forward_and_backward),
    "one thread each": (2, 3, one_thread_each),
    "used twice": (2, 3, used_twice),
    "used twice, added": (2, 3, used_twice),
    "predicted": (2, 1, predicted),
    "local": (4, 1, forward_and_backward, {"mode": "local", "virtual_devices": 2}),
    "shuffle": (4, 1, forward_and_backward, {"mode": "shuffle", "virtual_devices": 2}),
    "groups": (4, 1, forward_and_backward, {"group_size": 2}),
    "another backward": (2, 1, meanwhile(lambda _, xs, ys, heads: autograd.backward(ys, heads, retain_graph=True))),
    "another batch": (2, 1, meanwhile(another_batch)),
    "other layers": (2, 1, meanwhile(other_layers)),
    "frozen weights": (2, 1, meanwhile(frozen_weights)),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_trains_as_without(contexts, name):
    """With a trainer that waits for nothing. One net takes the steps twice, because permutations depend on a layer's
    number.
    """
    replicas, steps, step, *given = STEPS[name]
    contexts = contexts[:replicas]
    net, found = make_net(contexts, **dict(*given)), []
    net.collect_params(".*(weight|bias|gamma|beta)").setattr("grad_req", "add" if "added" in name else "write")
    for active in (False, True):
        gluon_syncbn.configure(seed=3)
        for unit in net:
            assert recompute(unit, active=active) is unit
            unit.hybridize("hybrid" in name)
        if name == "within each other":
            recompute(net[0][0], active=active)
        one = filled(copy.deepcopy(net) if name == "a copy" else net, contexts, "float32", SHAPE)
        parameters = one.collect_params().values()
        gradients = [array for p in parameters if p.grad_req != "null" for array in p.list_grad()]
        trainer = gluon.Trainer(one.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.5})
        xs, heads = make_data(contexts)
        for number in range(steps):
            ys = step(one, xs, heads)
            if number + 1 < steps:
                trainer.step(sum(map(len, xs)))
        nd.waitall()
        arrays = [*ys, *[x.grad for x in xs], *gradients, *[array for p in parameters for array in p.list_data()]]
        found.append([array.asnumpy() for array in arrays])
    assert_close(*reversed(found))


BEFORE, AFTER = (recompute, convert), (convert, recompute, recompute)


@pytest.mark.parametrize("kind, changes", [*((kind, BEFORE) for kind in NETS), ("a model", AFTER), ("a graph", AFTER)])
def test_any_net_converted_before_and_after(kind, changes, contexts):
    """It leaves names alone, and a net that is as it was."""
    net = made(kind, contexts[:2])
    names, before = list(net._collect_params_with_prefix()), [(one, type(one), set(vars(one))) for one in iterate(net)]
    for change in changes:
        change(net)
    assert_as_plain(net, kind, contexts)
    assert "forward" in vars(net) and list(net._collect_params_with_prefix()) == names
    recompute_no_more(revert(net))
    assert all(set(vars(one)) == attributes for one, cls, attributes in before if type(one) is cls)


# ---- random operators --------------------------------------------------------------------------------------


class Scheduled(nn.HybridBlock):
    """Drops a half where one of its rates says so, or where it trains."""

    def __init__(self, change):
        super().__init__()
        self.rates, self.by_mode, self.traces = {"own": 0}, change == "the mode", []
        self.drop = recompute(nn.Dropout(0)) if change == "a nested layer's rate" else nn.Dropout(0)

    def hybrid_forward(self, F, x):
        self.traces += [F] if F is mx.sym else []
        if self.rates["own"] or (self.by_mode and autograd.is_training()):
            x = F.Dropout(x, p=0.5)
        return self.drop(x)


RATES = ["a layer's rate", "a rate of its own", "the mode"]


@pytest.mark.parametrize(
    "change, hybrid", [*((change, way) for change in RATES for way in (False, True)), ("a nested layer's rate", False)]
)
def test_dropout_draws_the_same_mask(contexts, change, hybrid):
    """Also where its rate rises after the first step."""
    block, x = recompute(Scheduled(change)), nd.random.uniform(1, 2, shape=(3, 4, 17, 9))
    x.attach_grad()
    for rate in (0, 0.5, 0.4):
        if change.endswith("layer's rate"):
            block.drop._rate = rate
        elif change == "a rate of its own":
            block.rates["own"] = rate
        block.hybridize(hybrid)  # a graph has the rates of its recording
        with autograd.record(train_mode=rate > 0):
            y = block(x)
        y.backward()
        share = rate if change.endswith("layer's rate") else 0.5 * (rate > 0)
        assert share * 0.8 <= (y.asnumpy() == 0).mean() <= share * 1.2
        np.testing.assert_allclose(x.grad.asnumpy(), (y / x).asnumpy(), rtol=1e-5)
    assert hybrid or "nested" in change or len(block.traces) == 2  # a rate that changes in each step costs no more


@pytest.mark.parametrize("anew", [False, True], ids=["kept", "anew"])
def test_threads_draw_masks_of_their_own(contexts, anew):
    """On each context and at each call; the threads live on, or are new at each call, as GluonCV's are."""
    net = recompute(nn.Dropout(0.5))
    pools = [ThreadPoolExecutor(1) for _ in contexts[:3]]

    def call(i):
        with autograd.record():
            masks[-1].append((i, (net(nd.ones(100, ctx=contexts[i])).asnumpy() != 0).tolist()))

    masks = []
    for seed in (5, 5, 6):
        mx.random.seed(seed)
        masks.append([])
        for _ in range(3):
            if anew:
                in_threads(call, 3)
            else:
                [future.result() for future in [pool.submit(call, i) for i, pool in enumerate(pools)]]
        masks[-1].sort(key=lambda mask: mask[0])
    different = {str(mask) for of_seed in masks for _, mask in of_seed}
    assert masks[0] == masks[1] and len(different) == 18
    masks[:] = [[], []]
    for i in range(2):  # the seed of one context gives it the numbers of a process that has this context alone
        mx.random.seed(5, ctx=contexts[i])
        call(i)
    assert masks[1][0][1] == masks[1][1][1]


# ---- arguments, results, use -------------------------------------------------------------------------------


class Rows(nn.Block):
    """Takes a number, and no array."""

    def __init__(self):
        super().__init__()
        self.table = self.params.get("table", shape=(6, 1, 1, 1), init="ones")

    def forward(self, count):
        return self.table.data()[:count]


class Structured(nn.Block):
    """Takes and returns more than an array; one output is not used, one is an input, one has no gradient."""

    def __init__(self, change):
        super().__init__()
        self.norm, self.rows, self.places = SyncBatchNorm(in_channels=3), change(Rows()), []
        self.scale = self.params.get("scale", shape=(1,), init="ones")
        self.unused = self.params.get("unused", shape=(1,), init="ones")
        change(self)

    def forward(self, a, more, factor):
        self.places.append(mx.current_context())
        b = more["b"][0] * factor * self.rows(len(a)).as_in_context(a.context)
        y = self.norm(a + b) * self.scale.data(a.context)
        return {"y": [y, a], "n": nd.array([1], ctx=a.context, dtype="int32"), "spare": self.norm(b)}


def test_arguments_and_results_of_any_structure(contexts):
    """And the second forward has the current context of the first, where numbers are drawn without `ctx=`."""
    found = []
    for change in (lambda block: block, recompute):
        block = ready(Structured(change), contexts=contexts[:2])
        xs, heads = make_data(contexts[:2])
        bs = [x * 2 for x in xs]
        for array in (*xs, *bs):
            array.attach_grad()
        with autograd.record():
            outs = [block(x, {"b": (b,)}, 3) for x, b in zip(xs, bs)]
            sums = [out["y"][0] + out["y"][1] for out in outs]
        assert outs[0]["n"].asscalar() == 1
        autograd.backward(sums, heads)
        assert (block.unused.grad(contexts[0]).asnumpy() == 0).all()
        arrays = [*[out["y"][0] for out in outs], *[array.grad for array in (*xs, *bs)], *block.scale.list_grad()]
        found.append([array.asnumpy() for array in (*arrays, block.rows.table.grad(contexts[0]))])
        assert block.places == contexts[:1] * (4 if change is recompute else 2)
    assert_close(*reversed(found))


def test_a_replica_without_samples(contexts):
    (xs, heads), found = make_data(contexts[:2]), []
    net = nn.HybridSequential()
    net.add(nn.Dense(3, flatten=False, in_units=3), SyncBatchNorm(in_channels=3))
    filled(net, contexts[:2], "float32", SHAPE).hybridize()
    with mx.util.np_shape(True):
        xs[0], heads[0] = (nd.zeros((0, *SHAPE), ctx=contexts[0]) for _ in range(2))
        for change in (recompute_no_more, recompute):
            change(net)
            with autograd.record():  # MXNet computes no gradient of an input without samples
                ys = [net(x) for x in xs]
            autograd.backward(ys, heads)
            found.append([array.asnumpy() for array in (ys[1], *net[0].weight.list_grad())])
    assert_close(*reversed(found))


def test_a_shallow_copy():
    block, ones = recompute(nn.Lambda(lambda x: x * 2)), nd.ones(1)
    twin = copy.copy(block)
    twin._func_impl = lambda x: x * 5
    with autograd.record():
        assert [one(ones).asscalar() for one in (block, twin, block)] == [2, 5, 2]


def record(net, context):
    with autograd.record():
        return net(nd.ones((2, *SHAPE), ctx=context))


def test_what_cannot_be_computed_twice(contexts):
    net = make_net(contexts[:1])
    unit = recompute(net[0])
    unit.hybridize(static_alloc=True)
    with pytest.raises(ValueError, match="expected no static_alloc"):
        record(net, contexts[0])
    unit.hybridize(False)
    revert(unit)
    with pytest.raises(ValueError, match=re.escape("expected SyncBatchNorm, which alone can repeat a forward")):
        record(net, contexts[0])
    with autograd.record(train_mode=False):
        net(nd.ones((2, *SHAPE), ctx=contexts[0])).wait_to_read()
    gluon_syncbn.freeze(unit)
    record(net, contexts[0]).wait_to_read()


def test_an_operator_of_batch_normalisation_is_no_layer(contexts):
    operates, data = ready(Operates(), contexts=contexts[:1]), mx.sym.var("data", dtype="float32")
    in_a_graph = gluon.SymbolBlock(operates(data), data, params=operates.collect_params())
    within = nn.Sequential()
    within.add(in_a_graph)
    for block in (operates, in_a_graph, within):
        recompute(block)
        with pytest.raises(ValueError, match=r"holds '\w*called\w*', expected SyncBatchNorm"):
            record(block, contexts[0])
    convert(within)
    recompute(in_a_graph, active=False)
    record(within, contexts[0]).wait_to_read()
    untold = ready(recompute(Calls()), contexts=contexts[:1])
    with pytest.raises(ValueError, match=r"hands '\w*running_mean' to an operator, expected SyncBatchNorm"):
        record(untold, contexts[0])


def test_a_hybridized_block_cannot_hold_it(contexts):
    net = ready(SyncBatchNorm(in_channels=3), nn.Activation("tanh"), contexts=contexts[:1])
    recompute(net[0])
    net.hybridize()
    with pytest.raises(mx.MXNetError, match="cannot be part of a hybridized block: hybridize each"):
        record(net, contexts[0])
    recompute(net[0], active=False)
    record(net, contexts[0]).wait_to_read()
    recompute(net[0])  # within a graph that is there
    with pytest.raises(mx.MXNetError, match="cannot be part of a hybridized block: hybridize each"):
        record(net, contexts[0])


class Changes(nn.Block):
    """Another forward the second time, on one of two devices."""

    def __init__(self, change):
        super().__init__()
        self.calls, self.change = 0, change
        self.first, self.second = SyncBatchNorm(in_channels=3), SyncBatchNorm(in_channels=3)

    def forward(self, x):
        self.calls += x.context == mx.cpu(1)
        y = self.first(x)
        if self.calls != 2 or x.context != mx.cpu(1):
            return self.second(y) if self.change == "fewer" else y
        if self.change == "raises":
            raise RuntimeError("not again")
        if self.change == "more":
            self.first(x)
        if self.change == "outputs":
            return y, x
        return self.second(x) if self.change == "parameter" else y


CHANGED = {
    "raises": "RuntimeError: not again",
    "fewer": "called 1 layer of SyncBatchNorm fewer",
    "more": "called 1 layer of SyncBatchNorm more",
    "outputs": "had 2 outputs, the first 1",
    "parameter": "used the parameter",
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_forward_the_second_time_is_an_error(contexts, change):
    """It releases the other replica, which waits for the gradients of the one that failed."""
    block = recompute(ready(Changes(change), contexts=contexts[:2]))
    xs, heads = make_data(contexts[:2])
    forward_and_backward(block, xs, heads)
    for x in xs:
        with pytest.raises(mx.MXNetError, match=f"was computed again.*{CHANGED[change]}"):
            x.grad.asnumpy()
    block.calls = 3
    forward_and_backward(block, xs, heads)  # the next step is none the worse
    assert all(np.isfinite(x.grad.asnumpy()).all() for x in xs)

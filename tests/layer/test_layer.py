"""What a layer is beside its numbers, and numbers of uses, modes and nets that test_cases.py does not draw."""

import copy
import gc
import inspect
import pickle
import sys
import time

import mxnet as mx
import numpy as np
import pytest
import replicas
from environments import ended
from gate import Gate
from internals import WHY_CUSTOM, core, exchange_of, replicas_of
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import Twice
from places import SUPPORT
from poolings import POOLINGS, specification
from replicas import WAYS, assert_same, make_batch, on_devices, prepare, ready, step, truth

import gluon_syncbn
from gluon_syncbn import ShuffleBatchNorm, SyncBatchNorm, SyncBatchNormAdd, convert, recompute
from gluon_syncbn.mxnet_side import op
from gluon_syncbn.training.replicas import Replicas


@pytest.mark.skipif("bfloat16" not in replicas.ON_CPUS, reason="MXNet has no bfloat16 on GPUs")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spatial, axis", [((33, 37), 1), ((3, 5), -1)], ids=str)
def test_bfloat16_is_rounded_once(contexts, rng, spatial, axis, way):
    """Each value is one that is next to the exact one, also where the data have an offset."""
    batch = make_batch(rng, 3, spatial=spatial, axis=axis, dtype="bfloat16", offset=20)
    layer = prepare(SyncBatchNorm(axis=axis, in_channels=5), batch, contexts[:3], "bfloat16", WAYS[way])
    got, want = step(layer, batch, contexts, "bfloat16"), specification(layer, batch)
    assert layer.gamma.dtype == "float32"
    for name in ("outputs", "dxs"):
        for one, exact in zip(getattr(got, name), getattr(want, name)):
            assert (one == replicas.rounded(one, "bfloat16")).all()
            assert (np.abs(one - exact) <= 2.0**-8 * np.abs(exact) + 1e-5 * np.abs(exact).max()).all()
    nothing = {"outputs": [], "dxs": []}
    assert_same(got._replace(**nothing), want._replace(**nothing), replicas.TOLERANCE["float32"])


def test_settings_are_read_and_shown():
    plain = repr(nn.BatchNorm(in_channels=3))[len("BatchNorm(") : -1]
    given = {"virtual_devices": 4, "groups": [[0, 2], [1]], "activation": "leaky", "slope": 0.2, "timeout": 5.0}
    layer = SyncBatchNorm(in_channels=3, running_variance="unbiased", **given)
    copies = layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    assert len({replicas_of(one).id for one in copies}) == 3
    for one in copies:
        assert repr(one) == (
            f"SyncBatchNorm({plain}, activation='leaky', slope=0.2, running_variance='unbiased', virtual_devices=4, "
            "groups=((0, 2), (1,)), timeout=5.0)"
        )
    assert (layer.mode, layer.group_size, layer.num_devices, layer.timeout) == ("sync", None, None, 5.0)
    for norm, name in ((ShuffleBatchNorm, "mode"), (SyncBatchNormAdd, "activation")):  # as `help` shows it
        assert inspect.signature(norm).parameters[name].default == getattr(norm(virtual_devices=2), name)
    with pytest.raises(ValueError, match="mode: 'sync' was given, expected 'shuffle'; SyncBatchNorm has the other"):
        ShuffleBatchNorm(mode="sync")


PICKLED = """
import pickle
import light
import mxnet as mx
x, want, net = pickle.load(open("net", "rb"))
assert (net(x) - want).abs().max().asscalar() < 1e-6
contexts = [mx.cpu(0), mx.cpu(1)]
net.collect_params().reset_ctx(contexts)
with mx.autograd.record():
    ys = [net(x.as_in_context(context)) for context in contexts]
mx.autograd.backward(ys)
assert all((gradient == 16).asnumpy().all() for gradient in net[2].beta.list_grad())
for parameter in net.collect_params(".*running_mean").values():
    mean, other = (array.asnumpy() for array in parameter.list_data())
    assert (mean == other).all() and abs(mean).max() > 0
"""


def test_a_pickled_net_in_another_process(contexts, tmp_path):
    net, x = gluon.nn.HybridSequential(), nd.random.normal(shape=(4, 3, 2, 2))
    net.add(nn.BatchNorm(in_channels=3), nn.BatchNorm(in_channels=3), ShuffleBatchNorm(in_channels=3))
    for layer in convert(net):
        recompute(layer)
    net.initialize(ctx=contexts[:1])
    gluon.Trainer(net.collect_params(), "sgd")  # which the parameters hold
    (tmp_path / "net").write_bytes(pickle.dumps((x, net(x), net)))
    ended([sys.executable, "-W", "ignore", "-c", PICKLED], SUPPORT, code=0, cwd=tmp_path)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("channels", [0, 3])
def test_a_layer_that_is_gone_leaves_nothing(contexts, channels, hybrid):
    """Also one of several that share parameters. A symbol outlives its net."""

    def made(params=None):
        net = nn.HybridSequential(prefix="shared_", params=params)
        with net.name_scope():
            net.add(SyncBatchNorm(in_channels=channels))
        net.hybridize(hybrid)
        return net

    def count():
        mx.nd.waitall()
        gc.collect()
        return core.layers(), len(Replicas.by_id), len(Replicas.placed())

    before = count()
    first = made()
    first.initialize(ctx=contexts[:2])
    for net in (first, *(made(first.collect_params()) for _ in range(3))):
        ys = replicas.forward_and_backward(net, [mx.nd.ones((2, 3), ctx=context) for context in contexts[:2]])
    del net, ys
    assert count() == tuple(number + 1 for number in before)
    data = mx.sym.var("data", dtype="float32")
    graph, parameters = made(first.collect_params())(data), first.collect_params()
    del first
    assert count()[1] == before[1] + 1, "that of the symbol"
    block = gluon.SymbolBlock(graph, [data], parameters)
    with autograd.train_mode():
        ys = [block(mx.nd.ones((2, 3), ctx=context)) for context in contexts[:2]]
    assert all((y.asnumpy() == 0).all() for y in ys)
    del block, graph, parameters, ys
    assert count() == before


def test_a_layer_with_a_kvstore_is_copied_and_not_pickled():
    layer = SyncBatchNorm(in_channels=3, kvstore="device")
    assert exchange_of(copy.deepcopy(layer)) is exchange_of(layer)
    assert exchange_of(SyncBatchNorm(kvstore="device")) is exchange_of(layer), "MXNet's stores stay"
    with pytest.raises(TypeError, match=r"cannot be pickled, nor can a layer.*net.save_parameters"):
        pickle.dumps(layer)


def test_eager_calls_have_a_number_in_place_of_their_attributes(monkeypatch):
    given, custom = [], op.ARRAYS.Custom
    noted = lambda *args, **kwargs: given.append(kwargs) or custom(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(op.ARRAYS, "Custom", noted)
    layer = ready(gluon_syncbn.SyncBatchNorm(in_channels=3))
    for frozen in (False, True, False):
        layer._kwargs["use_global_stats"] = frozen
        with autograd.record():
            y = layer(mx.nd.ones((2, 3)))
        y.wait_to_read()
        with pytest.raises(mx.MXNetError, match="eager calls of a SyncBatchNorm"):
            autograd.get_symbol(y).tojson()
    assert all(set(kwargs) == {"op_type", "call"} for kwargs in given)
    first, second, third = [kwargs["call"] for kwargs in given]
    assert len({first, second, third}) == 3, "each of its settings"


def test_a_schedule_of_the_momentum_keeps_few_calls(rng):
    layer = ready(gluon_syncbn.SyncBatchNorm(in_channels=3, gamma_initializer=mx.init.Constant(1.5)))
    x, head, found = *(mx.nd.array(rng.normal(2, 3, (4, 3))) for _ in range(2)), []
    x.attach_grad()
    for change in (0, 300):  # a forward whose call is forgotten before its backward
        with autograd.record():
            y = layer(x)
        for part in range(change):
            layer._kwargs["momentum"] = 0.9 - part / 1000
            with autograd.record():
                layer(x)
        y.backward(head)
        found.append(x.grad.asnumpy())
    assert len(replicas_of(layer).now()[1]) == 1
    assert np.array_equal(*found) and np.abs(found[0]).max() > 0.1


# ---- modes and slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["sync", "local, 2 slots", "shuffle, 2 slots", "groups of 2"])
def test_same_bits_whatever_the_order_of_arrival(contexts, rng, pooling):
    batch = make_batch(rng, 4, dtype="float32", spatial=(9, 7))
    layer = prepare(SyncBatchNorm(in_channels=5, **POOLINGS[pooling]), batch, contexts[:4], "float32")

    def run(order):
        gluon_syncbn.configure(seed=3)
        moved = batch._replace(**{name: [getattr(batch, name)[i] for i in order] for name in ("shards", "heads")})
        got = step(layer, moved, [contexts[i] for i in order], "float32")
        back = {name: [getattr(got, name)[i] for i in np.argsort(order)] for name in ("outputs", "dxs")}
        return got._replace(**back, running_mean=[], running_var=[])

    first = run(range(4))
    for _ in range(4):
        replicas.assert_same_bits(run(rng.permutation(4)), first)


@pytest.mark.parametrize(
    "settings, places, shape, said",
    [
        ({"mode": "shuffle", "virtual_devices": 4}, 1, (1, 5), "had 1 slot with values in this step, expected"),
        ({"axis": -2, "mode": "local", "virtual_devices": 2}, 1, (5, 4), "along axis 0, but here that is the channel"),
        ({"groups": [[0, 2], [1, 3]]}, 4, (2, 5), "groups name 4 replicas, but 2 take part in this step"),
    ],
    ids=str,
)
def test_what_turns_out_in_a_step(contexts, settings, places, shape, said):
    layer = ready(SyncBatchNorm(in_channels=5, **settings), contexts=contexts[:places])
    with pytest.raises(mx.MXNetError, match=said), gluon_syncbn.only_on(contexts[: min(places, 2)]), autograd.record():
        ys = [layer(nd.ones(shape, ctx=context)) for context in contexts[: min(places, 2)]]
        ys[0].asnumpy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pooling", ["sync", "local, 2 slots", "shuffle, 2 slots", "groups of 2"])
def test_a_layer_that_is_used_often(contexts, rng, pooling, way):
    """Twice in a forward, in three forwards before a backward, call by call or one replica after the other."""
    shapes = [(4, 6), (4, 6), (3, 7)][: 2 if way == "static_shape" else 3]
    batches = [make_batch(rng, 4, spatial=spatial) for spatial in shapes]
    batches = [batch._replace(gamma=batches[0].gamma, beta=batches[0].beta) for batch in batches]
    layer = prepare(SyncBatchNorm(in_channels=5, **POOLINGS[pooling]), batches[0], contexts[:4], "float64")
    net = Twice(layer)
    net.hybridize(**WAYS[way])
    for turn in range(4):
        xs, heads = ([on_devices(batch[k], contexts, "float64") for batch in batches] for k in (0, 1))
        places = [(call, i) for call in range(len(batches)) for i in range(4)]
        places.sort(key=lambda place: place[turn % 2])
        for call, i in places:
            xs[call][i].attach_grad()
        with autograd.record():
            ys = {(call, i): net(xs[call][i]) for call, i in places}
        autograd.backward([ys[place] for place in places], [heads[call][i] for call, i in places])
        dgamma = 0
        for call, batch in enumerate(batches):
            number = turn * len(batches) + call
            draws = [{"call": 2 * number + use} if way == "eager" else {"call": number, "node": use} for use in (0, 1)]
            second = batch._replace(shards=[2 * x * x for x in batch.shards])
            uses = [specification(layer, one, **draw) for one, draw in zip((batch, second), draws)]
            for i, x in enumerate(batch.shards):
                y, dx = uses[0].outputs[i] + uses[1].outputs[i], uses[0].dxs[i] + 4 * x * uses[1].dxs[i]
                np.testing.assert_allclose(ys[call, i].asnumpy(), y, rtol=0, atol=1e-10)
                np.testing.assert_allclose(xs[call][i].grad.asnumpy(), dx, rtol=0, atol=1e-9)
            dgamma = dgamma + uses[0].dgamma + uses[1].dgamma
        np.testing.assert_allclose(sum(g.asnumpy() for g in layer.gamma.list_grad()), dgamma, rtol=1e-9)


MEMORY = """
import light, gluon_syncbn
gluon_syncbn.cpu_devices(1)
from mxnet import autograd, nd
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
xs = [nd.random.normal(shape=(8, 64, 32, 32)) for _ in range(20)]
for x in xs:
    x.attach_grad()
for settings in ({}, {"mode": "local", "virtual_devices": 8}, {"mode": "shuffle", "virtual_devices": 8}):
    layer = gluon_syncbn.SyncBatchNorm(in_channels=64, **settings)
    layer.initialize()
    nd.waitall()
    with autograd.record():
        layer(xs[0]).wait_to_read()
        before, kept = resident(), []
        for x in xs:
            kept.append(layer(x).sum())
            nd.waitall()
    print((resident() - before) / (20 * xs[0].size * 4))
    del kept
"""


def test_no_mode_keeps_more_than_its_input():
    """What a call leaves for its backward beside that, in multiples of it, measured on the process: nothing or,
    through MXNet's `Custom`, the copy that guards it."""
    guards = 1 if WHY_CUSTOM else 0
    # From this size on glibc returns what is freed to the system; by itself it raises the limit above an array's.
    run = ended([sys.executable, "-W", "ignore", "-c", MEMORY], SUPPORT, code=0, MALLOC_MMAP_THRESHOLD_=65536)
    kept = [float(line) for line in run.stdout.splitlines()]
    assert len(kept) == 3
    assert all(guards - 0.5 < multiple < guards + 0.5 for multiple in kept), kept


# ---- nets and training loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", [5, 0])
@pytest.mark.parametrize(
    "places, settings, said, fitting",
    [
        ((0, 0), {}, r"^ctx: .*'bn' are on \w+\(0\), \w+\(0\), expected each .* virtual_devices has", (0, 1)),
        ((0,), {"num_devices": 2}, "^num_devices: 2 .*expected None or 1, .*'bn'.* contrib's .* would wait", (0, 1)),
        ((0, 1), {"num_devices": 1}, r"^num_devices: 1 .*expected None or 2, .* on \w+\(0\), \w+\(1\)\.$", (1,)),
        ((0, 1, 2), {"group_size": 2}, "^group_size: 2 was given, expected", (0, 1)),
        ((0, 1, 2), {"groups": [[0, 3], [1, 2]]}, "^groups: 4 replicas were given, expected", (0, 1, 2, 3)),
        ((0,), {"mode": "shuffle"}, "^virtual_devices: 1 was given, expected at least 2", (0, 1)),
    ],
    ids=str,
)
def test_contexts_that_do_not_fit(contexts, rng, way, channels, places, settings, said, fitting):
    """The thread that trains gets the error. The layer predicts, and trains after it was moved."""
    batch, places, fitting = make_batch(rng, len(fitting)), *([contexts[i] for i in some] for some in (places, fitting))
    layer = ready(SyncBatchNorm(in_channels=channels, prefix="bn_", **settings), contexts=places, way=way)
    x = nd.array(batch.shards[0], ctx=contexts[0])
    for _ in range(2):  # also with a graph that has predicted
        with pytest.raises(ValueError, match=said), autograd.record():
            layer(x)
        np.testing.assert_allclose(layer(x).asnumpy(), x.asnumpy(), rtol=1e-5, atol=1e-5)
    layer.collect_params().reset_ctx(fitting)
    prepare(layer, batch, fitting, "float64", WAYS[way])
    draw = {"node": -1 if way == "eager" else 0}
    assert_same(step(layer, batch, fitting, "float64"), specification(layer, batch, **draw), 1e-11)
    layer.collect_params().reset_ctx(places)
    with pytest.raises((ValueError, mx.MXNetError), match=said.strip("^$")), autograd.record():
        layer(x.astype("float64")).asnumpy()  # a graph that has trained calls no Python code


def test_parameters_are_put_where_they_are(rng, contexts):
    """While a step is on its way, as by a `DataParallelModel` made behind one: who has come still meets who comes."""
    batch, contexts = make_batch(rng, 2), contexts[:2]
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64")
    xs, gate = on_devices(batch.shards, contexts, "float64"), Gate()
    with autograd.record():
        ys = [layer(gate.behind(xs[0])), layer(xs[1])]
        time.sleep(0.2)  # until the second waits
        layer.collect_params().reset_ctx(contexts)
        gate.open()
    for y, expected in zip(ys, truth(batch).outputs):
        np.testing.assert_allclose(y.asnumpy(), expected, rtol=0, atol=1e-11)


class Unordered(nn.HybridBlock):
    """One layer behind two convolutions that nothing puts in order."""

    def __init__(self, wide):
        super().__init__()
        with self.name_scope():
            self.convs = [nn.Conv2D(wide, 1, groups=32, in_channels=wide, use_bias=False) for _ in range(2)]
            self.norm = SyncBatchNorm(in_channels=wide)
            for conv in self.convs:
                self.register_child(conv)

    def hybrid_forward(self, F, *xs):
        return sum(self.norm(conv(x)) for conv, x in zip(self.convs, xs))


def test_a_graph_that_uses_a_layer_twice(contexts, rng):
    """The engine does not know that the operators which MXNet keeps write running statistics."""
    places, data = contexts[:2], [rng.normal(mean, mean + 1, (4, 4096, 1, 1)) for mean in (0, 5)]
    net = Unordered(4096)
    net.initialize(mx.init.Normal(1), ctx=places)
    first, second = (conv(nd.array(x)).asnumpy().var((0, 2, 3)) for conv, x in zip(net.convs, data))
    net.hybridize(static_alloc=True, static_shape=True)
    parts = list(zip(*(gluon.utils.split_and_load(x, places) for x in data)))
    for turn in range(60):
        net.norm.running_var.set_data(nd.ones(4096))
        with autograd.record():
            ys = [net(*part) for part in parts]
        autograd.backward(ys)
        got = [array.asnumpy() for array in net.norm.running_var.list_data()]  # without a wait for the step
        np.testing.assert_allclose(got[0], 0.9 * (0.9 + 0.1 * first) + 0.1 * second, rtol=1e-4)
        assert np.array_equal(*got), turn


@pytest.mark.skipif(bool(WHY_CUSTOM), reason="the guards of Custom have no second derivative either")
@pytest.mark.parametrize("way", ["eager", "hybrid"])  # MXNet itself refuses static_alloc
def test_a_second_derivative(contexts, rng, way):
    """A gradient penalty is MXNet's error. One derivative is right, and so is the next step."""
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:2], "float64", WAYS[way])
    xs, heads = on_devices(batch.shards, contexts, "float64"), on_devices(batch.heads, contexts, "float64")
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = [layer(x) for x in xs]
        dxs = autograd.grad(ys, xs, heads, create_graph=True, retain_graph=True)
        penalties = [(dx**2).sum() for dx in dxs]
    want = truth(batch)
    for got, dx in zip(dxs, want.dxs):
        np.testing.assert_allclose(got.asnumpy(), dx, atol=1e-11 * np.abs(dx).max())
    with pytest.raises(mx.MXNetError, match="_backward_Custom is non-differentiable"):
        autograd.backward(penalties)
    assert_same(step(layer, batch, contexts, "float64"), truth(batch, steps=2), 1e-10)

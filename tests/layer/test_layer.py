"""N devices with the layer are one device with nn.BatchNorm on the concatenated batch."""

import copy
import gc
import inspect
import pickle
import sys

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from internals import core, exchange_of, replicas_of
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from places import SUPPORT
from poolings import specification
from replicas import (
    ON_CPUS,
    TOLERANCE,
    WAYS,
    assert_same,
    assert_same_bits,
    forward_and_backward,
    make_batch,
    on_devices,
    prepare,
    rounded,
    step,
    truth,
)

import gluon_syncbn
from gluon_syncbn import ShuffleBatchNorm, SyncBatchNorm, SyncBatchNormAdd, convert, freeze, recompute
from gluon_syncbn.exchange import agreement
from gluon_syncbn.mxnet_side import op
from gluon_syncbn.training.replicas import Replicas


@pytest.mark.skipif("bfloat16" not in ON_CPUS, reason="MXNet has no bfloat16 on GPUs")
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
            assert (one == rounded(one, "bfloat16")).all()
            assert (np.abs(one - exact) <= 2.0**-8 * np.abs(exact) + 1e-5 * np.abs(exact).max()).all()
    nothing = {"outputs": [], "dxs": []}
    assert_same(got._replace(**nothing), want._replace(**nothing), TOLERANCE["float32"])


def test_empty_shards_everywhere(contexts):
    with mx.util.np_shape(True):
        layer = SyncBatchNorm(in_channels=5)
        layer.initialize(ctx=contexts[:2])
        with pytest.raises(mx.MXNetError, match="empty"):
            with autograd.record():
                ys = [layer(nd.zeros((0, 5, 4, 6), ctx=c)) for c in contexts[:2]]
            for y in ys:
                y.wait_to_read()


def test_settings_are_read_and_shown():
    plain = repr(nn.BatchNorm(in_channels=3))[len("BatchNorm(") : -1]
    given = {"virtual_devices": 4, "groups": [[0, 2], [1]], "activation": "leaky", "slope": 0.2, "timeout": 5.0}
    layer = SyncBatchNorm(in_channels=3, running_variance="unbiased", **given)
    assert repr(layer) == (
        f"SyncBatchNorm({plain}, activation='leaky', slope=0.2, running_variance='unbiased', virtual_devices=4, "
        "groups=((0, 2), (1,)), timeout=5.0)"
    )
    assert (layer.mode, layer.group_size, layer.num_devices, layer.timeout) == ("sync", None, None, 5.0)
    for norm, name in ((ShuffleBatchNorm, "mode"), (SyncBatchNormAdd, "activation")):  # as `help` shows it
        assert inspect.signature(norm).parameters[name].default == getattr(norm(virtual_devices=2), name)
    with pytest.raises(ValueError, match="mode: 'sync' was given, expected 'shuffle'; SyncBatchNorm has the other"):
        ShuffleBatchNorm(mode="sync")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copied_net_trains_on_its_own(contexts, rng, copied):
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=7), batch, contexts[:2], "float64")
    twin = copied(layer)
    assert replicas_of(twin).id != replicas_of(layer).id and repr(twin) == repr(layer) and twin.timeout == 7
    twin.collect_params().reset_ctx(contexts[:2])  # a copied array has no gradient
    want = truth(batch)
    for net in (twin, layer):
        assert_same(step(net, batch, contexts, "float64"), want, 1e-11)


PICKLED = """
import pickle
import gluon_syncbn_first
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
    ran = ended([sys.executable, "-W", "ignore", "-c", PICKLED], SUPPORT, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_processes_compare_the_present_settings():
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize()
    twin = copy.deepcopy(layer)
    for one, other in ((layer, twin), (twin, layer)):
        freeze(one)
        one._kwargs["eps"] = 0.5
        shown, untouched = (agreement.described(replicas_of(net))[1] for net in (one, other))
        assert "use_global_stats True" in shown and "eps 0.5" in shown and "eps 0.5" not in untouched
        freeze(one, active=False)
        one._kwargs["eps"] = 1e-5


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
        return core.layers(), len(Replicas.by_id), len(Replicas.placed)

    before = count()
    first = made()
    first.initialize(ctx=contexts[:2])
    for net in (first, *(made(first.collect_params()) for _ in range(3))):
        ys = forward_and_backward(net, [mx.nd.ones((2, 3), ctx=context) for context in contexts[:2]])
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


@pytest.mark.skipif("bfloat16" not in ON_CPUS, reason="MXNet has no bfloat16 on GPUs")
def test_bfloat16_in_what_is_done_with_nets(contexts, rng):
    """`recompute` computes again what it computed, and `update_bn_stats` takes the values that the layer is given."""
    batch = make_batch(rng, 2, dtype="bfloat16")
    results = []
    for active in (False, True):
        layer = prepare(SyncBatchNorm(in_channels=5, activation="leaky"), batch, contexts[:2], "bfloat16")
        gluon_syncbn.recompute(layer, active)
        results.append(step(layer, batch, contexts, "bfloat16"))
    assert_same_bits(*results)
    gluon_syncbn.recompute(layer, False)
    gluon_syncbn.update_bn_stats(layer, [on_devices(batch.shards, contexts, "bfloat16")])
    values = np.concatenate(batch.shards).astype("float64")
    np.testing.assert_allclose(layer.running_mean.data(contexts[1]).asnumpy(), values.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(layer.running_var.data(contexts[0]).asnumpy(), values.var((0, 2, 3)), rtol=1e-5)


def test_eager_calls_have_a_number_in_place_of_their_attributes(monkeypatch):
    given, custom = [], op.ARRAYS.Custom
    noted = lambda *args, **kwargs: given.append(kwargs) or custom(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(op.ARRAYS, "Custom", noted)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
    layer.initialize()
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
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, gamma_initializer=mx.init.Constant(1.5))
    layer.initialize()
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

"""`inplace=True`: of x and y, the backward has y alone. That it computes the same is tested in test_activation.py and
test_native.py.
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import Trainer, nn
from poolings import specification
from replicas import TOLERANCE, WAYS, assert_same, collect, forward_and_backward, make_batch, on_devices, prepare, step

from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, convert, summary
from gluon_syncbn.activation import BatchNormAdd

LEAKY = {"activation": "leaky", "inplace": True}
#: How gamma is initialised, by how it comes to be 0.
GAMMAS = {"zeros": "zeros", "Zero": mx.init.Zero(), "Constant": mx.init.Constant(0), "deferred": "zeros"}
GAMMAS.update(set="ones", loaded="ones")


@pytest.mark.parametrize("behind", [{"inplace": True}, LEAKY], ids=["none", "leaky"])
def test_x_is_not_needed(contexts, rng, behind):
    """Whatever becomes of it after the forward: MXNet may free it."""
    batch = make_batch(rng, 2, dtype="float32")
    layer = prepare(SyncBatchNorm(in_channels=5, **behind), batch, contexts[:2], "float32")
    xs, heads = on_devices(batch.shards, contexts, "float32"), on_devices(batch.heads, contexts, "float32")
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = [layer(x) for x in xs]
    for x in xs:
        x[:] = np.nan
    autograd.backward(ys, heads)
    got = collect(layer, ys, [x.grad for x in xs], contexts[:2])
    assert_same(got, specification(layer, batch), 20 * TOLERANCE["float32"])


@pytest.mark.on_gpus
@pytest.mark.parametrize("gamma, beta", [(1e-6, 1), (1e-41, 0), (np.nan, 0)])
@pytest.mark.parametrize("training", [True, False], ids=["batch", "running"])
def test_a_gamma_that_hides_x(contexts, rng, gamma, beta, training):
    """Prediction goes on; a gradient there is none."""
    batch = make_batch(rng, 2, dtype="float32")
    batch.gamma[3], batch.beta[3] = gamma, beta
    layer = prepare(SyncBatchNorm(in_channels=5, prefix="deep_", **LEAKY), batch, contexts[:2], "float32", {})
    xs = on_devices(batch.shards, contexts, "float32")
    for x in xs:
        x.attach_grad()
    with autograd.record(train_mode=training):
        ys = [layer(x) for x in xs]
    nd.waitall()
    autograd.backward(ys, on_devices(batch.heads, contexts, "float32"))
    said = r"'deep' on \w+\(.\): no gradient: gamma of channel 3 is too small, .*inplace"
    with pytest.raises(mx.MXNetError, match=said):
        nd.waitall()


@pytest.mark.parametrize("way", ["eager", "hybrid", "static_alloc"])
@pytest.mark.parametrize("begin", GAMMAS)
def test_a_gamma_that_begins_at_0(contexts, rng, capsys, tmp_path, begin, way):
    """As at the end of residual blocks. The layer keeps x, and trains on when gamma has left 0."""
    batch, places = make_batch(rng, 2, dtype="float32"), contexts[:2]
    xs, heads = on_devices(batch.shards, places, "float32"), on_devices(batch.heads, places, "float32")
    found = []
    for inplace in (True, False):
        layer = nn.BatchNorm(gamma_initializer=GAMMAS[begin], in_channels=0 if begin in ("deferred", "loaded") else 5)
        layer = convert(layer, inplace=inplace)
        layer.initialize(ctx=places)
        if begin == "set":
            layer.gamma.set_data(nd.array([1, 1, 0, 1, 1]))
        if begin == "loaded":
            zeros = {name: nd.zeros(5) for name in ("gamma", "beta", "running_mean", "running_var")}
            nd.save(str(tmp_path / "zeros"), zeros)
            layer.load_parameters(str(tmp_path / "zeros"), ctx=places)
        if WAYS[way] is not None:
            layer.hybridize(**WAYS[way])
        summary(layer)
        before = "not in place, because gamma begins at 0" in capsys.readouterr().out
        trainer = Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.1})
        for _ in range(3):
            forward_and_backward(layer, xs, heads)
            trainer.step(1)
        summary(layer)
        after = "not in place, because gamma begins at 0" in capsys.readouterr().out
        assert before == after == inplace
        found.append([layer.gamma.data(places[0]).asnumpy(), *(x.grad.asnumpy() for x in xs)])
    assert np.abs(found[0][0]).min() > 1e-3
    for got, want in zip(*found):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("gamma, beta", [(3e-6, 1), (-3e-6, -1), (1e-30, 0)])
def test_a_gamma_that_just_does(contexts, rng, gamma, beta):
    batch = make_batch(rng, 2, dtype="float32")
    batch.gamma[3], batch.beta[3] = gamma, beta
    layer = prepare(SyncBatchNorm(in_channels=5, inplace=True), batch, contexts[:2], "float32")
    got, want = step(layer, batch, contexts, "float32"), specification(layer, batch)
    assert np.abs(got.dgamma - want.dgamma)[3] <= 1 / 32 * np.abs(batch.heads[0]).sum()
    for a, b in zip(got.dxs, want.dxs):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_a_fixed_gamma_beside_a_large_beta(contexts, rng):
    batch = make_batch(rng, 2, dtype="float16")
    batch.beta[3] = 100
    layer = prepare(SyncBatchNorm(in_channels=5, scale=False, inplace=True), batch, contexts[:2], "float16")
    with pytest.raises(mx.MXNetError, match="no gradient: gamma of channel 3 is too small"):
        step(layer, batch, contexts, "float16")


@pytest.mark.parametrize("dtype, slope, gamma", [("float16", 1e-6, 0.5), ("float32", 1e-30, 1e-7)])
def test_a_slope_that_hides_x(contexts, rng, dtype, slope, gamma):
    """Its product is below what the type can hold."""
    batch = make_batch(rng, 2, dtype=dtype)
    batch.gamma[:], batch.beta[:] = gamma, 0
    layer = SyncBatchNorm(in_channels=5, activation="leaky", slope=slope, inplace=True)
    prepare(layer, batch, contexts[:2], dtype)
    with pytest.raises(mx.MXNetError, match="no gradient: gamma of channel 0 is too small"):
        step(layer, batch, contexts, dtype)


@pytest.mark.parametrize("make, given, expected", [
    (SyncBatchNorm, {"inplace": True, "activation": "relu"}, "inplace: True was given, expected False: .*'relu'"),
    (SyncBatchNormAdd, LEAKY, "inplace: True was given, expected False: .* addition"),
    (SyncBatchNorm, {"inplace": True, "mode": "shuffle"}, "inplace: True .* expected False with mode='shuffle'"),
    (convert, {"net": nn.BatchNorm(), "inplace": True, "mode": "shuffle"}, "inplace: True .* with mode='shuffle'"),
])  # fmt: skip
def test_what_cannot_be_found_again_is_refused(make, given, expected):
    with pytest.raises(ValueError, match=expected):
        make(**given)


@pytest.mark.parametrize("make", [nn.BatchNormReLU, BatchNormAdd, SyncBatchNorm])
def test_convert_passes_over_what_is_not_invertible(make):
    """And over what is synchronised already."""
    assert not convert(make(in_channels=3), inplace=True).inplace

"""Positions that do not count: `layer(x, mask)` against the specification."""

import json
import re

import mxnet as mx
import numpy as np
import pytest
from masks import make_masks, masked_step
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock, nn
from poolings import specification
from replicas import (
    WAYS,
    make_batch,
    on_devices,
    prepare,
    short_waits,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd

# ---- nothing counts ----------------------------------------------------------------------------------------


def test_nothing_counts_at_all(contexts, rng):
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(), batch, contexts[:2], "float64")
    with pytest.raises(mx.MXNetError, match="all replicas are empty or masked, so there is no mean"):
        masked_step(layer, batch, [mask * 0 for mask in make_masks(rng, batch)], contexts, "float64")


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5, 4, 6), (2, 4), (5,), (3, 4, 6), (2, 4, 1, 6), (4, 6)], ids=str)
def test_another_shape_is_an_error(contexts, shape):
    x, mask = nd.ones((2, 5, 4, 6), ctx=contexts[0]), nd.ones(shape, ctx=contexts[0])
    layer = SyncBatchNorm(in_channels=5)
    layer.initialize(ctx=contexts[:1])
    text = f"the mask has the shape {shape} and the data (2, 5, 4, 6); expected (2, 1, 4, 6) or (2, 4, 6) of the mask"
    for hybridized in (False, True):
        layer.hybridize(hybridized)
        with pytest.raises(mx.MXNetError, match=re.escape(text)), short_waits(), autograd.train_mode():
            layer(x, mask)


@pytest.mark.parametrize("cls, inputs", [(SyncBatchNorm, 1), (SyncBatchNormAdd, 2)])
def test_an_input_behind_the_mask_is_refused(contexts, cls, inputs):
    x, mask = nd.ones((2, 5), ctx=contexts[0]), nd.ones((2, 1), ctx=contexts[0])
    layer = cls(in_channels=5, prefix="bn_")
    layer.initialize(ctx=contexts[:1])
    with pytest.raises(TypeError, match="SyncBatchNorm 'bn': hybrid_forward has no argument behind the mask"):
        layer(*[x] * inputs, mask, x)


# ---- nets --------------------------------------------------------------------------------------------------


class Padded(HybridBlock):
    """Of sequences, the elements beyond a length do not count."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.conv, self.norm, self.residual = nn.Conv1D(6, 3, padding=1), SyncBatchNorm(), SyncBatchNormAdd()

    def hybrid_forward(self, F, x, mask):
        x = self.conv(x)
        y = self.residual(F.relu(self.norm(x, mask)), x, mask)
        return F.broadcast_mul(y, F.expand_dims(mask, axis=1))


@pytest.mark.parametrize("way", ["hybrid", "static_alloc"])
@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")  # SymbolBlock.imports
def test_what_becomes_of_a_net(contexts, rng, way, tmp_path):
    """Prediction, export, freeze and summary of a net whose layers take masks."""
    batch = nd.array(rng.randn(4, 3, 8)), nd.array(np.arange(8) < rng.randint(1, 9, (4, 1)), dtype="float32")
    net = Padded()
    net.initialize(mx.init.Xavier(), ctx=contexts[:1])
    with autograd.record():  # which moves the running statistics
        net(*batch)
    want = net(*batch).asnumpy()
    ignored = net(batch[0], nd.ones_like(batch[1])).asnumpy() * batch[1].asnumpy()[:, None]
    np.testing.assert_allclose(want, ignored, rtol=1e-6)  # the mask is not among what predicts
    net.hybridize(**WAYS[way])
    np.testing.assert_allclose(net(*batch).asnumpy(), want, rtol=1e-5, atol=1e-6)
    net.export(str(tmp_path / "net"))
    operators = {node["op"] for node in json.loads((tmp_path / "net-symbol.json").read_text())["nodes"]}
    assert "BatchNorm" in operators and "Custom" not in operators
    loaded = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data0", "data1"], str(tmp_path / "net-0000.params"), ctx=contexts[0]
    )
    np.testing.assert_allclose(loaded(*batch).asnumpy(), want, rtol=1e-5, atol=1e-6)
    gluon_syncbn.freeze(net)
    with autograd.record():
        np.testing.assert_allclose(net(*batch).asnumpy(), want, rtol=1e-5, atol=1e-6)


class Marked(HybridBlock):
    """Two layers under the mask that the data itself gives, and one without a mask."""

    def __init__(self, **settings):
        super().__init__()
        with self.name_scope():
            self.norm, self.residual = SyncBatchNorm(**settings), SyncBatchNormAdd(**settings)
            self.of_all = SyncBatchNorm(**settings)

    def hybrid_forward(self, F, x):
        mask = F.expand_dims(F.sum(x, axis=1), 1) > 0
        return self.residual(x, self.norm(x, mask), mask) + self.of_all(x, None)


@pytest.mark.parametrize("way", ["eager", "hybrid"])
def test_statistics_of_a_population(contexts, rng, way):
    """Those of what counts. One shard is padding alone."""
    batches = [[rng.randn(n, 5, 4, 6) * (1 + b) + k for k, n in enumerate((3, 2))] for b in range(3)]
    batches[1][0] = -np.abs(batches[1][0])
    net = Marked(in_channels=5)
    net.cast("float64")
    net.initialize(ctx=contexts[:2])
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    gluon_syncbn.update_bn_stats(net, [on_devices(batch, contexts, "float64") for batch in batches])
    counting = np.concatenate([x.swapaxes(0, 1)[:, x.sum(1) > 0] for batch in batches for x in batch], axis=1)
    everything = np.concatenate([x.swapaxes(0, 1).reshape(5, -1) for batch in batches for x in batch], axis=1)
    for layer, values in ((net.norm, counting), (net.residual, counting), (net.of_all, everything)):
        for context in contexts[:2]:
            np.testing.assert_allclose(layer.running_mean.data(context).asnumpy(), values.mean(1), rtol=1e-11)
            np.testing.assert_allclose(layer.running_var.data(context).asnumpy(), values.var(1), rtol=1e-11)


@pytest.mark.parametrize("settings", [{}, {"activation": "leaky"}, {"mode": "local"}], ids=str)
def test_in_a_module(contexts, rng, settings):
    batch = make_batch(rng, 2)._replace(shards=[rng.randn(3, 5, 4, 6) + k for k in range(2)])
    batch = batch._replace(heads=[rng.randn(3, 5, 4, 6) for _ in range(2)])
    masks = make_masks(rng, batch)
    data, mask = mx.sym.var("data"), mx.sym.var("mask")
    y = gluon_syncbn.symbol.SyncBatchNorm(data, mask=mask, name="bn", eps=1e-5, fix_gamma=False, **settings)
    module = mx.mod.Module(y, ["data", "mask"], None, context=contexts[:2])
    shapes = [mx.io.DataDesc("data", (6, 5, 4, 6), "float64"), mx.io.DataDesc("mask", (6, 4, 6), "float64")]
    module.bind(shapes, inputs_need_grad=True)
    given = {"bn_gamma": nd.array(batch.gamma, dtype="float64"), "bn_beta": nd.array(batch.beta, dtype="float64")}
    states = {"bn_moving_mean": nd.zeros(5, dtype="float64"), "bn_moving_var": nd.ones(5, dtype="float64")}
    module.init_params(arg_params=given, aux_params=states)
    whole = [nd.array(np.concatenate(arrays), dtype="float64") for arrays in (batch.shards, masks, batch.heads)]
    module.forward(mx.io.DataBatch(whole[:2]), is_train=True)
    module.backward(whole[2:])
    gradients = [sum(one.asnumpy() for one in parts) for parts in module._exec_group.grad_arrays]
    dx, of_mask = module.get_input_grads()
    want = specification(SyncBatchNorm(**settings), batch, masks=masks)
    pairs = [(module.get_outputs()[0], want.outputs), (dx, want.dxs)]
    for got, parts in pairs:
        np.testing.assert_allclose(got.asnumpy(), np.concatenate(parts), rtol=0, atol=1e-11)
    np.testing.assert_allclose(gradients, [want.dgamma, want.dbeta], rtol=1e-11)
    assert not of_mask.asnumpy().any()
    for parts, wanted in zip(module._exec_group.aux_arrays, (want.running_mean, want.running_var)):
        np.testing.assert_allclose([one.asnumpy() for one in parts], wanted, rtol=1e-11)


def test_a_misspelt_mask_is_refused():
    class Masked(SyncBatchNorm):
        def hybrid_forward(self, F, x, mask, **parameters):
            return super().hybrid_forward(F, x, masks=mask, **parameters)

    layer = Masked(in_channels=3, prefix="bn_")
    layer.initialize()
    with pytest.raises(TypeError, match="SyncBatchNorm 'bn': hybrid_forward has no argument masks"):
        layer(nd.ones((2, 3, 4)), nd.ones((2, 1, 4)))

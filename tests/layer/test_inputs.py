"""What a layer may have beside its data: positions that do not count, an addition, and an activation behind it."""

import json

import mxnet as mx
import numpy as np
import pytest
from masks import make_masks
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock
from poolings import specification
from replicas import WAYS, make_batch, on_devices, prepare, ready, short_waits

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, reference

ACTIVATIONS = {
    "none": {"activation": None},
    "relu": {"activation": "relu"},
    "relu6": {"activation": "relu6"},
    "leaky": {"activation": "leaky", "slope": 0.1},
}


def make(adds, **settings):
    return (SyncBatchNormAdd if adds else SyncBatchNorm)(in_channels=5, **settings)


# ---- errors ------------------------------------------------------------------------------------------------


EXPECTED = r"the mask has the shape .* and the data \(2, 5, 4, 6\); expected \(2, 1, 4, 6\) or \(2, 4, 6\) of the mask"


@pytest.mark.parametrize(
    "shape, adds, said",
    [
        *((shape, False, EXPECTED) for shape in ((2, 5, 4, 6), (2, 4), (5,), (3, 4, 6), (2, 4, 1, 6), (4, 6))),
        *((shape, True, "addend|[Ss]hape") for shape in ((2, 5, 4, 1), (2, 5, 4), (3, 5, 4, 6))),
    ],
    ids=str,
)
def test_another_shape_is_an_error(contexts, shape, adds, said):
    x, other = nd.ones((2, 5, 4, 6), ctx=contexts[0]), nd.ones(shape, ctx=contexts[0])
    layer = ready(make(adds), contexts=contexts[:1])
    for hybridized in (False, True):
        layer.hybridize(hybridized)
        with pytest.raises(mx.MXNetError, match=said), short_waits(), autograd.train_mode():
            layer(x, other).wait_to_read()


class Misspelt(SyncBatchNorm):
    def hybrid_forward(self, F, x, mask, **parameters):
        return super().hybrid_forward(F, x, masks=mask, **parameters)


@pytest.mark.parametrize(
    "cls, count, said",
    [(SyncBatchNorm, 3, "behind the mask"), (SyncBatchNormAdd, 4, "behind the mask"), (Misspelt, 2, "masks")],
)
def test_an_input_that_there_is_not_is_refused(cls, count, said):
    layer = ready(cls(in_channels=5, prefix="bn_"))
    with pytest.raises(TypeError, match=f"SyncBatchNorm 'bn': hybrid_forward has no argument {said}"):
        layer(*[nd.ones((2, 5))] * count)


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.on_gpus
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("behind", ACTIVATIONS)
def test_gradients_of_predictions_and_frozen_statistics(rng, contexts, adds, behind):
    batch, context, mean, var = make_batch(rng, 1), contexts[0], np.arange(5), np.arange(1, 6)
    batch = batch._replace(gamma=4 * batch.gamma)  # of outputs on both sides of 0 and of 6
    addends = [2 * rng.randn(*x.shape) for x in batch.shards]
    x, other, head = (on_devices(arrays, contexts, "float64")[0] for arrays in (batch.shards, addends, batch.heads))
    for use_global_stats in (False, True):
        layer = make(adds, use_global_stats=use_global_stats, **ACTIVATIONS[behind])
        prepare(layer, batch, [context], "float64", {})
        layer.running_mean.set_data(nd.array(mean, dtype="float64"))
        layer.running_var.set_data(nd.array(var, dtype="float64"))
        x.attach_grad()
        with autograd.record(train_mode=use_global_stats):
            y = layer(*([x, other] if adds else [x]))
        y.backward(head, train_mode=use_global_stats)
        forward = reference.forward(
            batch.shards, batch.gamma, batch.beta, mean, var, addends=addends if adds else None,
            use_global_stats=True, **layer._activation._asdict(),
        )  # fmt: skip
        gradients = reference.backward(batch.shards, batch.heads, batch.gamma, forward)
        np.testing.assert_allclose(y.asnumpy(), forward.outputs[0], atol=1e-10)
        np.testing.assert_allclose(x.grad.asnumpy(), gradients.dxs[0], atol=1e-10)
        np.testing.assert_allclose(layer.gamma.grad(context).asnumpy(), gradients.dgammas[0], rtol=1e-10)


# ---- nets --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("way", ["hybrid", "static_alloc"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")  # SymbolBlock.imports
def test_what_becomes_of_a_net(contexts, rng, activation, way, tmp_path):
    """Prediction, export as plain operators, and freeze."""
    net, x = Marked(in_channels=5, **ACTIVATIONS[activation]), nd.array(8 * rng.randn(4, 5, 8))
    net.initialize(ctx=contexts[:1])
    with autograd.record():  # which moves the running statistics
        net(x)
    want = net(x).asnumpy()
    net.hybridize(**WAYS[way])
    np.testing.assert_allclose(net(x).asnumpy(), want, rtol=1e-5, atol=1e-6)
    net.export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    operators = {node["op"] for node in json.loads((tmp_path / "net-symbol.json").read_text())["nodes"]}
    assert "BatchNorm" in operators and "Custom" not in operators
    loaded = mx.gluon.SymbolBlock.imports(*files, ctx=contexts[0])
    np.testing.assert_allclose(loaded(x).asnumpy(), want, rtol=1e-5, atol=1e-6)
    gluon_syncbn.freeze(net)
    with autograd.record():
        np.testing.assert_allclose(net(x).asnumpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"activation": "leaky"}, {"mode": "local"}], ids=str)
def test_in_a_module(contexts, rng, settings):
    whole = make_batch(rng, 1)._replace(gamma=np.ones(5), beta=np.zeros(5))
    batch = whole._replace(**{name: np.split(getattr(whole, name)[0], 2) for name in ("shards", "heads")})
    masks = make_masks(rng, batch)
    data, mask = mx.sym.var("data"), mx.sym.var("mask")
    y = gluon_syncbn.symbol.SyncBatchNorm(data, mask=mask, name="bn", eps=1e-5, fix_gamma=False, **settings)
    module = mx.mod.Module(y, ["data", "mask"], None, context=contexts[:2])
    shapes = [mx.io.DataDesc("data", (2, 5, 4, 6), "float64"), mx.io.DataDesc("mask", (2, 4, 6), "float64")]
    module.bind(shapes, inputs_need_grad=True)
    module.init_params()
    given = [nd.array(np.concatenate(arrays), dtype="float64") for arrays in (batch.shards, masks, batch.heads)]
    module.forward(mx.io.DataBatch(given[:2]), is_train=True)
    module.backward(given[2:])
    gradients = [sum(one.asnumpy() for one in parts) for parts in module._exec_group.grad_arrays]
    dx, of_mask = module.get_input_grads()
    want = specification(SyncBatchNorm(**settings), batch, masks=masks)
    for got, parts in ((module.get_outputs()[0], want.outputs), (dx, want.dxs)):
        np.testing.assert_allclose(got.asnumpy(), np.concatenate(parts), rtol=0, atol=1e-11)
    np.testing.assert_allclose(gradients, [want.dgamma, want.dbeta], rtol=1e-11)
    assert not of_mask.asnumpy().any()
    for parts, wanted in zip(module._exec_group.aux_arrays, (want.running_mean, want.running_var)):
        np.testing.assert_allclose([one.asnumpy() for one in parts], wanted, rtol=1e-11)

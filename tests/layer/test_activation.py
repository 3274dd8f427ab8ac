"""A layer with an activation, and with an addition before it."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn
from poolings import specification
from replicas import WAYS, make_batch, on_devices, prepare, step_of

from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, convert, reference, revert

ACTIVATIONS = {
    "none": {"activation": None},
    "relu": {"activation": "relu"},
    "relu6": {"activation": "relu6"},
    "leaky": {"activation": "leaky", "slope": 0.1},
}


def make(adds, **settings):
    return (SyncBatchNormAdd if adds else SyncBatchNorm)(in_channels=5, **settings)


@pytest.fixture
def batch(rng):
    """Of one or two replicas, with outputs on both sides of 0 and of 6."""

    def batch(replicas, dtype="float64"):
        made = make_batch(rng, replicas, dtype=dtype)
        return made._replace(gamma=4 * made.gamma), [2 * rng.randn(*x.shape) + k for k, x in enumerate(made.shards)]

    return batch


@pytest.mark.parametrize("behind, slope", [("relu", 1), ("relu6", 0), ("leaky", 1)])
def test_an_infinite_value_has_the_gradient_of_mxnet_s_operators(batch, contexts, behind, slope):
    """As float16 makes one by an overflow."""
    batch, addends = batch(2, "float32")
    addends[0].flat[0] = np.inf
    layer = prepare(make(True, **ACTIVATIONS[behind]), batch, contexts[:2], "float32")
    xs, others, heads = (on_devices(arrays, contexts, "float32") for arrays in (batch.shards, addends, batch.heads))
    got, daddends = step_of(layer, [xs, others], heads)
    assert daddends[0].flat[0] == np.float32(slope * batch.heads[0].flat[0])
    want = specification(layer, batch, addends=addends)
    for a, b in zip([*got.dxs, got.dbeta], [*want.dxs, want.dbeta]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    z = nd.array([np.inf])
    z.attach_grad()
    with autograd.record():
        layer._activation.apply(nd, z).backward()
    assert z.grad.asscalar() == slope


@pytest.mark.on_gpus
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("behind", ACTIVATIONS)
def test_gradients_of_predictions_and_frozen_statistics(batch, contexts, adds, behind):
    (batch, addends), context, mean, var = batch(1), contexts[0], np.arange(5), np.arange(1, 6)
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


@pytest.mark.parametrize("shape", [(2, 5, 4, 1), (2, 5, 4), (3, 5, 4, 6)], ids=str)
def test_an_addend_of_another_shape_is_refused(contexts, shape):
    layer = make(True)
    layer.initialize(ctx=contexts[:1])
    with autograd.record(), pytest.raises(mx.MXNetError, match=r"addend|[Ss]hape"):
        layer(nd.ones((2, 5, 4, 6)), nd.ones(shape)).wait_to_read()


def test_a_failed_step_leaves_no_gradient_of_the_addend(batch, contexts):
    batch, addends = batch(2)
    layer = prepare(make(True, timeout=0.3), batch, contexts[:2], "float64")
    x, other = nd.array(batch.shards[0], dtype="float64"), nd.array(addends[0], dtype="float64")
    other.attach_grad()
    with autograd.record():
        y = layer(x, other)
    y.backward()
    with pytest.raises(mx.MXNetError, match=layer.name):
        other.grad.wait_to_read()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("way", ["eager", "hybrid"])
@pytest.mark.parametrize("kind", ["nd", "np"])
def test_is_reverted_and_converted_again(request, batch, contexts, kind, way, adds, activation):
    if kind == "np":
        mx.npx.set_np()
        request.addfinalizer(mx.npx.reset_np)
    batch, addends = batch(1)
    layer = prepare(make(adds, **ACTIVATIONS[activation]), batch, contexts[:1], "float64", WAYS[way])
    given, array = [batch.shards[0], addends[0]] if adds else batch.shards, getattr(mx, kind).array
    inputs = [array(values, dtype="float64") for values in given]
    before, parameters, behind = layer(*inputs).asnumpy(), dict(layer.collect_params()), layer._activation
    revert(layer)
    assert not isinstance(layer, SyncBatchNorm)
    np.testing.assert_allclose(layer(*inputs).asnumpy(), before, rtol=1e-12, atol=1e-13)
    convert(layer)
    assert type(layer) is (SyncBatchNormAdd if adds else SyncBatchNorm) and layer._activation == behind
    assert dict(layer.collect_params()) == parameters
    np.testing.assert_allclose(layer(*inputs).asnumpy(), before, rtol=1e-12, atol=1e-13)


class End(nn.HybridBlock):
    """Of a residual block."""

    def __init__(self, **settings):
        super().__init__()
        with self.name_scope():
            self.bn = SyncBatchNormAdd(in_channels=3, **settings)

    def hybrid_forward(self, F, x):
        return self.bn(2 * x, x)


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_exported_as_plain_operators(contexts, tmp_path, activation):
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(3, 3, in_channels=3),
        SyncBatchNorm(in_channels=3, **ACTIVATIONS[activation]),
        End(**ACTIVATIONS[activation]),
    )
    net.initialize(ctx=contexts[:1])
    net.hybridize()
    x = 8 * nd.random.normal(shape=(2, 3, 4, 5))
    with autograd.record():
        net(x)
    want = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    assert '"Custom"' not in (tmp_path / "net-symbol.json").read_text()
    loaded = nn.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), "data", str(tmp_path / "net-0000.params"))
    np.testing.assert_allclose(loaded(x).asnumpy(), want, rtol=1e-5, atol=1e-6)

"""A layer with an activation, and with an addition before it."""

from contextlib import nullcontext
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn
from poolings import specification
from replicas import ON_CPUS, WAYS, Batch, make_affine, make_batch, on_devices, prepare, rounded, step_of

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, convert, reference, revert

SLOPE = 0.1  # float32 has no such number
ACTIVATIONS = {
    "none": {"activation": None},
    "relu": {"activation": "relu"},
    "relu6": {"activation": "relu6"},
    "leaky": {"activation": "leaky", "slope": SLOPE},
}
# whether something is added, and what stands behind it
CASES = [(adds, name) for adds in (False, True) for name in ACTIVATIONS]


@pytest.fixture
def case(rng):
    """A batch and addends whose values each type can hold, and whose outputs are on both sides of 0 and of 6."""

    def make(replicas, dtype="float64", **settings):
        batch = make_batch(rng, replicas, **settings)
        shards = [rounded(x, dtype).astype("float64") for x in batch.shards]
        batch = batch._replace(shards=shards, gamma=4 * batch.gamma)
        addends = [rounded(2 * rng.randn(*x.shape) + k, dtype).astype("float64") for k, x in enumerate(batch.shards)]
        return batch, addends

    return make


def make(adds, **settings):
    return (SyncBatchNormAdd if adds else SyncBatchNorm)(in_channels=5, epsilon=1e-3, **settings)


def step(layer, batch, addends, contexts, dtype, req="write", before=0.0):
    """One training step: `replicas.Result`, and the gradients of the addends."""
    inputs = [on_devices(batch.shards, contexts, dtype)]
    if isinstance(layer, SyncBatchNormAdd):
        inputs.append(on_devices(addends, contexts, dtype))
    return step_of(layer, inputs, on_devices(batch.heads, contexts, dtype), req, before)


def check(layer, batch, addends, contexts, dtype="float64", before=0.0, **settings):
    adds = isinstance(layer, SyncBatchNormAdd)
    given = {"addends": addends} if adds else {}
    # where rounding decides on which side of 0 or 6 a value is, that of a single one decides about its gradient
    near = 0 if dtype == "float64" else min(50 * ON_CPUS[dtype], 0.1)
    plain = specification_of_z(layer, batch, given, settings)
    clear = [(np.abs(z) > near) & (np.abs(z - layer._activation.ceiling) > near) for z in plain]
    if dtype == "bfloat16":  # of whose values one in a hundred is so near
        batch = batch._replace(heads=[head * sure for head, sure in zip(batch.heads, clear)])
    got, daddends = step(layer, batch, addends, contexts, dtype, "add" if before else "write", before)
    want = specification(layer, batch, **given, **settings)
    want = want._replace(dxs=[dx + before for dx in want.dxs])
    for name, value, expected in zip(got._fields, got, want):
        exact = dtype == "float64" or name in ("outputs", "running_mean", "running_var")
        loose = 1 if exact else 5 if dtype == "bfloat16" else 20
        scale = max(np.abs(part).max(initial=0) for part in expected)
        for i, (a, b) in enumerate(zip(value, expected)):
            sure = clear[i] if name == "dxs" else ...
            assert np.abs(a - b)[sure].max(initial=0) <= loose * ON_CPUS[dtype] * max(scale, 1), name
    if adds:
        heads = [head * np.where(z > 0, z < layer._activation.ceiling, layer._activation.slope)
                 for head, z in zip(batch.heads, plain)]  # fmt: skip
        for a, b, sure in zip(daddends, heads, clear):
            assert np.abs(a - b - before)[sure].max(initial=0) <= ON_CPUS[dtype] * np.abs(b).max(initial=0)


def expected(layer, batch, addends=None, mean=0.0, var=1.0, use_global_stats=True):
    """Outputs and gradients by the specification, by default with these running statistics."""
    forward = reference.forward(
        batch.shards, batch.gamma, batch.beta, np.zeros(5) + mean, np.zeros(5) + var, epsilon=1e-3, addends=addends,
        use_global_stats=use_global_stats, **layer._activation._asdict(),
    )  # fmt: skip
    return forward.outputs, reference.backward(batch.shards, batch.heads, batch.gamma, forward)


def specification_of_z(layer, batch, given, settings):
    """What the activation gets."""
    before = layer._replicas.settings
    layer._replicas.settings = replace(before, **gluon_syncbn.activation.NONE._asdict())
    try:
        return specification(layer, batch, **given, **settings).outputs
    finally:
        layer._replicas.settings = before


@pytest.mark.parametrize("behind, slope", [("relu", 1), ("relu6", 0), ("leaky", 1)])
def test_an_infinite_value_has_the_gradient_of_mxnet_s_operators(case, contexts, behind, slope):
    """As float16 makes one by an overflow."""
    batch, addends = case(2, "float32")
    addends[0].flat[0] = np.inf
    layer = prepare(make(True, **ACTIVATIONS[behind]), batch, contexts[:2], "float32")
    got, daddends = step(layer, batch, addends, contexts, "float32")
    assert daddends[0].flat[0] == np.float32(slope * batch.heads[0].flat[0])
    want = specification(layer, batch, addends=addends)
    for a, b in zip([*got.dxs, got.dbeta], [*want.dxs, want.dbeta]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    z = nd.array([np.inf])
    z.attach_grad()
    with autograd.record():
        layer._activation.apply(nd, z).backward()
    assert z.grad.asscalar() == slope


@pytest.mark.parametrize("axis, spatial", [(1, (4, 6)), (1, (5, 7)), (-1, (4, 6))], ids=str)
@pytest.mark.parametrize("adds, behind", CASES)
def test_equals_the_specification_in_bfloat16(case, contexts, adds, behind, axis, spatial):
    batch, addends = case(3, "bfloat16", axis=axis, spatial=spatial)
    layer = prepare(make(adds, axis=axis, **ACTIVATIONS[behind]), batch, contexts[:3], "bfloat16")
    check(layer, batch, addends, contexts, "bfloat16", axis=axis)


@pytest.fixture
def empty_case(case):
    """Of three replicas, the second one has no sample or no position."""

    def make(dtype, no):
        batch, addends = case(3, dtype, spatial=(2, 3))
        for arrays in (batch.shards, batch.heads, addends):
            arrays[1] = arrays[1][:0] if no == "sample" else arrays[1][..., :0]
        return batch, addends

    with mx.util.np_shape(True):
        yield make


# Random layers have empty shards of the other types, in each mode, and of no sample.
EMPTY = [pytest.param("float64", "eager", marks=pytest.mark.on_gpus)]
EMPTY += [("bfloat16", way) for way in ("eager", "hybrid") if "bfloat16" in ON_CPUS]


@pytest.mark.parametrize("dtype, way", EMPTY)
@pytest.mark.parametrize("no", ["sample", "position"])
def test_an_empty_shard(empty_case, contexts, no, dtype, way):
    """MXNet gives no memory for it; a null pointer does not mean that there is no such input."""
    for adds, behind in CASES:
        for before in (0, 0.75):
            batch, addends = empty_case(dtype, no)
            layer = prepare(make(adds, **ACTIVATIONS[behind]), batch, contexts[:3], dtype, WAYS[way])
            check(layer, batch, addends, contexts, dtype, before)


@pytest.mark.parametrize("adds, behind", CASES)
def test_an_empty_shard_with_frozen_statistics(empty_case, contexts, adds, behind):
    batch, addends = empty_case("float64", "sample")
    layer = prepare(make(adds, **ACTIVATIONS[behind]), batch, contexts[:3], "float64", {})
    inputs = [
        on_devices(arrays, contexts, "float64") for arrays in ((batch.shards, addends) if adds else (batch.shards,))
    ]
    for array in inputs[0]:
        array.attach_grad()
    with autograd.record(train_mode=False):
        ys = [layer(*given) for given in zip(*inputs)]
    autograd.backward(ys, on_devices(batch.heads, contexts, "float64"))
    outputs, gradients = expected(layer, batch, addends if adds else None)
    for x, y, output, dx in zip(inputs[0], ys, outputs, gradients.dxs):
        np.testing.assert_allclose(y.asnumpy(), output, atol=1e-11)
        np.testing.assert_allclose(x.grad.asnumpy(), dx, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [
    "alone", "added", "local", "frozen", "reverted", "predicts", "fused",
])  # fmt: skip
def test_the_slope_is_that_of_float64(contexts, rng, kind, way):
    """Of float64 data, wherever the layer or MXNet multiplies."""
    if way == "eager" and kind == "fused":
        pytest.skip("without a graph nothing is fused")
    settings = {"local": {"mode": "local"}, "frozen": {"use_global_stats": True}}
    gamma, beta = make_affine(rng, 5)
    z = rng.randn(4, 5, 3)
    x = (z - beta[:, None]) / gamma[:, None]  # by running statistics 0 and 1, z comes of it
    batch = Batch([x], [rng.randn(*x.shape)], gamma, beta)
    if kind == "fused":
        net = nn.HybridSequential()
        net.add(SyncBatchNorm(in_channels=5, epsilon=0), nn.LeakyReLU(SLOPE))
        convert(net, fuse=True)
        layer = net[0]
        prepare(layer, batch, contexts[:1], "float64")
        net.hybridize(**WAYS[way])
    else:
        make_layer = SyncBatchNormAdd if kind == "added" else SyncBatchNorm
        kwargs = dict(in_channels=5, epsilon=0, activation="leaky", slope=SLOPE, **settings.get(kind, {}))
        net = layer = prepare(make_layer(**kwargs), batch, contexts[:1], "float64")
        net = revert(net) if kind == "reverted" else net
        if WAYS[way] is not None:
            net.hybridize(**WAYS[way])
    running = kind in ("frozen", "predicts")
    inputs = [nd.array(x, dtype="float64")]
    if isinstance(layer, SyncBatchNormAdd):
        inputs.append(nd.zeros(x.shape, dtype="float64"))
    with autograd.record() if kind != "predicts" else nullcontext():
        y = net(*inputs)
    if not running:
        z = gamma[:, None] * (x - x.mean((0, 2), keepdims=True)) / x.std((0, 2), keepdims=True) + beta[:, None]
    np.testing.assert_allclose(y.asnumpy(), np.where(z > 0, z, SLOPE * z), rtol=0, atol=1e-13)


@pytest.mark.on_gpus
@pytest.mark.parametrize("adds, behind", CASES)
def test_prediction_and_frozen_statistics(case, contexts, adds, behind):
    (batch, addends), context = case(1), contexts[0]
    x, other, head = (on_devices(arrays, contexts, "float64")[0] for arrays in (batch.shards, addends, batch.heads))
    for use_global_stats in (False, True):
        layer = make(adds, use_global_stats=use_global_stats, **ACTIVATIONS[behind])
        prepare(layer, batch, [context], "float64", {})
        layer.running_mean.set_data(nd.arange(5, dtype="float64"))
        layer.running_var.set_data(nd.arange(1, 6, dtype="float64"))
        inputs = [x, other] if adds else [x]
        x.attach_grad()
        with autograd.record(train_mode=use_global_stats):
            y = layer(*inputs)
        y.backward(head)
        outputs, gradients = expected(layer, batch, addends if adds else None, np.arange(5), np.arange(1, 6))
        np.testing.assert_allclose(y.asnumpy(), outputs[0], atol=1e-10)
        np.testing.assert_allclose(x.grad.asnumpy(), gradients.dxs[0], atol=1e-10)


@pytest.mark.parametrize("way", [None, {}, {"static_alloc": True}], ids=["eager", "hybrid", "static_alloc"])
@pytest.mark.parametrize("kind", ["frozen", "reverted"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_way_to_ask_for_gradients(case, contexts, activation, kind, way):
    """MXNet's own addition is wrong in graphs where a gradient is added to an array, or wanted by nobody."""
    (batch, addends), contexts = case(1), contexts[:1]
    settings = {"use_global_stats": True} if kind == "frozen" else {}
    for reqs in [("write", None), ("write", "add"), ("add", "write"), ("add", "add"), (None, "add")]:
        layer = prepare(make(True, **ACTIVATIONS[activation], **settings), batch, contexts, "float64", way)
        _, gradients = expected(layer, batch, addends, use_global_stats=kind == "frozen")
        layer = revert(layer) if kind == "reverted" else layer
        inputs = [on_devices(arrays, contexts, "float64") for arrays in (batch.shards, addends)]
        followed = [  # array, what is there before, what is there then
            (array, 0.75, gradient + (0.75 if req == "add" else 0))
            for arrays, req, want in zip(inputs, reqs, (gradients.dxs, gradients.daddends)) if req
            for array, gradient in zip(arrays, want)
        ]  # fmt: skip
        for arrays, req in zip(inputs, reqs):
            for array in arrays if req else ():
                array.attach_grad(req)
        for _ in range(2):  # MXNet plans with the memory of the first
            for array, before, _ in followed:
                array.grad[:] = before
            with autograd.record():
                ys = [layer(*replica) for replica in zip(*inputs)]
            autograd.backward(ys, on_devices(batch.heads, contexts, "float64"))
        for array, _, want in followed:
            np.testing.assert_allclose(array.grad.asnumpy(), want, atol=1e-6, err_msg=str(reqs))
        for parameter, want in ((layer.gamma, gradients.dgammas), (layer.beta, gradients.dbetas)):
            got = sum(gradient.asnumpy() for gradient in parameter.list_grad())
            np.testing.assert_allclose(got, sum(want), atol=1e-6, err_msg=str(reqs))


@pytest.mark.parametrize("shape", [(2, 5, 4, 1), (2, 5, 4), (3, 5, 4, 6)], ids=str)
def test_an_addend_of_another_shape_is_refused(contexts, shape):
    layer = make(True)
    layer.initialize(ctx=contexts[:1])
    with autograd.record(), pytest.raises(mx.MXNetError, match=r"addend|[Ss]hape"):
        layer(nd.ones((2, 5, 4, 6)), nd.ones(shape)).wait_to_read()


def test_a_failed_step_leaves_no_gradient_of_the_addend(case, contexts):
    batch, addends = case(2)
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
def test_is_reverted_and_converted_again(case, contexts, adds, activation):
    batch, addends = case(1)
    layer = prepare(make(adds, **ACTIVATIONS[activation]), batch, contexts[:1], "float64")
    inputs = [nd.array(array, dtype="float64") for array in ((batch.shards[0], addends[0]) if adds else batch.shards)]
    before = layer(*inputs).asnumpy()
    parameters = dict(layer.collect_params())
    revert(layer)
    assert not isinstance(layer, SyncBatchNorm)
    np.testing.assert_allclose(layer(*inputs).asnumpy(), before, rtol=1e-12, atol=1e-13)
    convert(layer)
    assert type(layer) is (SyncBatchNormAdd if adds else SyncBatchNorm)
    assert dict(layer.collect_params()) == parameters
    check(layer, batch, addends, contexts)


def test_convert_takes_the_activation_of_a_layer(case, contexts):
    batch, addends = case(2)
    layer = convert(nn.BatchNormReLU(in_channels=5, epsilon=1e-3))
    assert str(layer._activation) == "ReLU"
    check(prepare(layer, batch, contexts[:2], "float64"), batch, addends, contexts)
    assert type(revert(layer)) is nn.BatchNormReLU


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

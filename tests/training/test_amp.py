"""Automatic mixed precision (mxnet.contrib.amp). `amp.init` changes all of MXNet, so it is called in other processes.

MXNet's convolutions and matrix products know no float16 on a CPU: nets with them are looked at as graphs, and the steps
that are run hold the layer alone, or have AMP leave such operators in float32. They know bfloat16, if oneDNN does.
"""

import json
import sys

import numpy as np
import pytest
from environments import ended
from places import PACKAGE, SUPPORT
from replicas import convolves_bfloat16

from gluon_syncbn import _native

HEAD = """
import json, sys, warnings
import gluon_syncbn_first
import mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp
from mxnet.gluon import nn
warnings.simplefilter("ignore")
def initialise():
    global gluon_syncbn, CONTEXTS, SyncBatchNorm, json_of
    import gluon_syncbn
    from gluon_syncbn import SyncBatchNorm
    from gluon_syncbn.mxnet_side.nodes import json_of
    CONTEXTS = gluon_syncbn.cpu_devices(2)
"""


def run(*programs):
    """What these programs print, one after the other in one process, each a line of JSON."""
    done = ended([sys.executable, "-c", "\n".join([HEAD, *programs])], SUPPORT, PACKAGE.parent, cwd=SUPPORT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


GRAPH = """
def graph(norm):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4), nn.Activation("relu"),
                nn.Conv2D(4, 3, in_channels=4))
    net.initialize(ctx=CONTEXTS)
    output = net(mx.sym.var("data"))
    internals = output.get_internals()
    _, types, _ = internals.infer_type(data=np.float32)
    types = dict(zip(internals.list_outputs(), [t.__name__ for t in types]))
    operators = [node["op"] for node in json_of(output)["nodes"]]
    return [op for op in operators if op not in ("null", "SwapAxis")], types
(plain, types), (synced, synced_types) = graph(nn.BatchNorm), graph(SyncBatchNorm)
print(json.dumps([plain, synced, types, synced_types]))
"""

TRAINING = """
# Activation gives float16 to the layer. What a CPU cannot do in float16 stays in float32; on a CPU, AMP does not
# cast to float32 itself.
amp.init(target_precision_ops=["Activation"])
initialise()
random = np.random.RandomState(0)
data = [random.randn(n, 3, 6, 6).astype("float32") for n in (2, 3)]
labels = [random.randint(0, 3, n) for n in (2, 3)]
weights = {}
def train(norm, contexts, shards, targets, hybrid):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.Activation("relu"), norm(in_channels=4),
                nn.HybridLambda(lambda F, x: F.cast(x, dtype="float32")), nn.GlobalAvgPool2D(), nn.Flatten(),
                nn.Dense(3, in_units=4))
    net.initialize(ctx=contexts)
    for name, parameter in net.collect_params().items():
        weights.setdefault(name, parameter.data(contexts[0]).asnumpy())
        if not name.startswith("net_batchnorm"):
            parameter.set_data(nd.array(weights[name]))
    if hybrid:
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, update_on_kvstore=False)
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 2.0**7
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    def step():
        with autograd.record():
            losses = [loss(net(nd.array(x, ctx=c)), nd.array(y, ctx=c)) for x, y, c in zip(shards, targets, contexts)]
            with amp.scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(5)
    for i in range(4):
        step()
    before = {name: p.data(contexts[0]).asnumpy() for name, p in net.collect_params().items()}
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 2.0**24  # for float16, too much
    step()
    after = {name: p.data(contexts[0]).asnumpy() for name, p in net.collect_params().items()}
    kept = all((before[name] == after[name]).all() for name in before if "running" not in name)
    return before, kept and trainer._amp_loss_scaler._next_loss_scale == 2.0**23
answers = []
for hybrid in (False, True):
    one, _ = train(nn.BatchNorm, [mx.cpu()], [np.concatenate(data)], [np.concatenate(labels)], hybrid)
    many, kept = train(SyncBatchNorm, CONTEXTS, data, labels, hybrid)
    errors = {name: float(np.abs(one[name] - many[name]).max() / (np.abs(one[name]).max() + 1e-3)) for name in one}
    moved = min(float(np.abs(many[name] - weights[name]).max()) for name in errors)
    answers.append([errors, moved, kept])
print(json.dumps(answers))
"""

BFLOAT16 = """
from core_counts import core_count
amp.init(target_dtype="bfloat16")
initialise()
random = np.random.RandomState(0)
data = [(1 + random.randn(n, 3, 12, 12) * (n - 1)).astype("float32") for n in (2, 3, 4)]
targets = [random.randn(len(x), 3).astype("float32") for x in data]
values = {}
def net_of(norm, contexts):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(2):
            net.add(nn.Conv2D(16, 3, use_bias=False), norm(), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(3))
    net.initialize(mx.init.Normal(0.3), ctx=contexts)
    with autograd.pause():
        net(nd.array(data[0], ctx=contexts[0]))
    for name, parameter in net.collect_params().items():
        parameter.set_data(nd.array(values.setdefault(name, parameter.data(contexts[0]).asnumpy())))
    return net
def train(net, contexts, shards, wanted):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    losses = []
    for i in range(6):
        with autograd.record():
            outputs = [net(nd.array(x, ctx=c)) for x, c in zip(shards, contexts)]
            parts = [((y.astype("float32") - nd.array(t, ctx=c)) ** 2).sum()
                     for y, t, c in zip(outputs, wanted, contexts)]
        autograd.backward(parts)
        trainer.step(9)
        losses.append(float(sum(part.asscalar() for part in parts)))
    return losses, {name: p.data(contexts[0]).asnumpy().tolist() for name, p in net.collect_params().items()}
answers, places = [], gluon_syncbn.cpu_devices(3)
whole = [np.concatenate(data)], [np.concatenate(targets)]
for how in ({}, {"static_alloc": True}, None):
    results = []
    for norm, contexts, given in ((nn.BatchNorm, places[:1], whole), (SyncBatchNorm, places, (data, targets)),
                                  ("convert", places, (data, targets))):
        net = net_of(nn.BatchNorm if norm == "convert" else norm, contexts)
        if norm == "convert":
            gluon_syncbn.convert(net, fuse=True)
        if how is not None:
            net.hybridize(**how)
        before = core_count("blocked_calls")
        results.append(train(net, contexts, *given))
        results[-1] += (core_count("blocked_calls") - before,)
    answers.append(results)
print(json.dumps(answers))
"""

CAST = """
initialise()
bfloat16 = np.dtype([("bfloat16", np.uint16)])
net = nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(nn.Conv2D(16, 3, in_channels=3), SyncBatchNorm(in_channels=16), nn.Activation("relu"))
net.initialize(ctx=CONTEXTS)
net.cast(bfloat16)
types = {name: str(p.dtype) for name, p in net.collect_params().items()}
x = nd.random.normal(shape=(2, 3, 6, 6)).astype(bfloat16)
answers = []
for hybrid in (False, True):
    net.hybridize(hybrid)
    with autograd.record():
        ys = [net(x.as_in_context(c)) for c in CONTEXTS]
    autograd.backward(ys)
    weight = net[0].weight.grad(CONTEXTS[1]).astype("float32")
    answers.append([str(ys[0].dtype), bool(np.isfinite(weight.asnumpy()).all())])
print(json.dumps([types, answers]))
"""

CONVERT = """
net = nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(nn.Conv2D(4, 3, in_channels=3), SyncBatchNorm(in_channels=4), nn.Activation("relu"))
net.initialize()
x = nd.random.randn(2, 3, 8, 8)
answers = []
for revert in (False, True):
    if revert:
        gluon_syncbn.revert(net)
    net.hybridize()
    net(x)
    low = amp.convert_hybrid_block(net, ctx=mx.cpu())
    nodes = json_of(low._cached_graph[1])["nodes"]
    answers.append([node["op"] for node in nodes if node["op"] not in ("null", "SwapAxis")])
print(json.dumps(answers))
"""

FUSED = """
class Residual(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Conv2D(4, 3, padding=1), nn.BatchNorm()
    def hybrid_forward(self, F, x):
        return F.relu(self.norm(self.body(x)) + x)
answers = []
for fuse in (False, True):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), Residual(), nn.Conv2D(4, 3))
    gluon_syncbn.convert(net, fuse=fuse)
    net.initialize()
    net.hybridize()
    nodes = gluon_syncbn.mxnet_side.recording.running_graph(net, nd.ones((2, 4, 8, 8)))[2]["nodes"]
    answers.append([node["op"] for node in nodes if node["op"] not in ("null", "SwapAxis")])
print(json.dumps(answers))
"""


computes = pytest.mark.skipif(not convolves_bfloat16(), reason="MXNet has no convolution of bfloat16 here")


@pytest.fixture(scope="module")
def before():
    """AMP, then this package."""
    return run("amp.init(); initialise()", GRAPH)


@pytest.fixture(scope="module")
def after():
    """This package, and AMP in the end."""
    return run("initialise()", CONVERT, "amp.init()", GRAPH, FUSED)


@pytest.mark.parametrize("order", ["before", "after"])
def test_no_cast_around_the_layer(order, request):
    plain, synced, types, synced_types = request.getfixturevalue(order)[{"before": 0, "after": 1}[order]]
    assert plain.count("amp_cast") == 6  # of two convolutions: the wrappers are at work
    assert synced == ["Custom" if op == "BatchNorm" else op for op in plain]
    for name, type_ in types.items():
        assert synced_types[name] == type_, name
    assert synced_types["net_batchnorm0_fwd_output"] == "float16"
    assert synced_types["net_batchnorm0_running_var"] == "float32"


def test_fused_graphs_keep_the_casts(after):
    """And the addition is fused, too: the cast before it has two arrays of one type."""
    recorded, fused = after[2]
    assert recorded[-12:-4] == [*["amp_cast"] * 3, "Convolution", "Custom", "amp_multicast", "elemwise_add", "relu"]
    assert fused == [*["amp_cast"] * 3, "Convolution", "Custom"] * 2 + [*["amp_cast"] * 3, "Convolution"]


def test_training_with_loss_scaling():
    """Four steps of a trainer on two devices, as on one device with plain BatchNorm; then one that overflows."""
    for errors, moved, kept in run(TRAINING)[0]:
        assert max(errors.values()) < 1e-2, errors  # float16 activations
        assert moved > 1e-3
        assert kept


@computes
def test_training_in_bfloat16():
    """Three devices after six steps, as one with plain BatchNorm. Convolutions leave oneDNN's blocks to the layer."""
    for (losses, parameters, _), *ours in run(BFLOAT16)[0]:
        assert losses[-1] < 0.75 * losses[0]
        for own_losses, own_parameters, blocked in ours:
            assert blocked > 0 or _native.why_custom()
            np.testing.assert_allclose(own_losses, losses, rtol=1e-2)
            for name, value in parameters.items():
                largest = np.abs(value).max()
                assert np.abs(np.subtract(own_parameters[name], value)).max() <= 0.1 * largest, name


@computes
def test_cast_to_bfloat16_keeps_float32_parameters():
    types, answers = run(CAST)[0]
    assert {name: "float32" in kind for name, kind in types.items()} == {name: "batchnorm" in name for name in types}
    assert answers == [["[('bfloat16', '<u2')]", True]] * 2


def test_convert_hybrid_block_after_revert_is_that_of_plain_batchnorm(after):
    kept, reverted = after[0]
    # AMP's converter works on the graph, where the layer is a Custom: right, but in float32.
    assert kept[4:6] == ["amp_cast", "Custom"]
    assert reverted[3:6] == ["Convolution", "BatchNorm", "Activation"]

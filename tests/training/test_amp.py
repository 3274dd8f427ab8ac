"""Automatic mixed precision (mxnet.contrib.amp). `amp.init` changes all of MXNet, so it is called in other processes.

MXNet's convolutions and matrix products know no float16 on a CPU: nets with them are looked at as graphs, and the steps
that are run hold the layer alone, or have AMP leave such operators in float32. They know bfloat16, if oneDNN does.
"""

import json
import sys

import numpy as np
import pytest
from environments import ended
from internals import WHY_CUSTOM
from places import PACKAGE, SUPPORT
from replicas import convolves_bfloat16

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
    CONTEXTS = gluon_syncbn.cpu_devices(3)
def net_of(layers):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(*layers())
    return net
def operators(graph):
    return [node["op"] for node in graph["nodes"] if node["op"] not in ("null", "SwapAxis")]
values = {}
def placed(net, contexts, shape):
    # All nets have the parameters of the first.
    net.initialize(mx.init.Normal(0.3), ctx=contexts)
    with autograd.pause():
        net(nd.ones(shape, ctx=contexts[0]))
    for name, parameter in net.collect_params().items():
        parameter.set_data(nd.array(values.setdefault(name, parameter.data(contexts[0]).asnumpy())))
    return net
def parameters_of(net):
    return {name: p.data(p.list_ctx()[0]).asnumpy().tolist() for name, p in net.collect_params().items()}
"""


def run(*programs):
    """What these programs print, one after the other in one process, each a line of JSON."""
    done = ended([sys.executable, "-c", "\n".join([HEAD, *programs])], SUPPORT, PACKAGE.parent, code=0, cwd=SUPPORT)
    return [json.loads(line) for line in done.stdout.splitlines()]


GRAPH = """
def graph(norm):
    net = net_of(lambda: (nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4), nn.Activation("relu"),
                          nn.Conv2D(4, 3, in_channels=4)))
    net.initialize(ctx=CONTEXTS)
    output = net(mx.sym.var("data"))
    internals = output.get_internals()
    _, types, _ = internals.infer_type(data=np.float32)
    return operators(json_of(output)), dict(zip(internals.list_outputs(), [t.__name__ for t in types]))
(plain, types), (synced, synced_types) = graph(nn.BatchNorm), graph(SyncBatchNorm)
print(json.dumps([plain, synced, types, synced_types]))
"""

# Losses and parameters after steps, calls in blocks of oneDNN, and whether the last step was left out: it overflows.
TRAIN = """
from internals import core_count
random = np.random.RandomState(0)
data = [1 + random.randn(n, 3, 12, 12) * (n - 1) for n in (2, 3, 4)]
targets = [random.randn(len(x), 3) for x in data]
whole = [np.concatenate(data)], [np.concatenate(targets)]
def train(norm, how, scales, shards=data, wanted=targets, fuse=False):
    contexts = CONTEXTS[:len(shards)]
    net = placed(net_of(lambda: layers(norm)), contexts, (1, 3, 12, 12))
    if fuse:
        gluon_syncbn.convert(net, fuse=True)
    if how is not None:
        net.hybridize(**how)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, update_on_kvstore=False)
    amp.init_trainer(trainer)
    scaler, losses, blocked = trainer._amp_loss_scaler, [], core_count("blocked_calls")
    for scale in scales:
        before = parameters_of(net)
        scaler._loss_scale = scaler._next_loss_scale = scale
        with autograd.record():
            outputs = [net(nd.array(x, ctx=c)).astype("float32") for x, c in zip(shards, contexts)]
            parts = [((y - nd.array(t, ctx=c)) ** 2).sum() for y, t, c in zip(outputs, wanted, contexts)]
            with amp.scale_loss(parts, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(9)
        losses.append(float(sum(part.asscalar() for part in parts)))
    after = parameters_of(net)
    left_out = all(before[name] == after[name] for name in before if "running" not in name)
    return losses, after, core_count("blocked_calls") - blocked, left_out and scaler._next_loss_scale == scale / 2
"""

FLOAT16 = """
# Activation gives float16 to the layer. What a CPU cannot do in float16 stays in float32; on a CPU, AMP does not
# cast to float32 itself.
amp.init(target_precision_ops=["Activation"])
initialise()
def layers(norm):
    cast = nn.HybridLambda(lambda F, x: F.cast(x, dtype="float32"))
    return (nn.Conv2D(4, 3, in_channels=3), nn.Activation("relu"), norm(in_channels=4), cast, nn.GlobalAvgPool2D(),
            nn.Flatten(), nn.Dense(3, in_units=4))
scales = [2.0**7] * 4 + [2.0**24]  # the last one is too much for float16
for how in ({}, None):
    print(json.dumps([train(nn.BatchNorm, how, scales, *whole), train(SyncBatchNorm, how, scales)]))
"""

BFLOAT16 = """
amp.init(target_dtype="bfloat16")
initialise()
def layers(norm):
    def half():
        return nn.Conv2D(16, 3, use_bias=False), norm(), nn.Activation("relu")
    return (*half(), *half(), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(3))
scales = [1.0] * 6
for how in ({}, {"static_alloc": True}, None):
    ours = [train(SyncBatchNorm, how, scales), train(nn.BatchNorm, how, scales, fuse=True)]
    print(json.dumps([train(nn.BatchNorm, how, scales, *whole), *ours]))
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
    net = net_of(lambda: (nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), Residual(), nn.Conv2D(4, 3)))
    gluon_syncbn.convert(net, fuse=fuse)
    net.initialize()
    net.hybridize()
    answers.append(operators(gluon_syncbn.mxnet_side.recording.running_graph(net, nd.ones((2, 4, 8, 8)))[2]))
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    "programs", [["amp.init(); initialise()"], ["initialise()", "amp.init()"]], ids=["AMP first", "AMP in the end"]
)
def test_no_cast_around_the_layer_nor_a_fused_one(programs):
    """The addition is fused, too: the cast before it has two arrays of one type."""
    (plain, synced, types, synced_types), (recorded, fused) = run(*programs, GRAPH, FUSED)
    assert plain.count("amp_cast") == 6  # of two convolutions: the wrappers are at work
    assert synced == ["Custom" if op == "BatchNorm" else op for op in plain]
    for name, type_ in types.items():
        assert synced_types[name] == type_, name
    assert synced_types["net_batchnorm0_fwd_output"] == "float16"
    assert synced_types["net_batchnorm0_running_var"] == "float32"
    assert recorded[-12:-4] == [*["amp_cast"] * 3, "Convolution", "Custom", "amp_multicast", "elemwise_add", "relu"]
    assert fused == [*["amp_cast"] * 3, "Convolution", "Custom"] * 2 + [*["amp_cast"] * 3, "Convolution"]


def assert_alike(got, want, tolerance):
    (losses, parameters, *_), (own_losses, own_parameters, *_) = want, got
    assert losses[3] < 0.95 * losses[0]
    np.testing.assert_allclose(own_losses, losses, rtol=1e-2)
    for name, value in parameters.items():
        limit = tolerance * (np.abs(value).max() + 1e-3)
        assert np.abs(np.subtract(own_parameters[name], value)).max() <= limit, name


def test_training_with_loss_scaling():
    """Four steps of a trainer on three devices, as on one device with plain BatchNorm; then one that overflows."""
    for one, many in run(TRAIN, FLOAT16):
        assert_alike(many, one, 1e-2)
        assert one[-1] and many[-1]


@pytest.mark.skipif(not convolves_bfloat16(), reason="MXNet has no convolution of bfloat16 here")
def test_training_in_bfloat16():
    """Three devices after six steps, as one with plain BatchNorm. Convolutions leave oneDNN's blocks to the layer."""
    for plain, *ours in run(TRAIN, BFLOAT16):
        for got in ours:
            assert_alike(got, plain, 0.1)
            assert got[2] > 0 or WHY_CUSTOM

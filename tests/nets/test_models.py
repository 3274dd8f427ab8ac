"""Whole networks: a training step on two devices with the layer is the step on one with `nn.BatchNorm`.

One step is a forward, GluonCV's loss with its auxiliary part and a backward. Compared are the loss, the
gradient of every parameter summed over the devices, and the running statistics. The split is uneven and the
devices see different distributions, so that statistics of one device alone would be far off. All is in
float64, where rounding is so small that no ReLU switches because of it.
"""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from replicas import release

from gluon_syncbn import SyncBatchNorm

pytest.importorskip("gluoncv", reason="GluonCV is not installed")

from gluoncv.loss import MixSoftmaxCrossEntropyLoss
from gluoncv.model_zoo.deeplabv3 import DeepLabV3
from gluoncv.model_zoo.fastscnn import FastSCNN
from gluoncv.model_zoo.fcn import FCN
from gluoncv.model_zoo.pspnet import PSPNet

CLASSES = 4
# No larger than the nets need, which have 8 x 8 and 32 x 32 pixels for one in the deepest layers.
CROPS = {FCN: 32, PSPNet: 32, DeepLabV3: 32, FastSCNN: 64}
SPLIT = (1, 2)
CONTEXTS = [mx.cpu(0), mx.cpu(1)]

# What these FastSCNN parameters add is the same at every position, and on every way out a normalisation takes
# it away again: their gradient is zero but for rounding, and has no relative error. Both sides must vanish
# instead, measured by the gradient of the weight or gamma that they belong to.
VANISHING = re.compile(
    r"feature_fusion\.conv_(lower|higher)_res\.bias"
    r"|global_feature_extractor\.bottleneck\d\.\d\.block\.3\.beta"
)


@pytest.fixture(autouse=True)
def released_each():
    """As in conftest.py, but after each test: three such nets one after the other came to 5 GB."""
    yield
    release()


def build(model, norm_layer, contexts):
    """A network whose parameters depend on their structural names alone, so that two of them are equal."""
    kwargs, crop = {} if model is FastSCNN else {"backbone": "resnet50"}, CROPS[model]
    net = model(
        CLASSES, aux=True, pretrained_base=False, crop_size=crop, base_size=crop, norm_layer=norm_layer, **kwargs
    )
    net.initialize(mx.init.Zero(), ctx=contexts, force_reinit=True)
    net.cast("float64")
    with autograd.pause():  # the number of input channels becomes known
        net(mx.nd.zeros((1, 3, crop, crop), ctx=contexts[0], dtype="float64"))
    for number, (name, parameter) in enumerate(sorted(net._collect_params_with_prefix().items())):
        rng = np.random.default_rng(number)
        if name.endswith(("gamma", "running_var")):
            value = rng.uniform(0.5, 1.5, parameter.shape)
        elif name.endswith("weight"):
            value = rng.normal(0, np.sqrt(2 / np.prod(parameter.shape[1:])), parameter.shape)
        else:
            value = rng.normal(0, 0.2, parameter.shape)
        parameter.set_data(mx.nd.array(value, dtype="float64"))

    def without_dropout(block):
        if isinstance(block, nn.Dropout):
            block._rate = 0  # its masks are drawn per device

    return net.apply(without_dropout)


def step(net, contexts, split):
    """The sum of all samples' losses, and by structural name gradients and running statistics per device."""
    rng, crop = np.random.default_rng(0), CROPS[type(net)]
    images = [rng.normal(k, 1 + k, (3, crop, crop)) for k in range(sum(SPLIT))]
    labels = rng.integers(-1, CLASSES, (sum(SPLIT), crop, crop))  # -1 is ignored
    cuts = np.cumsum(split)[:-1]
    # With size_average the gradient is divided by the number of labelled pixels of the device, whatever the
    # layers do: an uneven split is another loss. Without, the devices' gradients add up to the batch's.
    criterion = MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.4, size_average=False)
    losses = []
    with autograd.record():
        for x, label, ctx in zip(np.split(np.array(images), cuts), np.split(labels, cuts), contexts):
            outputs = net(mx.nd.array(x, ctx=ctx, dtype="float64"))
            losses.append(criterion(*outputs, mx.nd.array(label, ctx=ctx, dtype="float64")))
    autograd.backward(losses)
    parameters = net._collect_params_with_prefix()
    grads = {n: [g.asnumpy() for g in p.list_grad()] for n, p in parameters.items() if p.grad_req != "null"}
    running = {n: [d.asnumpy() for d in p.list_data()] for n, p in parameters.items() if ".running_" in n}
    return sum(float(loss.sum().asscalar()) for loss in losses), grads, running


def distance(got, want):
    """Relative error in the L2 norm."""
    return np.linalg.norm(np.subtract(got, want, dtype="float64")) / np.linalg.norm(want.astype("float64"))


def errors(net, plain):
    """The relative error of the loss, every gradient and every running statistic, by name."""
    loss, grads, running = step(net, CONTEXTS, SPLIT)
    want_loss, want_grads, want_running = step(plain, CONTEXTS[:1], [sum(SPLIT)])
    trained = [name for name, p in plain._collect_params_with_prefix().items() if p.grad_req != "null"]
    assert grads.keys() == want_grads.keys() == set(trained), "no parameter is left out"
    found = {"loss": distance(loss, np.array(want_loss))}
    for name, (want,) in want_grads.items():
        got = sum(grads[name])
        if VANISHING.fullmatch(name):
            sibling = name.replace(".bias", ".weight").replace(".beta", ".gamma")
            found[name] = max(np.linalg.norm(got), np.linalg.norm(want)) / np.linalg.norm(want_grads[sibling])
        else:
            found[name] = distance(got, want)
    for name, (want,) in want_running.items():
        one, *others = running[name]
        for other in others:
            np.testing.assert_array_equal(one, other, err_msg=f"{name} differs between the devices")
        found[name] = distance(one, want)
    return found


# Residual nets of 18 layers take part in test_families.py and test_fusion.py.
SLOW = [pytest.param(model, marks=pytest.mark.slow) for model in (FCN, PSPNet, DeepLabV3)]


@pytest.mark.parametrize("model", [FastSCNN, *SLOW], ids=lambda model: model.__name__)
def test_a_step_on_two_devices_is_the_step_on_one(model):
    net, plain = build(model, SyncBatchNorm, CONTEXTS), build(model, nn.BatchNorm, CONTEXTS[:1])
    net.hybridize(static_alloc=True)
    found = errors(net, plain)
    worst = sorted(((value, name) for name, value in found.items() if not value <= 1e-7), reverse=True)
    assert not worst, f"{len(worst)} of {len(found)}: {worst[:10]}"

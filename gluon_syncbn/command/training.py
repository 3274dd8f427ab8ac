"""A small training on several contexts, beside plain BatchNorm on a CPU.

Copies, cuDNN and this layer do all that its net does on a GPU, so no GPU lacks code for it.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

from ..layer import SyncBatchNorm

CLASSES = 4
BATCH = 24  # samples of a step, over all devices
RATE, MOMENTUM = 0.05, 0.9
STEPS = 20


def _drawn(random: np.random.RandomState) -> Tuple[np.ndarray, np.ndarray]:
    """Returns coloured images of 16 x 16 in noise, and what they show: a disc, a frame, a bar or a cross."""
    labels = random.randint(CLASSES, size=BATCH)
    y, x = np.abs(np.mgrid[:16, :16] - random.uniform(6, 9, (BATCH, 2))[:, :, None, None]).transpose(1, 0, 2, 3)
    shapes = np.stack([x**2 + y**2 < 20, np.abs(np.maximum(x, y) - 4) < 1, x < 1.5, np.minimum(x, y) < 1])
    colours = random.uniform(0.5, 2, (BATCH, 3, 1, 1))
    images = shapes[labels, np.arange(BATCH)][:, None] * colours + 0.5 * random.standard_normal((BATCH, 3, 16, 16))
    return images.astype("float32"), labels


def _network(ours: bool) -> nn.HybridSequential:
    """Returns a net like VGG."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for before, channels in ((3, 16), (16, 32), (32, 64)):
            net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False, in_channels=before))
            if ours:
                net.add(SyncBatchNorm(in_channels=channels, activation="relu"))
            else:
                net.add(nn.BatchNorm(in_channels=channels), nn.Activation("relu"))
            net.add(nn.MaxPool2D() if channels < 64 else nn.GlobalAvgPool2D())
        net.add(nn.Conv2D(CLASSES, 1, in_channels=64))
    return net


def _trained(ours: bool, contexts: Sequence[mx.Context]) -> Tuple[List[float], np.ndarray]:
    """Returns the loss of each step, and the weights after the first. NumPy updates them."""
    random = np.random.RandomState(0)
    mx.random.seed(0)
    net = _network(ours)
    net.initialize(mx.init.Xavier(), ctx=list(contexts))  # drawn on the CPU
    net.hybridize(static_alloc=True, static_shape=True)
    weights = [one for one in net.collect_params().values() if one.grad_req != "null"]
    velocity, losses, first = [0.0] * len(weights), [], np.empty(0)
    for _ in range(STEPS):
        images, labels = _drawn(random)
        images += np.linspace(0, 3, BATCH, dtype="float32")[:, None, None, None]  # other statistics on each context
        shards, wanted = (np.array_split(array, len(contexts)) for array in (images, labels))
        xs = [mx.nd.array(shard, ctx=context) for shard, context in zip(shards, contexts)]
        with autograd.record():
            ys = [net(x) for x in xs]
        losses.append(0.0)
        heads = []
        for y, label in zip(ys, wanted):
            outputs = y.asnumpy().astype("float64").reshape(len(label), -1)
            outputs = np.exp(outputs - outputs.max(1, keepdims=True))
            outputs /= outputs.sum(1, keepdims=True)
            losses[-1] -= float(np.log(outputs[np.arange(len(label)), label]).sum()) / BATCH
            outputs[np.arange(len(label)), label] -= 1
            heads.append(mx.nd.array(outputs.reshape(y.shape), ctx=y.context))
        autograd.backward(ys, heads)
        for at, weight in enumerate(weights):
            change = -RATE / BATCH * sum(gradient.asnumpy() for gradient in weight.list_grad())
            velocity[at] = MOMENTUM * velocity[at] + change
            weight.set_data(mx.nd.array(weight.list_data()[0].asnumpy() + velocity[at]))
        if not first.size:
            first = np.concatenate([weight.list_data()[-1].asnumpy().ravel() for weight in weights])
    return losses, first


def beside_plain(contexts: Sequence[mx.Context]) -> str:
    """Trains a net on all contexts, and with plain BatchNorm on a CPU, which has all samples. Returns both in words."""
    (got, mine), (want, theirs) = _trained(True, contexts), _trained(False, [mx.cpu()])
    loss, weight = abs(got[0] - want[0]) / want[0], float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
    text = (
        f"after a step, {len(contexts)} replicas and a CPU differ by {loss:.0e} (loss), {weight:.0e} (weights), "
        f"and {STEPS} steps take the loss from {got[0]:.3f} to {got[-1]:.3f}, from {want[0]:.3f} to {want[-1]:.3f}"
    )
    # TensorFloat-32 has 10 bits. Later steps say less: trainings in float32 drift apart, with plain BatchNorm alone.
    if not max(loss, weight) < 3e-3:
        raise ArithmeticError(f"{text}; expected are differences below 3e-3")
    if not all(np.mean(some[-5:]) < 0.8 * some[0] for some in (got, want)):
        raise ArithmeticError(f"{text}; expected are losses that fall by a fifth")
    return text

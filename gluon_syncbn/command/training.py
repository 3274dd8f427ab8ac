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
RATE = 0.005
STEPS = 20


def _network(ours: bool) -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for before, channels in ((3, 16), (16, 32)):
            net.add(nn.Conv2D(channels, 3, 2, 1, use_bias=False, in_channels=before))
            if ours:
                net.add(SyncBatchNorm(in_channels=channels, activation="relu"))
            else:
                net.add(nn.BatchNorm(in_channels=channels), nn.Activation("relu"))
        net.add(nn.Conv2D(CLASSES, 4, use_bias=False, in_channels=32))
    return net


def _trained(ours: bool, contexts: Sequence[mx.Context]) -> Tuple[List[float], np.ndarray]:
    """Returns the loss of each step, which tells four patterns in noise apart, and the weights after the first. NumPy
    updates them.
    """
    random = np.random.RandomState(0)
    mx.random.seed(0)
    patterns = random.standard_normal((CLASSES, 3, 16, 16))
    net = _network(ours)
    net.initialize(mx.init.Xavier(), ctx=list(contexts))  # drawn on the CPU
    net.hybridize(static_alloc=True, static_shape=True)
    weights = [one for one in net.collect_params().values() if one.grad_req != "null"]
    losses, first = [], np.empty(0)
    for _ in range(STEPS):
        labels = random.randint(CLASSES, size=BATCH)
        images = patterns[labels] + random.standard_normal((BATCH, 3, 16, 16))
        images += np.linspace(0, 3, BATCH)[:, None, None, None]  # other statistics on each context
        shards, wanted = (np.array_split(array, len(contexts)) for array in (images, np.eye(CLASSES)[labels]))
        xs = [mx.nd.array(shard, ctx=context) for shard, context in zip(shards, contexts)]
        with autograd.record():
            ys = [net(x) for x in xs]
        wrong = [y.asnumpy() - target[:, :, None, None] for y, target in zip(ys, wanted)]
        autograd.backward(ys, [mx.nd.array(dy / BATCH, ctx=y.context) for dy, y in zip(wrong, ys)])
        losses.append(float(sum((dy**2).sum() for dy in wrong)) / BATCH)
        for weight in weights:
            gradient = sum(one.asnumpy() for one in weight.list_grad())
            weight.set_data(mx.nd.array(weight.list_data()[0].asnumpy() - RATE * gradient))
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

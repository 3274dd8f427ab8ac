"""A small training. Copies, cuDNN and this layer do all that its net does on a GPU, so no GPU lacks code for it."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

CLASSES = 4
BATCH = 24  # samples of a step, over all devices
RATE, MOMENTUM = 0.05, 0.9


def drawn(random: np.random.RandomState, count: int = BATCH) -> Tuple[np.ndarray, np.ndarray]:
    """Returns coloured images of 16 x 16 in noise, and what they show: a disc, a frame, a bar or a cross."""
    labels = random.randint(CLASSES, size=count)
    y, x = np.abs(np.mgrid[:16, :16] - random.uniform(6, 9, (count, 2))[:, :, None, None]).transpose(1, 0, 2, 3)
    shapes = np.stack([x**2 + y**2 < 20, np.abs(np.maximum(x, y) - 4) < 1, x < 1.5, np.minimum(x, y) < 1])
    colours = random.uniform(0.5, 2, (count, 3, 1, 1))
    images = shapes[labels, np.arange(count)][:, None] * colours + 0.5 * random.standard_normal((count, 3, 16, 16))
    return images.astype("float32"), labels


def network(norm: Callable[[int], List[nn.HybridBlock]], classes: int = CLASSES) -> nn.HybridSequential:
    """Returns a net like VGG. ``norm`` makes, for a number of channels, what stands behind a convolution."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for before, channels in ((3, 16), (16, 32), (32, 64)):
            net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False, in_channels=before), *norm(channels))
            net.add(nn.MaxPool2D() if channels < 64 else nn.GlobalAvgPool2D())
        net.add(nn.Conv2D(classes, 1, in_channels=64))
    return net


class Training:
    """SGD on a net, with softmax cross-entropy and updates in NumPy.

    With ``everywhere``, a ``gluon.Trainer`` updates the weights where they are, by kernels of MXNet's.
    """

    def __init__(self, net: nn.HybridBlock, contexts: Sequence[mx.Context], everywhere: bool) -> None:
        self.net, self.contexts, self._everywhere = net, list(contexts), everywhere
        self._velocity: Dict[str, Any] = {}
        mx.random.seed(0)
        net.initialize(mx.init.Xavier(), ctx=self.contexts)  # drawn on the CPU
        net.hybridize(static_alloc=True, static_shape=True)
        settings = {"learning_rate": RATE, "momentum": MOMENTUM}
        self._trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore="device")

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Trains with a batch, of which each replica has a part. Returns the loss, summed over them."""
        shards, wanted = (np.array_split(array, len(self.contexts)) for array in (images, labels))
        xs = [mx.nd.array(shard, ctx=context) for shard, context in zip(shards, self.contexts)]
        with autograd.record():
            ys = [self.net(x) for x in xs]
        loss, heads = 0.0, []
        for y, label, context in zip(ys, wanted, self.contexts):
            outputs = y.asnumpy().astype("float64").reshape(len(label), -1)
            outputs = np.exp(outputs - outputs.max(1, keepdims=True))
            outputs /= outputs.sum(1, keepdims=True)
            loss -= float(np.log(outputs[np.arange(len(label)), label]).sum())
            outputs[np.arange(len(label)), label] -= 1
            heads.append(mx.nd.array(outputs.reshape(y.shape), ctx=context))
        autograd.backward(ys, heads)
        self._update()
        # MXNet frees a store that still adds (`~KVStoreLocal` in src/kvstore/kvstore_local.h), as after a last step.
        mx.nd.waitall()
        return loss

    def _update(self) -> None:
        if self._everywhere:
            self._trainer.step(BATCH)
            return
        for name, parameter in self.net.collect_params().items():
            if parameter.grad_req != "null":
                change = -RATE / BATCH * sum(gradient.asnumpy() for gradient in parameter.list_grad())
                self._velocity[name] = MOMENTUM * self._velocity.get(name, 0) + change
                parameter.set_data(mx.nd.array(parameter.list_data()[0].asnumpy() + self._velocity[name]))

    def arrays(self) -> Dict[str, np.ndarray]:
        """Returns the parameters and the running statistics; of different ones the mean."""
        parameters = self.net.collect_params().items()
        return {name: np.mean([one.asnumpy() for one in p.list_data()], 0) for name, p in parameters}

"""MoCo: a query encoder, a key encoder that follows it slowly, and a queue of keys.

K. He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020 (arXiv 1911.05722);
X. Chen et al., "Improved Baselines with Momentum Contrastive Learning", 2020 (arXiv 2003.04297): the MLP head.
"""

from __future__ import annotations

import functools

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import contrastive

#: The mode of the normalisation layers for each `--bn`. sample-shuffle moves the keys instead.
MODES = {"local": "local", "sync": "sync", "shuffle": "shuffle", "sample-shuffle": "local"}


class Block(nn.HybridBlock):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, norm, channels, stride):
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(
                nn.Conv2D(channels, 3, stride, 1, use_bias=False), norm(), nn.Activation("relu"),
                nn.Conv2D(channels, 3, 1, 1, use_bias=False), norm(),
            )  # fmt: skip
            self.shortcut = nn.HybridSequential()
            self.shortcut.add(nn.Conv2D(channels, 1, stride, use_bias=False), norm())

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + self.shortcut(x))


class Encoder(nn.HybridBlock):
    """A small residual network (`features`), then MoCo v2's head. The output is (N, dim), with length 1."""

    def __init__(self, bn: str, virtual_devices: int, width: int = 32, dim: int = 64):
        super().__init__()
        norm = functools.partial(gluon_syncbn.SyncBatchNorm, mode=MODES[bn], virtual_devices=virtual_devices)
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(nn.Conv2D(width, 3, 1, 1, use_bias=False), norm(), nn.Activation("relu"))
            for factor in (1, 2, 4):
                self.features.add(Block(norm, factor * width, 2))
            self.features.add(nn.GlobalAvgPool2D(), nn.Flatten())
            self.head = nn.HybridSequential()
            self.head.add(nn.Dense(4 * width, activation="relu"), nn.Dense(dim))

    def hybrid_forward(self, F, x):
        return F.L2Normalization(self.head(self.features(x)))


class MoCo:
    """The two encoders and the queue, on one or several contexts of one or several processes.

    The normalisation layers divide a batch into slots (virtual devices). With ``bn='local'``, a query and its key are
    in the same slot. The two encoders are nearly equal, so both share statistics with few other samples. All processes
    have the same encoders and the same queue.
    """

    def __init__(
        self,
        contexts,
        kvstore=None,
        *,
        bn,
        virtual_devices,
        channels,
        size,
        queue,
        momentum,
        temperature,
        seed,
        lr,
        dim=64,
    ):
        mx.random.seed(seed)
        self.contexts, self.momentum, self.temperature = contexts, momentum, temperature
        self.query, self.key = (Encoder(bn, virtual_devices, dim=dim) for _ in range(2))
        for encoder in (self.query, self.key):
            encoder.initialize(mx.init.Xavier(magnitude=2), ctx=contexts)
            encoder(nd.zeros((1, channels, size, size), ctx=contexts[0]))  # the first batch fixes the shapes
            encoder.hybridize(static_alloc=True)
        if kvstore:
            gluon_syncbn.broadcast_parameters(self.query)
        self._pairs = []
        for key, query in zip(self.key.collect_params().values(), self.query.collect_params().values()):
            key.set_data(query.data(contexts[0]))
            if query.grad_req != "null":
                self._pairs.append((key, query))
                key.grad_req = "null"
        keys = np.random.RandomState(seed).randn(queue, dim)
        self.queue = nd.array(keys / np.linalg.norm(keys, axis=1, keepdims=True))
        self.position = 0  # of the next keys in the queue
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        # Without the running statistics, because a resumed Trainer copies the first device's parameters to all devices.
        trained = [query for _, query in self._pairs]
        settings = {"learning_rate": lr, "momentum": 0.9, "wd": 1e-4}
        self.trainer = gluon.Trainer(trained, "sgd", settings, kvstore=kvstore or "device")

    def step(self, x_q: np.ndarray, x_k: np.ndarray, own_keys) -> np.ndarray:
        """One training step on this process's queries of a batch, and on the keys that it computes.

        ``own_keys`` takes the keys of all processes, and returns those of these queries. Returns the loss of each
        query, and whether its key was found: (2, rows).
        """
        for key, query in self._pairs:
            for context in self.contexts:
                key.data(context)[:] = self.momentum * key.data(context) + (1 - self.momentum) * query.data(context)
        with autograd.train_mode():  # statistics of the batch, no gradients
            everyone, *_ = contrastive.gather([self.key(x) for x in self._load(x_k)])  # on each context
        losses, hits = [], []
        with autograd.record():
            for x, k in zip(self._load(x_q), self._load(own_keys(everyone))):
                q = self.query(x)
                positive = (q * k).sum(axis=1, keepdims=True)
                negative = nd.dot(q, self.queue.as_in_context(x.context), transpose_b=True)
                logits = nd.concat(positive, negative, dim=1) / self.temperature  # (n, 1 + K), the positive key first
                losses.append(self.loss(logits, nd.zeros(len(x), ctx=x.context)))
                hits.append(logits.argmax(axis=1) == 0)
        autograd.backward(losses)
        self.trainer.step(len(everyone))
        self._enqueue(everyone)
        return np.array([np.concatenate([one.asnumpy() for one in values]) for values in (losses, hits)])

    def _load(self, x) -> list:
        return gluon.utils.split_and_load(x, self.contexts)

    def _enqueue(self, keys):
        rows = (self.position + np.arange(len(keys))) % len(self.queue)
        self.queue[nd.array(rows, dtype="int64")] = keys
        self.position = int((self.position + len(keys)) % len(self.queue))

    def features(self, images: np.ndarray, batch: int = 64) -> np.ndarray:
        """The features of the query encoder, without its head, in predict mode."""
        parts = [nd.array(images[i : i + batch], ctx=self.contexts[0]) for i in range(0, len(images), batch)]
        return np.concatenate([self.query.features(part).asnumpy() for part in parts])

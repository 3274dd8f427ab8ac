"""A trial: one short training run of `compare.py`, in memory."""

from __future__ import annotations

import random
from functools import partial

import gluon_syncbn  # isort: skip  (before mxnet: it finds what MXNet needs)
import mxnet as mx
import numpy as np
from checkpoint import net_arrays, set_arrays
from gluoncv.loss import MixSoftmaxCrossEntropyLoss
from gluoncv.model_zoo import get_model
from gluoncv.model_zoo.fastscnn import FastSCNN
from gluoncv.utils import LRScheduler
from mxnet import autograd, gluon
from mxnet.gluon import nn
from randomness import Xavier
from scene import CLASSES, draw_scene
from scores import Scores, spread

DEVICES = 4
# One CPU computes what DEVICES of them do, in less time. The slots of its batch are their batches.
NORMS = {
    "BatchNorm": partial(gluon_syncbn.SyncBatchNorm, mode="local", virtual_devices=DEVICES),
    "SyncBatchNorm": gluon_syncbn.SyncBatchNorm,
}
SIZE, CROP = (144, 120), 96  # pixels: width and height of a scene, and the sides of a crop
CONSTANT = 1e-6  # of a channel's running variance, which starts at 1


class FCN(gluon.HybridBlock):
    """A fully convolutional network: GluonCV's ResNet-20 for CIFAR on halved images, and a classifier of its pixels.

    images (N, 3, CROP, CROP) -> a tuple of one array of scores (N, classes, CROP, CROP).
    """

    def __init__(self, nclass: int, norm_layer):
        super().__init__()
        self.features = get_model("cifar_resnet20_v1", norm_layer=norm_layer).features[:-1]  # without its pooling
        self.classifier = nn.Conv2D(nclass, 1)

    def hybrid_forward(self, F, x):
        x = F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg")
        return (F.contrib.BilinearResize2D(self.classifier(self.features(x)), height=CROP, width=CROP),)


NETS = {
    "FastSCNN": lambda nclass, norm: FastSCNN(nclass, aux=False, crop_size=CROP, norm_layer=norm),
    "FCN-ResNet20": FCN,
}


class Scenes:
    """Drawn scenes, the same in each run: normalised images (N, 3, height, width), and masks of classes from -1 on."""

    def __init__(self, part: int, count: int):
        images, masks = [], []
        label = np.full(256, -1, np.int8)
        label[list(CLASSES)] = range(len(CLASSES))
        for i in range(count):
            image, mask = draw_scene([0, part, i])
            images.append(np.asarray(image.resize(SIZE), np.float32) / 255)
            masks.append(label[np.asarray(mask.resize(SIZE, 0))])
        self.images = ((np.stack(images) - 0.45) / 0.225).transpose(0, 3, 1, 2)
        self.masks = np.stack(masks)

    def crops(self, chosen, rng=None) -> tuple:
        """A crop of each chosen scene as (images, masks): mirrored and placed by rng, or in the centre."""
        images, masks = [], []
        for i in chosen:
            y, x = (SIZE[1] - CROP) // 2, (SIZE[0] - CROP) // 2
            step = 1
            if rng:
                y, x, step = rng.randint(SIZE[1] - CROP + 1), rng.randint(SIZE[0] - CROP + 1), rng.choice([-1, 1])
            images.append(self.images[i, :, y : y + CROP, x : x + CROP][:, :, ::step])
            masks.append(self.masks[i, y : y + CROP, x : x + CROP][:, ::step])
        return mx.nd.array(np.stack(images)), mx.nd.array(np.stack(masks), dtype="int32")


def trained(net_name: str, norm_layer, batch: int, rate: float, seed: int, epochs: int, scenes: Scenes, contexts: list):
    """Train a network by the mean loss over the pixels of a batch. Return its arrays as Gluon would save them."""
    rng = np.random.RandomState(seed)
    for module in (random, np.random, mx.random):
        module.seed(seed)
    net = NETS[net_name](len(CLASSES), norm_layer)
    net.initialize(Xavier(), ctx=contexts, force_reinit=True)
    net(mx.nd.zeros((1, 3, CROP, CROP), ctx=contexts[0]))  # fixes the shapes that GluonCV leaves open
    net.hybridize()
    loss = MixSoftmaxCrossEntropyLoss(aux=False)
    steps = len(scenes.images) // batch
    schedule = LRScheduler("poly", base_lr=rate, nepochs=epochs, iters_per_epoch=steps, power=0.9)
    settings = {"lr_scheduler": schedule, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore="local")
    for _ in range(epochs):
        order = rng.permutation(len(scenes.images))
        for step in range(steps):
            x, y = scenes.crops(order[step * batch : (step + 1) * batch], rng)
            with autograd.record():
                losses = [loss(net(a)[0], b) for a, b in zip(spread(x, contexts), spread(y, contexts))]
            autograd.backward(losses)
            trainer.step(len(contexts))
            mx.nd.waitall()
    return net_arrays(net)[0]


def scores(net_name: str, arrays: dict, scenes: Scenes) -> dict:
    """Score the arrays over the centre crops (pixAcc, mIoU), as saved and with `constant_channels_kept`."""
    net = NETS[net_name](len(CLASSES), nn.BatchNorm)
    net.initialize(mx.init.Zero(), force_reinit=True)
    net(mx.nd.zeros((1, 3, CROP, CROP)))
    net.hybridize()
    found = {}
    for suffix, values in ((" as saved", arrays), ("", constant_channels_kept(arrays))):
        set_arrays(net, values)
        metric = Scores(len(CLASSES))
        for first in range(0, len(scenes.images), 10):
            x, y = scenes.crops(range(first, first + 10))
            metric.update(y, net(x)[0])
        found.update(zip(("pixAcc" + suffix, "mIoU" + suffix), metric.get()))
    return found


def constant_channels_kept(arrays: dict) -> dict:
    """The arrays, with gamma = 0 in each channel that was constant in training.

    BatchNorm's output of a constant channel is beta. In prediction, its running variance of 0 multiplies each deviation
    by gamma / sqrt(epsilon) instead. FastSCNN pools one branch to one value per channel, which is constant if BatchNorm
    sees one image.
    """
    kept = dict(arrays)
    for name, variance in arrays.items():
        if name.endswith("running_var"):
            gamma = name.replace("running_var", "gamma")
            kept[gamma] = arrays[gamma] * (variance > CONSTANT)
    return kept

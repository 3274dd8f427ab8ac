"""A training script with types, as a user writes it, which `make lint` has mypy read. Nothing runs it."""

from __future__ import annotations

from typing import List

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import ShuffleBatchNorm, SyncBatchNorm, contrastive
from gluon_syncbn.contrastive import SampleShuffle, ShuffledBatch
from gluon_syncbn.parallel import DataParallelModel

contexts: List[mx.Context] = gluon_syncbn.cpu_devices(2)
net: nn.HybridSequential = nn.HybridSequential()
net.add(nn.Conv2D(4, 3), SyncBatchNorm(momentum=0.9), ShuffleBatchNorm(in_channels=4), nn.Dense(2))
converted: nn.HybridSequential = gluon_syncbn.convert(net)
net.initialize(ctx=contexts)
gluon_syncbn.configure(timeout=60.0, seed=1)
version: str = gluon_syncbn.__version__
trainer = gluon.Trainer(net.collect_params(), "sgd")
parts = gluon.utils.split_and_load(mx.nd.ones((4, 3, 8, 8)), contexts)
for _ in range(2):
    with autograd.record():
        losses = [net(part) for part in parts]
    autograd.backward(losses)
    trainer.step(4)
keys: ShuffledBatch = contrastive.split_and_load(mx.nd.ones((4, 3, 8, 8)), contexts, shuffle=SampleShuffle(seed=1))
gluon_syncbn.summary(net)
model = DataParallelModel(net, contexts)
gluon_syncbn.average_running_stats(net)
gluon_syncbn.update_bn_stats(net, [parts])
gluon_syncbn.freeze(net)
gluon_syncbn.revert(net)
gluon_syncbn.reset()

# Where the package has types, each of these is an error; mypy says so of one that is none.
gluon_syncbn.__version__ / 2  # type: ignore[operator]
gluon_syncbn.cpu_devices("two")  # type: ignore[arg-type]
missing = gluon_syncbn.no_such_name  # type: ignore[attr-defined]

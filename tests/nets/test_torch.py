"""Against PyTorch on the whole batch: steps of a residual network, which each goes on where the other one stands."""

import copy

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from replicas import forward_and_backward, on_devices

from gluon_syncbn import SyncBatchNorm, from_torch, to_torch

torch = pytest.importorskip(
    "torch", reason="needs `make test-torch`: GluonCV imports beside no younger PyTorch than 2.0"
)
CONTEXTS = [mx.cpu(i) for i in range(3)]


class Block(torch.nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(into, out, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(out), torch.nn.ReLU(),
            torch.nn.Conv2d(out, out, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(out, eps=1e-3, momentum=0.3),
        )  # fmt: skip
        self.shortcut = torch.nn.Sequential(
            torch.nn.Conv2d(into, out, 1, 2, bias=False), torch.nn.BatchNorm2d(out, affine=False)
        )

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class SameBlock(nn.HybridBlock):
    def __init__(self, channels):
        super().__init__()
        self.body, self.shortcut = nn.HybridSequential(), nn.HybridSequential()
        self.body.add(nn.Conv2D(channels, 3, 2, 1, use_bias=False), SyncBatchNorm(), nn.Activation("relu"))
        self.body.add(nn.Conv2D(channels, 3, 1, 1, use_bias=False), SyncBatchNorm())
        self.shortcut.add(nn.Conv2D(channels, 1, 2, 0, use_bias=False), SyncBatchNorm(scale=False, center=False))

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + self.shortcut(x))


def taken_over(module):
    """A net that goes on where a module of PyTorch's stands."""
    net = nn.HybridSequential()
    net.add(SameBlock(8), SameBlock(16), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(5))
    net.initialize(ctx=CONTEXTS)
    return from_torch(net, module)


def state(module):
    return {n: v.numpy().copy() for n, v in module.state_dict().items() if not n.endswith("num_batches_tracked")}


def test_each_goes_on_as_the_other_one_would():
    """Three uneven shards, and gradients of a sum over all samples."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        Block(3, 8), Block(8, 16), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 5)
    )
    net, rng = taken_over(module), np.random.RandomState(0)
    for _ in range(3):
        before = state(module)
        shards = [((1 + i) * rng.randn(n, 3, 12, 12) + i).astype("float32") for i, n in enumerate((5, 2, 4))]
        heads = [rng.randn(len(shard), 5).astype("float32") for shard in shards]
        module(torch.from_numpy(np.concatenate(shards))).backward(torch.from_numpy(np.concatenate(heads)))
        optimizer = torch.optim.SGD(module.parameters(), 0.01, weight_decay=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "wd": 1e-3})
        forward_and_backward(net, *(on_devices(arrays, CONTEXTS, "float32") for arrays in (shards, heads)))
        trainer.step(1)

        twin = copy.deepcopy(module)
        for layer in twin.modules():
            vars(layer).update(eps=1, momentum=1)  # until it gets those of the net
        got, want = state(to_torch(net, twin)), state(module)
        for name, value in want.items():
            error, moved = (np.abs(value - other).max() / np.abs(value).max() for other in (got[name], before[name]))
            assert error < 1e-5 < 1e-4 < moved, (name, error, moved)
        net, module = taken_over(module), twin


@pytest.mark.parametrize("settings", [{"momentum": None}, {"track_running_stats": False}])
def test_what_has_no_counterpart(settings):
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize()
    with pytest.raises(ValueError, match="a cumulative mean, or none, has no counterpart"):
        from_torch(layer, torch.nn.BatchNorm2d(3, **settings))

"""Against PyTorch on the whole batch: BatchNorm, and a training step of a residual network."""

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


def taken_over(module):
    """A layer that goes on where a BatchNorm of PyTorch stands."""
    layer = SyncBatchNorm(in_channels=module.num_features, scale=module.affine, center=module.affine)
    layer.cast(str(module.running_mean.dtype).split(".")[1])
    layer.initialize(ctx=CONTEXTS)
    return from_torch(layer, module)


def handed_over(layer, module):
    """A new module like this one, where the layer stands."""
    twin = torch.nn.BatchNorm2d(module.num_features, affine=module.affine, dtype=module.running_mean.dtype)
    return to_torch(layer, twin)


def drawn(channels, dtype, **settings):
    """A BatchNorm of PyTorch that has seen something."""
    rng = np.random.RandomState(0)
    module = torch.nn.BatchNorm2d(channels, dtype=getattr(torch, dtype), **settings)
    with torch.no_grad():
        for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
            if tensor is not None:
                tensor.copy_(torch.from_numpy(rng.rand(channels) + 0.5))
    return module


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("settings", [{"momentum": 0.3, "eps": 1e-3}, {"affine": False}])
def test_a_layer_goes_on_as_the_other_one_would(dtype, tolerance, settings):
    """Three uneven shards, two steps; then one step of each, from where the other one stands."""
    rng = np.random.RandomState(1)
    module = drawn(4, dtype, **settings)
    layer = taken_over(module)
    for _ in range(2):
        shards = [((i + 1) * rng.randn(n, 4, 3, 2) + i).astype(dtype) for i, n in enumerate((2, 1, 4))]
        heads = [rng.randn(*shard.shape).astype(dtype) for shard in shards]
        xs = on_devices(shards, CONTEXTS, dtype)
        ys = forward_and_backward(layer, xs, on_devices(heads, CONTEXTS, dtype))
        whole = torch.from_numpy(np.concatenate(shards)).requires_grad_()
        wanted = module(whole)
        wanted.backward(torch.from_numpy(np.concatenate(heads)))

        for got, want in ((ys, wanted), ([x.grad for x in xs], whole.grad)):
            whole_of_ours = np.concatenate([part.asnumpy() for part in got])
            np.testing.assert_allclose(whole_of_ours, want.detach().numpy(), rtol=tolerance, atol=tolerance)
        for name in ("running_mean", "running_var"):
            got, want = getattr(layer, name).data().asnumpy(), getattr(module, name).numpy()
            np.testing.assert_allclose(got, want, rtol=max(tolerance, 1e-6))  # MXNet keeps the momentum in float32

        twin = handed_over(layer, module)
        assert twin.momentum == pytest.approx(module.momentum) and twin.eps == module.eps
        for name in ("running_mean", "running_var"):
            np.testing.assert_array_equal(getattr(twin, name).numpy(), getattr(layer, name).data().asnumpy())
        if module.affine:
            np.testing.assert_array_equal(twin.weight.detach().numpy(), module.weight.detach().numpy())
            np.testing.assert_array_equal(twin.bias.detach().numpy(), module.bias.detach().numpy())
        layer, module = taken_over(twin), handed_over(taken_over(module), module)


class Block(torch.nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(into, out, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(out), torch.nn.ReLU(),
            torch.nn.Conv2d(out, out, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = torch.nn.Sequential(torch.nn.Conv2d(into, out, 1, 2, bias=False), torch.nn.BatchNorm2d(out))

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class SameBlock(nn.HybridBlock):
    def __init__(self, channels):
        super().__init__()
        self.body, self.shortcut = nn.HybridSequential(), nn.HybridSequential()
        self.body.add(nn.Conv2D(channels, 3, 2, 1, use_bias=False), SyncBatchNorm(), nn.Activation("relu"))
        self.body.add(nn.Conv2D(channels, 3, 1, 1, use_bias=False), SyncBatchNorm())
        self.shortcut.add(nn.Conv2D(channels, 1, 2, 0, use_bias=False), SyncBatchNorm())

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + self.shortcut(x))


def test_a_step_of_a_residual_network():
    """Uneven shards, and gradients of a sum over all samples: parameters and running statistics to 1e-5."""
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(
        Block(3, 8), Block(8, 16), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 5)
    )
    net = nn.HybridSequential()
    net.add(SameBlock(8), SameBlock(16), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(5))
    net.initialize(ctx=CONTEXTS)
    from_torch(net, theirs)
    before = {name: value.numpy().copy() for name, value in theirs.state_dict().items()}

    rng = np.random.RandomState(0)
    shards = [((1 + i) * rng.randn(n, 3, 12, 12) + i).astype("float32") for i, n in enumerate((5, 2, 4))]
    heads = [rng.randn(len(shard), 5).astype("float32") for shard in shards]
    optimizer = torch.optim.SGD(theirs.parameters(), 0.01, momentum=0.9, weight_decay=1e-3)
    theirs(torch.from_numpy(np.concatenate(shards))).backward(torch.from_numpy(np.concatenate(heads)))
    optimizer.step()
    settings = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-3}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings)
    forward_and_backward(net, *(on_devices(arrays, CONTEXTS, "float32") for arrays in (shards, heads)))
    trainer.step(1)

    want = {name: value.numpy().copy() for name, value in theirs.state_dict().items()}
    got = to_torch(net, theirs).state_dict()
    for name, value in want.items():
        if not name.endswith("num_batches_tracked"):
            error, moved = (
                np.abs(value - other).max() / np.abs(value).max() for other in (got[name].numpy(), before[name])
            )
            assert error < 1e-5 < 1e-4 < moved, (name, error, moved)

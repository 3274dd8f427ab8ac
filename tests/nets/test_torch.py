"""Against PyTorch on the whole batch: BatchNorm, and a training step of a residual network in two processes."""

import mxnet as mx
import numpy as np
import pytest
from mpi_job import Job
from places import SUPPORT
from replicas import forward_and_backward, on_devices
from torch_net import LEARNING_RATE, MOMENTUM, SIZES, WEIGHT_DECAY

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


@pytest.mark.parametrize("settings", [{"momentum": None}, {"track_running_stats": False}])
def test_what_has_no_counterpart(settings):
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize()
    with pytest.raises(ValueError, match="a cumulative mean, or none, has no counterpart"):
        from_torch(layer, torch.nn.BatchNorm2d(3, **settings))


class Block(torch.nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(into, out, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(out), torch.nn.ReLU(),
            torch.nn.Conv2d(out, out, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = torch.nn.Sequential(
            torch.nn.Conv2d(into, out, 1, stride, bias=False), torch.nn.BatchNorm2d(out)
        )

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def test_a_step_of_a_residual_network_in_two_processes(tmp_path):
    """Uneven shards and the mean loss over all samples: parameters and running statistics to 1e-5 of PyTorch's. Where
    shards are even, DistributedDataParallel's mean of gradients is that of this loss."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        Block(8, 16, 2), Block(16, 32, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 5),
    )  # fmt: skip

    def state():
        return [v.detach().numpy().copy() for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")]

    rng = np.random.RandomState(0)
    x = rng.randn(sum(SIZES), 3, 12, 12).astype("float32")
    x[SIZES[0] :] = 3 * x[SIZES[0] :] + 1  # the other process's
    y, before = rng.randint(0, 5, len(x)), state()
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    optimizer.step()
    arrays = {
        f"{name}{i}": a for name, all_of in (("before", before), ("after", state())) for i, a in enumerate(all_of)
    }
    np.savez(tmp_path / "step.npz", x=x, y=y, **arrays)
    job = Job(2, tmp_path / "step.npz", worker=SUPPORT / "torch_net.py")
    assert job.succeeded(2), job.output

"""A net trains as a PyTorch module does, whose parameters it has. GluonCV does not import beside PyTorch 2.0."""

import copy

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from replicas import forward_and_backward, on_devices

from gluon_syncbn import SyncBatchNorm


def test_each_goes_on_as_the_other_one_would(rng):
    """PyTorch on the whole batch, and ours on three uneven shards, with gradients of a sum over all samples."""
    torch = pytest.importorskip("torch", reason="needs `make test-torch`, without GluonCV")
    body = [torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8, eps=1e-3, momentum=0.3)]
    rest = [torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 1, bias=False), torch.nn.BatchNorm2d(16)]
    rest += [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 5)]
    module, contexts = torch.nn.Sequential(torch.nn.Sequential(*body), *rest), [mx.cpu(i) for i in range(3)]

    first = {"in_channels": 8, "epsilon": 1e-3, "momentum": 0.7, "running_variance": "unbiased"}
    second = {"in_channels": 16, "running_variance": "unbiased"}

    def state_of(module):
        return {n: v.numpy().copy() for n, v in module.state_dict().items() if not n.endswith("num_batches_tracked")}

    def taken_over(module):
        net, body = nn.HybridSequential(), nn.HybridSequential()
        body.add(nn.Conv2D(8, 3, 2, 1, use_bias=False, in_channels=3), SyncBatchNorm(**first))
        net.add(body, nn.Activation("relu"), nn.Conv2D(16, 1, use_bias=False, in_channels=8))
        net.add(SyncBatchNorm(**second), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(5, in_units=16))
        net.initialize(ctx=contexts)
        for parameter, value in zip(net.collect_params().values(), state_of(module).values()):
            parameter.set_data(nd.array(value))
        return net

    def handed_over(net, module):
        values = [torch.from_numpy(one.data().asnumpy()) for one in net.collect_params().values()]
        module.load_state_dict(dict(zip(state_of(module), values)), strict=False)
        return module

    net = taken_over(module)
    for _ in range(3):
        before = state_of(module)
        shards = [((1 + i) * rng.randn(n, 3, 12, 12) + i).astype("float32") for i, n in enumerate((5, 2, 4))]
        heads = [rng.randn(len(shard), 5).astype("float32") for shard in shards]
        module(torch.from_numpy(np.concatenate(shards))).backward(torch.from_numpy(np.concatenate(heads)))
        optimizer = torch.optim.SGD(module.parameters(), 0.01, weight_decay=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "wd": 1e-3})
        forward_and_backward(net, *(on_devices(arrays, contexts, "float32") for arrays in (shards, heads)))
        trainer.step(1)

        twin = handed_over(net, copy.deepcopy(module))
        got, want = state_of(twin), state_of(module)
        for name, value in want.items():
            error, moved = (np.abs(value - other).max() / np.abs(value).max() for other in (got[name], before[name]))
            assert error < 1e-5 < 1e-4 < moved, (name, error, moved)
        net, module = taken_over(module), twin

"""Measures what the owner of GPUs can report: a step of a net on all of them, and the time of the layer."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from ..layer import SyncBatchNorm

OPTION, NAME = "--report", "gluon-syncbn-report.txt"
SHAPES = ((4, 64, 8, 8), (4, 256, 60, 60), (16, 256, 60, 60))  # of one GPU
WAYS: Dict[str, Dict[str, bool]] = {"eager": {}, "static": {"static_alloc": True, "static_shape": True}}
LENGTH = 10  # layers of a chain, so that the host's work for one overlaps with the device's work for another

#: A layer for this number of channels, and what stands behind it.
NORMS: Dict[str, Callable[[int], List[nn.HybridBlock]]] = {
    "ours": lambda channels: [SyncBatchNorm(in_channels=channels)],
    "plain": lambda channels: [nn.BatchNorm(in_channels=channels)],
    "ours with ReLU": lambda channels: [SyncBatchNorm(in_channels=channels, activation="relu")],
    "plain and ReLU": lambda channels: [nn.BatchNorm(in_channels=channels), nn.Activation("relu")],
}


def net_on_all(contexts: Sequence[mx.Context]) -> str:
    """Trains a net of MXNet's operators on all contexts, and with plain BatchNorm on one, which has all samples.

    Returns the largest difference of outputs and updated parameters, relative to the largest value.
    """
    random = np.random.RandomState(0)
    shards = [n * random.randn(n, 3, 12, 12) + n for n in range(2, 2 + len(contexts))]
    heads = [random.randn(len(x), 5) for x in shards]
    values: Dict[str, np.ndarray] = {}

    def trained(norm: Any, contexts: Sequence[mx.Context], shards: Any, heads: Any) -> Dict[str, np.ndarray]:
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Conv2D(8, 3, in_channels=3), norm(in_channels=8, prefix="norm_"), nn.Activation("relu"))
            net.add(nn.GlobalAvgPool2D(), nn.Dense(5, in_units=8))
        net.initialize(ctx=list(contexts))
        parameters = {name: p for name, p in net.collect_params().items() if p.grad_req != "null"}
        for name, parameter in parameters.items():
            values.setdefault(name, random.rand(*parameter.shape) + 0.5)
            parameter.set_data(mx.nd.array(values[name]))
        net.hybridize(static_alloc=True)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
        with autograd.record():
            ys = [net(mx.nd.array(x, ctx=context)) for x, context in zip(shards, contexts)]
        autograd.backward(ys, [mx.nd.array(dy, ctx=context) for dy, context in zip(heads, contexts)])
        trainer.step(sum(map(len, shards)))
        found = {name: p.data(contexts[-1]).asnumpy() for name, p in parameters.items()}
        return {**found, "outputs": np.concatenate([y.asnumpy() for y in ys])}

    got = trained(SyncBatchNorm, contexts, shards, heads)
    want = trained(nn.BatchNorm, contexts[:1], [np.concatenate(shards)], [np.concatenate(heads)])
    error = max(np.abs(got[name] - want[name]).max() / np.abs(want[name]).max() for name in want)
    if not error < 1e-2:  # TensorFloat-32 has 10 bits
        raise ArithmeticError(f"{len(contexts)} replicas differ from one by {error:.1e} (relative), not below 1e-2")
    return f"{len(contexts)} replicas are one within {error:.0e}: a step of a net with convolutions and a trainer"


def times(contexts: Sequence[mx.Context], shapes: Sequence[Tuple[int, ...]] = SHAPES, rounds: int = 20) -> List[str]:
    """Returns lines with medians of microseconds for a layer, forward and backward, on one context and on all."""
    lines = []
    for count in sorted({1, len(contexts)}):
        for shape in shapes:
            for way, flags in WAYS.items():
                steps = {name: chain(norm, contexts[:count], shape, "float32", flags) for name, norm in NORMS.items()}
                taken = [{name: step() for name, step in steps.items()} for _ in range(rounds + 2)][2:]
                medians = {name: np.median([one[name] for one in taken], axis=0) * 1e6 for name in steps}
                figures = ", ".join(f"{name} {forward:.0f} + {back:.0f}" for name, (forward, back) in medians.items())
                lines.append(f"{count} x {' x '.join(map(str, shape))}, {way}: {figures}")
    return lines


def chain(
    norm: Callable[[int], List[nn.HybridBlock]],
    contexts: Sequence[mx.Context],
    shape: Tuple[int, ...],
    dtype: str,
    flags: Optional[Dict[str, bool]],
    length: int = LENGTH,
) -> Callable[[], Tuple[float, float]]:
    """Returns a function that runs a chain of layers once: seconds of one layer's forward, and of its backward.

    ``flags`` are those of `hybridize`; with none the net is eager.
    """
    net = nn.HybridSequential()
    for _ in range(length):
        net.add(*norm(shape[1]))
    net.initialize(ctx=list(contexts))
    net.cast(dtype)
    if flags:
        net.hybridize(**flags)
    random = np.random.RandomState(0)
    xs, heads, grads = (
        [mx.nd.array(random.standard_normal(shape), ctx=context, dtype=dtype) for context in contexts] for _ in range(3)
    )
    autograd.mark_variables(xs, grads)  # not attach_grad, which runs an operator

    def step() -> Tuple[float, float]:
        mx.nd.waitall()
        begun = time.perf_counter()
        with autograd.record():
            ys = [net(x) for x in xs]
        mx.nd.waitall()
        forward = time.perf_counter()
        autograd.backward(ys, heads)
        mx.nd.waitall()
        return (forward - begun) / length, (time.perf_counter() - forward) / length

    step()
    return step

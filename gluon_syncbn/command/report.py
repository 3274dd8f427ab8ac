"""Measures what the owner of GPUs can report: a training on all of them, and the time of the layer."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

from ..layer import SyncBatchNorm
from ..system import cuda
from .training import BATCH, CLASSES, Training, drawn, network

NAME = "gluon-syncbn-report.txt"
SHAPES = ((4, 64, 8, 8), (4, 256, 60, 60), (16, 256, 60, 60))  # of one GPU
WAYS: Dict[str, Dict[str, bool]] = {"eager": {}, "static": {"static_alloc": True, "static_shape": True}}
STEPS = 20  # of a training
LENGTH = 10  # layers of a chain, so that the host's work for one overlaps with the device's work for another

#: A layer for this number of channels, and what stands behind it.
NORMS: Dict[str, Callable[[int], List[nn.HybridBlock]]] = {
    "ours": lambda channels: [SyncBatchNorm(in_channels=channels)],
    "plain": lambda channels: [nn.BatchNorm(in_channels=channels)],
    "ours with ReLU": lambda channels: [SyncBatchNorm(in_channels=channels, activation="relu")],
    "plain and ReLU": lambda channels: [nn.BatchNorm(in_channels=channels), nn.Activation("relu")],
}


def trained_on_all(contexts: Sequence[mx.Context]) -> List[str]:
    """Trains nets on all contexts, and with plain BatchNorm on a CPU, which has all samples. Returns a line for each.

    The first needs no kernel of MXNet's. The second is GluonCV's, where that is installed and MXNet has code for all.
    """
    vgg = {True: NORMS["ours with ReLU"], False: NORMS["plain and ReLU"]}
    lines = [_beside_one("a net like VGG", lambda ours: network(vgg[ours]), contexts, False)]
    gpus = [cuda.gpu(context.device_id) for context in contexts if context.device_type == "gpu"]
    without = [f"{gpu.name}, for which MXNet has no code" for gpu in gpus if gpu.capability[0] not in cuda.MAJORS]
    if not without:
        try:
            from gluoncv.model_zoo import cifar_resnet20_v1
        except ImportError as error:
            without.append(str(error))
        else:
            norms = {True: SyncBatchNorm, False: nn.BatchNorm}
            made = functools.partial(cifar_resnet20_v1, classes=CLASSES)
            lines.append(_beside_one("cifar_resnet20_v1", lambda ours: made(norm_layer=norms[ours]), contexts, True))
    return lines + [f"no ResNet of GluonCV: {reason}" for reason in without[:1]]


def _beside_one(name: str, net: Callable[[bool], Any], contexts: Sequence[mx.Context], everywhere: bool) -> str:
    random = np.random.RandomState(0)
    batches = [drawn(random) for _ in range(STEPS)]
    for images, _ in batches:
        images += np.linspace(0, 3, BATCH, dtype="float32")[:, None, None, None]  # other statistics on each context

    def trained(ours: bool, contexts: Sequence[mx.Context]) -> Tuple[List[float], np.ndarray]:
        """Losses, and the weights after the first step."""
        training = Training(net(ours), contexts, everywhere=everywhere)
        losses = [training.step(*batches[0]) / BATCH]
        arrays = [array.ravel() for key, array in training.arrays().items() if "running" not in key]
        return losses + [training.step(*batch) / BATCH for batch in batches[1:]], np.concatenate(arrays)

    (got, mine), (want, theirs) = trained(True, contexts), trained(False, [mx.cpu()])
    loss, weight = abs(got[0] - want[0]) / want[0], float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
    text = (
        f"{name}: after a step {len(contexts)} replicas and a CPU differ by {loss:.0e} (loss), {weight:.0e} (weights); "
        f"{STEPS} steps take the loss from {got[0]:.3f} to {got[-1]:.3f}, and from {want[0]:.3f} to {want[-1]:.3f}"
    )
    # TensorFloat-32 has 10 bits. Later steps say less: trainings in float32 drift apart, with plain BatchNorm alone.
    if not max(loss, weight) < 3e-3:
        raise ArithmeticError(f"{text}; expected are differences below 3e-3")
    if not all(np.mean(some[-5:]) < 0.8 * some[0] for some in (got, want)):
        raise ArithmeticError(f"{text}; expected are losses that fall by a fifth")
    return text


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

"""Checks this machine, for ``gluon-syncbn check``: reports what it supports, and trains. Exit code 1 means a failed
check.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from typing import Callable, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

from .. import _native
from ..exchange import named
from ..nets.convert import convert
from ..system import cuda, cuda_libraries, distribution
from ..training.session import configure

INDENT = "\n" + " " * 18
CPU_BUILD = "none: this is a CPU build of MXNet"
# Of the training.
CLASSES = 4
BATCH = 24  # samples of a step, over all devices
RATE = 0.005
STEPS = 20


def versions() -> str:
    builds = {}  # by name: an editable package is found twice
    for package in importlib.metadata.distributions():
        name = str(package.metadata["Name"]).lower().replace("_", "-")
        if re.fullmatch(r"mxnet(-(cu\d+(mkl)?|mkl|native))?", name):
            builds[name] = package.version
    if len(builds) > 1:
        both = " and ".join(f"{name} {version}" for name, version in sorted(builds.items()))
        raise RuntimeError(
            f"{both} are installed and have overwritten each other's files: `pip uninstall "
            f"{' '.join(sorted(builds))}`, then install one of them, with "
            f"{distribution.command('cpu')} or {distribution.command('cu112')}{distribution.WHERE}"
        )
    return (
        f"gluon_syncbn {distribution.__version__}, Apache MXNet {mx.__version__} "
        f"({next(iter(builds), 'not from a package')}), "
        f"NumPy {np.__version__}, Python {platform.python_version()} on {platform.platform()}"
    )


def core() -> str:
    found = [f"{_native.PATH}, {_native.instruction_set()} kernels, {len(os.sched_getaffinity(0))} cores"]
    for device, copies in (("cpu", ", with copies"), ("gpu", "")):
        if device == "gpu" and not mx.runtime.Features().is_enabled("CUDA"):
            continue
        why = _native.WHY_CUSTOM[device]
        way = f"through MXNet's Custom{copies} ({why})" if why else "straight from MXNet's engine"
        found.append(f"on {device.upper()}s, calls come {way}")
    return "; ".join(found)


def stores() -> str:
    missing = _native.nccl_problem()
    nccl = f"no NCCL between GPUs ({missing})" if missing else "between GPUs NCCL"
    # Looked up, and not imported: to import it starts MPI. The first one that is found is imported.
    version = next((one.version for one in importlib.metadata.distributions(name="mpi4py")), None)
    mpi = f"kvstore('mpi') with mpi4py {version}" if version else f"no mpi ({distribution.command('mpi')})"
    return f"shared memory, {nccl}, KVStore {', '.join(named.TYPES)}; {mpi}"


def libraries() -> str:
    features = mx.runtime.Features()
    built = [name for name in ("CUDA", "CUDNN", "NCCL", "CUDA_RTC") if features.is_enabled(name)]
    if not built:
        return CPU_BUILD
    driver = ".".join(map(str, cuda.driver_version()))
    what = f"MXNet is built with {', '.join(built)}; the driver serves CUDA {driver}"
    return INDENT.join([what, *cuda_libraries.loaded()])


def on_gpus(check: Callable[[List[mx.Context]], str]) -> Callable[[], str]:
    """Has a check called with all GPUs, or tells why there is none."""

    @functools.wraps(check)
    def checked() -> str:
        if not mx.runtime.Features().is_enabled("CUDA"):
            return CPU_BUILD
        try:
            contexts = [mx.gpu(i) for i in range(cuda.count())]
        except OSError as reason:
            return f"none: {reason}"
        return check(contexts)

    return checked


@on_gpus
def gpus(contexts: List[mx.Context]) -> str:
    lines = [f"{len(contexts)}, as the driver sees them"]
    for context in contexts:
        cuda.check_architecture(context.device_id)
        name, (major, minor) = cuda.gpu(context.device_id)
        lines.append(f"{context}: {name}, compute capability {major}.{minor}")
    return INDENT.join(lines)


def live() -> str:
    return beside_plain([mx.cpu(0), mx.cpu(1)], {None: "shared memory", "device": "KVStore device"})


@on_gpus
def live_gpu(contexts: List[mx.Context]) -> str:
    problem = _native.nccl_problem()
    default = "no exchange" if len(contexts) == 1 else f"host memory, as {problem}" if problem else "NCCL"
    return beside_plain(contexts, {None: default, "host": "host memory"})


def trained(ours: bool, contexts: Sequence[mx.Context]) -> Tuple[List[float], np.ndarray]:
    """Returns the loss of each step, which tells four patterns in noise apart, and the parameters and running
    statistics after the first. NumPy updates them.
    """
    random = np.random.RandomState(0)
    mx.random.seed(0)
    patterns = random.standard_normal((CLASSES, 3, 16, 16))
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for before, channels in ((3, 16), (16, 32)):
            net.add(nn.Conv2D(channels, 3, 2, 1, use_bias=False, in_channels=before))
            net.add(nn.BatchNorm(in_channels=channels), nn.Activation("relu"))
        net.add(nn.Conv2D(CLASSES, 4, use_bias=False, in_channels=32))
    if ours:
        convert(net, fuse=True)
    net.initialize(mx.init.Xavier(), ctx=list(contexts))  # drawn on the CPU
    net.hybridize(static_alloc=True, static_shape=True)
    parameters = list(net.collect_params().values())
    losses, first = [], np.empty(0)
    for _ in range(STEPS):
        labels = random.randint(CLASSES, size=BATCH)
        images = patterns[labels] + random.standard_normal((BATCH, 3, 16, 16))
        images += np.linspace(0, 3, BATCH)[:, None, None, None]  # other statistics on each context
        shards, wanted = (np.array_split(array, len(contexts)) for array in (images, np.eye(CLASSES)[labels]))
        xs = [mx.nd.array(shard, ctx=context) for shard, context in zip(shards, contexts)]
        with autograd.record():
            ys = [net(x) for x in xs]
        wrong = [y.asnumpy() - target[:, :, None, None] for y, target in zip(ys, wanted)]
        autograd.backward(ys, [mx.nd.array(dy / BATCH, ctx=y.context) for dy, y in zip(wrong, ys)])
        losses.append(float(sum((dy**2).sum() for dy in wrong)) / BATCH)
        for weight in [one for one in parameters if one.grad_req != "null"]:
            gradient = sum(one.asnumpy() for one in weight.list_grad())
            weight.set_data(mx.nd.array(weight.list_data()[0].asnumpy() - RATE * gradient))
        if not first.size:
            mx.nd.waitall()  # a read does not wait for plain running statistics
            first = np.concatenate([one.list_data()[-1].asnumpy().ravel() for one in parameters])
    return losses, first


def beside_plain(contexts: Sequence[mx.Context], stores: Mapping[Optional[str], str]) -> str:
    """Trains a net on all contexts, and with plain BatchNorm on a CPU, which has all samples. Returns both in words.

    Copies, cuDNN and this layer do all that the net does on a GPU, so no GPU lacks code for it.
    """
    want, theirs = trained(False, [mx.cpu()])
    lines = [f"{len(contexts)} replicas on {contexts[0].device_type}, beside plain BatchNorm on one CPU"]
    for store, name in stores.items():
        configure(kvstore=store, timeout=30)
        got, mine = trained(True, contexts)
        loss, values = abs(got[0] - want[0]) / want[0], float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
        text = (
            f"with {name}, a step differs by {loss:.0e} (loss), {values:.0e} (parameters), and {STEPS} steps take the "
            f"loss from {got[0]:.3f} to {got[-1]:.3f}, from {want[0]:.3f} to {want[-1]:.3f}"
        )
        # TensorFloat-32 has 10 bits. Later steps say less: trainings in float32 drift apart, also with plain BatchNorm.
        if not max(loss, values) < 3e-3:
            raise ArithmeticError(f"{text}; expected are differences below 3e-3")
        if not all(np.mean(some[-5:]) < 0.8 * some[0] for some in (got, want)):
            raise ArithmeticError(f"{text}; expected are losses that fall by a fifth")
        lines.append(text)
    configure(kvstore=None)
    return INDENT.join(lines)


def main() -> int:
    """Runs and prints all checks."""
    checks = (versions, core, libraries, gpus, stores, live, live_gpu)
    broken = 0
    for check in checks:
        try:
            line = f"ok      {check.__name__:9} {check()}"
        except Exception as problem:  # the other checks still run
            broken += 1
            line = f"BROKEN  {check.__name__:9} {type(problem).__name__}: {problem}"
        print(line, flush=True)
    print(f"{broken} of {len(checks)} checks failed." if broken else "gluon_syncbn works here.")
    return 1 if broken else 0

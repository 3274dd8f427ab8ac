"""Self-check: what serves on this machine, and whether it works. Exit code 1 where something is broken.

``python -m gluon_syncbn``
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Callable, List

import mxnet as mx
import numpy as np
from mxnet import autograd

from . import SyncBatchNorm, __version__, _native, configure, cpu_devices, reference
from .exchange import kvstore as _kvstore


def versions() -> str:
    return (
        f"gluon_syncbn {__version__}, Apache MXNet {mx.__version__}, NumPy {np.__version__}, "
        f"Python {platform.python_version()} on {platform.platform()}"
    )


def core() -> str:
    return f"{_native.path()}, {_native.instruction_set()} kernels, {len(os.sched_getaffinity(0))} cores"


def stores() -> str:
    found = []
    for name in _kvstore.TYPES:
        try:
            _kvstore.create(name)
            found.append(name)
        except ValueError as missing:
            found.append(f"no {name} ({str(missing).splitlines()[0].split(': ')[-1]})")
    return "shared memory, KVStore " + ", ".join(found)


def processes() -> str:
    found = []
    for name, package in (("mpi", "mpi4py"), ("horovod", "horovod")):
        try:  # looked up, not imported: importing it starts MPI
            found.append(f"kvstore({name!r}) with {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name} (pip install 'gluon_syncbn[{name}]')")
    return ", ".join(found)


def gpu() -> str:
    features = mx.runtime.Features()
    built = [name for name in ("CUDA", "CUDNN", "NCCL", "CUDA_RTC") if features.is_enabled(name)]
    if not built:
        return "none: this is a CPU build of MXNet"
    return (
        f"MXNet is built with {', '.join(built)}; {mx.context.num_gpus()} GPUs. This version synchronises CPU contexts"
    )


def live() -> str:
    """One step on two replicas with 2 and 3 samples, against the float64 reference. Returns the largest error."""
    errors = []
    for store in (None, "device"):
        configure(kvstore=store, timeout=30)
        random = np.random.RandomState(0)
        shards = [3.0 * random.randn(n, 4, 5, 5) + n for n in (2, 3)]
        heads = [random.randn(*x.shape) for x in shards]
        gamma, beta = random.rand(4) + 0.5, random.randn(4)

        layer = SyncBatchNorm(in_channels=4)
        layer.initialize(ctx=CONTEXTS)
        layer.gamma.set_data(mx.nd.array(gamma))
        layer.beta.set_data(mx.nd.array(beta))
        inputs = [mx.nd.array(x, ctx=ctx) for x, ctx in zip(shards, CONTEXTS)]
        for x in inputs:
            x.attach_grad()
        with autograd.record():
            outputs = [layer(x) for x in inputs]
        autograd.backward(outputs, [mx.nd.array(dy, ctx=ctx) for dy, ctx in zip(heads, CONTEXTS)])

        expected = reference.forward(shards, gamma, beta, np.zeros(4), np.ones(4))
        gradients = reference.backward(shards, heads, gamma, expected.state)
        pairs = list(zip(outputs, expected.outputs)) + [(x.grad, dx) for x, dx in zip(inputs, gradients.dxs)]
        pairs += [(layer.running_var.data(ctx), var) for ctx, var in zip(CONTEXTS, expected.running_var)]
        pairs += [(layer.gamma.grad(ctx), dg) for ctx, dg in zip(CONTEXTS, gradients.dgammas)]
        error = max(np.abs(got.asnumpy() - want).max() / np.abs(want).max() for got, want in pairs)
        if not error < 1e-5:
            raise ArithmeticError(f"wrong by {error:.1e} (relative) with kvstore={store!r}, expected below 1e-5")
        errors.append(f"{error:.0e} with {'shared memory' if store is None else 'KVStore ' + store}")
    return f"two replicas, 2 + 3 samples, right within {', '.join(errors)}"


def main() -> int:
    checks: List[Callable[[], str]] = [versions, core, stores, processes, gpu, live]
    broken = 0
    for check in checks:
        try:
            print(f"ok      {check.__name__:9} {check()}")
        except Exception as problem:  # each line of the report stands for itself
            broken += 1
            print(f"BROKEN  {check.__name__:9} {type(problem).__name__}: {problem}")
    print("gluon_syncbn works here." if not broken else f"{broken} of {len(checks)} checks failed.")
    return 1 if broken else 0


CONTEXTS = cpu_devices(2)

if __name__ == "__main__":
    sys.exit(main())

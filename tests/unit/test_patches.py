"""What is changed in MXNet is changed once, and can be put back."""

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.nn.basic_layers import _BatchNorm
from mxnet.module.executor_group import DataParallelExecutorGroup

from gluon_syncbn.mxnet_side import patches
from gluon_syncbn.nets import checkpoint, executors

CHANGED = [
    (autograd._RecordingStateScope, "__enter__"),
    (autograd._RecordingStateScope, "__exit__"),
    (autograd, "backward"),
    (gluon.Trainer, "__init__"),
    (gluon.Trainer, "_allreduce_grads"),
    (gluon.Trainer, "_update"),
    (gluon.Trainer, "_init_params"),
    (gluon.Parameter, "_reduce"),
    (gluon.Trainer, "save_states"),
    (mx.nd.NDArray, "asnumpy"),
    (mx.nd.NDArray, "wait_to_read"),
    (_BatchNorm, "__call__"),
    (mx.nd, "CachedOp"),
    (gluon.HybridBlock, "_build_cache"),
    (mx.random, "seed"),
    (autograd, "grad"),
    (DataParallelExecutorGroup, "__init__"),
    (mx.sym.Symbol, "bind"),
    (mx.sym.Symbol, "simple_bind"),
]


def test_install_and_remove():
    ours = [getattr(owner, name) for owner, name in CHANGED]
    patches.install()
    assert [getattr(owner, name) for owner, name in CHANGED] == ours, "changed twice"
    try:
        patches.remove()
        plain = [getattr(owner, name) for owner, name in CHANGED]
        assert plain == [function.__wrapped__ for function in ours]
        assert all(function.__module__.startswith("mxnet.") for function in plain)
        assert not any(hasattr(function, "__wrapped__") for function in plain)
    finally:
        patches.install()
        executors.install()
        checkpoint.install()

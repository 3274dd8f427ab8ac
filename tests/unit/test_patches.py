"""What is changed in MXNet is changed once, and can be put back."""

import inspect

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.nn.basic_layers import _BatchNorm
from mxnet.module.executor_group import DataParallelExecutorGroup

from gluon_syncbn import SyncBatchNorm
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


def test_arguments():
    """Each function takes what MXNet's takes, by position and, where a program calls it, by name."""
    SyncBatchNorm()  # whose first one changes more
    of_modules = (DataParallelExecutorGroup, "get_params", executors._after_forward)
    for owner, name, around in [*patches._originals, of_modules]:
        original = inspect.unwrap(getattr(owner, name))
        fixed = [p for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        given = {one.name: None for one in fixed}
        inspect.signature(around).bind(original, *given)
        if not name.startswith("_"):
            own = [given.pop("self")] if "self" in given else []
            inspect.signature(around).bind(original, *own, **given)

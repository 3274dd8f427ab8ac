"""What is changed in MXNet is changed once, and can be put back."""

import subprocess
import sys

import mxnet as mx
from environments import shell
from mxnet import autograd, gluon
from mxnet.gluon.nn.basic_layers import _BatchNorm
from places import SUPPORT

from gluon_syncbn.mxnet_side import patches

CHANGED = [
    (autograd._RecordingStateScope, "__enter__"),
    (autograd._RecordingStateScope, "__exit__"),
    (autograd, "backward"),
    (gluon.Trainer, "_allreduce_grads"),
    (gluon.Trainer, "_update"),
    (gluon.Trainer, "_init_params"),
    (mx.nd, "waitall"),
    (mx.nd.ndarray, "waitall"),
    (mx.npx, "waitall"),
    (_BatchNorm, "__call__"),
    (mx.nd, "CachedOp"),
    (mx.random, "seed"),
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


def test_nothing_else_is_changed():
    """Every attribute of MXNet's modules and of their classes, before and after the import."""
    text = """
import sys, types
import names_alone
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import contrib
def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "mxnet" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__.startswith("mxnet"):
                    found.update({(value.__module__, value.__name__, k): id(v) for k, v in vars(value).items()})
    return found
before = attributes()
import gluon_syncbn
after = attributes()
classes = {key[:2] for key in before if len(key) == 3}
there = [key for key in after if key in before or key[:2] in classes]
print(sorted(".".join(key) for key in there if after[key] != before.get(key) and not key[-1].startswith("__weak")))
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=100, env=shell(SUPPORT)
    )
    assert run.returncode == 0, run.stderr
    changed = {name.rpartition(".")[2] for name in eval(run.stdout)}
    assert changed == {name for _, name in CHANGED}

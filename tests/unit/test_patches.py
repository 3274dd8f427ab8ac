"""What is changed in MXNet is changed once, and can be put back."""

import inspect

from mxnet.base import _LIB
from mxnet.module.executor_group import DataParallelExecutorGroup

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import patches
from gluon_syncbn.nets import executors


def test_install_and_remove():
    changed = list(patches._originals)
    ours = [getattr(owner, name) for owner, name, _ in changed]
    patches.install()
    assert [getattr(owner, name) for owner, name, _ in changed] == ours, "changed twice"
    try:
        patches.remove()
        plain = [getattr(owner, name) for owner, name, _ in changed]
        assert plain == [inspect.unwrap(function) for function in ours]
        assert all(function.__module__.startswith(("mxnet.", "ctypes")) for function in plain)
        assert not any(hasattr(function, "__wrapped__") for function in plain)
    finally:
        for owner, name, around in changed:
            patches.replace(around, owner, name)


def test_arguments():
    """Each function takes what MXNet's takes, by position and, where a program calls it, by name."""
    SyncBatchNorm()  # whose first one changes more
    of_modules = (DataParallelExecutorGroup, "get_params", executors._after_forward)
    of_python = [one for one in patches._originals if one[0] is not _LIB]
    for owner, name, around in [*of_python, of_modules]:
        original = inspect.unwrap(getattr(owner, name))
        fixed = [p for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        given = {one.name: None for one in fixed}
        inspect.signature(around).bind(original, *given)
        if not name.startswith("_"):
            own = [given.pop("self")] if "self" in given else []
            inspect.signature(around).bind(original, *own, **given)

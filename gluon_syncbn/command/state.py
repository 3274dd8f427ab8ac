"""What ``import gluon_syncbn`` changes in a process, and how to take it back. docs/state.md lists each change."""

from __future__ import annotations

from .. import _native
from ..mxnet_side import lifetime, patches, translations
from ..system import logs
from ..training import steps
from .replacements import uninstall


def begin() -> None:
    """Everything that the import does to the process, but for the names that MXNet needs to be imported at all."""
    logs.start(_native)
    _native.register()
    patches.install()
    translations.register()
    lifetime.watch()


def unpatch() -> None:
    """Puts back what this package has changed in MXNet and Gluon; call it between two steps.

    MXNet's functions and classes are then the objects that they were. Afterwards a layer of this package predicts, but
    a training step is an error until a new process begins: without the changes a failed step could end in a hang.
    docs/state.md says what stays: the operator, threads, handlers of exits and forks, settings that MXNet has read.

    Raises
    ------
    MXNetError
        If MXNet fails at every wait.
    """
    steps.reset()
    uninstall()
    patches.remove()
    translations.unregister()
    _native.fail(
        "gluon_syncbn.unpatch() has taken back what a training step needs. To train with a SyncBatchNorm, start a new "
        "process, and call gluon_syncbn.unpatch() after the last step"
    )

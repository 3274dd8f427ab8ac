"""Holds the changes that ``import gluon_syncbn`` makes in a process, and reverts them. docs/state.md lists them."""

from __future__ import annotations

from .. import _native
from ..mxnet_side import lifetime, patches, translations
from ..nets import executors
from ..system import logs
from ..training import steps
from .replacements import uninstall


def begin() -> None:
    """Makes all changes of the import, but for the names that MXNet needs to be imported at all."""
    logs.start(_native)
    _native.register()
    patches.install()
    executors.install()
    translations.register()
    lifetime.watch()


def unpatch() -> None:
    """Restores MXNet's and Gluon's functions and classes that this package has changed; call it between two steps.

    They are then the original objects. Afterwards a layer of this package predicts. A training step raises an error
    until a new process begins, because without the changes a failed step could hang. The operator, threads, handlers of
    exits and forks, and settings that MXNet has read stay: see docs/state.md.

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

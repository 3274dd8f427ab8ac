"""Holds the changes that ``import gluon_syncbn`` makes in a process, and reverts them. docs/state.md lists them."""

from __future__ import annotations

from .. import _native
from ..mxnet_side import lifetime, patches, translations
from ..nets import executors
from ..system import arguments, logs
from ..training import steps
from . import replacements


def begin() -> None:
    """Makes all changes of the import, but for the names that MXNet needs to be imported at all."""
    logs.start(_native)
    _native.register()
    patches.install()
    executors.install()
    translations.register()
    lifetime.watch()


def uninstall(everything: bool = False) -> None:
    """Undoes `install`: restores the original objects, also in modules that were imported since.

    Parameters
    ----------
    everything : bool
        Whether MXNet's functions and classes that the import has wrapped also become the original ones. Call it so
        between two steps. Afterwards a layer of this package predicts. A training step raises an error until a new
        process begins, because a failed step could hang. The operator, threads, handlers of exits and forks, and
        settings that MXNet has read stay: see docs/state.md.

    Raises
    ------
    ValueError
        If ``everything`` is not a truth value.
    MXNetError
        With ``everything``, if MXNet fails at every wait.
    """
    everything = arguments.flag("everything", everything)
    if everything:
        steps.reset()
    replacements.remove()
    if everything:
        patches.remove()
        translations.unregister()
        _native.fail(
            "gluon_syncbn.uninstall(everything=True) has taken back what a training step needs. To train with a "
            "SyncBatchNorm, start a new process, and call it after the last step"
        )

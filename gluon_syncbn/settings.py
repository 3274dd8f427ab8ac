"""Process-wide defaults."""

from __future__ import annotations

from typing import Any, Callable, Optional

from . import _native, arguments
from .exchange import kvstore as _kvstore
from .exchange.base import Exchange

#: Adds the statistics of layers that name no KVStore; None is shared memory.
exchange: Optional[Exchange] = None

_UNCHANGED: Any = object()
_listener: Optional[Callable[[Optional[Exchange]], None]] = None


def configure(*, kvstore: Any = _UNCHANGED, timeout: Any = _UNCHANGED, seed: Any = _UNCHANGED) -> None:
    """Sets defaults for all layers that do not say otherwise, those that exist already included.

    Some models call ``norm_layer`` without ``norm_kwargs``; this reaches their layers too.

    Parameters
    ----------
    kvstore : str, KVStore or None
        What adds the statistics over contexts: ``'device'``, ``'local'``, ``'nccl'``, a KVStore object, or
        ``None`` for shared memory, which is where a process starts.
    timeout : float
        Seconds that a replica waits for the others, 300 to start with. Then the step fails with an `MXNetError`
        that names the layer, who arrived and who is missing.
    seed : int
        Of the permutations of mode ``'shuffle'``, from 0 to 2**64 - 1; 0 to start with. Each layer draws a new one for
        each call, and setting a seed starts over: a run that sets seed + epoch at the start of each epoch is the same
        whether it was interrupted or not.

    Raises
    ------
    ValueError
        Where an argument is out of range. Nothing is changed then.
    """
    if seed is not _UNCHANGED:
        seed = arguments.seed("seed", seed)
    if timeout is not _UNCHANGED:
        timeout = arguments.seconds("timeout", timeout)
    new_exchange = exchange if kvstore is _UNCHANGED else _kvstore.create(kvstore)
    if timeout is not _UNCHANGED:
        _native.default_timeout(timeout)
    if seed is not _UNCHANGED:
        _native.seed(seed)
    if kvstore is not _UNCHANGED:
        globals()["exchange"] = new_exchange
        if _listener is not None:
            _listener(new_exchange)


def on_exchange(listener: Callable[[Optional[Exchange]], None]) -> None:
    """``listener`` is called now, and whenever the default exchange changes."""
    global _listener
    _listener = listener
    listener(exchange)

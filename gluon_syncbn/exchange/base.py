"""Defines what every exchange has: the native core's handle, and its layers."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from mxnet.context import Context

from .. import _native
from .groups import Groups


class LayerInfo(NamedTuple):
    """The properties of a layer that an exchange needs."""

    id: int
    name: str
    contexts: Sequence[Context]
    replicas: int
    channels: int
    mode: str
    virtual_devices: int
    group_size: Optional[int]
    groups: Optional[Groups] = None

    def in_groups(self) -> bool:
        return self.group_size is not None or self.groups is not None


class Exchange:
    """Combines the statistics of the replicas. An exception in it becomes the failure of the step, with its text."""

    #: Whether replicas of other processes take part.
    spans_processes = False
    #: The same, for the core.
    handle: _native.Handle

    def knows(self, layer: LayerInfo) -> bool:
        """Whether the exchange can serve this layer; if not, `learn` has to come first."""
        return True

    def learn(self, layers: Sequence[LayerInfo], more: bool = False) -> None:
        """Takes layers that it serves, in the order in which they were initialised. ``more``: others may follow."""

    def fail(self, reason: str) -> None:
        """Notes that the step has failed here; nothing may be exchanged with the rest of it."""

    def close(self) -> None:
        """Closes the exchange at the end of the process."""

    def forked(self) -> None:
        """Resets the exchange in the child of a fork, which is not a member of its parent's job."""


class Memory(Exchange):
    """The core's own exchange, over this process's contexts. ``gpus`` is ``'nccl'``, ``'host'`` or either if empty."""

    def __init__(self, gpus: str = "") -> None:
        self.handle = _native.memory_exchange(gpus)

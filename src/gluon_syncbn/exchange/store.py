"""A KVStore that spans processes, over any transport: one object for gradients and statistics.

process 0                      process 1              1. agree: both have the same layers, numbered alike
replicas ─► sum ─┐          ┌─ sum ◄─ replicas        2. one message per process, direction and layer
                 ├─ all ────┤                         3. all add up the parts in the order of the ranks,
replicas ◄───────┘          └───────► replicas           so that all have the same bits
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence

import mxnet as mx
import numpy as np

from .. import _native
from .._native import Ticket, Total
from . import base
from .base import Exchange, LayerInfo


class Label(NamedTuple):
    """What a message is about, the same in every process."""

    kind: str
    key: int = 0
    node: int = -1
    call: int = 0
    phase: int = 0
    what: str = ""  # for messages
    layer: int = 0  # in this process, for its time limit

    def __str__(self) -> str:
        return self.what


#: Makes one array of two.
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Transport(ABC):
    """Carries arrays between processes. Every call has a time limit and ends in an `MXNetError` that names the label
    and the ranks that are missing; after that, nothing is carried any more. Calls come from several threads at once,
    and other processes may make them in another order."""

    rank: int
    size: int
    #: Whether some ranks can exchange something without the others.
    partial = True

    @abstractmethod
    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        """The parts of all ranks, in their order. ``equal``: of another size or type than ours is an error. ``ranks``:
        only of these, of which this is one; each of them asks for this one, too."""

    @abstractmethod
    def allreduce(self, label: Label, array: np.ndarray, combine: Combine = np.add) -> np.ndarray:
        """What ``combine`` makes of the arrays of all ranks, two at a time, in the order of the ranks; the same bits
        everywhere. ``np.add`` may see parts of an array, anything else sees all of it."""

    @abstractmethod
    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        """The array of rank 0."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tells the others, and carries nothing any more."""

    @abstractmethod
    def close(self) -> None:
        """The process ends."""


class ProcessStore(mx.kvstore.KVStoreBase, Exchange):
    """Adds over the devices of all processes, for ``gluon.Trainer(kvstore=...)`` and ``SyncBatchNorm(kvstore=...)``.

    The Trainer's ``step(batch_size)`` takes the number of samples of all processes.

    Parameters
    ----------
    name : str
        Of the transport.
    transport : Transport
        What carries the sums.
    """

    reach = _native.PROCESSES

    def __init__(self, name: str, transport: Transport) -> None:
        self._name = name
        self._transport = transport
        self._keys: Dict[int, int] = {}  # of layers
        self._replicas: Dict[int, List[int]] = {}  # of layers, by rank
        self._rounds: Counter = Counter()  # of gradients
        self._lock = threading.Lock()
        self._agreements = 0

    # ---- KVStoreBase ---------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        return f"gluon_syncbn_{self._name}"

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def num_workers(self) -> int:
        return self._transport.size

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # the optimizer runs in the Trainer, where every process has the same gradients

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Rank 0's ``value`` into ``out``, in every process."""
        value = value[0] if isinstance(value, (list, tuple)) else value
        label = self._label("broadcast", key)
        array = self._transport.broadcast(label, value.asnumpy())
        for target in out if isinstance(out, (list, tuple)) else [out]:
            mx.nd.array(array, dtype=array.dtype).copyto(target)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """The sum of ``value`` over the devices of all processes into ``out``, or into ``value`` itself."""
        values = value if isinstance(value, (list, tuple)) else [value]
        arrays = [v.asnumpy() for v in values]
        wide = np.float32 if arrays[0].dtype == np.float16 else arrays[0].dtype
        total = arrays[0].astype(wide)
        for array in arrays[1:]:
            total += array
        total = self._transport.allreduce(self._label("gradient", key), total)
        out = values if out is None else out
        for target in out if isinstance(out, (list, tuple)) else [out]:
            mx.nd.array(total, dtype=arrays[0].dtype).copyto(target)

    def allgather(self, key: str, array: np.ndarray, *, equal: bool = True) -> List[np.ndarray]:
        """The arrays of all processes, in the order of the ranks. All make the same calls with the same key.
        ``equal``: of another size or type than ours is an error."""
        return self._transport.allgather(self._label("exchange", key), array, equal=equal)

    def _label(self, kind: str, key: Any) -> Label:
        number = key
        if not isinstance(key, int):
            number = int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=7).digest(), "little")
            kind += " of"  # a name is no number
        with self._lock:
            call = self._rounds[kind, number]
            self._rounds[kind, number] += 1
        return Label(kind, number, call=call, what=f"{kind.split()[0]} {key!r}, round {call + 1}")

    # ---- Exchange ------------------------------------------------------------------------------------------

    def merge(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        label = self._call(layer, ticket)
        moments = functools.reduce(base.merge_moments, rows)
        return Total(self._transport.allreduce(label, moments, base.merge_moments), 0, label.key)

    def add(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        label = self._call(layer, ticket)
        return Total(self._transport.allreduce(label, rows.sum(axis=0)), 0, label.key)

    def gather(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        label = self._call(layer, ticket)
        if layer.group_size:
            return self._gather_groups(layer, ticket, label, rows[0])
        parts = self._transport.allgather(label, rows[0], equal=False)
        first = sum(part.size for part in parts[: self.rank])
        return Total(np.concatenate(parts), first, label.key)

    def _gather_groups(self, layer: LayerInfo, ticket: Ticket, label: Label, own: np.ndarray) -> Total:
        """From the processes with which replicas of this one share a group, and from nobody where there is none."""
        length = 2 * layer.channels + (ticket.phase == 0)  # of a replica: moments or gradients
        here, replicas = own.size // length, self._replicas[layer.id]
        ends = np.cumsum(replicas)
        starts = ends - replicas
        first, end = starts[self.rank], ends[self.rank]
        size = layer.group_size or 0
        begin, stop = first // size * size, -(-end // size) * size  # of the groups that have a replica here
        ranks = [rank for rank in range(len(replicas)) if starts[rank] < stop and ends[rank] > begin]
        if not self._transport.partial and (ends % size).any():  # some group crosses a border: all take part
            ranks = list(range(len(replicas)))
        if len(ranks) == 1:
            if here % size:
                raise ValueError(f"group_size: {size} was given, expected a divisor of the {here} devices of this step")
            return Total(own, 0, label.key)
        if here != replicas[self.rank]:
            raise ValueError(
                f"group_size: {size} was given, and groups reach from rank {self.rank} to others; expected all "
                f"{replicas[self.rank]} devices in every step, not {here}"
            )
        values = np.concatenate(self._transport.allgather(label, own, equal=False, ranks=ranks))
        before = starts[ranks[0]]
        needed = values[(begin - before) * length : (stop - before) * length]
        return Total(needed, int(first - begin) * length, label.key)

    def fail(self, reason: str) -> None:
        self._transport.fail(reason)

    def close(self) -> None:
        self._transport.close()

    def forked(self) -> None:
        self._lock = threading.Lock()  # another thread, which is not here, may have held it
        self._transport = _OfParent(self._transport)

    def knows(self, layer: LayerInfo) -> bool:
        return layer.id in self._keys

    def learn(self, layers: Sequence[LayerInfo]) -> None:
        """Numbers the layers that have no number yet, in their order, after a look at those of the other processes.

        Names are compared without Gluon's counters, which depend on what else a process has built.
        """
        with self._lock:
            new = [layer for layer in layers if layer.id not in self._keys]
            if new:
                self._agree(new)

    def _agree(self, new: Sequence[LayerInfo]) -> None:
        ours = [_describe(layer) for layer in new]
        label = Label("agreement", call=self._agreements, what="the agreement on the layers of the net")
        self._agreements += 1
        part = np.frombuffer(json.dumps(ours).encode(), np.uint8)
        everyone = [json.loads(bytes(p)) for p in self._transport.allgather(label, part, equal=False)]
        for rank, theirs in enumerate(everyone):
            difference = _difference(self.rank, ours, rank, theirs)
            if difference:
                self.fail(difference)
                raise mx.MXNetError(difference)
        for i, layer in enumerate(new):
            group = layer.group_size
            total = sum(layers[i]["replicas"] for layers in everyone)
            if group and total % group:
                raise ValueError(f"group_size: {group} was given, expected a divisor of the number of devices, {total}")
            self._replicas[layer.id] = [layers[i]["replicas"] for layers in everyone]
            self._keys[layer.id] = len(self._keys)  # last: whoever finds it goes on

    def _call(self, layer: LayerInfo, ticket: Ticket) -> Label:
        key = self._keys[ticket.layer]
        direction = "forward" if ticket.phase == 0 else "backward"
        what = f"the {direction} of call {ticket.call + 1} of SyncBatchNorm '{layer.name}'"
        return Label("statistics", key, ticket.node, ticket.call, ticket.phase, what, ticket.layer)


class _OfParent(Transport):
    """What the child of a fork has of its parent's transport."""

    def __init__(self, parent: Transport) -> None:
        self.rank, self.size = parent.rank, parent.size

    def _refuse(self) -> NoReturn:
        raise mx.MXNetError(
            f"this process was forked from rank {self.rank} of {self.size} and is no member of its job; only processes "
            "that the launcher has started are"
        )

    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        self._refuse()

    def allreduce(self, label: Label, array: np.ndarray, combine: Combine = np.add) -> np.ndarray:
        self._refuse()

    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        self._refuse()

    def fail(self, reason: str) -> None:
        pass  # the parent's own failures are told by the parent

    def close(self) -> None:
        pass


def _describe(layer: LayerInfo) -> Dict[str, Any]:
    return {
        "name": layer.name,
        "channels": layer.channels,
        "pooling": [layer.mode, layer.virtual_devices, layer.group_size],
        "replicas": layer.replicas,
    }


def _difference(rank: int, ours: List[Dict], other: int, theirs: List[Dict]) -> str:
    """What is not the same, as an error; empty where both nets are the same."""

    def sort(layer: Optional[Dict]) -> Optional[List]:
        return None if layer is None else [re.sub(r"\d+", "", layer["name"]), layer["channels"], layer["pooling"]]

    def tell(layer: Optional[Dict]) -> str:
        if layer is None:
            return "none"
        mode, slots, group = layer["pooling"]
        detail = f"{layer['channels']} channels, mode {mode!r}, virtual_devices {slots}, group_size {group}"
        return f"SyncBatchNorm '{layer['name']}' ({detail})"

    for i in range(max(len(ours), len(theirs))):
        a, b = (layers[i] if i < len(layers) else None for layers in (ours, theirs))
        if sort(a) != sort(b):
            return (
                f"the processes disagree about the net: layer {i + 1} is {tell(a)} on rank {rank} and {tell(b)} on "
                f"rank {other}. Build and initialise the same net in every process; layers that train in one process "
                "only need a KVStore of their own."
            )
    return ""

"""Orders the collectives of GPUs, which all processes have to post alike.

process 0        process 1        process 2      1. each process brings all calls that are ready there
  a, b             b                b, a         2. a call that is ready in all of them gets the next number; where
    └────────── one ballot ─────────┘               there are several, in the order of rank 0
  number 7: b    number 7: b      number 7: b    3. the rest comes again in the next ballot

A ballot is one allgather, and every process makes the same ballots. A net without branches takes one ballot for each
call. A ballot waits for a process that has no call ready: nothing could get a number before.

A call never gets its number before it is ready everywhere. A process that posts the collective it expects next may wait
for ever. Another process may read the result of one branch before it calls the branch that was expected. NCCL cannot
withdraw a collective, and completes collectives in the order of posting.
"""

from __future__ import annotations

import threading
from typing import Dict, List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from .transport import Label
from .waiting import Wait, WaitingTransport

_Call = Tuple[int, ...]  # key, node, call, phase

_POLL = 0.05  # seconds between checks of other reasons to end a wait
_AT_ONCE = 3  # ballots that gave no number, until the next one waits for a moment
_PAUSE = 0.002  # seconds of such a moment, which ends with a call that is ready
_SKIPPED_AFTER = 0.5  # seconds after which another call of the same layer is a step that was skipped


class Part(NamedTuple):
    """The contribution of a process to a collective."""

    devices: Tuple[int, ...]
    counts: np.ndarray  # float64, of the slots of its replicas


class Place(NamedTuple):
    """The place of a collective among all collectives."""

    number: int
    clique: int  # which set of devices it is
    identity: bytes  # of the new communicator, where this is the first collective of the set
    parts: List[Part]  # by rank


class Turns:
    """Numbers the collectives of all processes. Calls come from several threads; one of them is in a ballot for all."""

    def __init__(self, transport: WaitingTransport) -> None:
        self._transport = transport
        self._changed = threading.Condition()  # guards all of this
        self._ready: Dict[_Call, Part] = {}
        self._numbered: Dict[_Call, Place] = {}
        self._missing: Dict[_Call, List[int]] = {}  # ranks that were not ready in the last ballot
        self._asks = False  # a thread is in a ballot
        self._ballots = self._numbers = self._in_vain = 0
        self._cliques: Dict[Tuple[Tuple[int, ...], ...], int] = {}  # by the devices of each rank

    def next(self, label: Label, devices: Sequence[int], counts: np.ndarray) -> Place:
        """Waits until the call of the label is ready in all processes. Returns its place."""
        call, wait = tuple(label[1:5]), Wait(self._transport, label)
        others = [rank for rank in range(self._transport.size) if rank != self._transport.rank]
        with self._changed:
            self._ready[call] = Part(tuple(devices), np.array(counts, np.float64).ravel())
            self._changed.notify_all()
        while True:
            with self._changed:
                if call in self._numbered:
                    return self._numbered.pop(call)
                asks, self._asks = not self._asks, True
                brought = dict(self._ready)
                if not asks:
                    self._changed.wait(_POLL)
            if asks:
                try:
                    self._ask(label, brought, wait.seconds())
                finally:
                    with self._changed:
                        self._asks = False
                        self._changed.notify_all()
            if call not in self._numbered:
                wait.poll(self._missing.get(call, others))

    def _ask(self, label: Label, brought: Dict[_Call, Part], waited: float) -> None:
        """Holds one ballot."""
        of_ballot = label._replace(key=0, node=-1, call=self._ballots, phase=1)
        everyone = [_calls_of(part) for part in self._transport.allgather(of_ballot, _flat(brought), equal=False)]
        self._ballots += 1
        agreed = [call for call in everyone[0] if all(call in theirs for theirs in everyone)]
        for call in agreed:
            place = self._place(label, [theirs[call] for theirs in everyone])
            with self._changed:
                del self._ready[call]
                self._missing.pop(call, None)
                self._numbered[call] = place
        for call in brought.keys() - set(agreed):
            self._missing[call] = [rank for rank, theirs in enumerate(everyone) if call not in theirs]
        if agreed:
            self._in_vain = 0
            return
        self._refuse_a_skipped_step(label, everyone, waited)
        self._in_vain += 1
        if self._in_vain > _AT_ONCE:
            with self._changed:
                self._changed.wait_for(lambda: self._ready.keys() != brought.keys(), _PAUSE)

    def _place(self, label: Label, parts: List[Part]) -> Place:
        devices, known = tuple(part.devices for part in parts), len(self._cliques)
        clique = self._cliques.setdefault(devices, known)
        number, self._numbers = self._numbers, self._numbers + 1
        identity = b""
        if clique == known:
            new = _native.nccl_unique_id() if self._transport.rank == 0 else b""
            of_clique = label._replace(key=0, node=-1, call=clique, phase=2)
            identities = self._transport.allgather(of_clique, np.frombuffer(new, np.uint8), equal=False)
            identity = identities[0].tobytes()
        return Place(number, clique, identity, parts)

    def _refuse_a_skipped_step(self, label: Label, everyone: List[Dict[_Call, Part]], waited: float) -> None:
        key, node, number, phase = label[1:5]
        if phase > 0 or waited < _SKIPPED_AFTER:
            return
        for rank, theirs in enumerate(everyone):
            calls = [call[2] for call in theirs if (call[0], call[1], call[3]) == (key, node, phase)]
            if calls and number not in calls:
                reason = (
                    f"rank {self._transport.rank} is in {label}, but rank {rank} is in number {calls[0] + 1}: one of "
                    "them has skipped or repeated a step."
                )
                self._transport.fail(reason)
                raise mx.MXNetError(reason)


def _flat(calls: Dict[_Call, Part]) -> np.ndarray:
    """Packs calls as float64: [key, node, call, phase, devices, counts, ... ] of each."""
    heads = [[*call, len(part.devices), len(part.counts), *part.devices] for call, part in calls.items()]
    arrays = [array for head, part in zip(heads, calls.values()) for array in (head, part.counts)]
    return np.concatenate(arrays)


def _calls_of(flat: np.ndarray) -> Dict[_Call, Part]:
    calls: Dict[_Call, Part] = {}
    while flat.size:
        *call, devices, counts = flat[:6].astype(np.int64).tolist()
        end = 6 + devices
        calls[tuple(call)] = Part(tuple(flat[6:end].astype(np.int64).tolist()), flat[end : end + counts])
        flat = flat[end + counts :]
    return calls

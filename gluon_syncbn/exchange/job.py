"""Exchanges statistics between processes by what adds the gradients of their job, which is not of this package."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Dict, NoReturn, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments, locks
from .base import Exchange, leave
from .store import described, kind_of

_TEXT = 1024  # bytes that describe a layer
WORDS = 1 + _TEXT // 8  # of an agreement: also the number of replicas
Call = Tuple[int, ...]  # layer, as all processes number it; node, sequence and phase of its call


class JobExchange(Exchange):
    """Brings each process the statistics of all, in the order of the ranks. The core combines them in that order.

    It has no groups, and carries nothing else. A process that fails has exit code 1.
    """

    spans_processes = True

    def __init__(self, name: str, rank: int, processes: int) -> None:
        super().__init__(_native.python_exchange(self, processes), name)
        self.rank, self.num_workers = rank, processes
        self.layers = self.replicas = 0  # on which the processes have agreed, and of such a layer in all processes
        self.failure = ""  # after which nothing is exchanged
        self._numbers: Dict[int, int] = {}  # of layers in all processes, by those here
        self._pid = os.getpid()
        self._lock: Any
        locks.give(self, _lock=threading.RLock)
        atexit.register(self._leave_if_failed)  # before the handlers that would wait for operators

    def __repr__(self) -> str:
        return f"<exchange {self.name!r} of statistics: rank {self.rank} of {self.num_workers}>"

    # ---- of a subclass ------------------------------------------------------------------------------------------

    def _rows(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        """Returns the rows of all ranks for this call, [ranks][words]. MXNetError: one has not come, or has failed."""
        raise NotImplementedError

    def _begin_layer(self, number: int, words: int) -> None:
        """Prepares rows of so many words, when all processes have come to the layer."""

    def _tell_failure(self) -> None:
        """Tells the others that this process has failed."""

    def _part(self) -> None:
        """Runs at the end of a process that has failed and told it."""

    def close(self) -> None:
        """Runs at the end of the process, when its work is done."""

    def forked(self) -> None:
        """Runs in the child of a fork."""

    # ---- failures -----------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """A step has failed here: nothing more is exchanged."""
        if not self.failure:
            self.failure = reason
            self._tell_failure()

    def give_up(self, reason: str) -> NoReturn:
        self.fail(reason)
        raise _native.StepError(reason)

    def _leave_if_failed(self) -> None:
        reason = self.failure or _native.failure()
        if reason and os.getpid() == self._pid:
            self.fail(reason)
            self._part()
            leave()

    # ---- statistics ---------------------------------------------------------------------------------------------

    def check(self, pooling: Any) -> None:
        """ValueError for a layer whose replicas share something else than one statistic of all."""
        for name in ("group_size", "groups"):
            if getattr(pooling, name) is not None:
                arguments.refuse(name, getattr(pooling, name), f"None with kvstore={self.name!r}{_MPI}")
        if pooling.mode == "shuffle":
            arguments.refuse("mode", pooling.mode, f"'sync' or 'local' with kvstore={self.name!r}{_MPI}")

    def add(self, _contexts: str, rows: np.ndarray, timeout: float, call: Call) -> np.ndarray:
        """For the core: returns the rows of all processes for a call {layer, node, sequence, phase}."""
        phase = f"backward {call[3]}" if call[3] else "forward"
        what = f"the {phase} of call {call[2] + 1}"
        return self._brought((self._numbers[call[0]], *call[1:]), rows[0], timeout, what)

    def _brought(self, call: Call, row: np.ndarray, timeout: float, what: str) -> np.ndarray:
        if self.failure:
            raise _native.StepError(self.failure)
        try:
            return self._rows(call, row, timeout)
        except mx.MXNetError as error:
            self.give_up(f"{what}: {error}")

    def agree(self, layer: Any, _layers: Sequence[Any], _more: bool) -> None:
        """Numbers a layer that is about to train, after a comparison: all processes train theirs in one order first."""
        with self._lock:
            if layer.store is self:  # another thread has been faster
                return
            self.check(layer.settings)
            name, settings, replicas = described(layer)
            text = f"{kind_of(name)} {settings}"
            row = np.zeros(WORDS)
            row[0] = replicas
            row[1:].view(np.uint8)[: len(text)] = np.frombuffer(text.encode(errors="replace")[:_TEXT], np.uint8)
            what = f"SyncBatchNorm '{layer.name}': the agreement on layer {self.layers + 1}"
            everyone = self._brought((-1, 0, self.layers, 0), row, layer.settings.timeout or _native.timeout_of(), what)
            texts = [theirs[1:].tobytes().rstrip(b"\0").decode(errors="replace") for theirs in everyone]
            for rank, theirs in enumerate(texts):
                if theirs != texts[self.rank]:
                    self.give_up(
                        f"the processes disagree about the net: the layer that trains as number {self.layers + 1} is "
                        f"{texts[self.rank]} on rank {self.rank} and {theirs} on rank {rank}. Build the same net in "
                        "every process; layers that train in one process only need kvstore='host'."
                    )
            self._begin_layer(self.layers, 1 + 2 * layer.channels)
            self._numbers[layer.id] = self.layers
            _native.layer_restart(layer.id)
            layer.store, layer.key = self, self.layers
            self.layers += 1
            self.replicas = int(everyone[:, 0].sum())


_MPI = "; kvstore='mpi' has it, in a job that mpiexec starts"

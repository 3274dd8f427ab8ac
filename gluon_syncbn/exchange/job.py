"""Exchanges statistics between processes by what adds the gradients of their job, which is not of this package."""

from __future__ import annotations

import atexit
import itertools
import json
import os
from typing import Any, List, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments
from .agreement import ProcessExchange

#: The words of a row of bytes.
WORDS = 1024
Call = Tuple[int, ...]  # layer, as all processes number it; node, sequence and phase of its call


class JobExchange(ProcessExchange):
    """Brings each process the rows of all, in the order of the ranks. The core combines them in that order.

    It has no groups, and carries nothing else. The others miss a process that fails, within their time limit.
    """

    def __init__(self, name: str, rank: int, processes: int) -> None:
        super().__init__(_native.python_exchange(self, processes), name)
        self.rank, self.num_workers = rank, processes
        self.failure = ""  # after which nothing is exchanged
        self._told, self._pid = itertools.count(), os.getpid()
        atexit.register(self._leave_if_failed)  # before the handlers that would wait for operators

    def __repr__(self) -> str:
        return f"<exchange {self.name!r} of statistics: rank {self.rank} of {self.num_workers}>"

    def rows_of(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        """Returns the rows of all ranks for this call, [ranks][words]. MXNetError: one has not come."""
        raise NotImplementedError

    def close(self) -> None:
        """Runs at the end of the process, and ends it after a failure. Takes no longer than the time limit."""
        raise NotImplementedError

    def check(self, settings: Any) -> None:
        """ValueError for a layer whose replicas share something else than one statistic of all."""
        mpi = f"with kvstore={self.name!r}; kvstore='mpi' has it, in a job that mpiexec starts"
        for name in ("group_size", "groups"):
            if getattr(settings, name) is not None:
                arguments.refuse(name, getattr(settings, name), f"None {mpi}")
        if settings.mode == "shuffle":
            arguments.refuse("mode", settings.mode, f"'sync' or 'local' {mpi}")

    def add(self, _contexts: str, rows: np.ndarray, timeout: float, call: Call) -> np.ndarray:
        """For the core: returns the rows of all processes for a call."""
        return self._gathered(name_of(call), call, rows[0], timeout)

    def _gathered(self, what: str, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        if self.failure:
            raise _native.StepError(self.failure)
        try:
            return self.rows_of(call, row, timeout)
        except mx.MXNetError as error:
            self.give_up(f"{what}: {error}")

    def tell_all(self, what: str, ours: Any) -> List[Any]:
        text = json.dumps(ours).encode()
        call, timeout = (-1, 0, next(self._told), 0), _native.timeout_of()
        sizes = self._gathered(what, call, np.array([float(len(text))]), timeout)[:, 0].astype(int)
        texts = [b""] * self.num_workers
        for begin in range(0, max(sizes), 8 * WORDS):
            words = np.frombuffer(text[begin : begin + 8 * WORDS].ljust(8 * WORDS), np.float64)
            rows = self._gathered(what, (-1, begin + 1, *call[2:]), words, timeout)
            texts = [told + row.tobytes() for told, row in zip(texts, rows)]
        return [json.loads(told[:size]) for told, size in zip(texts, sizes)]

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def _leave_if_failed(self) -> None:
        if os.getpid() == self._pid and (self.failure or _native.failure()):
            self.fail(_native.failure())
            self.close()


def name_of(call: Call) -> str:
    """Returns what errors call it: "the forward of call 3"."""
    return f"the {'backward' if call[3] else 'forward'} of call {call[2] + 1}"

"""Provides what all transports share: time limit, one warning, the identity of messages, and the text of failures.

A transport brings `allgather`, `tell` and `close`, and calls `Wait.poll` while it waits.
"""

from __future__ import annotations

import functools
import threading
import time
from abc import abstractmethod
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence

import mxnet as mx
import numpy as np

from .. import _native
from ..system.logs import log
from .transport import Combine, Label, Transport

_WARN_AFTER = 10.0  # seconds
_POLL = 0.05  # seconds between looks at the native core


class Wait:
    """One wait of this rank for others, in the exchange that the label names. Its time begins when it is made."""

    def __init__(self, transport: WaitingTransport, label: Label) -> None:
        self._transport, self._label = transport, label
        self._interrupts = _native.interrupts()
        self._began = time.monotonic()
        self._limit = 0.0  # set, like the fields below, only if the wait is not over at once
        self._polled = 0.0
        self._native: Optional[_native.Wait] = None

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self, missing: Sequence[int]) -> None:
        """Raises an error if the wait must end; warns once if it takes long. May be called at any rate."""
        transport, label, waited = self._transport, self._label, self.seconds()
        transport.check_unbroken(label)
        if self._native is None:
            self._limit = _native.timeout_of(label.layer) + label.longer
            self._native = _native.Wait(self._limit, _WARN_AFTER, self._interrupts)
        if waited - self._polled < _POLL:
            return
        self._polled = waited
        why = self._native.poll()
        if why == "late":
            no_answer = f"no answer within {self._limit:.0f} s"
            transport.give_up(label, no_answer, lambda: transport.late(label, missing, self._limit))
        elif why == "forked":
            forked = "the process was forked (os.fork, multiprocessing, subprocess with preexec_fn)"
            advice = "Fork before a step or after it."
            transport.give_up(label, f"{forked}, and rank {transport.rank} was in {label}. {advice}")
        elif why == "long":
            log.warning("%s Still waiting, until %.0f s.", transport.describe_wait(label, missing, waited), self._limit)
        elif why:
            stopped = f"rank {transport.rank} was asked to end, or its step failed, in {label}."
            transport.give_up(label, _native.failure() or stopped)


class WaitingTransport(Transport):
    """Ends a failed exchange with an error that describes it, and then all other exchanges."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._broken = ""  # why nothing is carried any more
        self._closed = False
        self._state = threading.Lock()  # guards _broken

    # ---- what a transport brings ---------------------------------------------------------------------------

    @abstractmethod
    def tell(self, label: Optional[Label], reason: str) -> None:
        """Tells the other ranks, once, that nothing is carried any more; the reason is empty if unknown so far."""

    def native(self, ranks: Sequence[int]) -> Optional[Dict[str, Any]]:
        """Returns what the core needs to add arrays among these ranks without Python: see `_native.sum_between`.

        None if it cannot. All ranks call it.
        """
        return None

    def meanwhile(self, missing: Sequence[int]) -> List[str]:
        """Returns what is known of these ranks."""
        return []

    # ---- Transport -----------------------------------------------------------------------------------------

    def allreduce(
        self, label: Label, array: np.ndarray, combine: Combine = np.add, *, ranks: Optional[Sequence[int]] = None
    ) -> np.ndarray:
        array = np.ascontiguousarray(array)
        total = functools.reduce(combine, self.allgather(label, array.ravel(), equal=True, ranks=ranks))
        return total.reshape(array.shape)

    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        own = array.ravel() if self.rank == 0 else array.ravel()[:0]
        first = self.allgather(label, own, equal=False)[0]
        self.check_alike(label, 0, first.size, first.dtype, array)
        return first.reshape(array.shape)

    def fail(self, reason: str) -> None:
        with self._state:
            if self._broken or self._closed:
                return
            self._broken = reason
        self.tell(None, reason)

    # ---- errors --------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises an error if the transport is broken or closed, before anything is sent."""
        if self._broken:
            raise mx.MXNetError(
                f"nothing is exchanged any more. Start the job again. The first error was: {self._broken}"
            )

    def check_unbroken(self, label: Label) -> None:
        """Raises an error if the transport breaks during a wait."""
        if self._broken:
            raise mx.MXNetError(f"in {label}, rank {self.rank} of {self.size}: {self._broken}")

    def check_alike(self, label: Label, rank: int, size: int, dtype: np.dtype, ours: np.ndarray) -> None:
        """Checks that an array from a rank has our array's size and type."""
        if (size, dtype) != (ours.size, ours.dtype):
            self.give_up(
                label,
                f"in {label}, rank {rank} sent {size} values of {dtype} where rank {self.rank} has "
                f"{ours.size} of {ours.dtype}. All processes must build the same net and cast it alike.",
            )

    @contextmanager
    def told_if_left(self, label: Label) -> Iterator[None]:
        """Tells the other ranks if another exception than an error of MXNet leaves this, as Ctrl-C does."""
        try:
            yield
        except mx.MXNetError:
            raise
        except BaseException as error:
            self.fail(f"{type(error).__name__} left {label}.")
            raise

    def give_up(self, label: Label, reason: str, find_out: Optional[Callable[[], str]] = None) -> NoReturn:
        """Ends all exchanges, and raises an error with the reason, or with the result of ``find_out``."""
        reason = find_out() if find_out else reason
        self.fail(reason)
        raise mx.MXNetError(reason)

    def describe_wait(self, label: Label, missing: Sequence[int], seconds: float) -> str:
        ranks = ", ".join(map(str, missing))
        return f"rank {self.rank} of {self.size} waits for rank {ranks} in {label} after {seconds:.0f} s."

    def late(self, label: Label, missing: Sequence[int], seconds: float) -> str:
        """Returns the error of a wait whose time is up."""
        text = (
            f"{self.describe_wait(label, missing, seconds)} A process that is missing has ended, hangs, or makes other "
            "calls: every process must run the same number of steps with the same net."
        )
        instead = self.meanwhile(missing)
        return text + (f" Meanwhile {'; '.join(instead)}." if instead else "")

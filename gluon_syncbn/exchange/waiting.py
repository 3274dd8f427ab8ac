"""Provides what transports in Python share: a wait with a time limit, one warning, and an error that says what for.

Such a transport brings `carry`, `tell` and `close`, and calls `Wait.poll` while it waits.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Iterator, Optional, Sequence

import mxnet as mx

from .. import _native
from ..system.logs import log
from .transport import Label, Transport

_WARN_AFTER = 10.0  # seconds
_POLL = 0.05  # seconds between looks at the native core


class Wait:
    """One wait of this rank for others, in the exchange that the label names. Its time begins when it is made."""

    def __init__(self, transport: WaitingTransport, label: Label) -> None:
        self._transport, self._label = transport, label
        self._interrupts = _native.interrupts()
        self._began = self._polled = time.monotonic()
        self._limit = 0.0
        self._native: Optional[_native.Wait] = None  # only if the wait is not over at once

    def text(self, missing: Sequence[int], why: str = "late") -> str:
        """Returns the text of the core for a wait that takes too long, or ends for another reason."""
        rank = f"rank {self._transport.rank} of {self._transport.size}"
        waited = time.monotonic() - self._began
        return _native.text_of_wait(why, str(self._label), rank, ", ".join(map(str, missing)), self._limit, waited)

    def poll(self, missing: Sequence[int]) -> None:
        """Raises an error if the wait must end; warns once if it takes long. May be called at any rate."""
        transport, label, now = self._transport, self._label, time.monotonic()
        transport.check_unbroken(label)
        if self._native is None:
            self._limit = _native.timeout_of(label.layer) + label.longer
            self._native = _native.Wait(self._limit, _WARN_AFTER, self._interrupts)
        if now - self._polled < _POLL:
            return
        self._polled = now
        why = self._native.poll()
        if why == "late":
            transport.give_up(label, transport.late(label, missing, self))
        elif why == "long":
            log.warning("%s", self.text(missing, why))
        elif why:
            transport.give_up(label, _native.failure() or self.text(missing, why))


class WaitingTransport(Transport):
    """Ends a failed exchange with an error that describes it, and then all other exchanges."""

    def check_unbroken(self, label: Label) -> None:
        """Raises an error if the transport breaks during a wait."""
        if self._broken:
            raise mx.MXNetError(f"in {label}, rank {self.rank} of {self.size}: {self._broken}")

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

    def late(self, label: Label, missing: Sequence[int], wait: Wait) -> str:
        """Returns the error of a wait whose time is up."""
        return wait.text(missing)

"""Provides what transports in Python share: a wait with a time limit, one warning, and an error that says what for.

Such a transport brings `carry`, `tell` and `close`, and calls `Wait.poll` while it waits.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Iterator, Sequence

import mxnet as mx

from .. import _native
from .transport import Label, Transport

_WARN_AFTER = 10.0  # seconds


class Wait:
    """One wait of this rank for others, in the exchange that the label names. Its time begins when it is made."""

    def __init__(self, transport: WaitingTransport, label: Label) -> None:
        self._transport, self._label = transport, label
        rank, limit = f"rank {transport.rank} of {transport.size}", _native.timeout_of(label.layer) + label.longer
        self._wait = _native.wait_begin(str(label), rank, limit, _WARN_AFTER)
        weakref.finalize(self, _native.wait_end, self._wait).atexit = False

    def text(self, missing: Sequence[int]) -> str:
        """Returns the text of a wait whose time is up."""
        return _native.wait_text(self._wait, ", ".join(map(str, missing)))

    def poll(self, missing: Sequence[int]) -> None:
        """Raises an error if the wait must end; warns once if it takes long. May be called at any rate."""
        transport, label = self._transport, self._label
        transport.check_unbroken(label)
        try:
            is_late = _native.wait_is_late(self._wait, ", ".join(map(str, missing)))
        except mx.MXNetError as error:
            transport.give_up(label, str(error))
        if is_late:
            transport.give_up(label, transport.late(label, missing, self))


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

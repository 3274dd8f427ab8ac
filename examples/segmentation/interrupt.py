"""Ctrl-C and SIGTERM: the first signal requests a stop after the current step, the second stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager. `requested` becomes true when the user wants to stop.

    Python runs signal handlers only between two bytecodes of the main thread. The main thread spends its time inside
    MXNet, waiting for a step. The C-level handler writes to the wakeup file descriptor at once. A thread that reads
    this descriptor can therefore print a message, or end the process, in mid-step.
    """

    def __init__(self, quiet: bool = False):
        self.requested = False
        self._quiet = quiet
        self._old = {}

    def __enter__(self) -> Interrupt:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in SIGNALS:
            # The handler does nothing, but without a handler Python would raise KeyboardInterrupt.
            self._old[number] = signal.signal(number, lambda *_: None)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._write)  # the thread reads end-of-file and returns
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        while True:
            byte = os.read(self._read, 1)
            if not byte:
                return
            if byte[0] not in SIGNALS:
                continue
            if self.requested:
                os._exit(128 + byte[0])  # the second signal asks for no clean-up
            self.requested = True
            if not self._quiet:
                print(
                    "\nstopping after this step, then saving; press Ctrl-C again to stop at once without saving",
                    file=sys.stderr,
                    flush=True,
                )

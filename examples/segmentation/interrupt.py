"""Ctrl-C and SIGTERM: the first asks for a stop after the running step, the second stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def step_behind_horovodrun() -> None:
    """Under horovodrun, go on in a child of this process, which waits for it and ends as it does.

    At Ctrl-C horovodrun sends SIGTERM to the children of what it has started, and SIGSTOP to that itself. What it has
    started is a shell where /bin/sh is dash; where it is bash, which gives its place to its only command, it is us.
    """
    if "HOROVOD_RANK" not in os.environ:
        return
    child = os.fork()  # before there are threads
    if not child:
        return
    for number in SIGNALS:
        signal.signal(number, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


class Interrupt:
    """Context manager; `requested` turns true when the user wants to stop.

    Python runs signal handlers only between two bytecodes of the main thread, and that thread spends
    its time inside MXNet waiting for a step. The wakeup file descriptor is written by the C-level
    handler at once, so a thread that reads it can answer, and can end the process, in mid-step.
    """

    def __init__(self, quiet: bool = False):
        self.requested = False
        self._quiet = quiet
        self._old = {}

    def __enter__(self) -> Interrupt:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in SIGNALS:
            # The handler has nothing to do, but without one Python would raise KeyboardInterrupt.
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
                os._exit(128 + byte[0])  # no clean-up: that is what the second one asks for
            self.requested = True
            if not self._quiet:
                print(
                    "\nstopping after this step, then saving (once more: stop at once, without saving)",
                    file=sys.stderr,
                    flush=True,
                )

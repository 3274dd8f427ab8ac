"""The logger ``gluon_syncbn``, and how it gets what the native core has to say.

At level ``debug`` it tells of every meeting: which layer and call, who came when, how long each waited; and at the end
of the run which layers and replicas were waited for longest. ``GLUON_SYNCBN_LOG=debug`` in the environment sets the
level and prints to stderr; so do the means of `logging`.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Optional

from .. import _native

VARIABLE = "GLUON_SYNCBN_LOG"
LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("gluon_syncbn")


def start() -> None:
    """Takes the level from the environment, and starts to fetch what the native core says.

    Raises
    ------
    ValueError
        Where the environment names no level.
    """
    level = os.environ.get(VARIABLE, "")
    if level:
        if level not in LEVELS:
            raise ValueError(f"{VARIABLE}: {level!r} was given, expected one of {LEVELS}")
        log.setLevel(level.upper())
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("gluon_syncbn: %(message)s"))
            log.addHandler(handler)
    fetch()


def fetch() -> None:
    """From a thread of its own; also in the child of a fork, which has none."""
    threading.Thread(target=_fetch_for_ever, name="gluon_syncbn-log", daemon=True).start()


def _fetch_for_ever() -> None:
    while True:
        _pass_on(60.0)


def _pass_on(seconds: float) -> Optional[str]:
    record = _native.next_record(seconds)
    if record is None:
        return None
    log.log(*record)
    return record[1]


def follow_level() -> None:
    """Tells the native core whether anybody wants to know of every meeting."""
    _native.debug(log.isEnabledFor(logging.DEBUG))


def finish() -> None:
    """What is left to say at the end of the process."""
    while _pass_on(0.0):
        pass
    slowest = _native.slowest()
    if slowest:
        log.debug(slowest)

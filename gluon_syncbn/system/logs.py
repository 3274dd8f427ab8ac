"""The logger ``gluon_syncbn``, and how it gets what the native core has to say.

At level ``debug`` it tells of every meeting: which layer and call, who came when, how long each waited; and at the end
of the run which layers and replicas were waited for longest. ``GLUON_SYNCBN_LOG=debug`` in the environment sets the
level and prints to stderr; so do the means of `logging`.
"""

from __future__ import annotations

import logging
import threading
from types import ModuleType
from typing import Optional

from . import arguments
from .environment import read

VARIABLE = "GLUON_SYNCBN_LOG"
LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("gluon_syncbn")
_core: ModuleType  # gluon_syncbn._native, which is above this folder


def start(core: ModuleType) -> None:
    """Takes the level from the environment, and starts to fetch what the native core says.

    Raises
    ------
    ValueError
        Where the environment names no level.
    """
    global _core
    _core = core
    level = read(VARIABLE)
    if level:
        if level not in LEVELS:
            arguments.refuse(VARIABLE, level, f"one of {LEVELS}")
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
    record = _core.next_record(seconds)
    if record is None:
        return None
    log.log(*record)
    return record[1]


def follow_level() -> None:
    """Tells the native core whether anybody wants to know of every meeting."""
    _core.debug(log.isEnabledFor(logging.DEBUG))


def finish() -> None:
    """What is left to say at the end of the process."""
    while _pass_on(0.0):
        pass
    slowest = _core.slowest()
    if slowest:
        log.debug(slowest)

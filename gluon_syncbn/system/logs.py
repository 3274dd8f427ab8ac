"""Owns the logger ``gluon_syncbn``, and passes the native core's records to it.

At level ``debug`` it reports every meeting: layer and call, and when each replica came and how long it waited. At the
end it reports the layers and replicas that others waited for longest. ``GLUON_SYNCBN_LOG=debug`` in the environment
sets the level and prints to stderr. ``logging.getLogger("gluon_syncbn").setLevel`` sets the level too.
"""

from __future__ import annotations

import logging
import threading
from types import ModuleType

from . import arguments
from .environment import read

VARIABLE = "GLUON_SYNCBN_LOG"
LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("gluon_syncbn")
_core: ModuleType  # gluon_syncbn._native, which imports this folder


def start(core: ModuleType) -> None:
    """Takes the level from the environment, and starts to fetch the native core's records.

    Raises
    ------
    ValueError
        If the environment has an unknown level.
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
    follow_level()
    fetch()


def fetch() -> None:
    """Starts the thread that fetches records; also in the child of a fork, which has no such thread."""
    threading.Thread(target=_fetch_for_ever, name="gluon_syncbn-log", daemon=True).start()


def _fetch_for_ever() -> None:
    while True:
        _pass_on(60.0)


def _pass_on(seconds: float) -> bool:
    level, _, text = _core.next_record(seconds).partition(" ")
    if level:
        log.log(int(level), text)
    return bool(level)


def follow_level() -> None:
    """Tells the native core whether this logger itself has a level that asks for a record of every meeting. A level of
    the root logger is meant for the user's own messages.
    """
    _core.debug(log.level != logging.NOTSET and log.isEnabledFor(logging.DEBUG))


def finish() -> None:
    """Logs the remaining records at the end of the process."""
    while _pass_on(0.0):
        pass
    slowest = _core.slowest()
    if slowest:
        log.debug(slowest)

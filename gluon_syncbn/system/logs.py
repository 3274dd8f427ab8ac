"""Owns the logger ``gluon_syncbn``, to which `lifetime` passes the native core's records.

``GLUON_SYNCBN_LOG=error`` in the environment sets the level and prints to stderr.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Iterator

from . import arguments
from .environment import read

VARIABLE = "GLUON_SYNCBN_LOG"
LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("gluon_syncbn")


def start() -> None:
    """Takes the level from the environment. ValueError: the environment has an unknown one."""
    level = read(VARIABLE)
    if level:
        if level not in LEVELS:
            arguments.refuse(VARIABLE, level, f"one of {LEVELS}")
        log.setLevel(level.upper())
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("gluon_syncbn: %(message)s"))
            log.addHandler(handler)


@contextmanager
def errors_reported(text: str) -> Iterator[None]:
    """Reports what a filter or handler of the program's raises, with the record's text, as `logging` reports errors of
    its own handlers: for a caller that has to go on.
    """
    try:
        yield
    except (Exception, SystemExit):
        logging.Handler().handleError(log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None))

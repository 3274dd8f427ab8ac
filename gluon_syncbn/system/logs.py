"""Owns the logger ``gluon_syncbn``, to which `lifetime` passes the native core's records.

At level ``debug`` it reports every meeting: layer and call, and when each replica came and how long it waited. At the
end it reports the layers and replicas that others waited for longest. ``GLUON_SYNCBN_LOG=debug`` in the environment
sets the level and prints to stderr. ``logging.getLogger("gluon_syncbn").setLevel`` sets the level too.
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

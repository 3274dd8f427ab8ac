"""Defines what every exchange has."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn


class Exchange:
    """Combines the statistics of the replicas. An exception in it becomes the failure of the step, with its text."""

    spans_processes = False
    #: The settings of a ``gluon.Trainer`` that adds its gradients by the same means, if these are a store's.
    of_trainer: Any = None

    def __init__(self, handle: int, name: str = "") -> None:
        self.handle = handle  # of the core's, which lasts as long as the process
        self.name = name  # that `configure` takes

    def check(self, settings: Any) -> None:
        """ValueError: it does not carry what a layer with these settings needs."""

    def __deepcopy__(self, memo: Any) -> Exchange:
        return self  # a copy of a layer exchanges as the layer does

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled, nor can a layer or a Trainer with kvstore=, nor a net of these, because a "
            "KVStore belongs to its process: save net.save_parameters(file) and trainer.save_states(file), and give "
            "the layers of the process that loads them a KVStore there"
        )


def leave() -> NoReturn:
    """Ends the process: after a failure, the normal exit would wait for operations that never complete."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(1)

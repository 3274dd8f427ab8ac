"""Variables of the environment: settings of MXNet, which it reads when it first needs them, and our own."""

from __future__ import annotations

import os


def at_least(variable: str, value: int) -> bool:
    """Raises it to ``value``; one that is larger stays. Whether it was raised."""
    current = os.environ.get(variable, "")
    if current.isdigit() and int(current) >= value:
        return False
    os.environ[variable] = str(value)
    return True


def shared_memory() -> bool:
    """Whether processes of a machine may meet in memory that they share: GLUON_SYNCBN_SHARED_MEMORY is not ``off``."""
    return os.environ.get("GLUON_SYNCBN_SHARED_MEMORY", "") != "off"

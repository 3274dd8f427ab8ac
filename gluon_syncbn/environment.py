"""Settings of MXNet that are variables of the environment, which it reads when it first needs them."""

from __future__ import annotations

import os


def at_least(variable: str, value: int) -> bool:
    """Raises it to ``value``; one that is larger stays. Whether it was raised."""
    current = os.environ.get(variable, "")
    if current.isdigit() and int(current) >= value:
        return False
    os.environ[variable] = str(value)
    return True

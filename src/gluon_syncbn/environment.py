"""Settings of MXNet that are variables of the environment, which it reads when it first needs them."""

from __future__ import annotations

import os


def at_least(variable: str, value: int) -> None:
    """Raises it to ``value``; one that is larger stays."""
    current = os.environ.get(variable, "")
    if not current.isdigit() or int(current) < value:
        os.environ[variable] = str(value)

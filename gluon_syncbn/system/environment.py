"""Reads and writes variables of the environment; nothing else does. docs/state.md has all of them, and their defaults.

The native core reads ``MXNET_ENGINE_TYPE``.
"""

from __future__ import annotations

import os


def read(variable: str) -> str:
    """Returns a variable's value, empty if it is not set."""
    return os.environ.get(variable, "")


def at_least(variable: str, value: int) -> bool:
    """Raises a variable to ``value``; a larger value stays. Returns whether it was raised."""
    current = read(variable)
    if current.isdigit() and int(current) >= value:
        return False
    os.environ[variable] = str(value)
    return True

"""Reads variables of the environment; nothing else does. docs/state.md has all of them, and their defaults."""

from __future__ import annotations

import os


def read(variable: str) -> str:
    """Returns a variable's value, empty if it is not set."""
    return os.environ.get(variable, "")

"""Compares versions, in place of ``distutils.version``, which Python 3.12 removed."""

from __future__ import annotations

import functools
import re
from typing import Tuple


def release(version: str) -> Tuple[int, ...]:
    """Returns the numbers at the beginning of a version: (2, 5, 5) for 2.5.5rc1."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version.strip()).group())))  # type: ignore[union-attr]


@functools.total_ordering
class Version:
    """Compares by its release. MXNet and GluonCV need no more."""

    def __init__(self, vstring: str) -> None:
        self.vstring = vstring
        self.version = release(vstring)

    def __str__(self) -> str:
        return self.vstring

    def __eq__(self, other: object) -> bool:
        return self.version == _version(other).version

    def __lt__(self, other: object) -> bool:
        return self.version < _version(other).version

    def __hash__(self) -> int:
        return hash(self.version)


def _version(value: object) -> Version:
    return value if isinstance(value, Version) else Version(str(value))


LooseVersion = StrictVersion = Version

"""Compares versions, in place of ``distutils.version``, which Python 3.12 removed."""

from __future__ import annotations

import re
from typing import Tuple


def release(version: str) -> Tuple[int, ...]:
    """Returns the numbers at the beginning of a version: (2, 5, 5) for 2.5.5rc1."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version.strip()).group())))  # type: ignore[union-attr]


LooseVersion = StrictVersion = release  # MXNet and GluonCV only compare

"""The structures of csrc/cuda/params.h for NumPy, for launches outside the package."""

import re
from pathlib import Path
from typing import Any, Dict

import numpy as np

PARAMS = Path(__file__).resolve().parents[1] / "gluon_syncbn" / "csrc" / "cuda" / "params.h"
NUMBERS = {"int": "i4", "Index": "i8", "double": "f8"}


def structures() -> Dict[str, np.dtype]:
    """Of each name, as a compiler lays it out; a pointer is a number."""
    text = re.sub(r"//.*", "", PARAMS.read_text(encoding="utf-8"))
    sizes = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    found: Dict[str, Any] = {**NUMBERS, "Range": np.dtype([("begin", "i4"), ("end", "i4")])}
    for name, body in re.findall(r"struct (\w+) {(.*?)};", text, re.DOTALL):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            kind, names = re.fullmatch(r"(?:const )?(\w+)(.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
            for field in names.split(","):
                one, _, size = field.strip(" *\n]").partition("[")
                fields.append((one, "u8" if "*" in field else found[kind], (sizes[size],) if size else ()))
        found[name] = np.dtype(fields, align=True)
    return found


STRUCTURES = structures()


def filled(name: str, **fields: Any) -> np.ndarray:
    """One of that structure, zero but for these fields; a structure within is a mapping, or one that is filled."""
    return _fill(np.zeros((), STRUCTURES[name]), fields)


def _fill(out: np.ndarray, fields: Dict[str, Any]) -> np.ndarray:
    for field, value in fields.items():
        out[field] = _fill(np.zeros((), out.dtype[field]), value) if isinstance(value, dict) else value
    return out

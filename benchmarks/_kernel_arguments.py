"""The kernels' source, their grids and the structures of csrc/cuda/params.h, for launches outside the package."""

import ctypes
import functools
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

CSRC = Path(__file__).resolve().parents[1] / "gluon_syncbn" / "csrc"
PARAMS = CSRC / "cuda" / "params.h"
(BLOCK,) = map(int, re.findall(r"constexpr int kBlock = (\d+);", PARAMS.read_text(encoding="utf-8")))
ACTIVATED = ("normalise", "grad_sums", "grad_input", "masked_grad_input")
OTHERS = ("moments", "masked_moments", "merge_moments", "merge_sums", "expand_mask", "add")
NUMBERS = {"int": "i4", "Index": "i8", "double": "f8"}


def structures() -> Dict[str, np.dtype]:
    """Of each name, as a compiler lays it out; a pointer is a number."""
    text = re.sub(r"//.*", "", PARAMS.read_text(encoding="utf-8"))
    sizes = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    found: Dict[str, Any] = {**NUMBERS, "Range": np.dtype([("begin", "i4"), ("end", "i4")])}  # of csrc/plain.h
    found["Mask"] = np.dtype("i4, i4, i8, 4i8, 4i8", align=True)
    found["Mask"].names = ("bytes", "floating", "size", "extents", "strides")
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


def few(ranges: Sequence[Sequence[int]]) -> Dict[str, np.ndarray]:
    """`Lists` of these ranges, which travel with a launch."""
    out = np.zeros(STRUCTURES["Lists"]["few"].shape, STRUCTURES["Lists"]["few"].base)
    out[: len(ranges)] = list(map(tuple, ranges))
    return {"few": out}


def source() -> str:
    """kernels.cu with the headers that it includes in their places, each once, and all kernels, which
    csrc/cuda/driver.cc adds one by one."""
    seen = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = (CSRC / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return re.sub(r'^#include "(.*)"\n', lambda found: text(found[1]), lines, flags=re.MULTILINE)

    kernels = [*product(ACTIVATED, ("identity", "rectifier")), *product(OTHERS, ("identity",))]
    types = ("float16", "float32", "float64")
    lines = (f"SYNCBN_KERNEL({stem}, {name}, {kind})\n" for (stem, name), kind in product(kernels, types))
    return text("cuda/kernels.cu") + "".join(lines)


PLAN = """
#include "cuda/plan.h"
extern "C" void plan(int64_t samples, int64_t per_sample, int64_t channels, int64_t inner, int64_t slots, int64_t* to) {
    const syncbn::cuda::Plan is({samples * per_sample, channels, inner}, samples, slots);
    for (auto value : {is.tiles, is.slots, is.chunks, 0LL + is.each().x, 0LL + is.width, is.segment}) *to++ = value;
}
"""


@functools.lru_cache(maxsize=None)
def _planning() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        compiled = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", "-x", "c++", "-", "-o", f"{folder}/plan.so"]
        subprocess.run(compiled, input=PLAN.encode(), check=True, timeout=120)
        return ctypes.CDLL(f"{folder}/plan.so").plan


def plan(shape: Sequence[int], slots: int) -> List[int]:
    """[tiles, slots, chunks] of the reductions, blocks of the others along x, width, segment: see csrc/cuda/plan.h."""
    values = (ctypes.c_int64 * 6)()
    _planning()(*map(ctypes.c_int64, (*shape, slots)), values)
    return list(values)

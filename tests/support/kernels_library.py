"""The CPU kernels behind C names, compiled for one instruction set alone."""

import ctypes
from typing import List, Sequence

import libraries
from internals import core
from places import SOURCES, SUPPORT

# How each is asked for, and how many float64 a register of it has; the widest first.
SETS = {
    "avx512f": ('__attribute__((target("avx512f")))', 8),
    "avx2": ('__attribute__((target("avx2,fma")))', 4),
    "baseline": ("", 2),
}


def here() -> List[str]:
    """Those that this machine has."""
    return list(SETS)[list(SETS).index(core.instruction_set()) :]


def build(name: str, flags: Sequence[str] = ("-O1",)) -> ctypes.CDLL:
    target, width = SETS[name]
    sources = [SUPPORT / "kernels_driver.cc", SOURCES / "cpu" / "kernels.cc"]
    defined = [f"-DSYNCBN_CLONES={target}", f"-DSYNCBN_WIDTH={width}"]
    return libraries.build(name, sources, [*flags, "-fopenmp", *defined])

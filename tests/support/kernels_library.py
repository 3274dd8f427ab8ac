"""The CPU kernels behind C names, compiled for one instruction set alone."""

import ctypes
import subprocess
from pathlib import Path
from typing import List, Sequence

from environments import shell
from places import SOURCES, SUPPORT

from gluon_syncbn import _native

# How each is asked for, and how many float64 a register of it has; the widest first.
SETS = {
    "avx512f": ('__attribute__((target("avx512f")))', 8),
    "avx2": ('__attribute__((target("avx2,fma")))', 4),
    "baseline": ("", 2),
}


def here() -> List[str]:
    """Those that this machine has."""
    return list(SETS)[list(SETS).index(_native.instruction_set()) :]


def build(name: str, folder: Path, flags: Sequence[str] = ("-O2",)) -> ctypes.CDLL:
    target, width = SETS[name]
    path = folder / f"kernels_{name}.so"
    command = ["g++", "-std=c++17", *flags, "-fPIC", "-shared", "-fopenmp"]
    command += [f"-DSYNCBN_CLONES={target}", f"-DSYNCBN_WIDTH={width}", f"-I{SOURCES}", "-o", str(path)]
    sources = [SOURCES / source for source in ("cpu/kernels.cc", "cpu/blocked.cc", "tensor.cc")]
    subprocess.run(
        [*command, *map(str, [SUPPORT / "kernels_driver.cc", *sources])], check=True, timeout=120, env=shell()
    )
    return ctypes.CDLL(str(path))

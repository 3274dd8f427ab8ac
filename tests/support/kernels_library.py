"""The CPU kernels behind C names, compiled for one instruction set alone."""

import ctypes
import hashlib
import os
import subprocess
from typing import List, Sequence

from environments import shell
from places import ROOT, SOURCES, SUPPORT

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


def build(name: str, flags: Sequence[str] = ("-O2",)) -> ctypes.CDLL:
    """The library, which is compiled once for all tests and benchmarks that ask for these sources and flags."""
    target, width = SETS[name]
    sources = [SUPPORT / "kernels_driver.cc", SOURCES / "cpu" / "kernels.cc"]
    command = ["g++", "-std=c++17", *flags, "-fPIC", "-shared", "-fopenmp"]
    command += [f"-DSYNCBN_CLONES={target}", f"-DSYNCBN_WIDTH={width}", f"-I{SOURCES}", *map(str, sources)]
    compiler = subprocess.run(["g++", "--version"], check=True, timeout=30, env=shell(), stdout=subprocess.PIPE).stdout
    made_of = hashlib.sha256(repr((command, compiler)).encode())
    for path in [*sources, *sorted(SOURCES.rglob("*.h"))]:
        made_of.update(path.read_bytes())
    library = ROOT / "build" / "kernels" / f"{name}-{made_of.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = f"{library}.{os.getpid()}"  # another process may be at it, or an interrupt come
        subprocess.run([*command, "-o", unfinished], check=True, timeout=120, env=shell())
        os.replace(unfinished, library)
    return ctypes.CDLL(str(library))

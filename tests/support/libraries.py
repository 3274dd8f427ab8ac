"""Shared libraries of C++ that tests and benchmarks call."""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Sequence

from environments import shell
from places import ROOT, SOURCES


def build(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of these sources and flags, which is compiled once for all that ask for it."""
    command = ["g++", "-std=c++17", *flags, "-fPIC", "-shared", f"-I{SOURCES}", *map(str, sources)]
    compiler = subprocess.run(["g++", "--version"], check=True, timeout=30, env=shell(), stdout=subprocess.PIPE).stdout
    made_of = hashlib.sha256(repr((command, compiler)).encode())
    for path in [*sources, *sorted(SOURCES.rglob("*.h"))]:
        made_of.update(path.read_bytes())
    library = ROOT / "build" / "libraries" / f"{name}-{made_of.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = f"{library}.{os.getpid()}"  # another process may be at it, or an interrupt come
        subprocess.run([*command, "-o", unfinished], check=True, timeout=280, env=shell())
        os.replace(unfinished, library)
    return ctypes.CDLL(str(library))

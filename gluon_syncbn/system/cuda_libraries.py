"""Loads the CUDA libraries that MXNet's builds for NVIDIA GPUs are linked against.

``mxnet-cu112`` contains none of them. Libraries that the dynamic loader finds stay as they are. The ``nvidia-*-cu11``
packages provide the others. MXNet uses a library that is in the process already. So it is enough to load them first,
and LD_LIBRARY_PATH need not be set.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import mmap
import os
import re
import struct
import sys
from pathlib import Path
from typing import List, Optional, Tuple

from .distribution import WHERE, command
from .environment import read

#: soname: the package that contains it. A library comes after those that it needs.
PACKAGES = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libcublasLt.so.11": "nvidia-cublas-cu11",
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libnvrtc.so.11.2": "nvidia-cuda-nvrtc-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
    "libcusolver.so.11": "nvidia-cusolver-cu11",
    "libnccl.so.2": "nvidia-nccl-cu11",
    "libnvToolsExt.so.1": "nvidia-nvtx-cu11",
}
DRIVER = "libcuda.so.1"


def load() -> None:
    """Loads the libraries that the MXNet on ``sys.path`` needs, unless they are loaded or MXNet is a CPU build.

    Raises ImportError if libraries or the driver are missing; the text names them and the packages that contain
    them. If a library exists and cannot be loaded, it raises OSError, in the dynamic loader's own words.
    """
    if "mxnet.base" in sys.modules:  # which loads MXNet's library
        return
    mxnet = _mxnet_library()
    wanted = needed(mxnet) if mxnet is not None else []
    lost = sorted({name for soname in PACKAGES if soname in wanted for name in _load(soname)})
    reasons = []
    if lost:
        brings = ", ".join(f"{soname} ({PACKAGES[soname]})" for soname in lost)
        reasons.append(f"without the CUDA libraries {brings}: {command('cu112')}{WHERE}")
    if DRIVER in wanted and not _found(DRIVER):
        reasons.append(
            f"without {DRIVER}, which comes with an NVIDIA driver and not with a package: install the driver of "
            "the GPU (520 or later); a container gets it from its host (`docker run --gpus all`). On a machine without "
            f"an NVIDIA GPU, install the CPU build: `pip uninstall mxnet-cu112`, then {command('cpu')}{WHERE}"
        )
    if not reasons:
        return
    try:
        ctypes.CDLL(str(mxnet))  # a library may know by itself where others are (RUNPATH)
    except OSError:
        what = f"The MXNet in {mxnet} is built for NVIDIA GPUs and cannot start "
        raise ImportError(what + "; and ".join(reasons), name=__package__) from None


def needed(library: Path) -> List[str]:
    """Returns the sonames that a library is linked against, which ``readelf --dynamic`` calls NEEDED."""
    with open(library, "rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":  # 64 bits, little endian
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            (headers,) = struct.unpack_from("<Q", image, 32)
            size, count = struct.unpack_from("<HH", image, 54)
            # type (1: loaded, 2: dynamic), flags, offset in the file, address, physical address, size in the file
            segments = [struct.unpack_from("<IIQQQQ", image, headers + i * size) for i in range(count)]
            start, length = next((s[2], s[5]) for s in segments if s[0] == 2)
            entries = list(struct.iter_unpack("<qQ", image[start : start + length]))
            (table,) = [value for tag, value in entries if tag == 5]  # the address of the strings
            strings = next(s[2] + table - s[3] for s in segments if s[0] == 1 and s[3] <= table < s[3] + s[5])
            places = [strings + value for tag, value in entries if tag == 1]
            return [image[place : image.find(b"\0", place)].decode() for place in places]


def loaded() -> List[Tuple[str, str, str]]:
    """Returns the CUDA libraries and the driver that are in this process: soname, version and path."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    files = re.findall(r" (/.*\.so.*)$", maps, re.MULTILINE)
    paths = {_major(os.path.basename(path)): path for path in files}
    found = [(soname, paths.get(_major(soname))) for soname in (DRIVER, *PACKAGES)]
    return [(soname, _version(soname, path), path) for soname, path in found if path is not None]


def _major(file: str) -> str:
    """Returns "libcudart.so.11" for libcudart.so.11.0 and its files. The driver's files differ: "libcuda.so"."""
    return ".".join(file.split(".")[: 2 if file.startswith("libcuda.") else 3])


def _mxnet_library() -> Optional[Path]:
    """Returns the library that MXNet's ``libinfo.find_lib_path`` finds; None if ``sys.path`` has no MXNet."""
    spec = importlib.machinery.PathFinder.find_spec("mxnet")
    if spec is None or spec.origin is None:
        return None
    given = read("MXNET_LIBRARY_PATH")
    if os.path.isabs(given) and os.path.isfile(given):
        return Path(given)
    folders = [folder for folder in read("LD_LIBRARY_PATH").split(":") if folder.strip()]
    for folder in [*folders, os.path.dirname(spec.origin)]:
        path = Path(folder.strip(), "libmxnet.so")
        if path.is_file():
            return path
    return None


def _load(soname: str) -> List[str]:
    """Loads a library. Returns the missing ones that keep it from being loaded: itself, or those that it needs."""
    if _found(soname):
        return []
    path = _packaged(soname)
    if path is None:
        return [soname]
    lost = [name for other in needed(path) if other in PACKAGES for name in _load(other)]
    if not lost:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return lost


def _found(soname: str) -> bool:
    """Loads a library that is in the process already or on the dynamic loader's path. Returns whether it did."""
    try:
        ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL)
        return True
    except OSError as error:
        # If a library exists and needs a missing one, the loader names the missing one.
        if str(error).startswith(f"{soname}: cannot open shared object file: No such file"):
            return False
        raise


def _packaged(soname: str) -> Optional[Path]:
    found = (path for entry in sys.path for path in sorted(Path(entry, "nvidia").glob(f"*/lib/{soname}")))
    return next(found, None)


def _version(soname: str, path: str) -> str:
    """Returns the version of a library according to its package, or to its file."""
    import importlib.metadata  # 20 ms that other imports do not have to pay

    packaged = _packaged(soname)
    if packaged is not None and path == os.path.realpath(packaged):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(PACKAGES[soname])
    return os.path.basename(path).split(".so.")[-1]  # libcuda.so.1 -> libcuda.so.535.104.05

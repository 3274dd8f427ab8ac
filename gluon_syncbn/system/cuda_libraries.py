"""Loads the CUDA libraries that MXNet's builds for NVIDIA GPUs are linked against.

``mxnet-cu112`` contains none of them. Libraries that the dynamic loader finds stay as they are. The ``nvidia-*-cu11``
packages provide the others. MXNet uses a library that is in the process already. So it is enough to load them first,
and LD_LIBRARY_PATH need not be set.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import re
import runpy
import sys
from pathlib import Path
from typing import List, Optional

from .distribution import WHERE, command

#: soname: the package that contains it.
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
    """Loads the library of the MXNet on ``sys.path``, after those that it needs and the packages contain. ImportError:
    some are missing. OSError, in the dynamic loader's words: one exists and cannot be loaded.
    """
    if "mxnet.base" in sys.modules:  # which loads MXNet's library
        return
    mxnet = _mxnet_library()
    if mxnet is None or _missing(mxnet, ctypes.RTLD_LOCAL) is None:  # as MXNet loads it
        return
    lost = sorted({name for name in map(_missing, PACKAGES) if name in PACKAGES})
    reasons = []
    if lost:
        brings = ", ".join(f"{soname} ({PACKAGES[soname]})" for soname in lost)
        reasons.append(f"without the CUDA libraries {brings}: {command('cu112')}{WHERE}")
    if _missing(DRIVER):
        reasons.append(
            f"without {DRIVER}, which comes with an NVIDIA driver and not with a package: install the driver of "
            "the GPU (520 or later); a container gets it from its host (`docker run --gpus all`). On a machine without "
            f"an NVIDIA GPU, install the CPU build: `pip uninstall mxnet-cu112`, then {command('cpu')}{WHERE}"
        )
    what = f"The MXNet in {mxnet} is built for NVIDIA GPUs and cannot start "
    raise ImportError(what + "; and ".join(reasons), name=__package__)


def loaded() -> List[str]:
    """Returns the files of the CUDA libraries and of the driver that are in this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    names = "|".join(soname.partition(".")[0] for soname in (DRIVER, *PACKAGES))
    return sorted(set(re.findall(rf" (/.*/(?:{names})\.so.*)$", maps, re.MULTILINE)))


def _mxnet_library() -> Optional[str]:
    """Returns the library that MXNet will load; None if ``sys.path`` has no MXNet."""
    spec = importlib.machinery.PathFinder.find_spec("mxnet")
    if spec is None or spec.origin is None:
        return None
    libinfo = Path(spec.origin).with_name("libinfo.py")
    return str(runpy.run_path(str(libinfo))["find_lib_path"]()[0]) if libinfo.is_file() else None


def _missing(library: str, mode: int = ctypes.RTLD_GLOBAL) -> Optional[str]:
    """Loads a library, after those that it needs and only packages contain. Returns a missing one that keeps it from
    being loaded: itself, or one that it needs; None if it is loaded.
    """
    try:
        ctypes.CDLL(library, mode=mode)
        return None
    except OSError as error:
        name = str(error).partition(": cannot open shared object file: No such file")[0]
        if name not in (DRIVER, *PACKAGES):
            raise
    path = _packaged(name)
    return name if path is None else _missing(str(path)) or _missing(library, mode)


def _packaged(soname: str) -> Optional[Path]:
    found = (path for entry in sys.path for path in sorted(Path(entry, "nvidia").glob(f"*/lib/{soname}")))
    return next(found, None)

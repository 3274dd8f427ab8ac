"""Queries the NVIDIA driver about the GPUs of this machine."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Tuple

from .environment import read

#: Major compute capabilities that MXNet 1.9.1 has machine code for. Its CUDA builds hold sm_50, 60, 70, 80 and 86 and
#: no PTX. Machine code runs on GPUs of the same major and the same or a later minor version: 8.0 and 8.6 on 8.9 too.
MAJORS = (5, 6, 7, 8)
ANYWAY = "GLUON_SYNCBN_ANY_ARCHITECTURE"


class Gpu(NamedTuple):
    name: str
    capability: Tuple[int, int]  # 8, 6


def count() -> int:
    """Returns the number of GPUs; raises OSError if the driver is missing or finds none, and says which."""
    found = ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGetCount", ctypes.byref(found))
    return found.value


def gpu(device_id: int) -> Gpu:
    """Returns the GPU that MXNet calls ``mx.gpu(device_id)``; raises OSError as `count` does, or if there is none."""
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device_id))
    _call("cuDeviceGetAttribute", ctypes.byref(major), ctypes.c_int(75), handle)
    _call("cuDeviceGetAttribute", ctypes.byref(minor), ctypes.c_int(76), handle)
    _call("cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value))


def driver_version() -> Tuple[int, int]:
    """Returns the CUDA version that the driver supports."""
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))  # works without a GPU, too
    return version.value // 1000, version.value % 1000 // 10


def check_architecture(device_id: int) -> None:
    """ValueError: MXNet's own operators cannot run on ``mx.gpu(device_id)``. OSError: the driver has no such GPU.

    ``GLUON_SYNCBN_ANY_ARCHITECTURE=1`` in the environment turns the check off. Copies, NCCL and kernels that are
    compiled at run time, such as this layer's, do not depend on it. An MXNet built from source may support more GPUs.
    """
    if read(ANYWAY) == "1":
        return
    name, (major, minor) = gpu(device_id)
    if major not in MAJORS:
        raise ValueError(
            f"ctx: gpu({device_id}) was given, {name} of compute capability {major}.{minor}, expected one from "
            f"{MAJORS[0]}.0 to {MAJORS[-1]}.9: MXNet 1.9.1 has no machine code for others and no PTX, so none of its "
            "own GPU operators starts there. Use an older GPU (up to Ampere and Ada, 8.x), CPU contexts "
            f"(gluon_syncbn.cpu_devices), or an MXNet built from source for sm_{major}{minor}, with {ANYWAY}=1"
        )


def _call(function: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = getattr(driver, function)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        words = text.value.decode(errors="replace") if text.value else "unknown error"
        raise OSError(f"the NVIDIA driver's {function} failed: {words} ({status})")

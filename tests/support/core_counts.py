"""What the native core counts for tests, and whether it has the layer on CPUs."""

from ctypes import c_int64

from gluon_syncbn import _native

WHY_CUSTOM = _native.WHY_CUSTOM["cpu"]  # MXNet's Custom runs the layer there; '' where it does not


def core_count(name: str) -> int:
    return c_int64.in_dll(_native._core, f"syncbn_{name}").value

"""What the native core counts for tests."""

from ctypes import c_int64

from gluon_syncbn import _native


def core_count(name: str) -> int:
    return c_int64.in_dll(_native._core, f"syncbn_{name}").value

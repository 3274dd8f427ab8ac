"""What tests need of the package beside its public names."""

from ctypes import CDLL, c_int64
from typing import Any

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn import _native as core

WHY_CUSTOM = core.WHY_CUSTOM["cpu"]  # MXNet's Custom runs the layer on CPUs; '' where it does not


def core_count(name: str) -> int:
    """What the core counts for tests."""
    return c_int64.in_dll(CDLL(str(core.PATH)), f"syncbn_{name}").value


def replicas_of(layer: SyncBatchNorm) -> Any:
    return layer._replicas


def exchange_of(layer: SyncBatchNorm) -> Any:
    """By way of which its statistics go where a KVStore of MXNet's is named."""
    return layer._replicas.exchange

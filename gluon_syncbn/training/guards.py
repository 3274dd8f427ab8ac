"""Guards the arrays of calls that come through MXNet's ``Custom``."""

from __future__ import annotations

from typing import Any, Callable, Optional

from .. import _native
from .replicas import Replicas


def guard(F: Any, replicas: Replicas, *, on_cpus: bool, eager: bool) -> Optional[Callable[[Any], Any]]:
    """Returns a function that copies an array that a call reads or returns. Returns None if calls need no copies.

    MXNet gives a custom operator a temporary copy of an array in oneDNN's layout, and frees it while the operator still
    runs. AllocateNDArrayCopy in src/operator/custom/custom.cc keeps a pointer and no reference. SwapAxis of an axis
    with itself is the cheapest operator that writes a new, plain array. On the output it does the same for the incoming
    gradient. GPUs have no such layout, and calls through csrc/native are not affected.

    MXNet bundles operators of a backward, and a bundle waits for the inputs of all of them. The copies of two eager
    calls must not share one if other processes may run the two in another order. A second copy ends a bundle.
    """
    if not (on_cpus and _native.why_custom()):
        return None
    ends_bundle = eager and replicas.reaches_other_processes()

    def copied(array: Any) -> Any:
        plain = F.SwapAxis(array, dim1=0, dim2=0)
        return plain.copyto(plain.ctx) if ends_bundle else plain

    return copied

"""Adds the operator ``gluon_syncbn`` to a graph."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, Callable, Iterable, List

import mxnet as mx
from mxnet.base import _LIB, OpHandle, c_str, check_call
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function

from .. import _native
from ..system import kinds
from ..training.replicas import EagerCall, Replicas

#: MXNet's ``op_type``.
NAME = "gluon_syncbn"


class Operators:
    """Stands in for ``mx.nd`` or ``mx.sym``, with some of MXNet's own operators, whatever has replaced them since:
    automatic mixed precision, or a user. Whatever else is asked for is as it is there now.

    ``mxnet.contrib.amp.init`` replaces the functions of ``mx.nd`` and ``mx.sym``. Its lists give ``Custom`` float32
    inputs only, because ``Custom`` may be any operator. `SyncBatchNorm` takes float16 as it is, as ``nn.BatchNorm``
    does, and casts would double the memory of its input and output. The functions here are made as MXNet makes its own.
    So they do not depend on whether ``amp.init`` ran before or after the import of this package. A script may also put
    this package's symbol into the place of ``mx.sym.BatchNorm``, which must not call itself then.
    """

    def __init__(self, module: Any, make: Callable[[Any, str, str], Callable[..., Any]]) -> None:
        self._module = module
        for name in ("BatchNorm", "Cast", "Custom", "SwapAxis"):
            handle = OpHandle()
            check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)))
            setattr(self, name, make(handle, name, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


SYMBOLS = Operators(mx.sym, _make_symbol_function)
ARRAYS = Operators(mx.nd, _make_ndarray_function)


def sync_batch_norm(
    F: Any, replicas: Replicas, data: List[Any], parameters: Iterable[Any], mask: Any = None, frozen: bool = False
) -> Any:
    """Normalises the first of ``data``, before an addend, by gamma, beta and, if ``frozen``, the running statistics."""
    eager, (settings, calls) = F is mx.nd, replicas.now()
    masks = mask is not None and not frozen
    call = calls.get((frozen, masks)) if eager else None  # it lives until MXNet has its node
    if call is None:
        fuses = settings.fuses and not frozen
        settings = replace(settings, use_global_stats=frozen, masks=masks, fuses=fuses)
        if eager:
            call = calls[frozen, masks] = EagerCall(replicas, settings)
    attributes = {"call": call.number} if call else {**replicas.to_node(settings), "name": "fwd"}
    F = ARRAYS if eager else SYMBOLS
    guards = replicas.on_cpus and _native.WHY_CUSTOM["cpu"]
    ends_bundle = bool(guards) and eager and replicas.reaches_other_processes()
    if masks:
        data = [*data, F.Cast(kinds.classic(mask), dtype="float64") if guards else mask]  # SwapAxis takes no bool
    inputs = [one if type(one) is mx.nd.NDArray else kinds.classic(kinds.dense(one)) for one in (*data, *parameters)]
    data, (gamma, beta, *running) = inputs[: len(data)], inputs[len(data) :]
    if guards:
        data = [_copied(F, one, ends_bundle) for one in data]
    y = F.Custom(data[0], gamma, beta, *data[1:], *running, op_type=NAME, **attributes)
    return _copied(F, y, ends_bundle) if guards else y


def _copied(F: Any, array: Any, ends_bundle: bool) -> Any:
    """Guards an array that a call reads or returns, where MXNet calls through its ``Custom``.

    MXNet gives a custom operator a temporary copy of an array in oneDNN's layout, and frees it while the operator still
    runs. AllocateNDArrayCopy in src/operator/custom/custom.cc keeps a pointer and no reference. SwapAxis of an axis
    with itself is the cheapest operator that writes a new, plain array. On the output it does the same for the incoming
    gradient. GPUs have no such layout, and calls through csrc/native are not affected.

    MXNet bundles operators of a backward, and a bundle waits for the inputs of all of them. The copies of two eager
    calls must not share one if other processes may run the two in another order. A second copy ends a bundle.
    """
    plain = F.SwapAxis(array, dim1=0, dim2=0)
    return plain.copyto(plain.ctx) if ends_bundle else plain

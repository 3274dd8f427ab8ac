"""Adds the operator ``gluon_syncbn`` to a graph."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Optional

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, OpHandle, c_str, check_call
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function

from .. import _native
from ..activation import NONE, Activation
from ..training.replicas import Replicas

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
_ARRAYS = Operators(mx.nd, _make_ndarray_function)


def own(F: Any) -> Operators:
    return _ARRAYS if F is mx.nd else SYMBOLS


def sync_batch_norm(
    F: Any,
    x: Any,
    gamma: Any,
    beta: Any,
    running_mean: Any,
    running_var: Any,
    replicas: Replicas,
    *,
    axis: int,
    node: int = -1,
    eps: float = 1e-5,
    momentum: float = 0.9,
    fix_gamma: bool = False,
    unbiased: bool = False,
    activation: Activation = NONE,
    addend: Optional[Any] = None,
    mask: Optional[Any] = None,
    fuses: bool = False,
    inplace: bool = False,
    frozen: bool = False,
) -> Any:
    """Normalises ``x`` with the statistics that the replicas' pooling selects; ``F`` is ``mx.nd`` or ``mx.sym``.

    ``node`` numbers the layer's nodes in graphs. It is -1 for an eager call. ``unbiased`` selects the variance that
    updates the running one. ``addend`` and ``activation`` come after the normalisation. Where ``mask`` is 0, a position
    does not count in the statistics. ``fuses`` is for `fusion`. ``inplace`` keeps y for the backward and not x. It
    needs an invertible activation and no addend. ``frozen`` selects the running statistics in training too. In a static
    graph MXNet's engine does not know that a node writes the running statistics. So two nodes of one layer may run in
    either order there.
    """
    guarded = _guard(F, replicas, eager=node < 0)
    data = [x] if addend is None else [x, addend]
    if mask is not None:
        data.append(F.Cast(mask, dtype="float64") if guarded else mask)  # SwapAxis takes no bool
    if guarded:
        data = [guarded(array) for array in data]
    inputs = [data[0], gamma, beta, *data[1:], running_mean, running_var]
    flags = fix_gamma, unbiased, addend is not None, mask is not None, inplace, frozen, replicas.on_cpus
    settings = axis, eps, momentum, activation, flags
    # An eager call has a number in place of the attributes, which would become texts, and be parsed again.
    number = replicas.calls.get(settings) if node < 0 else None
    if number is not None:
        y = F.Custom(*inputs, op_type=NAME, call=number)
        return guarded(y) if guarded else y
    attributes = {
        "layer": replicas.token,
        "node": node,
        "axis": axis,
        "eps": repr(float(eps)),
        "momentum": repr(float(np.float32(momentum))),  # as MXNet's own BatchNorm keeps it
        "fix_gamma": int(fix_gamma),
        "unbiased": int(unbiased),
        "on_cpus": int(replicas.on_cpus),
        **activation.attributes(),
        "fuses": int(fuses),
        "inplace": int(inplace),
        "use_global_stats": int(frozen),
        "adds": int(addend is not None),
        "masks": int(mask is not None),
    }
    if node < 0:
        texts = {key: str(value) for key, value in attributes.items()}
        number = str(_native.call_create(list(texts), list(texts.values())))
        replicas.attributes[number], replicas.by_call[number] = texts, replicas
        replicas.calls[settings] = number
        attributes = {"call": number}
    else:
        attributes["name"] = "fwd"
    y = F.Custom(*inputs, op_type=NAME, **attributes)
    return guarded(y) if guarded else y


def _guard(F: Any, replicas: Replicas, *, eager: bool) -> Optional[Callable[[Any], Any]]:
    """Returns a function that copies an array that a call reads or returns. Returns None if calls need no copies.

    MXNet gives a custom operator a temporary copy of an array in oneDNN's layout, and frees it while the operator still
    runs. AllocateNDArrayCopy in src/operator/custom/custom.cc keeps a pointer and no reference. SwapAxis of an axis
    with itself is the cheapest operator that writes a new, plain array. On the output it does the same for the incoming
    gradient. GPUs have no such layout, and calls through csrc/native are not affected.

    MXNet bundles operators of a backward, and a bundle waits for the inputs of all of them. The copies of two eager
    calls must not share one if other processes may run the two in another order. A second copy ends a bundle.
    """
    if not (replicas.on_cpus and _native.why_custom()):
        return None
    ends_bundle = eager and replicas.reaches_other_processes()

    def copied(array: Any) -> Any:
        plain = F.SwapAxis(array, dim1=0, dim2=0)
        return plain.copyto(plain.ctx) if ends_bundle else plain

    return copied

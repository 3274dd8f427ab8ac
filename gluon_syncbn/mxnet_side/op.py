"""Adds the operator ``gluon_syncbn`` to a graph."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, OpHandle, c_str, check_call
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function

from .. import _native
from ..activation import NONE, Activation
from ..training.replicas import Replicas

#: MXNet's ``op_type``.
NAME = "gluon_syncbn"


class Role:
    """Names the part of a call that a node computes. The numbers are those of `Role` in csrc/operator/call.h."""

    WHOLE, MEET, TRACK = range(3)


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
    per_context: int = 1,
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

    ``per_context`` is the number of replicas on each context. ``node`` numbers the layer's nodes in graphs. It is -1
    for an eager call. ``unbiased`` selects the variance that updates the running one. ``addend`` and ``activation``
    come after the normalisation. Where ``mask`` is 0, a position does not count in the statistics. ``fuses`` is for
    `fusion`, with one replica per context. ``inplace`` keeps y for the backward and not x. It needs an invertible
    activation, no addend and one replica per context. ``frozen`` selects the running statistics in training too, with
    one replica per context, because nobody meets. In a static graph MXNet's engine does not know that a node writes
    the running statistics. So two nodes of one layer may run in either order there.
    """
    guarded = _guard(F, replicas, eager=node < 0)
    data = [x] if addend is None else [x, addend]
    if mask is not None:
        data.append(F.Cast(mask, dtype="float64") if guarded else mask)  # SwapAxis takes no bool
    if guarded:
        data = [guarded(array) for array in data]
    inputs, states = [data[0], gamma, beta, *data[1:]], [running_mean, running_var]
    settings = per_context, axis, eps, momentum, fix_gamma, unbiased, activation, inplace, frozen, replicas.on_cpus

    def custom(*given: Any, role: int, adds: bool = addend is not None, masks: bool = mask is not None) -> Any:
        # An eager call has a number in place of the attributes, which would become texts, and be parsed again.
        number = replicas.calls.get((settings, role, adds, masks)) if node < 0 else None
        if number is not None:
            return F.Custom(*given, op_type=NAME, call=number)
        attributes = {
            "layer": replicas.token,
            "per_context": per_context,
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
            "role": role,
            "adds": int(adds),
            "masks": int(masks),
        }
        if node >= 0:
            return F.Custom(*given, op_type=NAME, name="track" if role == Role.TRACK else "fwd", **attributes)
        texts = {key: str(value) for key, value in attributes.items()}
        number = str(_native.call_create(list(texts), list(texts.values())))
        replicas.attributes[number], replicas.by_call[number] = texts, replicas
        replicas.calls[settings, role, adds, masks] = number
        return custom(*given, role=role, adds=adds, masks=masks)

    if per_context == 1:
        y = custom(*inputs, *states, role=Role.WHOLE)
    else:
        y, batch, *handed_on = custom(*inputs, role=Role.MEET)
        track = functools.partial(custom, y, gamma, beta, *handed_on, batch, *states, role=Role.TRACK, masks=False)
        if node >= 0:  # a graph predicts, too
            y = track()
        else:
            # Separate from the data, because this node waits for the previous writer of the running statistics. With a
            # thread for each replica, the writer may belong to a later call.
            recording = autograd.set_recording(False)
            track(adds=False)
            autograd.set_recording(recording)
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

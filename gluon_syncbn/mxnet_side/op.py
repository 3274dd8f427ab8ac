"""The operator ``gluon_syncbn`` in a graph."""

from __future__ import annotations

import functools
from typing import Any, Optional

import numpy as np
from mxnet import autograd

from .. import _native
from ..activation import NONE, Activation
from ..training.replicas import Replicas

#: MXNet's ``op_type``.
NAME = "gluon_syncbn"


class Role:
    """Which part of a call a node is; the numbers are those of `Role` in csrc/operator/call.h."""

    WHOLE, MEET, TRACK = range(3)


def sync_batch_norm(
    F: Any,
    x: Any,
    gamma: Any,
    beta: Any,
    running_mean: Any,
    running_var: Any,
    replicas: Replicas,
    *,
    lanes: int,
    node: int,
    axis: int,
    eps: float,
    momentum: float,
    fix_gamma: bool,
    unbiased: bool,
    activation: Activation = NONE,
    addend: Optional[Any] = None,
    fuses: bool = False,
    inplace: bool = False,
) -> Any:
    """Normalises ``x`` with the statistics that the replicas' pooling says; ``F`` is ``mx.nd`` or ``mx.sym``.

    ``lanes`` is the number of replicas on each context. ``node`` numbers the layer's nodes in graphs and is -1 for an
    eager call. ``unbiased`` is the variance that the running one takes. ``addend`` and ``activation`` come after the
    normalisation. ``fuses`` is for `fusion`, with a single lane. ``inplace`` keeps y for the backward and not x:
    where the activation is invertible, without an addend and with a single lane. A static graph does not tell MXNet's
    engine that a node writes the running statistics, so two nodes of one layer may run in either order there.
    """
    # MXNet hands a custom operator a temporary copy of an array in oneDNN's layout and frees it while the operator
    # still runs (AllocateNDArrayCopy in src/operator/custom/custom.cc keeps a pointer, no reference). SwapAxis of an
    # axis with itself is the cheapest operator that really writes a new, plain array; on the output it does the same
    # for the gradient that comes back. GPUs have no such layout, and where calls do not come through MXNet's custom.cc
    # (csrc/native) nothing is freed.
    on_cpus = not replicas.contexts or any(context.device_type != "gpu" for context in replicas.contexts)
    guarded = on_cpus and bool(_native.why_custom())
    custom = functools.partial(
        F.Custom,
        op_type=NAME,
        layer=replicas.token,
        lanes=lanes,
        node=node,
        axis=axis,
        eps=repr(float(eps)),
        momentum=repr(float(np.float32(momentum))),  # as MXNet's own BatchNorm keeps it
        fix_gamma=int(fix_gamma),
        unbiased=int(unbiased),
        on_cpus=int(on_cpus),
        **activation.attributes(),
        fuses=int(fuses),
        inplace=int(inplace),
    )
    data = [x] if addend is None else [x, addend]
    if guarded:
        data = [F.SwapAxis(array, dim1=0, dim2=0) for array in data]
    inputs, states = [data[0], gamma, beta, *data[1:]], [running_mean, running_var]
    adds = int(addend is not None)
    if lanes == 1:
        y = custom(*inputs, *states, role=Role.WHOLE, adds=adds, name="fwd")
    else:
        y, batch, *handed_on = custom(*inputs, role=Role.MEET, adds=adds, name="fwd")
        track = functools.partial(custom, y, gamma, beta, *handed_on, batch, *states, role=Role.TRACK, name="track")
        if node >= 0:  # it predicts, too
            y = track(adds=adds)
        else:
            # Beside the way of the data: what writes the running statistics waits for whoever wrote them before, of
            # a later call perhaps where each replica has a thread.
            recording = autograd.set_recording(False)
            track(adds=0)
            autograd.set_recording(recording)
    return F.SwapAxis(y, dim1=0, dim2=0) if guarded else y

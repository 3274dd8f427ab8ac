"""The operator ``gluon_syncbn`` and the group of replicas that it belongs to."""

from __future__ import annotations

import weakref
from typing import Any, List, Optional

import numpy as np
from mxnet.context import Context

from . import _native, settings
from .exchange.base import Exchange

_native.register()


class Replicas:
    """The replicas of one layer, as the native core sees them.

    Parameters
    ----------
    name : str
        Name of the layer, for messages.
    num_devices : int, optional
        Number of replicas. By default as many as there are contexts.
    exchange : Exchange, optional
        Adds the statistics. By default what `configure` says, else shared memory.
    timeout : float, optional
        Seconds that a replica waits for the others. By default what `configure` says.
    """

    def __init__(
        self, name: str, num_devices: Optional[int], exchange: Optional[Exchange], timeout: Optional[float]
    ) -> None:
        self.name = name
        self.num_devices = num_devices
        self.exchange = exchange
        self.timeout = timeout
        self.contexts: List[Context] = []
        self.lanes = 1  # replicas per context
        self.id = _native.layer_create(name)
        self.token = _native.layer_token(self.id)
        weakref.finalize(self, _native.layer_drop, self.id)
        _by_id[self.id] = self
        if timeout is not None:
            _native.layer_timeout(self.id, timeout)
        if exchange is not None:
            _native.layer_exchange(self.id, 1)

    def set_contexts(self, contexts: List[Context]) -> None:
        """The contexts that hold the layer's parameters; a repeated one holds several replicas."""
        unique = list(dict.fromkeys(contexts))
        replicas = self.num_devices or len(contexts)
        self.contexts = unique
        self.lanes = max(1, replicas // len(unique))
        _native.layer_replicas(self.id, [str(context) for context in unique], replicas)

    def __deepcopy__(self, memo: dict) -> Replicas:
        # A copy of a net trains on its own: its replicas must not meet those of the original.
        twin = Replicas(self.name, self.num_devices, self.exchange, self.timeout)
        memo[id(self)] = twin
        if self.contexts:
            twin.set_contexts([c for c in self.contexts for _ in range(self.lanes)])
        return twin


_by_id: weakref.WeakValueDictionary[int, Replicas] = weakref.WeakValueDictionary()


def _add(layer: int, rows: np.ndarray) -> np.ndarray:
    replicas = _by_id[layer]
    exchange = replicas.exchange or settings.exchange
    assert exchange is not None, "the native core calls only where an exchange is set"
    return exchange.add(layer, replicas.contexts[: len(rows)], rows)


def sync_batch_norm(
    F: Any,
    x: Any,
    gamma: Any,
    beta: Any,
    running_mean: Any,
    running_var: Any,
    replicas: Replicas,
    *,
    node: int,
    axis: int,
    eps: float,
    momentum: float,
    fix_gamma: bool,
) -> Any:
    """Normalises ``x`` with the statistics of all replicas; ``F`` is ``mx.nd`` or ``mx.sym``.

    ``node`` numbers the layer's nodes in graphs and is -1 for an eager call. A static graph does not tell MXNet's
    engine that a node writes the running statistics, so two nodes of one layer may run in either order there.
    """
    # MXNet hands a custom operator a temporary copy of an array in oneDNN's layout and frees it while the operator
    # still runs (AllocateNDArrayCopy in src/operator/custom/custom.cc keeps a pointer, no reference). SwapAxis of an
    # axis with itself is the cheapest operator that really writes a new, plain array; on the output it does the same
    # for the gradient that comes back.
    y = F.Custom(
        F.SwapAxis(x, dim1=0, dim2=0),
        gamma,
        beta,
        running_mean,
        running_var,
        op_type="gluon_syncbn",
        layer=replicas.token,
        lanes=replicas.lanes,
        node=node,
        axis=axis,
        eps=repr(float(eps)),
        momentum=repr(float(np.float32(momentum))),  # as MXNet's own BatchNorm keeps it
        fix_gamma=int(fix_gamma),
        name="fwd",
    )
    return F.SwapAxis(y, dim1=0, dim2=0)


settings.on_exchange(lambda exchange: _native.exchange(_add, exchange is not None))

"""The operator ``gluon_syncbn`` and the group of replicas that it belongs to."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from mxnet import autograd
from mxnet.context import Context

from . import _native, cuda, settings
from .environment import at_least
from .exchange import base
from .exchange.base import Exchange, Member

_native.register()


#: The order is that of `Mode` in csrc/params.h.
MODES = ("sync", "local", "shuffle")
# Those of `Role` in csrc/call.h.
_WHOLE, _MEET, _TRACK = range(3)


class Pooling(NamedTuple):
    """Which slots share a statistic, and whose a slot is normalised with."""

    mode: str = "sync"
    virtual_devices: int = 1  # slots of a replica
    group_size: Optional[int] = None  # replicas that share a statistic in `sync`; None is all

    def problem(self, replicas: int) -> str:
        """Why this many replicas cannot train so, as an argument's error; empty where they can."""
        if self.group_size is not None and replicas % self.group_size:
            return f"group_size: {self.group_size} was given, expected a divisor of the number of devices, {replicas}"
        if self.mode == "shuffle" and replicas * self.virtual_devices < 2:
            return (
                f"virtual_devices: {self.virtual_devices} was given, expected at least 2 with mode 'shuffle' on one "
                "device, whose slots have nobody else's statistics to take"
            )
        return ""


class Replicas:
    """The replicas of one layer, as the native core sees them.

    Parameters
    ----------
    name : str
        Name of the layer, for messages.
    pooling : Pooling
        Whose statistics are used.
    num_devices : int, optional
        Number of replicas. By default as many as there are contexts.
    exchange : Exchange, optional
        Adds the statistics. By default what `configure` says, else shared memory.
    timeout : float, optional
        Seconds that a replica waits for the others. By default what `configure` says.
    """

    def __init__(
        self,
        name: str,
        pooling: Pooling,
        num_devices: Optional[int],
        exchange: Optional[Exchange],
        timeout: Optional[float],
    ) -> None:
        self.name = name
        self.pooling = pooling
        self.num_devices = num_devices
        self.exchange = exchange
        self.timeout = timeout
        self.channels = 0
        self.given: List[Context] = []
        self.contexts: List[Context] = []  # the same, each once
        self.problem = ""  # why these contexts cannot train
        mode = MODES.index(pooling.mode)
        self.id = _native.layer_create(name, mode, pooling.virtual_devices, pooling.group_size or 0)
        self.token = _native.layer_token(self.id)
        weakref.finalize(self, _native.layer_drop, self.id).atexit = False  # a daemon thread may still use it
        if timeout is not None:
            _native.layer_timeout(self.id, timeout)
        if exchange is not None:
            _native.layer_exchange(self.id, _reach(exchange))

    def set_contexts(self, contexts: List[Context], channels: int) -> None:
        """The contexts that hold the layer's parameters; a repeated one holds several replicas."""
        unique = list(dict.fromkeys(contexts))
        for context in unique:
            if context.device_type == "gpu":
                cuda.check_architecture(context.device_id)
        replicas = self._count(contexts)
        self.given, self.contexts, self.channels = list(contexts), unique, channels
        self.problem = self.pooling.problem(replicas)
        if self.lanes(contexts) > 1:
            # From 8 gradients of an array on, MXNet adds each before it begins with the operators of the next
            # (AggregateGradient in src/executor/graph_executor.cc), and so one replica's before those of the next,
            # which it waits for. It looks at its first backward; a replica has two gradients for gamma.
            at_least("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", 4 * replicas)
        member = Member(self.id, self.name, unique, replicas, channels, tuple(self.pooling))
        _initialised[self.id] = (member, self.exchange)
        _native.layer_replicas(self.id, [str(context) for context in unique], replicas)

    def _count(self, contexts: List[Context]) -> int:
        return self.num_devices or len(contexts)

    def lanes(self, contexts: List[Context]) -> int:
        """How many replicas on each of these contexts wait for each other."""
        return 1 if self.pooling.mode == "local" else max(1, self._count(contexts) // len(set(contexts)))

    def reaches_beyond(self) -> bool:
        """Whether replicas of other processes take part."""
        exchange = self.exchange or settings.exchange
        return exchange is not None and exchange.processes

    def __deepcopy__(self, memo: dict) -> Replicas:
        # A copy of a net trains on its own: its replicas must not meet those of the original.
        twin = Replicas(self.name, self.pooling, self.num_devices, self.exchange, self.timeout)
        memo[id(self)] = twin
        if self.contexts:
            twin.set_contexts(self.given, self.channels)
        return twin


# In the order of their first initialisation, which is that of the net, and for good: whether a layer that is no longer
# used has been collected yet is nothing that processes could agree on.
_initialised: Dict[int, Tuple[Member, Optional[Exchange]]] = {}


def _put_together(ticket: _native.Ticket, reduction: str, rows: np.ndarray) -> _native.Total:
    member, own = _initialised[ticket.layer]
    exchange = own or settings.exchange or base.Memory()  # `configure` may have changed it since the native core asked
    reduce: Callable[..., _native.Total] = getattr(exchange, reduction)
    return reduce(member, ticket, rows)


def _roster(exchange: Exchange) -> List[Member]:
    return [
        member
        for member, own in _initialised.values()
        if (own or settings.exchange) is exchange and member.pooling[0] != "local"  # which exchanges nothing
    ]


def _reach(exchange: Optional[Exchange]) -> int:
    return 0 if exchange is None else 2 if exchange.processes else 1


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
) -> Any:
    """Normalises ``x`` with the statistics that the replicas' pooling says; ``F`` is ``mx.nd`` or ``mx.sym``.

    ``lanes`` is the number of replicas on each context. ``node`` numbers the layer's nodes in graphs and is -1 for an
    eager call. A static graph does not tell MXNet's engine that a node writes the running statistics, so two nodes of
    one layer may run in either order there.
    """
    # MXNet hands a custom operator a temporary copy of an array in oneDNN's layout and frees it while the operator
    # still runs (AllocateNDArrayCopy in src/operator/custom/custom.cc keeps a pointer, no reference). SwapAxis of an
    # axis with itself is the cheapest operator that really writes a new, plain array; on the output it does the same
    # for the gradient that comes back. GPUs have no such layout.
    guarded = not replicas.contexts or any(context.device_type != "gpu" for context in replicas.contexts)
    custom = functools.partial(
        F.Custom,
        op_type="gluon_syncbn",
        layer=replicas.token,
        lanes=lanes,
        node=node,
        axis=axis,
        eps=repr(float(eps)),
        momentum=repr(float(np.float32(momentum))),  # as MXNet's own BatchNorm keeps it
        fix_gamma=int(fix_gamma),
        guarded=int(guarded),
    )
    x = F.SwapAxis(x, dim1=0, dim2=0) if guarded else x
    if lanes == 1:
        y = custom(x, gamma, beta, running_mean, running_var, role=_WHOLE, name="fwd")
    else:
        y, batch = custom(x, gamma, beta, role=_MEET, name="fwd")
        track = functools.partial(custom, y, gamma, beta, batch, running_mean, running_var, role=_TRACK, name="track")
        if node >= 0:  # it predicts, too
            y = track()
        else:
            # Beside the way of the data: what writes the running statistics waits for whoever wrote them before, of
            # a later call perhaps where each replica has a thread.
            recording = autograd.set_recording(False)
            track()
            autograd.set_recording(recording)
    return F.SwapAxis(y, dim1=0, dim2=0) if guarded else y


_native.exchange(_put_together)
settings.on_exchange(lambda exchange: _native.reach(_reach(exchange)))

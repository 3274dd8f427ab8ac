"""The replicas of a layer, and whose statistics they use."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, List, NamedTuple, Optional, Tuple

from mxnet.context import Context

from .. import _native
from ..exchange.base import Exchange, LayerInfo
from ..system import arguments, cuda, temporary_space
from ..system.environment import at_least
from .session import session

#: The order is that of `Mode` in csrc/pooling/pooling.h.
MODES = ("sync", "local", "shuffle")


class Pooling(NamedTuple):
    """Which slots share a statistic, and whose a slot is normalised with."""

    mode: str = "sync"
    virtual_devices: int = 1  # slots of a replica
    group_size: Optional[int] = None  # replicas that share a statistic in `sync`; None is all

    @classmethod
    def checked(
        cls, mode: Any, virtual_devices: Any, group_size: Any, axis: int, num_devices: Optional[int]
    ) -> Pooling:
        """From a layer's arguments; ValueError where one is out of range or they do not go together."""
        pooling = cls(
            arguments.one_of("mode", mode, MODES),
            arguments.devices("virtual_devices", virtual_devices),
            None if group_size is None else arguments.devices("group_size", group_size),
        )
        if pooling.virtual_devices > 1 and axis == 0:
            arguments.refuse("virtual_devices", pooling.virtual_devices, "1 with axis=0, which is not the batch")
        if pooling.group_size is not None and mode != "sync":
            arguments.refuse("group_size", pooling.group_size, f"None with mode {mode!r}")
        if num_devices is not None and pooling.problem(num_devices):
            raise ValueError(pooling.problem(num_devices))
        return pooling

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

    _of_tokens: ClassVar[weakref.WeakValueDictionary[str, Replicas]] = weakref.WeakValueDictionary()

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
        self._of_tokens[self.token] = self
        temporary_space.of_layers(_native.layers())
        weakref.finalize(self, _native.layer_drop, self.id).atexit = False  # a daemon thread may still use it
        if timeout is not None:
            _native.layer_timeout(self.id, timeout)
        if exchange is not None:
            _native.layer_exchange(self.id, exchange.handle)

    @classmethod
    def of_token(cls, token: str) -> Optional[Replicas]:
        """Those that a node of a graph names, where they are of this process and not gone."""
        return cls._of_tokens.get(token)

    def set_contexts(self, contexts: List[Context], channels: int) -> None:
        """The contexts that hold the layer's parameters; a repeated one holds several replicas."""
        unique = list(dict.fromkeys(contexts))
        for context in unique:
            if context.device_type == "gpu":
                cuda.check_architecture(context.device_id)
        replicas = self.num_devices or len(contexts)
        self.given, self.contexts, self.channels = list(contexts), unique, channels
        self.problem = self.pooling.problem(replicas)
        if self.lanes(contexts) > 1:
            # From 8 gradients of an array on, MXNet adds each before it begins with the operators of the next
            # (AggregateGradient in src/executor/graph_executor.cc), and so one replica's before those of the next,
            # which it waits for. It looks at its first backward; a replica has two gradients for gamma.
            at_least("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", 4 * replicas)
        session.register(LayerInfo(self.id, self.name, unique, replicas, channels, *self.pooling), self.exchange)
        _native.layer_place(self.id, [str(context) for context in unique], replicas)

    def settings(self) -> Tuple[Pooling, Optional[int], Optional[Exchange], Optional[float]]:
        """All but the name, as the constructor takes them."""
        return self.pooling, self.num_devices, self.exchange, self.timeout

    def count(self) -> int:
        """Replicas of this process, where the contexts are known."""
        return self.num_devices or len(self.given)

    def lanes(self, contexts: List[Context]) -> int:
        """How many replicas on each of these contexts wait for each other."""
        return 1 if self.pooling.mode == "local" else max(1, (self.num_devices or len(contexts)) // len(set(contexts)))

    def reaches_other_processes(self) -> bool:
        """Whether replicas of other processes take part."""
        return session.reaches_other_processes(self.exchange)

    def __deepcopy__(self, memo: dict) -> Replicas:
        # A copy of a net trains on its own: its replicas must not meet those of the original.
        twin = Replicas(self.name, *self.settings())
        memo[id(self)] = twin
        if self.contexts:
            twin.set_contexts(self.given, self.channels)
        return twin

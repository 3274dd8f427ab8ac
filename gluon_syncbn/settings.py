"""Describes a layer: what it computes, and which replicas share a statistic."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, TypedDict

from .activation import Activation, of_arguments
from .system import arguments

Mode = Literal["sync", "local", "shuffle"]
#: The order is that of `Mode` in csrc/pooling/pooling.h.
MODES = ("sync", "local", "shuffle")
_MOST = arguments.MOST_DEVICES - 1
#: The ranks of the replicas of each group.
Groups = Tuple[Tuple[int, ...], ...]


class Arguments(TypedDict, total=False):
    """The arguments of a layer that `convert` takes too; `SyncBatchNorm` explains them."""

    num_devices: Optional[int]
    mode: Mode
    virtual_devices: int
    group_size: Optional[int]
    groups: Optional[Sequence[Sequence[int]]]
    running_variance: Literal["biased", "unbiased"]
    kvstore: Any
    timeout: Optional[float]


@dataclass(frozen=True)
class Settings:
    """The settings of a layer, or of one of its calls."""

    # A node of a graph has these before `mode`, and so has a call in the core: see csrc/operator/op.cc. The first five
    # are those of ``nn.BatchNorm``, under the names of its operator.
    axis: int = 1
    eps: float = 1e-5
    momentum: float = 0.9
    fix_gamma: bool = False
    use_global_stats: bool = False
    slope: float = 1.0
    ceiling: float = math.inf
    unbiased: bool = False  # the variance that updates the running one
    adds: bool = False  # a second input comes before the activation
    masks: bool = False  # where the mask is 0, a position does not count in the statistics
    fuses: bool = False  # what stands behind it in a graph: see mxnet_side/fusion.py
    mode: str = "sync"
    virtual_devices: int = 1  # slots of a replica
    group_size: Optional[int] = None  # consecutive replicas that share a statistic in `sync`; None is all
    groups: Optional[Groups] = None  # the same, named by their ranks
    num_devices: Optional[int] = None
    exchange: Any = None  # None is the setting of `configure`, here and in the next line
    timeout: Optional[float] = None

    @classmethod
    def of_arguments(cls, given: Mapping[str, Any], modes: Sequence[str], adds: bool) -> Settings:
        """Checks a layer's arguments, but a KVStore. ValueError: one is out of range, or they do not fit together."""

        def optional(name: str, check: Callable[[str, Any], Any]) -> Any:
            return None if given[name] is None else check(name, given[name])

        arguments.one_of("running_variance", given["running_variance"], ("biased", "unbiased"))
        settings = cls(
            axis=arguments.whole("axis", given["axis"], -5, 4),
            momentum=arguments.number("momentum", given["momentum"], 0, 1, "a number from 0 to 1"),
            eps=arguments.number("epsilon", given["epsilon"], 0, sys.float_info.max, "a finite number of at least 0"),
            fix_gamma=not arguments.flag("scale", given["scale"]),
            use_global_stats=arguments.flag("use_global_stats", given["use_global_stats"]),
            **of_arguments(given["activation"], given["slope"])._asdict(),
            unbiased=given["running_variance"] == "unbiased",
            adds=adds,
            mode=arguments.one_of("mode", given["mode"], MODES),
            virtual_devices=arguments.devices("virtual_devices", given["virtual_devices"]),
            group_size=optional("group_size", arguments.devices),
            groups=optional("groups", _groups),
            num_devices=optional("num_devices", arguments.devices),
            timeout=optional("timeout", arguments.seconds),
        )
        if settings.mode not in modes:
            arguments.refuse("mode", settings.mode, f"{modes[0]!r}; SyncBatchNorm has the other modes")
        if settings.virtual_devices > 1 and settings.axis == 0:
            arguments.refuse("virtual_devices", settings.virtual_devices, "1 with axis=0, which is not the batch")
        for name in ("group_size", "groups"):
            if given[name] is not None and settings.mode != "sync":
                arguments.refuse(name, given[name], f"None with mode {settings.mode!r}")
        if settings.groups is not None and settings.group_size is not None:
            arguments.refuse("groups", given["groups"], f"None with group_size={settings.group_size}")
        return settings

    def batch_norm(self) -> Dict[str, Any]:
        """Returns the arguments of ``nn.BatchNorm``."""
        own = {"axis": self.axis, "momentum": self.momentum, "epsilon": self.eps}
        return {**own, "scale": not self.fix_gamma, "use_global_stats": self.use_global_stats}

    def arguments(self) -> Dict[str, Any]:
        """Returns the further arguments of a layer that has these settings, without the usual ones."""
        usual = Settings()._further()
        return {name: value for name, value in self._further().items() if value != usual.get(name)}

    def _further(self) -> Dict[str, Any]:
        """Returns what ``nn.BatchNorm`` has no argument for."""
        own = {one.name: getattr(self, one.name) for one in fields(self)[len(_OF_NODE) :]}
        own["kvstore"] = own.pop("exchange")
        running_variance = "unbiased" if self.unbiased else "biased"
        return {**self.activation.arguments(), "running_variance": running_variance, **own}

    def compared(self) -> Dict[str, Any]:
        """Returns the settings that have to be equal in all processes."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_COMPARED}

    def to_node(self) -> Dict[str, str]:
        """Returns the attributes of a node, which are numbers."""
        return {name: repr(type(getattr(Settings, name))(getattr(self, name)) + 0) for name in _OF_NODE}

    @classmethod
    def from_node(cls, attributes: Mapping[str, Any], layer: Optional[Settings] = None) -> Settings:
        """Returns what a node computes, one of MXNet's too. What a node does not say is as in the layer's settings."""
        usual = {**vars(cls()), "eps": 1e-3, "fix_gamma": True}  # of MXNet's operator
        given = {name: type(usual[name])(arguments.value_of(attributes.get(name, usual[name]))) for name in _OF_NODE}
        return replace(layer or cls(), **given)

    @property
    def activation(self) -> Activation:
        return Activation(self.slope, self.ceiling)

    @property
    def behind(self) -> str:
        """Names what stands behind the normalisation."""
        return ", ".join(text for text in ("addition" if self.adds else "", str(self.activation)) if text)

    @property
    def one_pool(self) -> bool:
        """Whether all replicas share one statistic."""
        return self.mode == "sync" and self.group_size is None and self.groups is None

    def problem(self, replicas: int) -> str:
        """Returns the error of an argument with which this many replicas cannot train; empty if they can."""
        size, named = self.group_size, sum(map(len, self.groups or ()))
        if size is not None and replicas % size:
            return f"group_size: {size} was given, expected a divisor of the number of devices, {replicas}"
        if self.groups and named != replicas:
            differing = [str(rank) for rank in range(min(named, replicas), max(named, replicas))]
            what = "no group has rank" if named < replicas else "there is no replica of rank"
            return (
                f"groups: {named} replicas were given, expected each of the {replicas} replicas in one group: "
                f"{what} {arguments.some(differing, ', ')}"
            )
        if self.mode == "shuffle" and replicas * self.virtual_devices < 2:
            return (
                f"virtual_devices: {self.virtual_devices} was given, expected at least 2 with mode 'shuffle' on one "
                "device, whose slots have nobody else's statistics to take"
            )
        return ""

    def group_of_each(self) -> List[int]:
        """Returns the group of each replica that the groups name."""
        return [group for _, group in sorted((rank, i) for i, ranks in enumerate(self.groups or ()) for rank in ranks)]


_OF_NODE = tuple(one.name for one in fields(Settings))[:11]
_NOT_COMPARED = ("masks", "fuses", "num_devices", "exchange", "timeout")


def _groups(name: str, value: Any) -> Groups:
    """Checks groups, and sorts them and their ranks, because their order means nothing. ValueError: a rank is no whole
    number, stands there twice or is left out.
    """
    expected = "a list of groups, each a list of at least one rank of a replica"
    if not _is_list(value) or not all(_is_list(ranks) for ranks in value):
        arguments.refuse(name, value, expected)
    numbers = f"ranks in each group that are whole numbers from 0 to {_MOST}"
    groups = [[arguments.whole(name, rank, 0, _MOST, numbers) for rank in ranks] for ranks in value]
    count = Counter(rank for ranks in groups for rank in ranks)
    wrong = [str(rank) for rank in range(max(count) + 1) if count[rank] != 1]
    if wrong:
        listed = arguments.some(wrong, ", ")
        arguments.refuse(name, value, f"each rank to {max(count)} once, but missing or twice: {listed}")
    return tuple(sorted(tuple(sorted(ranks)) for ranks in groups))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and len(value) > 0

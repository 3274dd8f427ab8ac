"""Describes which replicas share a statistic."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

from ..system import arguments

#: The order is that of `Mode` in csrc/pooling/pooling.h.
MODES = ("sync", "local", "shuffle")
_MOST = arguments.MOST_DEVICES - 1
#: The ranks of the replicas of each group.
Groups = Tuple[Tuple[int, ...], ...]


class Pooling(NamedTuple):
    """Holds which slots share a statistic, and which statistic normalises a slot."""

    mode: str = "sync"
    virtual_devices: int = 1  # slots of a replica
    group_size: Optional[int] = None  # consecutive replicas that share a statistic in `sync`; None is all
    groups: Optional[Groups] = None  # the same, named by their ranks

    @classmethod
    def checked(
        cls, mode: Any, virtual_devices: Any, group_size: Any, groups: Any, axis: int, num_devices: Optional[int]
    ) -> Pooling:
        """Makes a pooling from a layer's arguments. ValueError: one is out of range, or they do not fit together."""
        pooling = cls(
            arguments.one_of("mode", mode, MODES),
            arguments.devices("virtual_devices", virtual_devices),
            None if group_size is None else arguments.devices("group_size", group_size),
            None if groups is None else _checked(groups),
        )
        if pooling.virtual_devices > 1 and axis == 0:
            arguments.refuse("virtual_devices", pooling.virtual_devices, "1 with axis=0, which is not the batch")
        for name, value in (("group_size", pooling.group_size), ("groups", groups)):
            if value is not None and mode != "sync":
                arguments.refuse(name, value, f"None with mode {mode!r}")
        if groups is not None and group_size is not None:
            arguments.refuse("groups", groups, f"None with group_size={group_size}")
        # Groups name replicas of all processes, and this process may have fewer.
        if num_devices is not None and num_devices > pooling.named():
            problem = pooling.problem(num_devices)
            if problem:
                raise ValueError(problem)
        return pooling

    def named(self) -> int:
        """Returns the number of replicas that the groups name."""
        return sum(map(len, self.groups or ()))

    def problem(self, replicas: int) -> str:
        """Returns the error of an argument with which this many replicas cannot train; empty if they can."""
        size, named = self.group_size, self.named()
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


def _checked(value: Any) -> Groups:
    """Checks groups as an argument. ValueError: a rank is no whole number, stands there twice or is left out.

    Groups and ranks are sorted, because their order means nothing.
    """
    expected = "a list of groups, each a list of at least one rank of a replica"
    if not _is_list(value) or not all(_is_list(ranks) for ranks in value):
        arguments.refuse("groups", value, expected)
    numbers = f"ranks in each group that are whole numbers from 0 to {_MOST}"
    groups = [[arguments.whole("groups", rank, 0, _MOST, numbers) for rank in ranks] for ranks in value]
    named = sorted(rank for ranks in groups for rank in ranks)
    twice = sorted({str(a) for a, b in zip(named, named[1:]) if a == b}, key=int)
    if twice:
        arguments.refuse("groups", value, f"each rank once, but {arguments.some(twice, ', ')} stands there twice")
    left_out = [str(rank) for rank in sorted(set(range(named[-1])) - set(named))]
    if left_out:
        missing = arguments.some(left_out, ", ")
        arguments.refuse("groups", value, f"all ranks to {named[-1]}, but {missing} is in no group")
    return tuple(sorted(tuple(sorted(ranks)) for ranks in groups))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and len(value) > 0

"""Defines groups of replicas that share a statistic, and finds the processes that have the members of a group."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import numpy as np

from .._native import Agreed
from ..system import arguments

_MOST = arguments.MOST_DEVICES - 1
#: The ranks of the replicas of each group.
Groups = Tuple[Tuple[int, ...], ...]


def shared(key: int, channels: int, group_of: np.ndarray, replicas: Sequence[int], rank: int) -> Agreed:
    """Returns what the processes agree on about a layer with groups: who shares one with some replica of ``rank``.

    ``group_of`` has the group of each replica of the job, ``replicas`` the number of replicas of each process.
    """
    ranks_of = np.repeat(np.arange(len(replicas)), replicas)
    here = np.isin(group_of, group_of[ranks_of == rank])
    ranks = np.union1d(ranks_of[here], [rank])
    members = np.flatnonzero(here[np.isin(ranks_of, ranks)])
    groups = np.unique(group_of[here], return_inverse=True)[1]
    first = np.flatnonzero(ranks_of[here] == rank)[:1].sum()
    return Agreed(key, ranks.tolist(), channels, replicas[rank], members, groups, int(first))


def group_of_each(replicas: int, size: int, groups: Optional[Groups]) -> np.ndarray:
    """Returns the group of each replica of a job."""
    out = np.arange(replicas, dtype=np.int32) // max(size, 1)
    for number, ranks in enumerate(groups or ()):
        out[list(ranks)] = number
    return out


def named_replicas(groups: Optional[Groups]) -> int:
    """Returns the number of replicas that groups name."""
    return sum(map(len, groups or ()))


def checked(name: str, value: Any) -> Groups:
    """Checks groups as an argument. ValueError: a rank is no whole number, stands there twice or is left out.

    Groups and ranks are sorted, because their order means nothing.
    """
    expected = "a list of groups, each a list of at least one rank of a replica"
    if not _is_list(value) or not all(_is_list(ranks) for ranks in value):
        arguments.refuse(name, value, expected)
    numbers = f"ranks in each group that are whole numbers from 0 to {_MOST}"
    groups = [[arguments.whole(name, rank, 0, _MOST, numbers) for rank in ranks] for ranks in value]
    named = sorted(rank for ranks in groups for rank in ranks)
    twice = sorted({str(a) for a, b in zip(named, named[1:]) if a == b}, key=int)
    if twice:
        arguments.refuse(name, value, f"each rank once, but {arguments.some(twice, ', ')} stands there twice")
    left_out = [str(rank) for rank in sorted(set(range(named[-1])) - set(named))]
    if left_out:
        arguments.refuse(name, value, f"all ranks to {named[-1]}, but {arguments.some(left_out, ', ')} is in no group")
    return tuple(sorted(tuple(sorted(ranks)) for ranks in groups))


def problem(replicas: int, size: Optional[int], groups: Optional[Groups]) -> str:
    """Why so many replicas of a job cannot have these groups, as the error of an argument; empty if they can."""
    if size is not None and replicas % size:
        return f"group_size: {size} was given, expected a divisor of the number of devices, {replicas}"
    named = named_replicas(groups)
    if not groups or named == replicas:
        return ""
    differing = [str(rank) for rank in range(min(named, replicas), max(named, replicas))]
    what = "no group has rank" if named < replicas else "there is no replica of rank"
    return (
        f"groups: {named} replicas were given, expected each of the {replicas} replicas in one group: "
        f"{what} {arguments.some(differing, ', ')}"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and len(value) > 0

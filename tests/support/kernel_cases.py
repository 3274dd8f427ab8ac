"""A step by kernels alone, those of CPUs or of GPUs, against reference.py: the slots of one tensor share statistics."""

from typing import Callable, List, NamedTuple, Optional, Sequence

import numpy as np
from replicas import rounded

from gluon_syncbn import reference

EPSILON = 1e-3
#: Of what is rounded to the data's type.
TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6, "float64": 1e-13}


class Way(NamedTuple):
    """How slots share statistics, whether gamma counts as 1, whether results are added to what is there, the activation
    behind, whether something is added before that, and whether a mask hides some of x."""

    pooling: str
    fix_gamma: bool = False
    add: bool = False
    slope: float = 1.0
    ceiling: float = np.inf
    added: bool = False
    masked: bool = False


WAYS = {
    "pooled": [Way("sync"), Way("local", fix_gamma=True, add=True), Way("groups"), Way("shuffle")],
    "masked": [
        Way("sync", masked=True),
        Way("local", add=True, masked=True),
        Way("shuffle", slope=0.25, masked=True),
    ],
    "behind": [
        Way("shuffle", slope=0.0),
        Way("shuffle", slope=0.0, ceiling=0.5),
        Way("sync", fix_gamma=True, add=True, slope=0.25),
        Way("shuffle", add=True, slope=0.0, ceiling=0.5, added=True),
        Way("groups", slope=0.25, added=True),
        Way("shuffle", fix_gamma=True, added=True),
    ],
}


class Task(NamedTuple):
    """Arrays [samples, extent, channels, inner]; of each slot, a part of the samples, the slots of the pool that
    normalises it, of the one that it feeds, and those that this one normalises."""

    way: Way
    x: np.ndarray
    hidden: np.ndarray  # x, which may hold anything where the mask does not count
    dy: np.ndarray
    addend: Optional[np.ndarray]
    start: np.ndarray  # of dx, if it is added to
    mask: Optional[np.ndarray]
    gamma: np.ndarray
    beta: np.ndarray
    used: List[List[int]]
    fed: List[List[int]]
    users: List[List[int]]


def drawn(shape: Sequence[int], dtype: str, count: int, offset: float = 0.0) -> List[np.ndarray]:
    """So many arrays, whose channels differ."""
    random = np.random.RandomState(sum(shape))
    scale = np.arange(1, shape[2] + 1).reshape(-1, 1) % 5 + 0.5
    return [rounded(random.randn(*shape) * scale + offset, dtype) for _ in range(count)]


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    error = np.abs(got.astype("float64") - want).max(initial=0)
    assert error <= tolerance * max(np.abs(want).max(initial=0), 1.0), f"off by {error}"


def check(step: Callable[[Task], Sequence[np.ndarray]], shape: Sequence[int], dtype: str, slots: int, way: Way) -> None:
    """`step` returns y, dx, dgamma and dbeta."""
    random, channels = np.random.RandomState(5), shape[2]
    x, dy, addend, start = drawn(shape, dtype, 4)
    x = rounded(x + 3, dtype)
    gamma, beta = ((random.rand(channels) + 0.5).astype("float32"), random.randn(channels).astype("float32"))
    mask = random.rand(shape[0], shape[1], 1, shape[3]) < 0.4
    mask.flat[-1] = True
    mask, addend = mask if way.masked else None, addend if way.added else None

    def cut(array: Optional[np.ndarray]) -> Optional[List[np.ndarray]]:
        return None if array is None else np.array_split(array, slots)

    shards = cut(x)
    filled = sum(counts.any() for counts in cut(np.ones(x.shape) if mask is None else mask))
    pooling = {"mode": "local" if way.pooling == "shuffle" and filled < 2 else way.pooling}
    if pooling["mode"] == "shuffle":
        pooling["permutation"] = np.roll(np.arange(filled), 1)
    if way.pooling == "groups":
        pooling = {"groups": [range(0, slots, 2), range(1, slots, 2)]}
    settings = {"axis": 2, "epsilon": EPSILON, "scale": not way.fix_gamma, "addends": cut(addend), "masks": cut(mask)}

    def forward(slope: float = 1.0, ceiling: float = np.inf) -> reference.Forward:
        zeros, ones = np.zeros(channels), np.ones(channels)
        behind = {"slope": slope, "ceiling": ceiling}
        return reference.forward(shards, gamma, beta, zeros, ones, **settings, **pooling, **behind)

    z, edge = np.concatenate(forward().outputs), 20 * TOLERANCE[dtype]
    dy[(np.abs(z) < edge) | (np.abs(z - way.ceiling) < edge)] = 0  # rounding decides there
    state = forward(way.slope, way.ceiling)
    gradients = reference.backward(shards, cut(dy), gamma, state)

    feeds, uses = ({slot.device: getattr(slot, name) for slot in state.slots} for name in ("feeds", "uses"))
    of_all: List[List[List[int]]] = [[], [], []]
    for slot in range(slots):  # one without a pool has an empty one of its own
        for lists, pools, pool in zip(of_all, (feeds, feeds, uses), (uses.get(slot), feeds.get(slot), feeds.get(slot))):
            lists.append([slot] if pool is None else [other for other, one in pools.items() if one == pool])
    hidden = x if mask is None else np.where(mask, x, np.array(np.nan, x.dtype))
    y, dx, dgamma, dbeta = step(Task(way, x, hidden, dy, addend, start, mask, gamma, beta, *of_all))
    close(y, np.concatenate(state.outputs), 4 * TOLERANCE[dtype])
    close(dx, np.concatenate(gradients.dxs) + way.add * start.astype("float64"), 16 * TOLERANCE[dtype])
    sums = np.array([sum(gradients.dgammas), sum(gradients.dbetas)])
    close(np.array([dgamma, dbeta]), sums, 16 * TOLERANCE["float32" if dtype != "float64" else dtype])

"""What a layer computes, from its definition: batch normalisation over slots, the addition and the activation.

The forward is that of Ioffe and Szegedy, algorithm 1; every gradient comes from `tape`. Nothing here comes from
gluon_syncbn.reference: an error there is no error here.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .case import Case
from .tape import DOUBLE, Rounding, Value, gradients

SINGLE = 2**-24


class Statistic(NamedTuple):
    """Of each channel."""

    count: int
    mean: Value
    variance: Value


class Part(NamedTuple):
    """One slot of a replica. ``[C, M]``"""

    replica: int
    x: Value
    addend: Optional[Value]
    where: Optional[np.ndarray]  # which values of a channel count, [M]; None: all


class Forward(NamedTuple):
    parts: List[Part]
    gammas: List[Value]  # one leaf for each replica
    betas: List[Value]
    zs: List[Value]  # one for each part: what the activation is applied to
    ys: List[Value]
    moving: List[Optional[Tuple[Value, Value]]]  # of each replica: the mean and variance that its running ones take


class Gradients(NamedTuple):
    """One for each replica."""

    xs: List[Value]
    addends: List[Value]
    gammas: List[Value]
    betas: List[Value]


class Truth:
    """Holds what the running statistics and the accumulated gradients have to be."""

    def __init__(
        self, case: Case, gamma: np.ndarray, beta: np.ndarray, running_mean: np.ndarray, running_var: np.ndarray
    ) -> None:
        self.case, self.gamma, self.beta = case, gamma, beta
        self.parameters = "float64" if case.dtype == "float64" else "float32"
        # Elements are computed in at least single precision; sums are accumulated in double, but by MXNet's operator.
        unit = 2**-53 if case.dtype == "float64" else SINGLE
        self.rounding = Rounding(unit, unit if case.settings["use_global_stats"] else 2**-53)
        # A thread of a GPU takes the moments of its few elements as they are computed in.
        self.moments = Rounding(unit, unit) if case.emulated else DOUBLE
        self.running = dict.fromkeys(case.contexts, (Value(running_mean[:, None]), Value(running_var[:, None])))
        self.gradients: Dict[Any, Value] = {}

    # ---- forward -----------------------------------------------------------------------------------------------

    def forward(
        self, shards: Sequence[np.ndarray], addends: Any, masks: Sequence[Any], permutation: Sequence[int]
    ) -> Forward:
        case = self.case
        addends = addends or [None] * len(shards)
        parts = [
            Part(i, self._leaf(x), None if a is None else self._leaf(a), where)
            for i, (shard, addend, mask) in enumerate(zip(shards, addends, masks))
            for x, a, where in zip(
                self.cut(shard), [None] * case.slots if addend is None else self.cut(addend), self.counting(shard, mask)
            )
        ]
        gammas, betas = ([self._leaf(v[:, None]) for _ in shards] for v in (self._gamma(), self.beta))
        frozen = case.settings["use_global_stats"]
        if frozen:
            statistics: List[Optional[Statistic]] = [
                Statistic(0, *self.running[case.contexts[part.replica]]) for part in parts
            ]
            moving: List[Optional[Tuple[Value, Value]]] = [None] * len(shards)
        else:
            statistics, own = self._statistics(parts, permutation)
            moving = [
                self._moving([s for s, part in zip(own, parts) if part.replica == i and s is not None])
                for i in range(len(shards))
            ]
        zs = [
            self.sum(
                self.normalised(part.x, s, gammas[part.replica], betas[part.replica], not frozen),
                part.addend,
                case.separate,
            )
            for part, s in zip(parts, statistics)
        ]
        return Forward(parts, gammas, betas, zs, [self.activated(z, case.separate) for z in zs], moving)

    def _gamma(self) -> np.ndarray:
        return self.gamma if self.case.settings["scale"] else np.ones_like(self.gamma)

    def _leaf(self, data: np.ndarray) -> Value:
        return Value(data, rounding=self.rounding)

    def counting(self, shard: np.ndarray, mask: Optional[np.ndarray]) -> List[Optional[np.ndarray]]:
        """Of each slot of a replica, which values of a channel count. ``[M]``"""
        if mask is None:
            return [None] * self.case.slots
        with_axis = mask if mask.ndim == shard.ndim else np.expand_dims(mask, self.case.axis % shard.ndim)
        return [slot[0] for slot in self.cut(np.broadcast_to(with_axis != 0, shard.shape))]

    def counted(self, part: Part) -> Value:
        """What counts in the statistics."""
        return part.x if part.where is None else part.x.columns(part.where)

    def cut(self, shard: np.ndarray) -> List[np.ndarray]:
        """The slots of a replica, with the channels in front. ``[C, M]``"""
        axis = self.case.axis % shard.ndim
        slots = np.array_split(shard, self.case.slots, axis=0) if axis else [shard]
        return [self.flat(slot) for slot in slots]

    def flat(self, array: np.ndarray) -> np.ndarray:
        """``[C, M]``"""
        moved = np.moveaxis(array, self.case.axis, 0)
        return moved.reshape(self.case.channels, moved.size // self.case.channels)

    def joined(self, parts: Sequence[Any], shards: Sequence[np.ndarray]) -> List[Any]:
        """From one for each slot to one for each replica: arrays in the shape of its data, values as ``[C, M]``."""
        joined, slots, axis = [], self.case.slots, self.case.axis
        for i, shard in enumerate(shards):
            some = parts[i * slots : (i + 1) * slots]
            if isinstance(some[0], Value):
                data, slack = (np.concatenate([getattr(v, name) for v in some], 1) for name in ("data", "slack"))
                joined.append(Value(data, slack))
            else:
                moved = np.moveaxis(shard, axis, 0).shape
                joined.append(np.moveaxis(np.concatenate(some, 1).reshape(moved), 0, axis))
        return joined

    def _statistics(self, parts: Sequence[Part], permutation: Sequence[int]) -> Tuple[List[Any], List[Any]]:
        """Of each part, the statistic that normalises it, and the one that its replica's running statistics take."""
        if self.case.mode == "sync":
            size = self.case.pooling.get("group_size", len(self.case.contexts))
            group_of = {replica: replica // size for replica in range(len(self.case.contexts))}
            for number, members in enumerate(self.case.pooling.get("groups", [])):
                group_of.update(dict.fromkeys(members, number))
            groups: Dict[int, List[Value]] = {}
            for part in parts:
                groups.setdefault(group_of[part.replica], []).append(self.counted(part))
            pools = {group: self.statistic(xs) for group, xs in groups.items()}
            shared = [pools[group_of[part.replica]] for part in parts]
            return shared, shared
        own = [self.statistic([self.counted(part)]) for part in parts]
        if self.case.mode == "local":
            return own, own
        filled = [i for i, statistic in enumerate(own) if statistic is not None]
        normalising = list(own)
        for place, source in zip(filled, self.sources(permutation)):
            normalising[place] = own[filled[source]]
        return normalising, own

    def sources(self, permutation: Sequence[int]) -> Sequence[int]:
        """Of each slot with values, the number of the slot whose statistics normalise it."""
        return permutation

    def statistic(self, xs: Sequence[Value]) -> Optional[Statistic]:
        """Over all values of a channel; None where there are none."""
        xs = [x.at(self.moments) for x in xs if x.data.size]
        if not xs:
            return None
        count = self.count(xs)
        mean = added([x.total() for x in xs]) * (1 / np.longdouble(count))
        squares = [((x - mean) * (x - mean)).total() for x in xs]
        return Statistic(count, mean, added(squares) * (1 / np.longdouble(count)))

    def count(self, xs: Sequence[Value]) -> int:
        return sum(x.data.shape[1] for x in xs)

    def normalised(self, x: Value, statistic: Optional[Statistic], gamma: Value, beta: Value, own: bool) -> Value:
        """``own``: by the layer's operator and not by MXNet's, which rounds on the way."""
        if statistic is None:
            return Value(np.zeros(x.data.shape), rounding=x.rounding) + beta
        deviation = (statistic.variance + float(self.case.settings["epsilon"])).root()
        scaled = (x - statistic.mean) * deviation.reciprocal() * gamma
        return (scaled if own else scaled.stored(self.case.dtype)) + beta

    def sum(self, z: Value, addend: Optional[Value], separate: bool) -> Value:
        """``separate``: MXNet's own operators may do it, with arrays in between."""
        z = z.stored(self.case.dtype) if separate else z
        if addend is None:
            return z
        z = z + addend  # whose gradient is an array
        return z.stored(self.case.dtype) if separate else z.fetched(self.case.dtype)

    def activated(self, z: Value, separate: bool) -> Value:
        kind, exact = self.case.activation, self.case.dtype == "float64"
        slope = self.case.slope if exact else float(np.float32(self.case.slope))
        if kind is None:
            return z
        capped = (z.data > 6) & (kind == "relu6")
        factor = np.where(z.data > 0, np.where(capped, 0.0, 1.0), slope if kind == "leaky" else 0.0)
        # MXNet's LeakyReLU multiplies in single precision (`xelu` in src/operator/mshadow_op.h).
        single = SINGLE * slope if separate and kind == "leaky" and (self.case.fused or not exact) else 0.0
        y = z * Value(factor, single * (factor != 1)) + Value(np.where(capped, 6.0, 0.0))
        return y.looser(z.slack * (1 - factor))  # the value may lie on the other side of a kink

    def undecided(self, z: Value, times: float) -> np.ndarray:
        """Where rounding decides on which side of a kink of the activation a value is, and with it about a gradient."""
        kinks = {"relu": (0,), "leaky": (0,), "relu6": (0, 6)}.get(self.case.activation or "", ())
        reach = times * z.stored(self.case.dtype).slack
        return np.any([np.abs(z.data - kink) <= reach for kink in kinks], axis=0) | np.zeros(z.data.shape, bool)

    def _moving(self, statistics: List[Statistic]) -> Optional[Tuple[Value, Value]]:
        """The mean over a replica's slots; those of a shared statistic are the same."""
        if not statistics:
            return None
        share = 1 / np.longdouble(len(statistics))
        variances = [s.variance * self.correction(s.count) for s in statistics]
        return added([s.mean for s in statistics]) * share, added(variances) * share

    def correction(self, count: int) -> Any:
        return np.longdouble(count) / (count - 1) if self.case.unbiased and count > 1 else 1.0

    # ---- what it leaves ----------------------------------------------------------------------------------------

    def move(self, forward: Forward) -> None:
        """The running statistics. Of replicas that share a context, the first hands its own on; in `local`, all do."""
        case, moved = self.case, set()
        share = np.longdouble(np.float32(case.settings["momentum"]))
        for context, batch in zip(case.contexts, forward.moving):
            handed_on = context not in moved or case.mode == "local"
            moved.add(context)
            if batch is None or not handed_on:
                continue
            self.running[context] = tuple(
                (old.at(self.rounding) * share + new.at(self.rounding) * (1 - share)).stored(self.parameters)
                for old, new in zip(self.running[context], batch)
            )

    def average_running(self) -> None:
        """What `save_parameters` writes: MXNet's average over the contexts, in the type of the parameters."""
        unit = 2**-53 if self.parameters == "float64" else SINGLE
        copies = [[value.at(Rounding(unit, unit)) for value in pair] for pair in self.running.values()]
        means = [(added(parts) * (1 / np.longdouble(len(parts)))).stored(self.parameters) for parts in zip(*copies)]
        self.running = dict.fromkeys(self.running, (means[0], means[1]))

    def accumulated(self, req: str, before: Value, gradient: Value, dtype: str) -> Value:
        """What is in the array of a gradient, which is of this type."""
        return (before + gradient).stored(dtype) if req == "add" else gradient

    def backward(self, forward: Forward, heads: Sequence[np.ndarray]) -> Gradients:
        """``heads``: one for each part."""
        xs = [part.x for part in forward.parts]
        addends = [part.addend for part in forward.parts if part.addend is not None]
        ys = [y for y, part in zip(forward.ys, forward.parts) if part.x.data.size]
        given = [head for head in heads if head.size]
        found = gradients(ys, given, [*xs, *addends, *forward.gammas, *forward.betas])
        cuts = np.cumsum([len(xs), len(addends), len(forward.gammas)])
        of_xs, of_addends, of_gammas, of_betas = (
            found[start:end] for start, end in zip([0, *cuts], [*cuts, len(found)])
        )
        return Gradients(of_xs, of_addends, of_gammas, of_betas)

    def predicted(self, shard: np.ndarray, addend: Any, context: int) -> Value:
        x, a = (None if v is None else self._leaf(self.flat(v)) for v in (shard, addend))
        gamma, beta = (self._leaf(v[:, None]) for v in (self._gamma(), self.beta))
        z = self.normalised(x, Statistic(0, *self.running[context]), gamma, beta, own=False)
        return self.activated(self.sum(z, a, separate=True), separate=True)


def added(values: Sequence[Value]) -> Value:
    """In any order."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    sizes = sum(np.abs(value.data) for value in values)
    return result.looser((len(values) - 1) * result.rounding.sums * sizes)

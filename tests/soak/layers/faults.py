"""What may be wrong with a layer, planted into the truth: each has to be found."""

from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

import numpy as np

from .tape import Value
from .truth import Forward, Part, Statistic, Truth, added


def constant(value: Value) -> Value:
    """The same, through which no gradient flows."""
    return Value(value.data, value.slack, value.rounding)


class AllShardsAreAsLarge(Truth):
    """As the first one."""

    def count(self, xs: Sequence[Value]) -> int:
        return len(xs) * xs[0].data.shape[1]


class MeanOfVariances(Truth):
    """Of the slots, in place of the variance of all values."""

    def statistic(self, xs: Sequence[Value]) -> Optional[Statistic]:
        whole = super().statistic(xs)
        if whole is None:
            return None
        own = [super(MeanOfVariances, self).statistic([x]) for x in xs if x.data.size]
        return whole._replace(variance=added([s.variance for s in own if s]) * (1 / np.longdouble(len(own))))


class NothingThroughTheMean(Truth):
    def statistic(self, xs: Sequence[Value]) -> Optional[Statistic]:
        whole = super().statistic(xs)
        return whole and whole._replace(mean=constant(whole.mean))


class NothingThroughTheVariance(Truth):
    def statistic(self, xs: Sequence[Value]) -> Optional[Statistic]:
        whole = super().statistic(xs)
        return whole and whole._replace(variance=constant(whole.variance))


class NormalisesByTheUnbiasedVariance(Truth):
    def statistic(self, xs: Sequence[Value]) -> Optional[Statistic]:
        whole = super().statistic(xs)
        return whole and whole._replace(variance=whole.variance * (whole.count / max(whole.count - 1, 1)))


class RunningVarianceIsTheOther(Truth):
    """Unbiased where the biased one was asked for, and the other way round."""

    def correction(self, count: int) -> Any:
        return 1.0 if self.case.unbiased else count / max(count - 1, 1)


class InversePermutation(Truth):
    def sources(self, permutation: Sequence[int]) -> List[int]:
        return [int(i) for i in np.argsort(permutation)]


class NothingIsAdded(Truth):
    """To the gradients that were there."""

    def accumulated(self, req: str, before: Value, gradient: Value, dtype: str) -> Value:
        return gradient


class RunningStatisticsOfEverySlot(Truth):
    """Of the first slot of a replica in place of the mean over its slots."""

    def _moving(self, statistics: List[Statistic]) -> Optional[Tuple[Value, Value]]:
        return super()._moving(statistics[:1])


class EverybodysGamma(Truth):
    """dgamma of all replicas in place of each one's own."""

    def backward(self, forward: Forward, heads: Sequence[np.ndarray]) -> Any:
        found = super().backward(forward, heads)
        return found._replace(gammas=[added(found.gammas)] * len(found.gammas))


class EverythingCounts(Truth):
    """What a mask excludes, too."""

    def counted(self, part: Part) -> Value:
        return part.x


FAULTS: Dict[str, Type[Truth]] = {kind.__name__: kind for kind in Truth.__subclasses__()}

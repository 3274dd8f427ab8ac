"""What a layer has to compute: `gluon_syncbn.reference`, and how far rounding may take a program from that.

The bounds are those of running error analysis, in first order: an operation on elements adds a part of its result, a
sum a part of the sum of its absolute terms (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 3.3). Each
takes the largest element of its channel.
"""

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from gluon_syncbn import reference

from .case import Case

SINGLE, DOUBLE = 2**-24, 2**-53
OPERATIONS = 4  # on an element, each of which rounds


class Near(NamedTuple):
    """A value, and how far a program may be off."""

    value: np.ndarray
    slack: np.ndarray

    def stored(self, dtype: str) -> "Near":
        """As an array of this type."""
        kind = np.finfo("float32" if dtype == "bfloat16" else dtype)
        return Near(self.value, self.slack + half_ulp(dtype) * np.abs(self.value) + float(kind.smallest_subnormal) / 2)

    def plus(self, other: "Near") -> "Near":
        return Near(self.value + other.value, self.slack + other.slack)


def exact(value: np.ndarray) -> Near:
    return Near(value, np.zeros_like(value))


def half_ulp(dtype: str) -> float:
    return 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps) / 2


class Forward(NamedTuple):
    state: reference.Forward
    zs: List[Near]  # one for each replica: what the activation is applied to
    ys: List[Near]


class Gradients(NamedTuple):
    """One for each replica."""

    xs: List[Near]
    addends: List[Near]
    gammas: List[Near]
    betas: List[Near]


class Truth:
    """Holds what the running statistics and the accumulated gradients have to be."""

    def __init__(
        self, case: Case, gamma: np.ndarray, beta: np.ndarray, running_mean: np.ndarray, running_var: np.ndarray
    ) -> None:
        self.case, self.gamma, self.beta = case, gamma, beta
        self.weight = np.abs(gamma) if case.settings["scale"] else np.ones_like(gamma)
        self.parameters = "float64" if case.dtype == "float64" else "float32"
        # Elements are computed in at least single precision; sums are accumulated in double, but by MXNet's operator,
        # and a thread of a GPU takes the moments of its few elements as they are computed in.
        unit = DOUBLE if case.dtype == "float64" else SINGLE
        self.unit, self.elements = unit, OPERATIONS * unit
        self.sums = unit if case.settings["use_global_stats"] or case.emulated else DOUBLE
        running = exact(running_mean), exact(running_var)
        self.running: Dict[int, Tuple[Near, ...]] = dict.fromkeys(case.contexts, running)
        self.gradients: Dict[Any, Near] = {}

    def computed(self, context: int, shards: Sequence[np.ndarray], addends: Any, **changes: Any) -> reference.Forward:
        """With the running statistics of this context."""
        case, exactly = self.case, self.case.dtype == "float64"
        settings = {name: value for name, value in case.settings.items() if name != "center"}
        settings["momentum"] = float(np.float32(settings["momentum"]))
        if case.activation is not None:
            slope = case.slope if exactly else float(np.float32(case.slope))
            settings["slope"] = slope if case.activation == "leaky" else 0
            settings["ceiling"] = 6 if case.activation == "relu6" else np.inf
        running = [near.value for near in self.running[context]]
        return reference.forward(shards, self.gamma, self.beta, *running, addends=addends, **{**settings, **changes})

    # ---- bounds ------------------------------------------------------------------------------------------------

    def _largest(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Of each channel. ``[C]``"""
        moved = [np.moveaxis(np.abs(np.asarray(x, np.float64)), self.case.axis, -1) for x in arrays]
        return np.max([x.reshape(-1, len(self.gamma)).max(0, initial=0) for x in moved], axis=0)

    def _normalised(self, state: reference.Forward, shards: Sequence[np.ndarray]) -> np.ndarray:
        """The largest normalised value, of those that a slot has with any pool that it feeds or uses. ``[C]``"""
        largest = [np.zeros_like(self.gamma)]
        for device, samples, *pools in state.slots:
            x = np.moveaxis(np.asarray(shards[device], np.float64), self.case.axis, -1)[samples]
            found = [state.pools[k].normalised(x) for k in pools if k is not None]
            largest += [np.abs(one).reshape(-1, len(self.gamma)).max(0) for one in found]
        return np.max(largest, axis=0)

    def _drift(self, state: reference.Forward) -> np.ndarray:
        """How far sums may take a mean, in standard deviations, or a deviation, in parts of it. ``[C]``"""
        sizes = [((np.abs(pool.mean) + np.sqrt(pool.var)) * pool.r + 1) * max(pool.n, 1) for pool in state.pools]
        return self.sums * np.max(sizes, axis=0)

    def _between(self, separate: bool) -> float:
        """What rounds in MXNet's own operators, with arrays in between."""
        # Its LeakyReLU multiplies in single precision (`xelu` in src/operator/mshadow_op.h).
        single = SINGLE if self.case.activation == "leaky" and self.case.fused else 0.0
        return half_ulp(self.case.dtype) + single if separate else 0.0

    def _shaped(self, slack: np.ndarray, value: np.ndarray) -> Near:
        """With a slack for each channel."""
        extents = np.ones(value.ndim, int)
        extents[self.case.axis] = -1
        return Near(value, np.broadcast_to(slack.reshape(extents), value.shape))

    def undecided(self, z: Near, times: float) -> np.ndarray:
        """Where rounding decides on which side of a kink of the activation a value is, and with it about a gradient."""
        kinks = {"relu": (0,), "leaky": (0,), "relu6": (0, 6)}.get(self.case.activation or "", ())
        reach = times * z.stored(self.case.dtype).slack
        return np.any([np.abs(z.value - kink) <= reach for kink in kinks], axis=0) | np.zeros(z.value.shape, bool)

    # ---- steps -------------------------------------------------------------------------------------------------

    def forward(
        self, shards: Sequence[np.ndarray], addends: Any, masks: Sequence[Any], permutation: Sequence[int]
    ) -> Forward:
        """The running statistics move."""
        given = {**self.case.pooling, "masks": masks, "permutation": permutation}
        states = [self.computed(context, shards, addends, **given) for context in self.case.contexts]
        forward = self._outputs(states[0], shards, addends, self.case.separate, given)
        if not self.case.settings["use_global_stats"]:
            for i, (context, state) in enumerate(zip(self.case.contexts, states)):
                self.running[context] = self._moved(self.running[context], state, i)
        return forward

    def _outputs(
        self, state: reference.Forward, shards: Sequence[np.ndarray], addends: Any, separate: bool, given: Any
    ) -> Forward:
        """``separate``: MXNet's own operators may do a part of it."""
        case = self.case
        part = self.elements + self._drift(state) + 2 * self._between(separate)
        slack = part * (self.weight * (1 + self._normalised(state, shards)) + np.abs(self.beta))
        slack = slack + part * (0 if addends is None else self._largest(addends))
        # A value may lie on the other side of a kink.
        linear = self.computed(case.contexts[0], shards, addends, **{**given, "slope": 1, "ceiling": np.inf})
        return Forward(state, *([self._shaped(slack, y) for y in of.outputs] for of in (linear, state)))

    def predicted(self, shard: np.ndarray, addend: Any, context: int) -> Near:
        addends, given = None if addend is None else [addend], {"use_global_stats": True}
        state = self.computed(context, [shard], addends, **given)
        return self._outputs(state, [shard], addends, True, given).ys[0]

    def _moved(self, olds: Tuple[Near, ...], state: reference.Forward, replica: int) -> Tuple[Near, ...]:
        """The running statistics."""
        deviation = np.max([1 / pool.r for pool in state.pools], axis=0)
        drift, moved = self._drift(state) * deviation, []
        # An unbiased variance is at most twice the other.
        for old, news, off in zip(olds, (state.running_mean, state.running_var), (drift, 4 * drift * deviation)):
            new = news[replica]
            slack = old.slack + off + self.elements * (np.abs(old.value) + np.abs(new))
            moved.append(Near(new, slack).stored(self.parameters))
        return tuple(moved)

    def average_running(self) -> None:
        """What `save_parameters` writes: MXNet's average over the contexts, in the type of the parameters."""
        means = []
        for copies in zip(*self.running.values()):
            values, slacks = (np.array([copy[k] for copy in copies]) for k in (0, 1))
            slack = slacks.mean(0) + len(copies) * self.unit * np.abs(values).mean(0)
            means.append(Near(values.mean(0), slack).stored(self.parameters))
        self.running = dict.fromkeys(self.running, tuple(means))

    def accumulated(self, req: str, before: Near, gradient: Near, dtype: str) -> Near:
        """What is in the array of a gradient, which is of this type."""
        return before.plus(gradient).stored(dtype) if req == "add" else gradient

    def backward(self, forward: Forward, shards: Sequence[np.ndarray], heads: Sequence[np.ndarray]) -> Gradients:
        state, largest = forward.state, self._largest(heads)
        found = reference.backward(shards, heads, self.gamma, state)
        normal, count = self._normalised(state, shards), sum(x.size for x in shards) // len(self.gamma)
        # The gradient of a sum is an array.
        between = max(self._between(self.case.separate), half_ulp(self.case.dtype) if self.case.addend else 0.0)
        part = (self.elements + between + count * self.sums + self._drift(state)) * largest
        through = count / min(max(pool.n, 1) for pool in state.pools) * (1 + normal) ** 2
        of_x = self.weight * np.max([pool.r for pool in state.pools], axis=0) * part * (1 + normal + through)
        gammas, betas = (
            [Near(one, part * count * size) for one in of]
            for of, size in ((found.dgammas, 1 + normal), (found.dbetas, 1))
        )
        return Gradients(
            *([self._shaped(slack, one) for one in of] for of, slack in ((found.dxs, of_x), (found.daddends, part))),
            gammas, betas,
        )  # fmt: skip

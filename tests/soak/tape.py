"""Reverse-mode differentiation over NumPy arrays. Each value carries a bound of what rounding may do to it.

A value is a matrix ``[C, M]``, or ``[C, 1]`` where it belongs to a channel. It is held in extended precision, whose own
rounding does not count. ``slack`` bounds the error of a program that computes the value with the given rounding, by the
rules of running error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 3.3). Gradients are
values, too, and carry such a bound.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

EXACT = np.longdouble


class Rounding(NamedTuple):
    """What one operation, and each term of a sum, adds to the error, relative to its result."""

    unit: float
    sums: float


DOUBLE = Rounding(2**-53, 2**-53)
NONE = Rounding(0.0, 0.0)


class Value:
    def __init__(self, data: Any, slack: Any = 0.0, rounding: Rounding = NONE, pulls: Sequence[Tuple] = ()) -> None:
        self.data = np.asarray(data, EXACT)
        self.slack = slack if np.shape(slack) == self.data.shape else np.full(self.data.shape, slack, float)
        self.rounding = rounding
        self.pulls: Sequence[Tuple[Value, Callable[[Value], Value]]] = pulls

    @staticmethod
    def of(it: Any) -> Value:
        return it if isinstance(it, Value) else Value(it)

    def _rounded(self, data: Any, slack: Any, other: Rounding, *pulls: Tuple) -> Value:
        rounding = max(self.rounding, other)
        return Value(data, slack + rounding.unit * np.abs(data), rounding, pulls)

    # ---- operations --------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Value:
        b = Value.of(other)
        pulls = (self, lambda g: g), (b, lambda g: g)
        return self._rounded(self.data + b.data, self.slack + b.slack, b.rounding, *pulls)

    def __neg__(self) -> Value:
        return Value(-self.data, self.slack, self.rounding, [(self, lambda g: -g)])

    def __sub__(self, other: Any) -> Value:
        return self + -Value.of(other)

    def __mul__(self, other: Any) -> Value:
        b = Value.of(other)
        slack = np.abs(self.data) * b.slack + np.abs(b.data) * self.slack + self.slack * b.slack
        return self._rounded(self.data * b.data, slack, b.rounding, (self, lambda g: g * b), (b, lambda g: g * self))

    def reciprocal(self) -> Value:
        """Of what is not 0."""
        data = 1 / self.data
        result = self._rounded(data, self.slack * data**2, NONE)
        result.pulls = [(self, lambda g: -(g * result * result))]
        return result

    def root(self) -> Value:
        """Of what is above 0."""
        data = np.sqrt(self.data)
        result = self._rounded(data, self.slack / (2 * data), NONE)
        result.pulls = [(self, lambda g: g * (result * 2.0).reciprocal())]
        return result

    def total(self) -> Value:
        """``[C, 1]``"""
        terms = max(self.data.shape[1] - 1, 0)
        slack = self.slack.sum(1, keepdims=True) + terms * self.rounding.sums * np.abs(self.data).sum(1, keepdims=True)
        ones = np.ones(self.data.shape)
        return Value(self.data.sum(1, keepdims=True), slack, self.rounding, [(self, lambda g: g * ones)])

    def columns(self, where: np.ndarray) -> Value:
        """Those that ``where`` names. ``[M]``, of bool"""

        def in_the_whole(gradient: Value) -> Value:
            data, slack = (np.zeros(self.data.shape, kind) for kind in (EXACT, float))
            data[:, where], slack[:, where] = gradient.data, gradient.slack
            return Value(data, slack, gradient.rounding)

        return Value(self.data[:, where], self.slack[:, where], self.rounding, [(self, in_the_whole)])

    def at(self, rounding: Rounding) -> Value:
        """From here on it is computed with another rounding."""
        return Value(self.data, self.slack, rounding, [(self, lambda g: g)])

    def looser(self, slack: Any) -> Value:
        return Value(self.data, self.slack + np.asarray(slack, float), self.rounding, [(self, lambda g: g)])

    def stored(self, dtype: str) -> Value:
        """As an array of this type; so is what comes back."""
        return self._stored(dtype, self.slack + storing(self.data, dtype))

    def fetched(self, dtype: str) -> Value:
        """What comes back comes as an array of this type."""
        return self._stored(dtype, self.slack)

    def _stored(self, dtype: str, slack: Any) -> Value:
        return Value(self.data, slack, self.rounding, [(self, lambda g: g.stored(dtype))])


def storing(data: np.ndarray, dtype: str) -> np.ndarray:
    """How far an element of this type may be off."""
    kind = np.finfo("float32" if dtype == "bfloat16" else dtype)
    eps = 2.0**-7 if dtype == "bfloat16" else float(kind.eps)
    return eps / 2 * np.abs(data) + float(kind.smallest_subnormal) / 2


def gradients(outputs: Sequence[Value], heads: Sequence[np.ndarray], leaves: Sequence[Value]) -> List[Value]:
    """Of the sum of the products of outputs and heads."""
    order: List[Value] = []
    seen = set()

    def visit(value: Value) -> None:
        if id(value) not in seen:
            seen.add(id(value))
            for parent, _ in value.pulls:
                visit(parent)
            order.append(value)

    found: Dict[int, Value] = {}

    def add(value: Value, gradient: Value) -> None:
        if not value.data.ndim:
            return  # a constant
        if gradient.data.shape != value.data.shape:
            gradient = gradient.total()  # the value was repeated
        found[id(value)] = found[id(value)] + gradient if id(value) in found else gradient

    for output, head in zip(outputs, heads):
        visit(output)
        add(output, Value(head, rounding=output.rounding))
    for value in reversed(order):
        if id(value) in found:
            for parent, pull in value.pulls:
                add(parent, pull(found[id(value)]))
    return [found.get(id(leaf), Value(np.zeros(leaf.data.shape))) for leaf in leaves]

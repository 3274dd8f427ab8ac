"""What stands behind a batch normalisation: nothing, an addition, ReLU or its leaky kind; and layers of these without
synchronisation, into which `revert` makes the synchronised ones.
"""

from __future__ import annotations

from typing import Any, Optional

from mxnet.gluon import nn

from . import arguments

#: The slope of what is not above 0 that leaves everything as it is.
IDENTITY = 1.0


def slope_of(activation: Any, slope: Any) -> float:
    """One number for both arguments of a layer: y = z where z > 0, else slope * z."""
    slope = arguments.number("slope", slope, 0, 1, "a number above 0 and below 1")
    if not 0 < slope < 1:
        arguments.refuse("slope", slope, "a number above 0 and below 1; activation=None and 'relu' are 1 and 0")
    if activation is None:
        return IDENTITY
    return {"relu": 0.0, "leaky": slope}[arguments.one_of("activation", activation, ("relu", "leaky"))]


def name_of(slope: float) -> str:
    return {IDENTITY: "", 0.0: "ReLU"}.get(slope, f"LeakyReLU({slope:g})")


def rectified(F: Any, z: Any, slope: float, addend: Optional[Any] = None) -> Any:
    """By MXNet's own operators."""
    if addend is not None:
        z = z + addend
    if slope == IDENTITY:
        return z
    return F.LeakyReLU(z, act_type="leaky", slope=slope) if slope else F.Activation(z, act_type="relu")


class BatchNormActivation(nn.BatchNorm):
    """``nn.BatchNorm``, and the activation behind it."""

    _slope = IDENTITY

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any) -> Any:
        return rectified(F, super().hybrid_forward(F, x, gamma, beta, running_mean, running_var), self._slope)


class BatchNormAdd(nn.BatchNorm):
    """``nn.BatchNorm``, and what is added, and the activation behind both."""

    _slope = IDENTITY

    def hybrid_forward(
        self, F: Any, x: Any, addend: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any
    ) -> Any:
        return rectified(F, super().hybrid_forward(F, x, gamma, beta, running_mean, running_var), self._slope, addend)

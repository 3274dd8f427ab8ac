"""Defines the activations and additions behind batch normalisation.

The layers here compute these without synchronisation. `revert` turns synchronised layers into them.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple, Optional

import numpy as np
from mxnet.gluon import nn

from .system import arguments, kinds


class Activation(NamedTuple):
    """A rectifier: y = min(z, ceiling) where z > 0, else slope * z."""

    slope: float = 1.0
    ceiling: float = math.inf

    def __str__(self) -> str:
        if self.slope:
            return f"LeakyReLU({self.slope:g})" if self != NONE else ""
        return f"ReLU{self.ceiling:g}" if math.isfinite(self.ceiling) else "ReLU"

    def arguments(self) -> Dict[str, Any]:
        """Returns the arguments of a layer."""
        name = next((name for name, one in _NAMED.items() if one == self), "leaky")
        return {"activation": name, "slope": self.slope} if name == "leaky" else {"activation": name}

    def apply(self, F: Any, z: Any, dtype: Any = np.float32) -> Any:
        """Applies the activation by MXNet's own operators. ``dtype`` is the type of the layer's parameters."""
        if self == NONE:
            return z
        if self.slope and np.dtype(dtype) == np.float64:  # LeakyReLU multiplies in float32 (xelu in mshadow_op.h)
            return F.maximum(self.slope * z, z)
        if self.slope:
            return F.LeakyReLU(z, act_type="leaky", slope=self.slope)
        return F.clip(z, 0, self.ceiling) if math.isfinite(self.ceiling) else F.Activation(z, act_type="relu")


NONE = Activation()
RELU = Activation(0.0)
RELU6 = Activation(0.0, 6.0)
_NAMED: Dict[Optional[str], Activation] = {None: NONE, "relu": RELU, "relu6": RELU6}
#: The least and the largest slope of a leaky ReLU. Kernels for float32 and float16 tell each from 0 and from 1.
SLOPES = float(np.finfo(np.float32).tiny), 1 - 2.0**-24


def of_arguments(activation: Any, slope: Any) -> Activation:
    """Returns the activation that a layer's arguments describe."""
    expected = "a number above 0 and below 1, in float32 too; activation=None and 'relu' are 1 and 0"
    slope = arguments.number("slope", slope, *SLOPES, expected)
    if activation is not None:
        arguments.one_of("activation", activation, ("relu", "relu6", "leaky"))
    return _NAMED.get(activation, Activation(slope))


class BatchNormActivation(nn.BatchNorm):
    """``nn.BatchNorm`` and an activation."""

    _activation = NONE

    def hybrid_forward(self, F: Any, x: Any, addend: Optional[Any] = None, **parameters: Any) -> Any:
        y = super().hybrid_forward(F, x, **parameters)
        z = kinds.classic(y)
        if addend is not None:
            # In graphs, `+` is elemwise_add, whose two gradients may share the memory of its one input (_backward_add
            # in src/operator/tensor/elemwise_binary_op_basic.cc). The gradients may be wrong where one is added to an
            # array, or where one is not requested. broadcast_add shares no memory.
            z = F.broadcast_add(z, kinds.classic(addend))
        return kinds.like(self._activation.apply(F, z, self.gamma.dtype), y)


class BatchNormAdd(BatchNormActivation):
    """``nn.BatchNorm``, an addition and an activation."""

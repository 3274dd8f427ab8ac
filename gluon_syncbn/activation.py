"""Defines what a layer computes, and the activations and additions behind batch normalisation.

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


class Computation(NamedTuple):
    """What a layer or one of its calls computes. The first five are those of ``nn.BatchNorm``. For a layer, its
    ``_kwargs`` have them, because anybody may change these.
    """

    axis: int = 1
    eps: float = 1e-5
    momentum: float = 0.9
    fix_gamma: bool = False
    use_global_stats: bool = False
    activation: Activation = NONE
    unbiased: bool = False  # the variance that updates the running one
    adds: bool = False  # a second input comes before the activation
    masks: bool = False  # where the mask is 0, a position does not count in the statistics
    fuses: bool = False  # what stands behind it in a graph: see mxnet_side/fusion.py

    def __str__(self) -> str:
        return ", ".join(text for text in ("addition" if self.adds else "", str(self.activation)) if text)

    def arguments(self) -> Dict[str, Any]:
        """Returns the arguments of a layer that ``nn.BatchNorm`` does not have."""
        return {**self.activation.arguments(), "running_variance": "unbiased" if self.unbiased else "biased"}

    def attributes(self) -> Dict[str, str]:
        """Returns the attributes of a node. An activation has a name of csrc/activation.h."""
        given = {**self._asdict(), **self.activation._asdict()}
        del given["activation"]
        given.update(eps=float(self.eps), momentum=float(np.float32(self.momentum)))  # as MXNet's BatchNorm keeps it
        texts = {name: repr(value if isinstance(value, float) else int(value)) for name, value in given.items()}
        return {**texts, "activation": "identity" if self.activation == NONE else "rectifier"}

    @classmethod
    def of_attributes(cls, attributes: Dict[str, str]) -> Computation:
        numbers = int(attributes["axis"]), float(attributes["eps"]), float(attributes["momentum"])
        flags = {name: attributes[name] == "1" for name, usual in cls._field_defaults.items() if usual is False}
        return cls(*numbers, activation=Activation(float(attributes["slope"]), float(attributes["ceiling"])), **flags)


#: What ``nn.BatchNorm`` computes.
PLAIN = Computation()


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

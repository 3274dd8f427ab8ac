"""The net of a case, in Gluon."""

from typing import Any, Type

from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd
from gluon_syncbn.activation import Activation, of_arguments

from .case import Case


class Sum(nn.HybridBlock):
    """Two branches."""

    def __init__(self, left: nn.HybridBlock, right: nn.HybridBlock) -> None:
        super().__init__()
        self.left, self.right = left, right

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self.left(x) + self.right(x)


class Residual(nn.HybridBlock):
    """The end of a residual block. Where the layer does not, the block adds, and applies the activation."""

    def __init__(self, linear: nn.HybridBlock, norm: nn.BatchNorm, activation: Activation) -> None:
        super().__init__()
        self.linear, self.norm = linear, norm
        self.activation, self._adds = activation, not isinstance(norm, SyncBatchNormAdd)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        z = self.linear(x)
        return self.activation.apply(F, self.norm(z) + x) if self._adds else self.norm(z, x)


def convert(net: nn.HybridBlock, case: Case) -> None:
    """The plain layers of the net."""
    gluon_syncbn.convert(net, fuse=case.fused, **case.pooling, kvstore=case.kvstore)


def build(case: Case) -> nn.HybridBlock:
    given = 0 if case.deferred else case.channels

    def norm(kind: Type[SyncBatchNorm] = SyncBatchNorm) -> nn.HybridBlock:
        return kind(in_channels=given, **case.settings, **case.pooling, kvstore=case.kvstore)

    def residual() -> nn.HybridBlock:
        activation = of_arguments(case.settings["activation"], 0.01)
        if not case.fused:
            return Residual(linear(), norm(SyncBatchNormAdd), activation)
        plain = {key: value for key, value in case.settings.items() if key != "activation"}
        block = Residual(linear(), nn.BatchNorm(in_channels=given, **plain), activation)
        convert(block, case)
        return block

    def linear() -> nn.HybridBlock:
        if case.axis == 1:
            return nn.Conv2D(case.channels, 3, padding=1, use_bias=False, in_channels=given)
        return nn.Dense(case.channels, flatten=False, use_bias=False, in_units=given)

    def tanh() -> nn.HybridBlock:
        return nn.Activation("tanh")

    if case.net == "layer":
        return norm()
    if case.net == "chain":
        # Nothing is dropped, but MXNet takes a random state for it.
        dropout = [nn.Dropout(1e-9)] if case.dropout else []
        return _chain(linear(), norm(), tanh(), *dropout, linear(), norm(), tanh(), linear())
    if case.net == "residual":
        return _chain(linear(), tanh(), residual(), tanh(), linear())
    if case.net == "branches":
        return _chain(linear(), Sum(_chain(norm(), tanh()), _chain(linear(), norm(), tanh())), linear(), norm())
    layer = norm()
    if case.net == "twice":
        return _chain(linear(), layer, tanh(), linear(), layer)
    return _chain(linear(), Sum(_chain(layer, tanh()), _chain(tanh(), layer)))  # in branches that nothing puts in order


def _chain(*blocks: nn.HybridBlock) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*blocks)
    return net

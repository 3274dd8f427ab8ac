"""The net of a case, in Gluon."""

from typing import Any

from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

from .case import Case


class Sum(nn.HybridBlock):
    """Two branches."""

    def __init__(self, left: nn.HybridBlock, right: nn.HybridBlock) -> None:
        super().__init__()
        self.left, self.right = left, right

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self.left(x) + self.right(x)


def build(case: Case) -> nn.HybridBlock:
    given = 0 if case.deferred else case.channels

    def norm() -> nn.HybridBlock:
        devices = len(case.places) if case.lanes > 1 and not case.repeated else None
        settings = {**case.settings, **case.pooling, "kvstore": case.kvstore, "num_devices": devices}
        return SyncBatchNorm(in_channels=given, **settings)

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

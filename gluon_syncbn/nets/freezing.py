"""Freezes layers of batch normalisation."""

from __future__ import annotations

from typing import Optional, TypeVar

from mxnet.gluon import Block

from ..system import arguments
from .selection import selected

NetT = TypeVar("NetT", bound=Block)


def freeze(net: NetT, select: Optional[str] = None, active: bool = True) -> NetT:
    """Makes BatchNorm layers normalise with their running statistics, in training too, without updates.

    It sets ``use_global_stats``, and ``grad_req`` of gamma and beta to ``'null'``, of plain and synchronised layers.
    Recipes for detection and the last phase of DeepLabV3 do so. Frozen layers wait for no replica. Layers are found
    where `convert` finds them, in a plain list too.

    ::

        import gluon_syncbn
        from mxnet import gluon

        net = gluon_syncbn.convert(gluon.model_zoo.vision.resnet18_v1(classes=10))
        gluon_syncbn.freeze(net, select=".*stage[12]")  # active=False thaws them

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, changed in place.
    select : str, optional
        As in `convert`.
    active : bool
        False lets the layers normalise with their batch, and gives gamma and beta ``grad_req='write'``, whatever had
        frozen them.

    Returns
    -------
    gluon.Block
        ``net``.

    Raises
    ------
    ValueError
        If an argument is not as described above.

    Warns
    -----
    UserWarning
        Once, with the names of selected nodes in recorded graphs that stay as they are, and the reasons. Also if
        ``select`` matches nothing.
    """
    arguments.block("net", net)
    active = arguments.flag("active", active)
    with selected("freeze", net, select) as (chosen, _):
        for layer in chosen:
            layer._kwargs["use_global_stats"] = active
            layer.gamma.grad_req = layer.beta.grad_req = "null" if active else "write"
    return net

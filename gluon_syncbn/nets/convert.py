"""Converts the BatchNorm layers of a network to synchronised ones, and back.

The layers are changed *in place*, because a model may hold a layer in children, attributes or lists, or register a
block twice: the object stays, its class and its settings change.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Type, TypeVar

from mxnet.gluon import Block
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.nn import BatchNorm  # by name, because a script may put ours into its place in `nn`

from ..activation import NONE, RELU, Activation, BatchNormActivation, BatchNormAdd
from ..layer import SyncBatchNorm, SyncBatchNormAdd
from ..mxnet_side import blocks
from ..mxnet_side.export import unshared
from ..settings import Arguments, Settings
from ..system import arguments
from ..system.classes import derived
from .selection import selected

if TYPE_CHECKING:
    from typing_extensions import Unpack

NetT = TypeVar("NetT", bound=Block)


def convert(
    net: NetT,
    norm_layer: Type[SyncBatchNorm] = SyncBatchNorm,
    select: Optional[str] = None,
    fuse: bool = False,
    **kwargs: Unpack[Arguments],
) -> NetT:
    """Makes the BatchNorm layers of a network synchronised layers.

    It takes ``nn.BatchNorm``, ``nn.BatchNormReLU``, GluonCV's ``BatchNormCudnnOff``, subclasses of the three without a
    forward of their own, which keep what they define, and contrib's ``SyncBatchNorm``. It also takes the nodes of these
    in the graph of a ``SymbolBlock``, whose class changes then.

    Layers are found among the children of blocks, in their attributes, and in lists, tuples, sets and
    dictionaries there. So those of a net that a plain list hides, such as a teacher, are converted too, unless
    ``select`` leaves them out.

    ::

        import gluon_syncbn
        from mxnet import gluon

        net = gluon.model_zoo.vision.resnet18_v1(classes=10)
        gluon_syncbn.convert(net, select=".*stage", fuse=True)  # the layers of the stages alone, with their ReLUs

    Parameters stay the same objects, also those whose initialisation is pending. Each layer keeps its settings, hooks
    and hybridize flags. Recorded graphs are dropped and rebuilt at the next call. Other normalisation layers stay as
    they are, and so do synchronised layers.

    Parameters
    ----------
    net : gluon.Block
        A network, a part of one or a single BatchNorm, changed in place. Hybridized blocks *around* it drop their
        graphs, too.
    norm_layer : type
        `SyncBatchNorm` or a subclass of it, such as `ShuffleBatchNorm`.
    select : str, optional
        A regular expression that selects layers as ``net.collect_params(select)`` does. It must match the name of the
        layer, or of one of its parameters, from the beginning. By default all layers.
    fuse : bool
        Whether the selected layers that are synchronised, now or before this call, fuse the activation after them.
        At the end of a residual block, they also fuse the addition before that activation. Activations are ReLU,
        ReLU6, and leaky ReLU with a slope above 0 and below 1. This works in the graphs of all hybridized blocks.
        `summary` shows where, once the graphs are recorded. Files of ``net.export`` do not change.
    **kwargs
        Further arguments of each new layer: ``num_devices``, ``mode``, ``virtual_devices``, ``group_size``, ``groups``,
        ``running_variance``, ``kvstore``, ``timeout``.

    Returns
    -------
    gluon.Block
        ``net``.

    Raises
    ------
    ValueError
        If an argument is not as described above. Then nothing has been changed.

    Warns
    -----
    UserWarning
        Once, with the names of selected layers that stay, and the reasons: a forward of their own, another mode or
        group than ``kwargs`` asks for, a gamma that is not a parameter, or a mean that is used elsewhere in the graph.
        Also if nothing is selected.
    """
    arguments.block("net", net)
    fuse = arguments.flag("fuse", fuse)
    if not (isinstance(norm_layer, type) and issubclass(norm_layer, SyncBatchNorm)):
        arguments.refuse("norm_layer", norm_layer, "SyncBatchNorm or a subclass of it")
    if SyncBatchNormAdd in norm_layer.__mro__:
        arguments.refuse("norm_layer", norm_layer, "a layer of one input; fuse=True finds additions")
    with selected("convert", net, select) as (chosen, stay):
        wanted = _check_kwargs(norm_layer, kwargs)
        stay.extend((one, _reason_to_stay(one, wanted, kwargs)) for one in chosen)
        plain = [one for one, why in stay if not why and not isinstance(one, SyncBatchNorm)]
        successors = [_successor(block, norm_layer, kwargs) for block in plain]
        classes = [_class_for(block, type(new)) for block, new in zip(plain, successors)]
        for block, new, cls in zip(plain, successors, classes):
            # It gets a class, and the settings of another layer. All else stays.
            origin = None if type(block) is ContribSyncBatchNorm else (type(block), block._kwargs)
            block.__class__, given = cls, _taken_from(new)
            vars(block).update({**given, **vars(block), "_kwargs": given["_kwargs"], "_origin": origin})
            block._adopt_parameters()
        if fuse:
            for block in chosen:
                if isinstance(block, SyncBatchNorm):
                    settings = block._replicas.settings
                    fuses = not settings.behind  # that is not the layer's own
                    block._replicas.settings = replace(settings, fuses=fuses)
    return net


def _reason_to_stay(layer: BatchNorm, wanted: Settings, kwargs: Mapping[str, Any]) -> str:
    """Says in what a layer differs from one that was asked for, or that can be converted; empty if in nothing."""
    if not isinstance(layer, SyncBatchNorm):
        return blocks.difference(layer)
    for name in ("mode", "virtual_devices", "group_size", "groups"):
        value, other = getattr(layer._replicas.settings, name), getattr(wanted, name)
        if value != other and (name in kwargs or other == "shuffle"):  # of `ShuffleBatchNorm`
            return f"it has {name}={value!r} already; call revert on it before"
    return ""


def revert(net: NetT) -> NetT:
    """Makes every `SyncBatchNorm` of a network plain again, subclasses included.

    A layer gets the class that it had before `convert`. A layer that was never converted, or was contrib's, becomes
    ``nn.BatchNorm``. The parameters stay the same objects, and layers keep all settings that ``nn.BatchNorm`` knows.

    ::

        import gluon_syncbn
        from mxnet import gluon

        net = gluon_syncbn.convert(gluon.model_zoo.vision.resnet18_v1(classes=10))
        gluon_syncbn.revert(net)  # as it was

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, changed in place.

    Returns
    -------
    gluon.Block
        ``net``.

    Raises
    ------
    ValueError
        If ``net`` is not a Gluon block.

    Warns
    -----
    UserWarning
        Once, with the names of the nodes in recorded graphs that stay synchronised, and the reasons.
    """
    arguments.block("net", net)
    with selected("revert", net, None) as (layers, _):
        for block in layers:
            if isinstance(block, SyncBatchNorm):
                _make_plain(block)
    return net


def _check_kwargs(norm_layer: Type[SyncBatchNorm], kwargs: Mapping[str, Any]) -> Settings:
    """Refuses bad arguments, and returns what they mean."""
    accepted = list(Arguments.__annotations__)
    for name, value in kwargs.items():
        if name in inspect.signature(SyncBatchNorm).parameters and name not in accepted:
            raise ValueError(f"{name}: {value!r} was given, but each layer keeps its own; expected one of {accepted}")
    try:
        layer = norm_layer(in_channels=1, **unshared("check_"), **kwargs)
        return _taken_from(layer)["_replicas"].settings
    except TypeError as error:
        raise ValueError(f"kwargs: {kwargs!r} was given, expected some of {accepted} ({error})") from error


def _successor(block: BatchNorm, norm_layer: Type[SyncBatchNorm], kwargs: Mapping[str, Any]) -> SyncBatchNorm:
    """Returns a synchronised layer with the settings of a plain one, and parameters of its own."""
    activation: Activation = getattr(block, "_activation", RELU if block.fuse_relu else NONE)
    own = dict(activation._asdict(), adds=isinstance(block, BatchNormAdd))
    settings = replace(Settings.from_node(block._kwargs), **own)
    # A user's own class may lack the arguments that other layers do not need.
    kwargs = {**({"activation": None} if settings.adds else {}), **settings.arguments(), **kwargs}
    if settings.adds:
        norm_layer = (
            derived(norm_layer, SyncBatchNormAdd, norm_layer) if norm_layer is not SyncBatchNorm else SyncBatchNormAdd
        )
    return norm_layer(
        center=block.beta._differentiable,
        in_channels=int(vars(block).get("in_channels", 0)),
        **unshared(""),
        **settings.batch_norm(),
        **kwargs,
    )


def _class_for(block: BatchNorm, norm_layer: Type[SyncBatchNorm]) -> Type[SyncBatchNorm]:
    """Returns the synchronised class of a layer, with what a subclass of BatchNorm defines beside its forward."""
    cls = type(block)
    return norm_layer if blocks.has_nothing_of_its_own(cls) else derived(cls, _Computes, cls, norm_layer)


class _Computes:
    """Comes before a subclass of the program's. The forward of GluonCV's ``BatchNormCudnnOff`` calls MXNet's operator,
    and a program's ``__setstate__`` does not know that a copy needs replicas.
    """

    def hybrid_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).__bases__[-1].hybrid_forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    def __setstate__(self: Any, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if hasattr(self._own_class, "__setstate__"):
            self._adopt_parameters(getattr(self._replicas, "settings", self._replicas))


def _taken_from(layer: BatchNorm) -> Dict[str, Any]:
    """Returns the attributes of a layer, and leaves it none. A layer is in a cycle: until it is collected, its replicas
    would count as those of a layer that is still to come.
    """
    attributes = dict(vars(layer))
    vars(layer).clear()
    return attributes


def _make_plain(block: SyncBatchNorm) -> None:
    """Gives a layer its former class, or MXNet's."""
    block._release_parameters()
    activation = block._activation
    alike = BatchNorm if activation == NONE else BatchNormActivation
    cls, settings = block._origin or (BatchNormAdd if isinstance(block, SyncBatchNormAdd) else alike, {})
    for name in ("_origin", "_replicas"):  # which only a synchronised layer has
        delattr(block, name)
    block.__class__ = cls
    block._kwargs = {**settings, **block._kwargs}
    if issubclass(cls, BatchNormActivation):
        block._activation = activation

"""Exchange the BatchNorm layers of a finished network for synchronised ones, and back.

The layers are changed *in place*: the block object stays, its class and its settings change. So every
reference to it keeps meaning the same layer, wherever a model holds one (children, attributes, lists, a block
registered twice), and parameters, names, their order, hooks and hybridize settings are never touched.
"""

import inspect
import json
import warnings
from functools import lru_cache
from typing import Any, Dict, FrozenSet, Iterator, Optional, Set, Tuple, Type, TypeVar

from mxnet.gluon import Block, HybridBlock, ParameterDict, SymbolBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.nn.basic_layers import _BatchNorm

from . import arguments
from .layer import SyncBatchNorm

__all__ = ["convert", "revert"]

NetT = TypeVar("NetT", bound=Block)

# What each layer brings along itself, and what therefore is not an argument of `convert`.
_KEPT = (
    "axis",
    "momentum",
    "epsilon",
    "center",
    "scale",
    "use_global_stats",
    "beta_initializer",
    "gamma_initializer",
    "running_mean_initializer",
    "running_variance_initializer",
    "in_channels",
    "prefix",
    "params",
)
# Set by BatchNorm's constructor from its arguments, or belonging to a graph recorded with the old operator.
_RENEWED = ("_kwargs", "fuse_relu", "_cached_graph", "_cached_op", "_cached_op_args")


def convert(net: NetT, norm_layer: Type[SyncBatchNorm] = SyncBatchNorm, **kwargs: Any) -> NetT:
    """Makes every ``nn.BatchNorm`` (and contrib ``SyncBatchNorm``) of a network a synchronised layer.

    Parameters stay the same objects: values, contexts, grad_req, lr_mult, wd_mult, initialisers and pending
    initialisation, names and order. Each layer keeps its axis, momentum, epsilon, scale, center, the present
    ``use_global_stats``, its hooks and its hybridize settings. Recorded graphs are dropped and rebuilt at the
    next call, with the same flags. Subclasses of BatchNorm and other normalisation layers are left alone, and
    so are layers that are synchronised already.

    Parameters
    ----------
    net : gluon.Block
        A network or a single BatchNorm, changed in place. Give the outermost block: a graph that a hybridized
        block *around* it has recorded is out of reach and keeps the old layers.
    norm_layer : type
        `SyncBatchNorm` or a subclass of it, such as `ShuffleBatchNorm`.
    **kwargs
        Further arguments of each new layer: ``num_devices``, ``mode``, ``virtual_devices``, ``group_size``,
        ``kvstore``, ``timeout``.

    Returns
    -------
    gluon.Block
        ``net``, the same object.

    Raises
    ------
    ValueError
        Where an argument is not what is said above; nothing has been changed then.

    Warns
    -----
    UserWarning
        Where the network holds a ``SymbolBlock`` with BatchNorm operators: recorded graphs cannot be changed. Where it
        holds subclasses of BatchNorm, which stay: the warning names them.
    """
    _check_net(net)
    if not (isinstance(norm_layer, type) and issubclass(norm_layer, SyncBatchNorm)):
        arguments.refuse("norm_layer", norm_layer, "SyncBatchNorm or a subclass of it")
    plain = (nn.BatchNorm, ContribSyncBatchNorm)
    _check_kwargs(norm_layer, kwargs, {1, *(_axis(block._kwargs) for block in _blocks(net) if type(block) in plain)})

    left = []
    for block in _blocks(net):
        if type(block) in plain:
            _become(block, norm_layer, kwargs)
            block._adopt_parameters()
        elif isinstance(block, SymbolBlock):
            _warn_of_recorded(block, ("BatchNorm", "_contrib_SyncBatchNorm"), "convert")
        elif isinstance(block, _BatchNorm) and not isinstance(block, SyncBatchNorm):
            left.append(f"{block.name} ({type(block).__name__})")
    _forget_graphs(net)
    if left:
        some = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        warnings.warn(
            f"convert left {len(left)} normalisation layers as they are, not synchronised: {some}. They are subclasses "
            "of BatchNorm, which may do something else",
            stacklevel=2,
        )
    return net


def revert(net: NetT) -> NetT:
    """Makes every `SyncBatchNorm` of a network, subclasses included, a plain ``nn.BatchNorm`` again.

    The parameters stay the same objects and all settings that ``nn.BatchNorm`` knows are kept, so that
    ``net.export`` writes plain ``BatchNorm`` operators after the next forward.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, changed in place.

    Returns
    -------
    gluon.Block
        ``net``, the same object.

    Raises
    ------
    ValueError
        Where ``net`` is not a Gluon block.

    Warns
    -----
    UserWarning
        Where the network holds a ``SymbolBlock`` that recorded the synchronised operator.
    """
    _check_net(net)
    for block in _blocks(net):
        if isinstance(block, SyncBatchNorm):
            block._release_parameters()
            _become(block, nn.BatchNorm, {})
        elif isinstance(block, SymbolBlock):
            _warn_of_recorded(block, ("gluon_syncbn",), "revert")
    _forget_graphs(net)
    return net


def _check_net(net: Any) -> None:
    if not isinstance(net, Block):
        arguments.refuse("net", net, "a gluon.Block")


def _check_kwargs(norm_layer: Type[SyncBatchNorm], kwargs: Dict[str, Any], axes: Set[int]) -> None:
    """Refuse arguments before the first layer changes: half a converted network helps nobody."""
    accepted = [
        name
        for name, parameter in {**_parameters(SyncBatchNorm), **_parameters(norm_layer)}.items()
        if name not in _KEPT and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for name, value in kwargs.items():
        if name in _KEPT:
            raise ValueError(f"{name}: {value!r} was given, but each layer keeps its own; expected one of {accepted}")
    try:
        for axis in axes:
            norm_layer(axis=axis, in_channels=1, prefix="check_", params=ParameterDict(), **kwargs)
    except TypeError as error:
        raise ValueError(f"kwargs: {kwargs!r} was given, expected some of {accepted} ({error})") from error


def _parameters(norm_layer: Type[SyncBatchNorm]) -> Dict[str, inspect.Parameter]:
    return dict(inspect.signature(norm_layer).parameters)


def _axis(settings: Dict[str, Any]) -> int:
    # A plain Python number: BatchNorm also takes NumPy's. Contrib's layer has no axis: it is always 1.
    return int(settings.get("axis", 1))


def _blocks(net: Block, seen: Optional[Set[int]] = None) -> Iterator[Block]:
    """Every registered block once, `net` first."""
    seen = set() if seen is None else seen
    if id(net) in seen:
        return
    seen.add(id(net))
    yield net
    for child in list(net._children.values()):
        yield from _blocks(child, seen)


def _become(block: nn.BatchNorm, cls: Type[nn.BatchNorm], kwargs: Dict[str, Any]) -> None:
    """Run `cls`'s constructor on the existing object, then put back everything that was not its to set."""
    before = dict(vars(block))
    old_cls, settings = type(block), before["_kwargs"]
    private = _private_names() if issubclass(old_cls, SyncBatchNorm) else frozenset()
    try:
        vars(block).clear()
        block.__class__ = cls
        cls.__init__(
            block,
            axis=_axis(settings),
            momentum=float(settings["momentum"]),
            epsilon=float(settings["eps"]),
            center=before["beta"]._differentiable,
            scale=not settings["fix_gamma"],
            use_global_stats=bool(settings["use_global_stats"]),
            in_channels=int(before.get("in_channels", 0)),
            prefix="",
            params=ParameterDict(),  # nothing to share: the constructor's own parameters are thrown away
            **kwargs,
        )
    except BaseException:
        vars(block).clear()
        block.__class__ = old_cls
        vars(block).update(before)
        raise
    vars(block).update({k: v for k, v in before.items() if k not in _RENEWED and k not in private})


@lru_cache(maxsize=None)
def _private_names() -> FrozenSet[str]:
    """The attributes that a synchronised layer has beyond a plain one; they end with it."""
    layer, plain = (c(prefix="", params=ParameterDict()) for c in (SyncBatchNorm, nn.BatchNorm))
    return frozenset(vars(layer)) - frozenset(vars(plain))


def _forget_graphs(net: Block) -> None:
    """Drop what hybridized blocks recorded with the old layers; active and the flags stay."""
    for block in _blocks(net):
        if isinstance(block, HybridBlock):
            block._clear_cached_op()


def _warn_of_recorded(block: SymbolBlock, operators: Tuple[str, ...], verb: str) -> None:
    """`operators`: what a node runs, which for a Custom node is its op_type."""
    nodes = json.loads(block._cached_graph[1].tojson())["nodes"]
    runs = [node.get("attrs", {}).get("op_type") if node["op"] == "Custom" else node["op"] for node in nodes]
    count = sum(operator in operators for operator in runs)
    if count:
        warnings.warn(
            f"{block.name or 'a SymbolBlock'} is a recorded graph with {count} normalisation operators, "
            f"which {verb} cannot change: {verb} the network that it was traced from",
            stacklevel=3,
        )

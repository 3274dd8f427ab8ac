"""Exchange the BatchNorm layers of a finished network for synchronised ones, and back; freeze them.

The layers are changed *in place*: the block object stays, its class and its settings change. So every
reference to it keeps meaning the same layer, wherever a model holds one (children, attributes, lists, a block
registered twice), and parameters, names, their order, hooks and hybridize settings are never touched.
"""

import inspect
import warnings
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple, Type, TypeVar

from mxnet.gluon import Block, HybridBlock, ParameterDict, SymbolBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from ..activation import NONE, RELU, BatchNormActivation, BatchNormAdd, invertible
from ..layer import SyncBatchNorm, SyncBatchNormAdd
from ..mxnet_side import blocks, gamma
from ..mxnet_side.op import NAME
from ..system import arguments
from . import fusion
from .graphs import Left, close_graph, open_graph

__all__ = ["convert", "freeze", "revert"]

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
    "activation",
    "slope",
    "prefix",
    "params",
)
# Set by BatchNorm's constructor from its arguments, or belonging to a graph recorded with the old operator.
_RENEWED = ("_kwargs", "_cached_graph", "_cached_op", "_cached_op_args")


def convert(
    net: NetT,
    norm_layer: Type[SyncBatchNorm] = SyncBatchNorm,
    select: Optional[str] = None,
    fuse: bool = False,
    **kwargs: Any,
) -> NetT:
    """Makes the BatchNorm layers of a network synchronised layers: ``nn.BatchNorm``, ``nn.BatchNormReLU``, contrib's
    ``SyncBatchNorm``, subclasses of the first two without a forward of their own, GluonCV's ``BatchNormCudnnOff``, and
    the nodes of these in the graph of a ``SymbolBlock``, which becomes one of a class of its own.

    Layers are found among the children of blocks, in their attributes and slots, and in lists, tuples, sets and
    dictionaries there. A layer in an attribute of another object is found once it has run within the net.

    Parameters stay the same objects: values, contexts, grad_req, lr_mult, wd_mult, initialisers and pending
    initialisation, names and order. Each layer keeps its axis, momentum, epsilon, scale, center, the present
    ``use_global_stats``, its hooks and its hybridize settings. Recorded graphs are dropped and rebuilt at the
    next call, with the same flags. Other normalisation layers are left alone, and so are layers that are synchronised
    already.

    Parameters
    ----------
    net : gluon.Block
        A network or a single BatchNorm, changed in place. Give the outermost block: a graph that a hybridized
        block *around* it has recorded is out of reach and keeps the old layers.
    norm_layer : type
        `SyncBatchNorm` or a subclass of it, such as `ShuffleBatchNorm`.
    select : str, optional
        A regular expression: only layers whose name, or the name of one of whose parameters, it matches from the
        beginning, as ``net.collect_params(select)`` does. By default all.
    fuse : bool
        Whether synchronised layers, those that were synchronised before included, take the activation behind them into
        themselves, and the addition before that at the end of a residual block: ReLU, ReLU6, and leaky ReLU with a
        slope above 0 and below 1. This happens in the graphs of hybridized blocks, whatever wrote them; `summary` says
        where, once they are recorded. Files of ``net.export`` are the same as without.
    **kwargs
        Further arguments of each new layer: ``num_devices``, ``mode``, ``virtual_devices``, ``group_size``,
        ``inplace``, ``running_variance``, ``kvstore``, ``timeout``. ``inplace=True`` is for those that can: it passes
        over ``nn.BatchNormReLU``, and a layer that takes a ReLU or an addition in is not in place then.

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
        One, that names what was selected and stays, and why: subclasses of BatchNorm with a forward of their own, and
        nodes whose gamma is no parameter or whose mean is used elsewhere in the graph.
    """
    arguments.block("net", net)
    fuse = arguments.flag("fuse", fuse)
    if not (isinstance(norm_layer, type) and issubclass(norm_layer, SyncBatchNorm)):
        arguments.refuse("norm_layer", norm_layer, "SyncBatchNorm or a subclass of it")
    if issubclass(norm_layer, SyncBatchNormAdd):
        arguments.refuse("norm_layer", norm_layer, "a layer of one input; fuse=True finds additions")
    selection = blocks.Selection(select)
    with _open_graphs(net) as nodes:
        plain = [block for block in blocks.of(net) if _is_plain(block) and block in selection]
        reasons = {id(block): blocks.difference(block) for block in plain}
        plain, left = [b for b in plain if not reasons[id(b)]], [b for b in plain if reasons[id(b)]]
        _check_kwargs(norm_layer, kwargs, {1, *(_axis(block._kwargs) for block in plain)})

        for block in plain:
            _synchronise(block, norm_layer, kwargs)
        if fuse:
            fusion.install()
            for block in blocks.of(net):
                if isinstance(block, SyncBatchNorm) and block in selection:
                    block._fuses = True
        ignored = gamma.of_layers(net, lambda layer: isinstance(layer, SyncBatchNorm) and layer in selection)
    gamma.write_ones("convert", ignored)
    stay = [Left(block.name, type(block).__name__, reasons[id(block)]) for block in left]
    _warn("convert", selection, stay + nodes)
    return net


def convert_nodes(block: SymbolBlock, operator: str) -> None:
    """`convert` for the nodes of one operator in a graph."""
    nodes = open_graph(block)
    for slot in getattr(block, "__layers__", {}).values():
        if slot.operator == operator and _is_plain(slot.layer):
            _synchronise(slot.layer, SyncBatchNorm, {})
    close_graph(block)
    _warn("convert", blocks.Selection(None), [node for node in nodes if node.operator == operator])


def _synchronise(block: nn.BatchNorm, norm_layer: Type[SyncBatchNorm], kwargs: Dict[str, Any]) -> None:
    origin = (type(block), dict(block._kwargs))
    _become(block, *_synchronised_form(block, norm_layer, kwargs))
    if origin[0] is not ContribSyncBatchNorm:
        block._origin = origin
    block._adopt_parameters()


def _is_plain(block: Block) -> bool:
    return blocks.is_batch_norm(block) and not isinstance(block, SyncBatchNorm)


@contextmanager
def _open_graphs(net: Block) -> Iterator[List[Left]]:
    """Makes layers of the nodes in recorded graphs, and graphs of them again; what was recorded with the old layers is
    forgotten. Gives the nodes that no layer stands for.
    """
    recorded = [block for block in blocks.of(net) if isinstance(block, SymbolBlock)]
    try:
        yield [node for block in recorded for node in open_graph(block)]
    finally:
        for block in recorded:
            close_graph(block)
        _forget_graphs(net)


def _warn(verb: str, selection: blocks.Selection, stay: Sequence[Left]) -> None:
    texts = [f"{one.name} ({one.operator}: {one.reason})" for one in stay if selection.matches(one.name)]
    if texts:
        warnings.warn(f"{verb} left as it was: {arguments.some(texts, '; ')}", stacklevel=3)


def revert(net: NetT) -> NetT:
    """Makes every `SyncBatchNorm` of a network, subclasses included, plain again: of the class that it had before
    `convert`, otherwise, and where that was contrib's, ``nn.BatchNorm``.

    The parameters stay the same objects and all settings that ``nn.BatchNorm`` knows are kept. The graphs that are
    recorded from the next forward on have plain ``BatchNorm`` operators, as the files of ``net.export`` have anyway.

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
        One, that names the nodes of recorded graphs that stay synchronised, and why.
    """
    arguments.block("net", net)
    with _open_graphs(net) as nodes:
        ignored = gamma.of_layers(net, lambda layer: isinstance(layer, SyncBatchNorm))
        for block in blocks.of(net):
            if isinstance(block, SyncBatchNorm):
                block._release_parameters()
                origin, activation = block._origin, block._activation
                if origin is None:
                    _become(block, _plain_form(block), {})
                else:
                    _become_again(block, *origin)
                if isinstance(block, (BatchNormActivation, BatchNormAdd)):
                    block._activation = activation
    gamma.write_ones("revert", ignored)
    _warn("revert", blocks.Selection(None), [node for node in nodes if node.operator == NAME])
    return net


def freeze(net: NetT, select: Optional[str] = None) -> NetT:
    """Lets BatchNorm layers normalise with their running statistics, in training too, and stay as they are.

    Sets ``use_global_stats``, and ``grad_req`` of gamma and beta to ``'null'``, as recipes for detection and the last
    phase of DeepLabV3 do. Waits for no replica. Takes plain and synchronised layers.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, changed in place.
    select : str, optional
        As in `convert`.

    Returns
    -------
    gluon.Block
        ``net``, the same object.

    Raises
    ------
    ValueError
        Where an argument is not what is said above.

    Warns
    -----
    UserWarning
        One, that names the nodes of recorded graphs that were selected and stay as they are, and why.
    """
    arguments.block("net", net)
    selection = blocks.Selection(select)
    with _open_graphs(net) as nodes:
        for block in blocks.of(net):
            if blocks.is_batch_norm(block) and block in selection:
                block._kwargs["use_global_stats"] = True
                block.gamma.grad_req = block.beta.grad_req = "null"
    _warn("freeze", selection, nodes)
    return net


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


def _synchronised_form(
    block: nn.BatchNorm, norm_layer: Type[SyncBatchNorm], kwargs: Dict[str, Any]
) -> Tuple[Type[SyncBatchNorm], Dict[str, Any]]:
    """Class and arguments."""
    activation = getattr(block, "_activation", RELU if block.fuse_relu else NONE)
    adds = isinstance(block, BatchNormAdd)
    if kwargs.get("inplace") and not invertible(activation, adds):
        kwargs = {**kwargs, "inplace": False}
    if adds:
        return _with_addition(norm_layer), {**activation.arguments(), **kwargs}  # type: ignore[arg-type]
    # A class of the user's own may not take what a plain layer does not need.
    return norm_layer, kwargs if activation == NONE else {**activation.arguments(), **kwargs}


@lru_cache(maxsize=None)
def _with_addition(norm_layer: Type[SyncBatchNorm]) -> Type[SyncBatchNorm]:
    if norm_layer is SyncBatchNorm:
        return SyncBatchNormAdd
    return type(f"{norm_layer.__name__}Add", (SyncBatchNormAdd, norm_layer), {"__doc__": norm_layer.__doc__})


def _plain_form(block: SyncBatchNorm) -> Type[nn.BatchNorm]:
    if isinstance(block, SyncBatchNormAdd):
        return BatchNormAdd
    return nn.BatchNorm if block._activation == NONE else BatchNormActivation


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


def _become_again(block: SyncBatchNorm, cls: Type[nn.BatchNorm], settings: Dict[str, Any]) -> None:
    """Of the class it was, whose constructor may take other arguments."""
    for name in _private_names():
        delattr(block, name)
    block.__class__ = cls
    block._kwargs = {**settings, "use_global_stats": block._kwargs["use_global_stats"]}


@lru_cache(maxsize=None)
def _private_names() -> FrozenSet[str]:
    """The attributes that a synchronised layer has beyond a plain one; they end with it."""
    layer, plain = (c(prefix="", params=ParameterDict()) for c in (SyncBatchNorm, nn.BatchNorm))
    return frozenset(vars(layer)) - frozenset(vars(plain))


def _forget_graphs(net: Block) -> None:
    """Drop what hybridized blocks recorded with the old layers; active and the flags stay."""
    for block in blocks.of(net):
        if isinstance(block, HybridBlock):
            block._clear_cached_op()

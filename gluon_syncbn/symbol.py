"""`SyncBatchNorm` for graphs that are written as symbols, for ``Module`` or the necks of GluonCV's detectors."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Optional

import mxnet as mx
from mxnet.gluon import HybridBlock

from . import _native, layer
from .mxnet_side import blocks, op
from .mxnet_side.nodes import json_of, layers_of
from .nets.graphs import close_graph, open_graph, plain_graphs
from .system import arguments
from .system.arguments import value_of
from .training.session import session

__all__ = ["SyncBatchNorm"]

# A node of a symbol cannot keep an object alive, so these layers stay as long as the core has nodes of them.
_written: List[layer.SyncBatchNorm] = []


def SyncBatchNorm(
    data: mx.sym.Symbol,
    gamma: Optional[mx.sym.Symbol] = None,
    beta: Optional[mx.sym.Symbol] = None,
    moving_mean: Optional[mx.sym.Symbol] = None,
    moving_var: Optional[mx.sym.Symbol] = None,
    eps: Any = 1e-3,
    momentum: Any = 0.9,
    fix_gamma: Any = True,
    use_global_stats: Any = False,
    output_mean_var: Any = False,
    ndev: Any = None,
    key: Any = None,
    name: Optional[str] = None,
    mask: Optional[mx.sym.Symbol] = None,
    attr: Optional[Dict[str, str]] = None,
    cudnn_off: Any = None,
    **kwargs: Any,
) -> mx.sym.Symbol:
    """`gluon_syncbn.SyncBatchNorm` as a symbol, with the arguments of MXNet's symbols ``mx.sym.BatchNorm`` and
    ``mx.sym.contrib.SyncBatchNorm``, in whose places it may be put.

    The graph goes into a ``SymbolBlock`` or a ``Module``. The replicas are the contexts of its parameters, or those of
    the ``Module``. `convert`, `revert` and `freeze` see the layers of a ``SymbolBlock``, and `summary` does once it has
    run. Executors of ``simple_bind`` or ``bind`` only predict.

    ``save``, and a checkpoint of a ``Module``, write ``BatchNorm`` operators. A ``Module`` of such a file synchronises
    again if this package is imported. A ``SymbolBlock`` of it has plain layers.

    Parameters
    ----------
    data : Symbol
        2 to 5 dimensions.
    gamma, beta, moving_mean, moving_var, eps, momentum, fix_gamma, use_global_stats, name, attr
        As in ``mx.sym.BatchNorm``, within the layer's bounds.
    output_mean_var : bool
        Must be False.
    ndev, key, cudnn_off
        Ignored: whom a replica meets in contrib's symbol, and MXNet's choice of a kernel.
    mask : Symbol, optional
        As in the layer.
    **kwargs
        ``axis``, ``activation``, ``slope``, ``mode``, ``virtual_devices``, ``group_size``, ``groups``,
        ``num_devices``, ``running_variance``, ``kvstore``, ``timeout`` of the layer. Also attributes that all symbols
        of MXNet take, such as ``lr_mult``, ``wd_mult`` and ``__lr_mult__``.

    Numbers and truth values may be text, as in ``momentum='0.9'`` and ``fix_gamma='False'``, or 0 and 1.

    Raises
    ------
    ValueError
        If an argument is not as described above.
    MXNetError
        In a training step of an executor of ``simple_bind`` or ``bind``.
    """
    inputs = dict(data=data, gamma=gamma, beta=beta, moving_mean=moving_mean, moving_var=moving_var)
    for argument, value in {**inputs, "mask": mask}.items():
        if not isinstance(value, mx.sym.Symbol) and (value is not None or argument == "data"):
            arguments.refuse(argument, value, "a Symbol")
    if _flag("output_mean_var", output_mean_var):
        arguments.refuse("output_mean_var", output_mean_var, "False")
    of_any = {key: kwargs.pop(key) for key in list(kwargs) if key in _OF_ANY or key.startswith("__")}
    # MXNet's own operator finds a name and makes the variables. They get its attributes, and the initial values of the
    # running statistics, which a Module reads.
    own = op.SYMBOLS.BatchNorm(**inputs, name=name, attr=attr, **of_any)
    variables = [own.get_children()[place] for place in range(len(inputs))]
    fix_gamma = _flag("fix_gamma", fix_gamma)
    if fix_gamma and gamma is None and variables[1].attr("__wd_mult__") is None:
        variables[1]._set_attr(__wd_mult__="0")  # it stays 1
    attributes = {key: value for key, value in own.list_attr().items() if key.startswith("__")}
    node = layer.SyncBatchNorm(
        momentum=value_of(momentum),
        epsilon=arguments.number("eps", value_of(eps), 0, sys.float_info.max, "a finite number of at least 0"),
        scale=not fix_gamma,
        use_global_stats=_flag("use_global_stats", use_global_stats),
        prefix=f"{own.name}_",
        **{argument: value_of(value) for argument, value in kwargs.items()},
    )
    _written[:] = [one for one in _written if _native.layer_in_use(one._replicas.id)] + [node]
    with node.name_scope(), mx.AttrScope(**attributes):
        y = node.hybrid_forward(mx.sym, variables[0], mask, **dict(zip(blocks.PARAMETERS, variables[1:])))
    y._set_attr(name=own.name)  # as MXNet's operators have it: an output is called after its node
    return y


#: Attributes that MXNet takes for every symbol, and gives to the variables that it makes (src/c_api/c_api_symbolic.cc).
_OF_ANY = ("ctx_group", "force_mirroring", "lr_mult", "mirror_stage", "profiler_scope", "wd_mult")


def _flag(name: str, argument: Any) -> bool:
    value = value_of(argument)
    return bool(value) if type(value) is int and value in (0, 1) else arguments.flag(name, value)


def _as_layers(block: HybridBlock) -> None:
    """Nodes in the graphs of `SymbolBlock`s within the block become layers."""
    written = {node._replicas for node in _written}
    for one in plain_graphs(block) if _written else ():
        if any(replicas in written for replicas, _ in layers_of(json_of(one._cached_graph[1]))):
            open_graph(one)
            close_graph(one)


session.also(recording=[_as_layers])

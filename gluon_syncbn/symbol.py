"""Provides `SyncBatchNorm` for graphs that are written as symbols, such as the necks of GluonCV's detectors."""

from __future__ import annotations

import json
import sys
from typing import Any, Callable, List, Optional

import mxnet as mx
from mxnet.gluon import SymbolBlock

from . import layer
from .mxnet_side import blocks, patches
from .mxnet_side.op import NAME
from .nets.graphs import open_graph
from .system import arguments

__all__ = ["SyncBatchNorm"]

# A node of a symbol cannot keep an object alive, so these layers stay for as long as the process.
_written: List[layer.SyncBatchNorm] = []


def SyncBatchNorm(
    data: mx.sym.Symbol,
    gamma: Optional[mx.sym.Symbol] = None,
    beta: Optional[mx.sym.Symbol] = None,
    moving_mean: Optional[mx.sym.Symbol] = None,
    moving_var: Optional[mx.sym.Symbol] = None,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    output_mean_var: bool = False,
    ndev: Any = None,
    key: Any = None,
    name: Optional[str] = None,
    **kwargs: Any,
) -> mx.sym.Symbol:
    """`gluon_syncbn.SyncBatchNorm` as a symbol, with the arguments of ``mx.sym.contrib.SyncBatchNorm``::

        import gluon_syncbn
        import mxnet as mx
        from mxnet import gluon

        data = mx.sym.var("data", dtype="float32")
        neck = mx.sym.Convolution(data, num_filter=8, kernel=(1, 1), name="neck")
        neck = gluon_syncbn.symbol.SyncBatchNorm(neck, name="neck_bn")
        net = gluon.SymbolBlock(neck, data)
        net.initialize()

    The graph goes into a ``SymbolBlock``, whose parameters determine the replicas. After the first use of this
    function, a ``SymbolBlock`` made of such a graph has layers. `convert`, `revert`, `freeze` and `summary` see them.

    Parameters
    ----------
    data : Symbol
        2 to 5 dimensions.
    gamma, beta, moving_mean, moving_var : Symbol, optional
        By default variables with the node's name as prefix.
    eps : float
        At least 0.
    momentum : float
        From 0 to 1: the weight of the old running statistics.
    fix_gamma, use_global_stats : bool
        Whether gamma counts as 1; whether training, too, uses the running statistics.
    output_mean_var : bool
        Only False.
    ndev, key
        Arguments of contrib's operator, which have no effect.
    name : str, optional
        Name of the node. By default numbered, as MXNet does with a ``BatchNorm``.
    **kwargs
        ``axis``, ``activation``, ``slope``, ``inplace``, ``mode``, ``virtual_devices``, ``group_size``,
        ``num_devices``, ``running_variance``, ``kvstore``, ``timeout`` of the layer.

    Returns
    -------
    Symbol
        The normalised data, in its shape and type.

    Raises
    ------
    ValueError
        Where an argument is not as described above.
    MXNetError
        In a training step of a graph that is in no ``SymbolBlock``.
    """
    inputs = dict(data=data, gamma=gamma, beta=beta, moving_mean=moving_mean, moving_var=moving_var)
    for argument, value in inputs.items():
        if not isinstance(value, mx.sym.Symbol) and (value is not None or argument == "data"):
            arguments.refuse(argument, value, "a Symbol")
    if arguments.flag("output_mean_var", output_mean_var):
        arguments.refuse("output_mean_var", output_mean_var, "False")
    patches.replace_once(SymbolBlock, "__init__", _opening)
    name = mx.sym.BatchNorm(data, name=name).name
    node = layer.SyncBatchNorm(
        momentum=momentum,
        epsilon=arguments.number("eps", eps, 0, sys.float_info.max, "a finite number of at least 0"),
        scale=not arguments.flag("fix_gamma", fix_gamma),
        use_global_stats=use_global_stats,
        prefix=f"{name}_",
        **kwargs,
    )
    _written.append(node)
    variables = [mx.sym.var(f"{name}_{argument}") if value is None else value for argument, value in inputs.items()]
    with node.name_scope():
        return node.hybrid_forward(mx.sym, *variables)


def _opening(construct: Callable[..., None]) -> Callable[..., None]:
    def opened(block: SymbolBlock, *args: Any, **kwargs: Any) -> None:
        construct(block, *args, **kwargs)
        tokens = {node._replicas.token for node in _written}
        nodes = json.loads(block._cached_graph[1].tojson())["nodes"]
        if any(blocks.operator_of(node) == NAME and node["attrs"]["layer"] in tokens for node in nodes):
            open_graph(block)

    return opened

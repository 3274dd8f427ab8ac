"""Replaces contrib's SyncBatchNorm and GluonCV's parallel helpers, so that scripts run unmodified."""

from __future__ import annotations

import functools
import gc
import re
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.nn.basic_layers import _BatchNorm

from .. import layer, parallel
from ..exchange import named
from ..mxnet_side import blocks, compatibility
from ..nets.convert import convert as convert_layers
from ..nets.graphs import plain_graphs
from ..system import arguments
from ..training.session import session

HELPERS = "gluoncv.utils.parallel"
OPERATOR = "_contrib_SyncBatchNorm"
_OWN = __name__.partition(".")[0]


class SyncBatchNorm(layer.SyncBatchNorm):
    """`gluon_syncbn.SyncBatchNorm` with the signature, and the names of parameters, of
    ``mx.gluon.contrib.nn.SyncBatchNorm``.

    ``num_devices`` is checked and not used: the replicas are the contexts of the parameters.
    """

    def __init__(self, in_channels: int = 0, num_devices: Optional[int] = None, *args: Any, **kwargs: Any) -> None:
        if num_devices is not None:  # scripts may pass on that they were given 0 GPUs
            arguments.whole("num_devices", num_devices, 0, arguments.MOST_DEVICES)
        kwargs["in_channels"] = in_channels
        super().__init__(1, *args, **kwargs)  # contrib's axis

    def _alias(self) -> str:
        return "syncbatchnorm"


def install(cpus: Optional[int] = None, convert: bool = False) -> str:
    """Replaces contrib's layer and operator, GluonCV's parallel helpers, and MXNet's KVStores by the names of those of
    `gluon_syncbn.kvstore`, by those of this package.

    `uninstall` restores them. Names in all loaded modules are replaced. If GluonCV is not imported yet, its import
    replaces those of its helpers. A second call with the same arguments changes nothing.

    Parameters
    ----------
    cpus : int, optional
        From 1 to 1024. ``mx.gpu(i)`` is one of that many CPU contexts, and functions that count GPUs return this
        number.
    convert : bool
        Whether a new ``gluon.Trainer`` converts the layers of its parameters, as `convert` does. Plain ``BatchNorm`` in
        the graph of a ``Module`` is synchronised then, too.

    Returns
    -------
    str
        A description of the replacements.

    Raises
    ------
    ValueError
        If ``cpus`` is out of range, or an argument differs from the value of an earlier call.

    Warns
    -----
    UserWarning
        When a graph is bound that uses the mean or variance of an operator, which then stays MXNet's.
    """
    convert = arguments.flag("convert", convert)
    if cpus is not None:
        cpus = arguments.whole("cpus", cpus, 1, 1024)
    for name, value in (("cpus", cpus), ("convert", convert)):
        before = _installed.setdefault(name, value)
        if value != before:
            arguments.refuse(name, value, f"{before}, as installed before; call gluon_syncbn.uninstall() first")
    if "pairs" in _installed:
        return _words()
    _put([(ContribSyncBatchNorm, SyncBatchNorm), (mx.kvstore.create, _creating(mx.kvstore.create))])
    # A symbol in a `SymbolBlock` belongs to Gluon. Others are found when they are bound.
    session.also(recording=[_converting_nodes], operators=[OPERATOR])
    if convert:
        session.also(constructing=[_converting_net], operators=["BatchNorm"])
    if cpus is not None:
        _put(_gpus(cpus))
    if HELPERS in sys.modules:
        _put_helpers(sys.modules[HELPERS])
    else:
        sys.meta_path.insert(0, _WATCH)
    return _words()


def uninstall() -> None:
    """Undoes `install`: restores the original objects, also in modules that were imported since."""
    if _WATCH in sys.meta_path:
        sys.meta_path.remove(_WATCH)
    session.no_longer(_converting_nodes, _converting_net, OPERATOR, "BatchNorm")
    _swap([(new, old) for old, new in _installed.get("pairs", ())])
    _installed.clear()


def _creating(create: Callable) -> Callable:
    """MXNet has no store ``'mpi'`` and makes a local one."""
    return functools.wraps(create)(
        lambda name="local": named.store(name) if named.spans_processes(name) else create(name)
    )


def _converting_nodes(block: HybridBlock) -> None:
    for one in plain_graphs(block):
        nodes = [node for node in blocks.recorded(one) if node.operator == OPERATOR]
        if nodes:
            names = [re.escape(name) for node in nodes for name in (node.name, node.inputs[1])]
            convert_layers(one, select=f"({'|'.join(names)})$")


def _converting_net(made: gluon.Trainer) -> None:
    for block in _with_parameters(made._params):
        convert_layers(block)


def _with_parameters(parameters: Sequence[Parameter]) -> List[Block]:
    """Returns the layers and the recorded graphs with batch normalisation on these parameters, in their order, which is
    the same in all processes. A parameter does not know its blocks, so all objects are searched.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    found: List[Tuple[int, Block]] = []
    for block in gc.get_objects():
        if issubclass(type(block), (_BatchNorm, SymbolBlock)) and not isinstance(block, layer.SyncBatchNorm):
            own = [places[id(one)] for one in block._reg_params.values() if id(one) in places]
            in_graph = isinstance(block, SymbolBlock)
            if own and (not in_graph or any(node.operator in blocks.OPERATORS for node in blocks.recorded(block))):
                found.append((min(own), block))
    return [block for _, block in sorted(found, key=lambda one: one[0])]


#: The arguments of `install`, and pairs of an original and its replacement.
_installed: Dict[str, Any] = {}


def _words() -> str:
    words = (
        "gluon_syncbn's SyncBatchNorm for mx.gluon.contrib.nn.SyncBatchNorm and, in a SymbolBlock or a Module, "
        f"mx.sym.contrib.SyncBatchNorm, gluon_syncbn.parallel for {HELPERS}, and gluon_syncbn.kvstore for the name "
        f"{named.MPI} in mx.kvstore.create"
    )
    if _installed["convert"]:
        words += "; and it converts the nets that a gluon.Trainer or a Module trains"
    if _installed["cpus"] is None:
        return words
    return f"{words}; mx.gpu(0) to mx.gpu({_installed['cpus'] - 1}) are CPU contexts"


def _put(pairs: List[Tuple[Any, Any]]) -> None:
    _installed.setdefault("pairs", []).extend(pairs)
    _swap(pairs)


def _swap(pairs: List[Tuple[Any, Any]]) -> None:
    """Replaces objects in every loaded module but this package's, whatever their names there."""
    places: Dict[int, Any] = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != _OWN:
            for attribute, value in list(vars(module).items()):
                if id(value) in places:
                    setattr(module, attribute, places[id(value)])


def _double(thing: Any) -> Any:
    """Returns another object that does the same, so that `uninstall` can tell a replacement from a module's own one."""
    if isinstance(thing, type):
        return type(thing.__name__, (thing,), {"__doc__": thing.__doc__, "__module__": thing.__module__})
    return functools.wraps(thing)(lambda *args, **kwargs: thing(*args, **kwargs))


def _put_helpers(module: ModuleType) -> None:
    _put([(getattr(module, name), _double(getattr(parallel, name))) for name in parallel.__all__])


def _gpus(count: int) -> List[Tuple[Callable, Callable]]:
    expected = f"a whole number from 0 to {count - 1}: there are {count} CPU contexts in the places of GPUs"

    def gpu(device_id: int = 0) -> mx.Context:
        """A CPU context in the place of a GPU."""
        context = mx.cpu(arguments.whole("device_id", device_id, 0, count - 1, expected))
        context.empty_cache = _keep_nothing
        return context

    # `mx.test_utils.list_gpus` asks the last of them.
    return [(mx.gpu, gpu), (mx.context.num_gpus, lambda: count), (mx.util.get_gpu_count, lambda: count)]


def _keep_nothing() -> None:
    """Empties the cache of a CPU context, which has none. MXNet's method raises an error there. GluonCV pickles it."""


#: Replaces GluonCV's helpers when GluonCV is imported, before its other modules import them by name.
_WATCH = compatibility.Finder({}, {HELPERS: _put_helpers})

"""The running statistics of a net: those of all its devices together, and those of a population."""

from __future__ import annotations

import functools
import json
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter, SymbolBlock

from . import arguments, blocks
from .exchange.base import merge_moments
from .exchange.store import ProcessStore
from .op import NAME, Role
from .session import session

__all__ = ["average_running_stats"]


def average_running_stats(net: Block, weights: Optional[Sequence[float]] = None, kvstore: Any = None) -> None:
    r"""Gives all devices the same running statistics: of each layer of batch normalisation, those of all together.

    .. math:: \mu = \frac{\sum_i w_i \mu_i}{\sum_i w_i} \qquad
              \sigma^2 = \frac{\sum_i w_i \left(\sigma_i^2 + (\mu_i - \mu)^2\right)}{\sum_i w_i}

    over the devices i, in float64: the variance of what all have seen, which the mean of their variances is not.

    For layers of mode ``'local'`` and ``'shuffle'``, for groups, and for plain BatchNorm on several contexts, where
    each device has running statistics of its own. Gluon's ``save_parameters`` writes their mean over the devices, so
    that a file differs from what each device predicts with; after this it does not. Reaches layers wherever a net holds
    them, frozen ones and those in the graph of a ``SymbolBlock`` too. The parameters stay the same objects.

    In a job of several processes all of them call it, and all have the same bits afterwards.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, initialised.
    weights : list of float, optional
        One for each context of the net, in the order that was given to ``initialize``: at least 0, and one above 0. For
        example the number of samples that each has seen. By default all the same. Of several processes, each gives
        those of its own contexts, on one scale.
    kvstore : str or KVStore, optional
        That of `kvstore`, for the devices of all its processes; another one reaches those of this process, as without
        processes. By default what `configure` says, or what the layers name.

    Raises
    ------
    ValueError
        Where an argument is not what is said above.
    MXNetError
        Where another process does not come in time, or has another net.

    References
    ----------
    T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    running = _running(arguments.block("net", net))
    store = _store(kvstore, net)
    given = None if weights is None else _weights(weights)
    for layer in running:
        if given is not None and len(given) != len(layer.contexts):
            arguments.refuse(
                "weights", weights, f"one for each of the {len(layer.contexts)} contexts of '{layer.name}'"
            )
    mx.nd.waitall()  # a static graph does not tell MXNet that it writes running statistics
    moments = []
    for layer in running:
        parts = [
            _packed(weight, layer.mean.data(context).asnumpy(), layer.var.data(context).asnumpy())
            for weight, context in zip(given or [1.0] * len(layer.contexts), layer.contexts)
        ]
        moments.append(functools.reduce(merge_moments, parts))
    for layer, total in zip(running, _of_all_processes(store, "running statistics", moments)):
        layer.write(total)


class _Running(NamedTuple):
    """Where running statistics stand, which several layers may share."""

    name: str  # of a layer
    mean: Parameter
    var: Parameter

    @property
    def contexts(self) -> List[mx.Context]:
        """Each once, also where it holds several replicas."""
        return list(dict.fromkeys(self.mean.list_ctx()))

    def arrays(self) -> List[mx.nd.NDArray]:
        return [*self.mean.list_data(), *self.var.list_data()]

    def write(self, moments: np.ndarray) -> None:
        mean, m2 = np.split(moments[1:], 2)
        for parameter, value in ((self.mean, mean), (self.var, m2 / moments[0])):
            for array in parameter.list_data():
                array[:] = value.astype(array.dtype)


def _running(net: Block) -> List[_Running]:
    """Of all layers, each once; ValueError where some have no values."""
    found: Dict[int, _Running] = {}
    for block in blocks.of(net):
        if blocks.is_batch_norm(block):
            found.setdefault(id(block.running_mean), _Running(block.name, block.running_mean, block.running_var))
        elif isinstance(block, SymbolBlock):
            for node in _nodes(block):
                if node.running is not None:
                    found.setdefault(id(node.running.mean), node.running)
    for name, *parameters in found.values():
        if any(parameter._data is None for parameter in parameters):
            raise ValueError(
                f"net: layer '{name}' without running statistics was given, expected a net that is initialised: call "
                "initialize, and predict with a batch where shapes are not known before"
            )
    return list(found.values())


class _Node(NamedTuple):
    """Batch normalisation in a recorded graph."""

    name: str
    running: Optional[_Running]  # None: they are no parameters
    frozen: bool


def _nodes(block: SymbolBlock) -> Iterator[_Node]:
    graph = json.loads(block._cached_graph[1].tojson())
    parameters = {parameter.name: parameter for parameter in block._reg_params.values()}
    for node in graph["nodes"]:
        operator, attributes = blocks.operator_of(node), node.get("attrs", {})
        if operator not in (*blocks.OPERATORS, NAME) or int(attributes.get("role", -1)) == Role.MEET:
            continue
        given = [graph["nodes"][at]["name"] for at, *_ in node["inputs"][-2:]]
        mean, var = map(parameters.get, given)
        running = None if mean is None or var is None else _Running(node["name"], mean, var)
        yield _Node(node["name"], running, attributes.get("use_global_stats") in ("1", "True"))


def _packed(count: float, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Moments, as `merge_moments` has them."""
    return np.concatenate([[count], mean.astype(np.float64), count * var.astype(np.float64)])


def _weights(weights: Any) -> List[float]:
    if not isinstance(weights, (list, tuple)):
        arguments.refuse("weights", weights, "None or a list of numbers, one for each context")
    # Up to where float64 counts one by one.
    given = [arguments.number("weights", weight, 0, 2**53, "numbers from 0 to 2**53") for weight in weights]
    if not any(given):
        arguments.refuse("weights", weights, "at least one above 0")
    return given


def _store(kvstore: Any, net: Block) -> Optional[ProcessStore]:
    """What reaches the other processes of the job; None where there are none."""
    exchange = session.exchange_of(kvstore)
    if kvstore is not None:
        return exchange if isinstance(exchange, ProcessStore) else None
    named = [getattr(block, "_replicas", None) for block in blocks.of(net)]
    used = [session.exchange, *(replicas.exchange for replicas in named if replicas is not None)]
    stores = {id(one): one for one in used if isinstance(one, ProcessStore)}
    if len(stores) > 1:
        arguments.refuse("kvstore", kvstore, f"one of the {len(stores)} that the layers use")
    return next(iter(stores.values()), None)


def _of_all_processes(store: Optional[ProcessStore], what: str, moments: List[np.ndarray]) -> List[np.ndarray]:
    """The moments of each layer, merged in the order of the ranks: the same bits everywhere."""
    if store is None or not moments:
        return moments
    ends = np.cumsum([part.size for part in moments])[:-1]
    everyone = [np.split(part, ends) for part in store.allgather(what, np.concatenate(moments))]
    return [functools.reduce(merge_moments, parts) for parts in zip(*everyone)]

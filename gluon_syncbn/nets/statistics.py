"""Computes the running statistics of a net over all its devices, and over a population."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock, nn

from .._native import merge_moments
from ..exchange.store import ProcessStore
from ..layer import SyncBatchNorm, SyncBatchNormAdd
from ..mxnet_side import blocks, op
from ..settings import Settings
from ..system import arguments, kinds
from ..system.kinds import values
from ..training import steps
from ..training.replicas import Replicas, store_of
from .parameters import await_values

#: Running variances, by the running mean, which several layers may share.
Running = Dict[Parameter, Parameter]


def average_running_stats(net: Block, kvstore: Any = None) -> None:
    r"""Gives all devices the same running statistics: for each layer, the moments over all devices together.

    .. math:: \mu = \frac{1}{n} \sum_i \mu_i \qquad
              \sigma^2 = \frac{1}{n} \sum_i \left(\sigma_i^2 + (\mu_i - \mu)^2\right)

    over the n devices i, in float64. This is the variance over all that the devices have seen, unlike the mean of their
    variances, which ``save_parameters`` writes. Use it where each device has running statistics of its own: in modes
    ``'local'`` and ``'shuffle'``, with groups, and with plain BatchNorm on several contexts. It reaches all layers of a
    net, including frozen ones and those in the graph of a ``SymbolBlock``.

    In a job of several processes all of them call it. Afterwards all have bitwise equal statistics.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, initialised.
    kvstore : str or KVStore, optional
        As in `broadcast_parameters`.

    Raises
    ------
    ValueError
        If an argument is not as described above.
    MXNetError
        If another process does not come in time, or has another net.

    References
    ----------
    T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    running = _find_running(arguments.block("net", net))
    store = store_of(kvstore, running)
    moments = {}
    for mean, var in running.items():
        parts = [_packed(1, mean.data(context).asnumpy(), var.data(context).asnumpy()) for context in mean.list_ctx()]
        moments[mean] = functools.reduce(merge_moments, parts)
    _write(running, _of_all_processes(store, "running statistics", moments))


def update_bn_stats(net: Block, batches: Iterable[Sequence[mx.nd.NDArray]], kvstore: Any = None) -> None:
    r"""Sets the running statistics to the moments of many batches ("precise BN"), in place of a moving average.

    For each channel, these are mean and biased variance of all inputs of the layer, as if they were one batch, in
    float64 and bitwise equal on every device. `configure`'s ``nonfinite`` holds for each shard.

    Calls the net in training mode and without gradient: the layers normalise as in training, each in its mode. In the
    end, only the running statistics have changed; after an error these are unchanged too. Graphs of hybridized blocks
    stay, but are not used here. Calls draw random numbers, so mode ``'shuffle'`` and Dropout draw others afterwards.

    Handles `SyncBatchNorm` in all modes, and the layers that `convert` takes. Frozen layers (``use_global_stats``) stay
    as they are. In a job of several processes, all of them call it, with equal numbers of batches.

    Parameters
    ----------
    net : gluon.Block
        A network or a single layer, initialised.
    batches : iterable
        The batches, all of which are used; each is a list of arrays, one on each context of the net.
    kvstore : str or KVStore, optional
        As in `broadcast_parameters`.

    Raises
    ------
    ValueError
        If an argument is not as described above, or there is no batch. In all processes, if one has fewer batches than
        another. Also if a layer is in the recorded graph of a ``SymbolBlock``.
    MXNetError
        Errors of the net in training.

    Warns
    -----
    UserWarning
        Once, with the names of the layers that stayed as they were, and the reasons. Either the net did not call a
        layer, or it is a subclass of BatchNorm with another forward.

    References
    ----------
    Y. Wu, J. Johnson, "Rethinking 'Batch' in BatchNorm", 2021, arXiv 2105.07576, section 3.
    """
    running = _find_running(arguments.block("net", net))
    store = store_of(kvstore, running)
    layers, stay = _layers_to_measure(net)
    parameters = [parameter for pair in running.items() for parameter in pair]
    before = [(array, array.copy()) for parameter in parameters for array in parameter.list_data()]
    try:
        totals = _population(net, layers, running, _equally_many(store, batches))
        totals = _of_all_processes(store, "population statistics", totals)
    finally:
        steps.drain("the end of update_bn_stats")  # operators in flight write them, too
        for array, value in before:
            value.copyto(array)
    given = {mean: total for mean, total in totals.items() if total[0] > 0}
    _write(running, given)
    stay += [f"{layer.name} (the net gave it no value)" for layer in layers if layer.running_mean not in given]
    if stay:
        warnings.warn(f"update_bn_stats left as it was: {arguments.some(stay, '; ')}", stacklevel=2)


def _find_running(net: Block) -> Running:
    """Returns those of all layers, which have their values, without repetitions."""
    found: Running = {}
    for block in blocks.iterate(net):
        if blocks.is_batch_norm(block):
            found.setdefault(block.running_mean, block.running_var)
        elif isinstance(block, SymbolBlock):
            parameters = {parameter.name: parameter for parameter in block._reg_params.values()}
            for node in blocks.recorded(block):
                mean, var = map(parameters.get, node.inputs[-2:])
                if mean is not None and var is not None:
                    found.setdefault(mean, var)
    await_values("net", [parameter for pair in found.items() for parameter in pair])
    return found


def _write(running: Running, totals: Dict[Parameter, np.ndarray]) -> None:
    for mean, moments in totals.items():
        first, m2 = np.split(moments[1:], 2)
        for parameter, value in ((mean, first), (running[mean], m2 / moments[0])):
            for array in parameter.list_data():
                array[:] = value.astype(array.dtype)


def _packed(count: float, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Packs moments as `merge_moments` takes them."""
    return np.concatenate([[count], mean.astype(np.float64), count * var.astype(np.float64)])


def _of_all_processes(
    store: Optional[ProcessStore], what: str, moments: Dict[Parameter, np.ndarray]
) -> Dict[Parameter, np.ndarray]:
    """Merges the moments of each layer in the order of the ranks, so that all processes have equal bits."""
    if store is None or not moments:
        return moments
    own = list(moments.values())
    ends = np.cumsum([part.size for part in own])[:-1]
    everyone = [np.split(part, ends) for part in store.allgather(what, np.concatenate(own))]
    return {mean: functools.reduce(merge_moments, parts) for mean, parts in zip(moments, zip(*everyone))}


# ---- of a population ---------------------------------------------------------------------------------------

_NONE = -1  # the variance where no position counts, or where `configure(nonfinite='skip')` leaves the batch out


def _layers_to_measure(net: Block) -> Tuple[List[nn.BatchNorm], List[str]]:
    """Returns the layers that normalise with their batch, and the names of layers with an unknown forward."""
    found = list(blocks.iterate(net))
    recorded = [node for block in found if isinstance(block, SymbolBlock) for node in blocks.recorded(block)]
    hidden = [node.name for node in recorded if not node.frozen]
    if hidden:
        raise ValueError(
            f"net: batch normalisation in the recorded graph of a SymbolBlock ({arguments.some(hidden, ', ')}) was "
            "given, expected layers that a net calls, or frozen ones (gluon_syncbn.freeze)"
        )
    layers = [one for one in found if blocks.is_batch_norm(one) and not one._kwargs["use_global_stats"]]
    reasons = ["" if isinstance(one, SyncBatchNorm) else blocks.difference(one) for one in layers]
    stay = [f"{one.name} ({type(one).__name__}: {why})" for one, why in zip(layers, reasons) if why]
    return [one for one, why in zip(layers, reasons) if not why], stay


def _population(
    net: Block, layers: Sequence[nn.BatchNorm], running: Iterable[Parameter], batches: Iterator[Any]
) -> Dict[Parameter, np.ndarray]:
    """Computes the moments over all values of all batches, for each of ``running``."""
    contexts = list(dict.fromkeys(context for mean in running for context in mean.list_ctx()))
    each_by_itself = Replicas("update_bn_stats", {}, Settings(mode="local"))
    each_by_itself.set_contexts(contexts, 0)
    totals = {mean: np.zeros(1 + 2 * mean.shape[0]) for mean in running}
    seen: List[Tuple[nn.BatchNorm, int, Tuple[mx.nd.NDArray, mx.nd.NDArray], Optional[mx.nd.NDArray]]] = []

    def see(layer: nn.BatchNorm, args: Tuple[Any, ...]) -> None:
        x = kinds.classic(args[0])
        if isinstance(x, mx.sym.Symbol) or x.size == 0:  # a symbol means that shapes are inferred
            return
        axis, masks = layer._kwargs.get("axis", 1), args[1 + isinstance(layer, SyncBatchNormAdd) :]
        mask = kinds.classic(masks[0]).copy() if masks and masks[0] is not None else None  # a net may overwrite it
        ones = mx.nd.ones((x.shape[axis],), x.ctx, np.float64 if x.dtype == np.float64 else np.float32)
        # With a momentum of 0, running statistics are those of the shard. The layer's own may be of slots, or of all.
        moments = mean, var = _NONE * ones, _NONE * ones
        each_by_itself.settings = Settings(mode="local", axis=axis, momentum=0)
        op.sync_batch_norm(mx.nd, each_by_itself, [x], [ones, ones, mean, var], mask)
        seen.append((layer, x.size // x.shape[axis], moments, mask))

    done = 0
    with ExitStack() as afterwards:
        for block in blocks.iterate(net):
            if isinstance(block, HybridBlock):  # a graph calls no layer
                afterwards.callback(setattr, block, "_active", block._active)
                block._active = False
        for layer in layers:
            afterwards.callback(layer.register_forward_pre_hook(see).detach)
        for batch in batches:
            arrays = batch if isinstance(batch, (list, tuple)) else ()
            known = arrays and all(isinstance(shard, mx.nd.NDArray) for shard in arrays)
            if not known or Counter(shard.ctx for shard in arrays) - Counter(contexts):
                places = ", ".join(map(str, contexts))
                expected = f"a list of arrays, one on each context of the net ({places})"
                arguments.refuse(f"batches[{done}]", batch, expected)
            with autograd.pause(train_mode=True):
                for shard in batch:
                    net(shard)
            mx.nd.waitall()  # no result is read before all replicas are called
            for layer, count, moments, mask in seen:
                if mask is not None:
                    count = np.count_nonzero(values(mask)) * count // mask.size
                mean, var = (array.asnumpy() for array in moments)
                if (var != _NONE).any():
                    packed = _packed(count, mean, var)
                    totals[layer.running_mean] = merge_moments(totals[layer.running_mean], packed)
            seen.clear()
            done += 1
    if not done:
        raise ValueError("batches: none was given, expected at least one batch")
    return totals


def _equally_many(store: Optional[ProcessStore], batches: Any) -> Iterator[Any]:
    """Yields the batches; ValueError, in all processes at once, where one has no more of them and another has."""
    try:
        following = iter(batches)
    except TypeError:
        arguments.refuse("batches", batches, "an iterable of batches")
    for count in itertools.count():
        batch = next(following, None)
        if store is not None:
            there = store.tell_all("batches", batch is not None)
            ended = [str(rank) for rank, has_one in enumerate(there) if not has_one]
            if 0 < len(ended) < store.num_workers:
                raise ValueError(
                    f"batches: rank {arguments.some(ended, ', ')} of {store.num_workers} gave {count}, "
                    "expected as many as the other ranks, which have more"
                )
        if batch is None:
            return
        yield batch

"""Gathers the rows of all devices and processes on each device, with a gradient."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.context import Context
from mxnet.util import is_np_array

from ..exchange.store import ProcessStore
from ..system import arguments
from .guards import guard
from .replicas import GATHER, Pooling, Replicas
from .session import session

__all__ = ["gather"]

#: MXNet's ``op_type``.
NAME = "gluon_syncbn_gather"
_MOST = 2**31 - 1  # rows


class _Place(Replicas):
    """The replicas whose rows meet: one for each of these contexts."""

    def __init__(self, name: str, contexts: Sequence[Context], kvstore: Any) -> None:
        super().__init__(f"{GATHER} '{name}'", Pooling(GATHER), None, kvstore, None)
        self.nodes: Iterator[int] = itertools.count()  # of graphs
        self.set_contexts(list(contexts), 0)


_places: Dict[Tuple, _Place] = {}
_named: Dict[str, Any] = {}  # exchanges; each replica's call names the store, and they meet over one
_lock = threading.Lock()


def gather(
    features: Any,
    *,
    contexts: Optional[Sequence[Context]] = None,
    rows: Optional[int] = None,
    name: str = "gather",
    kvstore: Any = None,
) -> Any:
    r"""Returns the rows of all devices and processes, concatenated in the order of the ranks and of the contexts.

    .. math:: y_s = (x_1, \ldots, x_R) \qquad dx_r = \sum_{s=1}^{R} dy_{s,r}

    y_s is the result on replica s of R. dy_{s,r} is the gradient of its rows that came from replica r.
    The gradient of a row is the sum of the gradients of its copies on all R replicas. A loss that each replica computes
    over the whole batch therefore counts R times. A loss over the replica's own rows against all others counts once.
    Each direction takes one collective. The backward sums in float64. Among the GPUs of a process, NCCL carries both;
    between processes, rows travel over the host.

    In the supervised contrastive loss, rows with the same label form positive pairs (Khosla et al., NeurIPS 2020). If
    the labels are the numbers of the samples, this is SimCLR's loss::

        import mxnet as mx
        import gluon_syncbn
        from gluon_syncbn.contrastive import gather
        from mxnet import autograd

        contexts = gluon_syncbn.cpu_devices(2)
        features = [mx.nd.random.normal(shape=(4, 8), ctx=c) for c in contexts]
        labels = [mx.nd.array([0, 1, 0, 1], ctx=c) for c in contexts]
        for x in features:
            x.attach_grad()
        with autograd.record():
            z = [mx.nd.L2Normalization(x) for x in features]
            everyone, of_all = gather(z), gather(labels)
            losses = []
            for own, label, others, other_labels in zip(z, labels, everyone, of_all):
                alike = mx.nd.dot(own, others, transpose_b=True) / 0.5
                same = mx.nd.broadcast_equal(label.expand_dims(1), other_labels.expand_dims(0))
                losses.append(-(mx.nd.log_softmax(alike) * same).sum(axis=1) / same.sum(axis=1))
        autograd.backward(losses)

    All processes make the same calls of one ``name``, in the same order. Calls of different names may come in any
    order. `gather` raises an error within `join`.

    Parameters
    ----------
    features : list of NDArray, NDArray or Symbol
        A list has one array for each context of this process, in their order, and returns a list. For a single array,
        pass ``contexts`` if the process has several. Rows are along axis 0. The other axes are equal on all replicas.
        The type is float16, float32 or float64. Within ``mxnet.util.np_shape``, a replica may have no row.
    contexts : list of Context, optional
        The contexts of this process, each once, all CPUs or all GPUs. By default those of ``features``. A Symbol, in
        a hybridized net, needs them.
    rows : int, optional
        The number of rows of all replicas together. If replicas have different numbers of rows, all calls need it. The
        default assumes that all processes have as many rows as this one. For a single array, it also assumes that all
        contexts have as many.
    name : str
        Identifies the gather. All processes pass the same name.
    kvstore : str or KVStore, optional
        The KVStore that exchanges rows and gradients, as in `SyncBatchNorm`. By default that of `configure`.

    Returns
    -------
    NDArray, Symbol or list of NDArray
        Of shape (rows, ...), on each context.

    Raises
    ------
    ValueError
        If an argument has a wrong type or value. The text names the argument, its value and the expected ones.
    MXNetError
        Outside ``autograd.record()`` and ``autograd.train_mode()``, and within `join`. Reading a result raises it if
        a replica is late, has failed or has rows of another shape or type. It also raises it if ``rows`` is not the
        total. The text names the missing replicas.
    """
    exchange = _exchange_of(kvstore)
    processes = exchange.num_workers if isinstance(exchange, ProcessStore) else 1
    listed, symbol = isinstance(features, (list, tuple)), isinstance(features, mx.sym.Symbol)
    arrays = list(features) if listed else [features]
    # The type itself: sparse and mx.np arrays are subclasses with other operators.
    if not arrays or is_np_array() or not (symbol or all(type(a) is mx.nd.NDArray and a.ndim for a in arrays)):
        expected = "an NDArray with rows or a Symbol, or a list of NDArrays, one for each context"
        arguments.refuse("features", features, expected)
    if not isinstance(name, str) or not name:
        arguments.refuse("name", name, "a text")
    if rows is not None:
        rows = arguments.whole("rows", rows, 0, _MOST)
    elif listed:
        rows = processes * sum(array.shape[0] for array in arrays)
    place = _place(name, _contexts(arrays, contexts, symbol, listed), exchange)
    if session.joins and processes > 1:
        raise mx.MXNetError(
            f"{place.name}: gather does not work within gluon_syncbn.join, because a process without a batch has no "
            "rows. Give all processes the same number of batches, and train without join."
        )
    if not symbol and not autograd.is_training():
        raise mx.MXNetError(f"{place.name}: gather works only within autograd.record() or autograd.train_mode().")
    # A number below 0 is a factor: so many times the rows of this input.
    attributes = {"layer": place.token, "rows": -processes * len(place.contexts) if rows is None else rows}
    if symbol:
        return _gathered(mx.sym, features, place, node=next(place.nodes), **attributes)
    results = [_gathered(mx.nd, array, place, node=-1, **attributes) for array in arrays]
    return results if listed else results[0]


def _exchange_of(kvstore: Any) -> Any:
    if not isinstance(kvstore, str):
        return session.exchange_of(kvstore) or session.exchange
    with _lock:
        if kvstore not in _named:
            _named[kvstore] = session.exchange_of(kvstore)
        return _named[kvstore]


def _gathered(F: Any, x: Any, place: _Place, **attributes: Any) -> Any:
    guarded = guard(F, place, on_cpus=place.contexts[0].device_type != "gpu", eager=F is mx.nd)
    y = F.Custom(guarded(x) if guarded else x, op_type=NAME, **attributes)
    return guarded(y) if guarded else y


def _contexts(arrays: List[Any], given: Any, symbol: bool, listed: bool) -> List[Context]:
    if given is None and symbol:
        arguments.refuse("contexts", given, "the contexts of the net, for a Symbol")
    own = [] if symbol else [array.context for array in arrays]
    contexts = own if given is None else arguments.contexts("contexts", given)
    if len({context.device_id for context in contexts}) < len(contexts) or len({c.device_type for c in contexts}) > 1:
        arguments.refuse("contexts", contexts, "each once, all CPUs or all GPUs")
    if listed and own != contexts:
        arguments.refuse("features", own, f"one on each of {contexts}")
    if any(context not in contexts for context in own):
        arguments.refuse("contexts", contexts, f"a list with the context of features, {own[0]}")
    if given is None and not listed:
        beside = session.beside(own[0])
        if beside:
            arguments.refuse("contexts", given, f"all contexts of the gather, because layers are on {beside}")
    return contexts


def _place(name: str, contexts: Sequence[Context], exchange: Any) -> _Place:
    key = name, id(exchange), tuple(contexts)
    with _lock:
        if key not in _places:
            # Two places of one name would mix up their messages in other processes.
            others = [k[2] for k in _places if k[:2] == key[:2]]
            if others and session.reaches_other_processes(exchange):
                expected = f"those of the first call, {list(others[0])}, or another name than {name!r}"
                arguments.refuse("contexts", list(contexts), expected)
            _places[key] = _Place(name, contexts, exchange)
        return _places[key]

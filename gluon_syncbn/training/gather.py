"""Gathers the rows of all devices and processes on each device, with a gradient."""

from __future__ import annotations

import functools
import itertools
from typing import Any, List

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from .. import _native
from ..exchange.store import ProcessStore
from ..system import arguments
from .replicas import Replicas, store_of


def gather(features: Any, *, name: str = "gather", kvstore: Any = None) -> Any:
    r"""Returns the rows of all devices and processes, concatenated in the order of the ranks and of the devices.

    .. math:: y_s = (x_1, \ldots, x_R) \qquad dx_r = \sum_{s=1}^{R} dy_{s,r}

    y_s is the result on replica s of R. dy_{s,r} is the gradient of its rows that came from replica r.
    The gradient of a row is the sum of the gradients of its copies on all R replicas. A loss that each replica computes
    over the whole batch therefore counts R times. A loss over the replica's own rows against all others counts once.

    Within a process, rows travel as MXNet's copies do. Between processes, they take one exchange in each direction,
    over the host. The forward waits for that of the other processes. Sums between processes are in float64.

    All processes make the same calls in the same order. Call it outside of hybridized blocks, on their outputs.

    Parameters
    ----------
    features : list of NDArray or NDArray
        A list has one array for each device of this process, and returns a list. Rows are along axis 0, and replicas
        may have different numbers of them. The other axes are equal on all replicas. The type is float16, float32 or
        float64. Within ``mxnet.util.np_shape``, a replica may have no row.
    name : str
        Names the gather in messages. All processes pass the same name.
    kvstore : str or KVStore, optional
        The KVStore that reaches the other processes, as in `SyncBatchNorm`. By default that of `configure`, or
        the only one.

    Returns
    -------
    NDArray or list of NDArray
        Of shape (rows, ...), on each device.

    Raises
    ------
    ValueError
        If an argument has a wrong type or value. The text names the argument, its value and the expected ones.
    StepError
        If another process is late, has failed, or has rows of another shape or type. The text names its rank.
    MXNetError
        Between processes, within `join` and within a block of `recompute`.
    """
    listed = isinstance(features, (list, tuple))
    arrays = list(features) if listed else [features]
    if any(isinstance(array, mx.sym.Symbol) for array in arrays):
        arguments.refuse("features", features, "NDArrays: call gather outside of hybridized blocks, on their outputs")
    # The type itself: sparse and mx.np arrays are subclasses with other operators.
    if not arrays or not all(type(a) is nd.NDArray and a.ndim and a.dtype in _TYPES for a in arrays):
        expected = "an NDArray with rows of float16, float32 or float64, or a list of them, one for each device"
        arguments.refuse("features", features, expected)
    kinds = {(array.shape[1:], array.dtype) for array in arrays}
    if len(kinds) > 1:
        arguments.refuse("features", features, "rows of one shape and type")
    if not isinstance(name, str) or not name:
        arguments.refuse("name", name, "a text")
    store = store_of(kvstore)
    for layer in [] if listed else Replicas.all():
        if len(layer.contexts) > 1 and features.context in layer.contexts:
            expected = f"a list of one array for each of {layer.contexts}, because layers are there"
            arguments.refuse("features", features, expected)
    contexts = [array.context for array in arrays]
    rows = arrays[0]
    if len(arrays) > 1:
        # The backward of a copy overwrites the gradient of a variable with grad_req="add". That of identity adds.
        rows = nd.concat(*[nd.identity(array).as_in_context(contexts[0]) for array in arrays], dim=0)
    if store is not None and store.num_workers > 1:
        rows = _of_all_processes(rows, name, store)
    return [rows.as_in_context(context) for context in contexts] if listed else rows


_TYPES = (np.float16, np.float32, np.float64)


def _of_all_processes(own: nd.NDArray, name: str, store: ProcessStore) -> nd.NDArray:
    """Returns the rows of all processes, recorded so that their gradients are added."""
    title = f"gather {name!r}"
    if store.joins:
        raise mx.MXNetError(
            f"{title}: gather does not work within gluon_syncbn.join, because a process without a batch has no rows. "
            "Give all processes the same number of batches, and train without join."
        )
    if _native.tape_runs():
        raise mx.MXNetError(
            f"{title}: gather between processes does not work within a block of gluon_syncbn.recompute, which would "
            "exchange the rows twice. Call it on the output of the block."
        )
    this_round = store.next_round(title)
    everyone = store.exchange(this_round, [own.asnumpy()], equal=False)
    kinds = [f"rows of shape {rows.shape[1:]} and type {rows.dtype}" for rows in everyone]
    for rank, kind in enumerate(kinds):
        if kind != kinds[store.rank]:
            raise _native.StepError(
                f"{title}: rank {store.rank} came with {kinds[store.rank]}, rank {rank} with {kind}. "
                "All processes need rows of one shape and type."
            )
    whole = nd.array(np.concatenate(everyone), ctx=own.context, dtype=own.dtype)
    if not autograd.is_recording():
        return whole
    backwards, ends = itertools.count(1), np.cumsum([len(rows) for rows in everyone])[:-1]

    def backward(heads: List[nd.NDArray], gradients: List[nd.NDArray], requests: List[int]) -> None:
        of_ranks = np.split(heads[0].asnumpy().astype(np.float64), ends)
        what = f"backward {next(backwards)} of {this_round}"
        total, gradient = functools.reduce(np.add, store.exchange(what, of_ranks, equal=True)), gradients[0]
        if total.size and requests[0] != _native.NULL:
            gradient[:] = total + gradient.asnumpy() if requests[0] == _native.ADD else total

    _native.record_function(title, [own], [whole], backward)
    # A head gradient in oneDNN's layout would reach the backward as a copy that is freed too early; see op.py.
    return whole if whole.context.device_type == "gpu" else nd.SwapAxis(whole, dim1=0, dim2=0)

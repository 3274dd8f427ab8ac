"""Makes the parameters of a net the same on all devices of all processes."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, List, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter, ParameterDict

from ..exchange.store import ProcessStore
from ..mxnet_side import blocks
from ..system import arguments, kinds
from ..training.replicas import stores_of
from ..training.session import session


def broadcast_parameters(params: Any, kvstore: Any = None, root_rank: int = 0) -> None:
    """Gives every device of every process the parameters on the first context of rank ``root_rank``.

    Call it before the first step, in every process, with the same net. Then all start from the same weights and running
    statistics. Gluon's names may differ between processes. Within one process, all contexts get the parameters of the
    first.

    Parameters
    ----------
    params : gluon.Block, ParameterDict or dict
        A net, with all blocks that it holds, or the result of ``net.collect_params()``. Running statistics are
        included. The parameters must be initialised. If shapes are not known yet, predict with a batch first.
    kvstore : str or KVStore, optional
        A store of several processes, made by `gluon_syncbn.kvstore`, reaches the devices of all. Any other store
        reaches the devices of this process. By default the setting of `configure`, or the layers' own.
    root_rank : int
        The rank of the process whose parameters are broadcast.

    Raises
    ------
    ValueError
        If an argument is not as described above.
    MXNetError
        If another process does not come in time, or has another net.
    """
    given = _listed(params)
    store = store_of(kvstore, given)
    last = store.num_workers - 1 if store is not None else 0
    root_rank = arguments.whole("root_rank", root_rank, 0, last)
    check_values("params", given)
    mx.nd.waitall()  # a static graph does not tell MXNet that it writes running statistics
    if store is not None:
        _agree(store, given)
    for number, parameter in enumerate(given):
        array = parameter.list_data()[0]
        value = array.asnumpy()
        if store is not None:
            own = value.ravel()
            part = own if store.rank == root_rank else own[:0]
            value = store.allgather(f"parameter {number}", part, equal=False)[root_rank].reshape(value.shape)
        parameter.set_data(kinds.like(mx.nd.array(value, dtype=value.dtype), array))


def check_values(argument: str, parameters: Iterable[Parameter]) -> None:
    for parameter in parameters:
        if parameter._data is None:
            raise ValueError(
                f"{argument}: '{parameter.name}' without a value was given, expected initialised parameters: call "
                "initialize, and predict one batch if shapes are not known yet"
            )


def store_of(kvstore: Any, parameters: Iterable[Parameter]) -> Optional[ProcessStore]:
    """Returns the store that reaches the other processes of the job; None if there are none."""
    exchange = session.exchange_of(kvstore)
    if kvstore is not None:
        return exchange if isinstance(exchange, ProcessStore) else None
    stores = stores_of(parameters)
    if len(stores) > 1:
        arguments.refuse("kvstore", kvstore, f"one of the {len(stores)} KVStores of the layers")
    return stores[0] if stores else None


def _listed(params: Any) -> List[Parameter]:
    if isinstance(params, Block):
        found: Dict[int, Parameter] = {}
        for block in blocks.iterate(params):
            found.update((id(parameter), parameter) for parameter in block._reg_params.values())
        return list(found.values())
    values = list(params.values()) if isinstance(params, (dict, ParameterDict)) else []
    if not values or not all(isinstance(value, Parameter) for value in values):
        arguments.refuse("params", params, "a gluon.Block, or parameters as net.collect_params() gives them")
    return values


def _agree(store: ProcessStore, parameters: Iterable[Parameter]) -> None:
    """Raises MXNetError, in all processes, if their parameters differ."""
    ours = [(f"'{one.name}'", f"of shape {one.shape} and type {np.dtype(one.dtype).name}") for one in parameters]
    texts = store.allgather("the parameters' shapes", np.frombuffer(json.dumps(ours).encode(), np.uint8), equal=False)
    store.compare([json.loads(bytes(text)) for text in texts], "the parameters: number")

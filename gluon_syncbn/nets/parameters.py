"""Makes the parameters of a net the same on all devices of all processes."""

from __future__ import annotations

from typing import Any, Iterable, List

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter, ParameterDict

from ..mxnet_side import blocks
from ..system import arguments, kinds
from ..training.replicas import store_of


def broadcast_parameters(params: Any, kvstore: Any = None, root_rank: int = 0) -> None:
    """Gives every device of every process the parameters on the first context of rank ``root_rank``.

    Call it before the first step, in every process, with the same net. Then all start from the same weights and running
    statistics. Gluon's names may differ between processes. Within one process, all contexts get the parameters of the
    first. A net that a plain list hides, such as a teacher, is among the blocks of its net.

    ::

        # mpiexec -n 2 python train.py
        import gluon_syncbn
        from mxnet import gluon

        net = gluon.nn.Dense(2, in_units=3)
        net.initialize()
        gluon_syncbn.broadcast_parameters(net, gluon_syncbn.kvstore("mpi"))

    Parameters
    ----------
    params : gluon.Block, ParameterDict or dict
        A net, with all blocks that it holds, or the result of ``net.collect_params()``. Running statistics are
        included. The parameters must be initialised. If shapes are not known yet, predict with a batch first.
    kvstore : str or KVStore, optional
        A store of several processes, made by `gluon_syncbn.kvstore`, reaches the devices of all. Any other store
        reaches the devices of this process. By default the setting of `configure`, or the layers' own, or the only one.
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
    root_rank = arguments.whole("root_rank", root_rank, 0, 0 if store is None else store.num_workers - 1)
    await_values("params", given)
    if store is not None:  # all raise an error if they differ
        ours = [(f"'{one.name}'", f"of shape {one.shape} and type {np.dtype(one.dtype).name}") for one in given]
        store.compare(store.tell_all("the parameters' shapes", ours), "the parameters: number")
    for number, parameter in enumerate(given):
        array = parameter.list_data()[0]
        value = array.asnumpy()
        if store is not None:
            part = value if store.rank == root_rank else value[:0]
            value = store.allgather(f"parameter {number}", part, equal=False)[root_rank]
        # MXNet's `set_data` drops what an optimizer in a KVStore keeps.
        if any((one.asnumpy() != value).any() for one in parameter.list_data()):
            parameter.set_data(kinds.like(mx.nd.array(value, dtype=value.dtype), array))


def await_values(argument: str, parameters: Iterable[Parameter]) -> None:
    """ValueError if some have none."""
    for parameter in parameters:
        if parameter._data is None:
            raise ValueError(
                f"{argument}: '{parameter.name}' without a value was given, expected initialised parameters: call "
                "initialize, and predict one batch if shapes are not known yet"
            )
    mx.nd.waitall()  # a static graph does not tell MXNet that it writes running statistics


def _listed(params: Any) -> List[Parameter]:
    if isinstance(params, Block):
        return list(dict.fromkeys(one for block in blocks.iterate(params) for one in block._reg_params.values()))
    values = list(params.values()) if isinstance(params, (dict, ParameterDict)) else []
    if not values or not all(isinstance(value, Parameter) for value in values):
        arguments.refuse("params", params, "a gluon.Block, or parameters as net.collect_params() gives them")
    return values

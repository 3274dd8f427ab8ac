"""Provides GluonCV's `DataParallelModel` and `DataParallelCriterion` without their growth in memory.

With ``sync``, GluonCV's classes start a thread for each replica at every call. MXNet gives every thread that runs an
operator its own random states and temporary space, and never frees them. So a job grows by megabytes at each step.
The classes here start no thread: a call issues operators, and MXNet's engine runs the operators of all replicas side
by side.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon.utils import split_and_load

from .system import arguments, kinds

__all__ = [
    "DataParallelCriterion",
    "DataParallelModel",
    "criterion_parallel_apply",
    "parallel_apply",
    "parallel_backward",
]


class DataParallelModel:
    """A network on several contexts: each replica is called with its part of the batch.

    Parameters
    ----------
    module : gluon.Block
        The network, whose parameters are put on the contexts. Also any callable with its ``collect_params``.
    ctx_list : list of Context, optional
        One for each replica; those of a network without `SyncBatchNorm` may share one. By default the network is called
        as it is.
    sync : bool
        Whether a call waits for the outputs and raises errors of the forward.

    Inputs
        - ***args**, ****kwargs**: arrays are cut along axis 0, also within tuples, lists and dictionaries. Everything
          else goes to each replica as it is.

    Outputs
        - A tuple with the outputs of each replica, each a tuple.

    Raises
    ------
    ValueError
        At construction, where an argument is not as described above. At a call, where the batch has fewer samples than
        there are replicas. (With ``mx.util.np_shape(True)``, some get none.)
    """

    def __init__(self, module: Any, ctx_list: Optional[Sequence[mx.Context]] = None, sync: bool = False) -> None:
        if isinstance(module, type) or not callable(module) or not callable(getattr(module, "collect_params", None)):
            arguments.refuse("module", module, "a network: something that can be called and has collect_params")
        self.module = module
        self.ctx_list = None if ctx_list is None else arguments.contexts("ctx_list", ctx_list)
        self.sync = arguments.flag("sync", sync)
        module.collect_params().reset_ctx(ctx=self.ctx_list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.ctx_list:
            return self.module(*args, **kwargs)
        return parallel_apply(self.module, _parts(args, self.ctx_list), _parts(kwargs, self.ctx_list), self.sync)

    def __repr__(self) -> str:
        return f"DataParallel:\n module = {{{self.module!r}}}"


class DataParallelCriterion:
    """A loss on several contexts: gets each replica's outputs and the replica's part of the targets.

    Parameters
    ----------
    module : callable
        The loss. Its arguments are a replica's outputs, then the targets.
    ctx_list, sync
        As in `DataParallelModel`. By default the loss is called as it is.

    Inputs
        - **inputs**: the outputs of the `DataParallelModel`.
        - ***targets**, ****kwargs**: arrays, cut like the inputs of the `DataParallelModel`.

    Outputs
        - A tuple with the loss of each replica.

    Raises
    ------
    ValueError
        As from `DataParallelModel`.
    """

    def __init__(
        self, module: Callable[..., Any], ctx_list: Optional[Sequence[mx.Context]] = None, sync: bool = False
    ) -> None:
        _check_callable(module, "a loss")
        self.ctx_list = None if ctx_list is None else arguments.contexts("ctx_list", ctx_list)
        self.sync = arguments.flag("sync", sync)
        self.module = module

    def __call__(self, inputs: Any, *targets: Any, **kwargs: Any) -> Any:
        if not self.ctx_list:
            return self.module(inputs, *targets, **kwargs)
        if len(inputs) != len(self.ctx_list):
            arguments.refuse("inputs", f"{len(inputs)} of them", f"outputs of {len(self.ctx_list)} replicas")
        parts, named = _parts(targets, self.ctx_list), _parts(kwargs, self.ctx_list)
        if len(parts) == 1:
            return _as_tuple(self.module(*inputs[0], *parts[0], **named[0]))
        return criterion_parallel_apply(self.module, inputs, parts, named, self.sync)


def parallel_apply(
    module: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    kwargs_tup: Optional[Sequence[Dict[str, Any]]] = None,
    sync: bool = False,
) -> Tuple[Any, ...]:
    """Returns the outputs of each replica, each a tuple. The arguments are on the replicas' contexts already.

    Parameters
    ----------
    module : callable
        The network.
    inputs, kwargs_tup : sequences
        The positional and the named arguments of each replica.
    sync : bool
        Whether the call waits for the outputs and raises errors of the forward.

    Raises
    ------
    ValueError
        If an argument is not as described above, or ``kwargs_tup`` has another length than ``inputs``.
    """
    _check_callable(module, "a network")
    return _apply(lambda *args, **kwargs: _as_tuple(module(*args, **kwargs)), inputs, kwargs_tup, sync)


def criterion_parallel_apply(
    module: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    targets: Sequence[Sequence[Any]],
    kwargs_tup: Optional[Sequence[Dict[str, Any]]] = None,
    sync: bool = False,
) -> Tuple[Any, ...]:
    """Does what `parallel_apply` does, for a loss of a replica's inputs and targets. Returns the losses unchanged."""
    if len(targets) != len(inputs):
        arguments.refuse("targets", f"{len(targets)} of them", f"those of {len(inputs)} replicas")
    _check_callable(module, "a loss")
    return _apply(module, [(*outputs, *wanted) for outputs, wanted in zip(inputs, targets)], kwargs_tup, sync)


def parallel_backward(losses: Sequence[Any], sync: bool = True) -> None:
    """Runs the backward of each replica's loss, side by side. ``sync`` is GluonCV's argument and has no effect."""
    autograd.backward(list(losses))


def _check_callable(module: Any, what: str) -> None:
    if not callable(module):
        arguments.refuse("module", module, f"{what}: something that can be called")


def _parts(value: Any, contexts: List[mx.Context]) -> List[Any]:
    """Cuts the arrays in a value into the parts of the replicas."""
    arrays = kinds.arrays_of(value)
    samples = min(map(len, arrays), default=len(contexts))
    if samples < len(contexts) and not mx.util.is_np_shape():  # without it MXNet knows no empty array
        raise ValueError(
            f"batch: {samples} samples were given, expected at least {len(contexts)}, one for each replica; a "
            "DataLoader with last_batch='discard' or 'rollover' gives no short batch"
        )
    cut = {id(array): split_and_load(array, contexts, even_split=False) for array in arrays}

    def part(replica: int) -> Any:
        return kinds.map_arrays(lambda array: cut[id(array)][replica], value)

    return [part(replica) for replica in range(len(contexts))]


def _apply(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Optional[Sequence[Dict[str, Any]]], sync: bool
) -> Tuple[Any, ...]:
    """Calls it with the arguments of each replica."""
    kwargs, sync = kwargs or [{}] * len(args), arguments.flag("sync", sync)
    if len(kwargs) != len(args):
        arguments.refuse("kwargs_tup", f"{len(kwargs)} of them", f"those of {len(args)} replicas")
    outputs = tuple(call(*each, **named) for each, named in zip(args, kwargs))
    for array in kinds.arrays_of(outputs) if sync else ():
        array.wait_to_read()
    return outputs


def _as_tuple(outputs: Any) -> Any:
    if isinstance(outputs, mx.nd.NDArray):
        return (outputs,)
    return tuple(outputs) if isinstance(outputs, list) and outputs else outputs

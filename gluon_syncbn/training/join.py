"""Lets a process without further batches take part in the steps of the others, with an empty shard."""

from __future__ import annotations

from types import TracebackType
from typing import Any, List, Optional, Tuple, Type

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .. import _native
from ..exchange.store import ProcessStore
from ..system import arguments
from .session import session


class join:
    """Trains until every process of the job has used all of its batches. Their numbers may differ.

    ::

        # mpiexec -n 2 python train.py
        import gluon_syncbn
        import mxnet as mx
        from mxnet import autograd, gluon

        kv = gluon_syncbn.kvstore("mpi")
        gluon_syncbn.configure(kvstore=kv)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(8, in_units=4), gluon_syncbn.SyncBatchNorm(in_channels=8), gluon.nn.Dense(1, in_units=8))
        net.initialize()
        gluon_syncbn.broadcast_parameters(net)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
        loader = [mx.nd.random.normal(shape=(3, 4)) for _ in range(2 + kv.rank)]  # its length differs between processes
        with gluon_syncbn.join(net, trainer):
            for x in loader:
                with autograd.record():
                    loss = net(x).square()
                loss.backward()
                trainer.step(len(x))  # the samples of this process

    A process that leaves its loop early repeats its last call of the net in each step of the others. The process
    contributes no sample to the statistics and zeros to the gradients. The result equals that of one process with all
    batches, because layers of this package weight statistics by samples. All processes leave the block together.

    Within the block, ``trainer.step(n)`` takes the number of samples of this process. It divides the gradients by the
    samples of all processes. Each step costs two small messages. Plain BatchNorm in the net would see the repeated
    batch, so convert the net first. `contrastive.gather` raises an error within the block, because a process without a
    batch has no rows.

    Parameters
    ----------
    net : Block
        The network that each step calls, in every context of this process.
    trainer : gluon.Trainer
        With ``kvstore=gluon_syncbn.kvstore(...)``.

    Raises
    ------
    ValueError
        If an argument has another type.
    MXNetError
        At the end of the block, if this process never called the net, and others still train. If an exception leaves
        the block, the other processes end with an error that names this rank and the exception.
    """

    def __init__(self, net: gluon.Block, trainer: gluon.Trainer) -> None:
        if not isinstance(net, gluon.Block):
            arguments.refuse("net", net, "a gluon.Block")
        store = trainer._kvstore_params["kvstore"] if isinstance(trainer, gluon.Trainer) else None
        if not isinstance(store, ProcessStore):
            arguments.refuse("trainer", trainer, "a gluon.Trainer(..., kvstore=gluon_syncbn.kvstore(...))")
        self._net, self._trainer, self._store = net, trainer, store
        self._calls: List[Tuple[Any, ...]] = []  # of the net, in the step that goes on or was the last
        self._in_step = False

    def __enter__(self) -> join:
        self._hook = self._net.register_forward_pre_hook(self._called)
        self._step, self._trainer.step = self._trainer.step, self._stepped
        session.joins += 1
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            if error is not None:
                self._fail(error)
                return
            if self._in_step:
                arguments.refuse("trainer", self._trainer, "trainer.step(...) after the last call of the net")
            self._hook.detach()
            while self._others_train(False):
                self._step_without_samples()
        except BaseException as own:
            self._fail(own)
            raise
        finally:
            self._hook.detach()
            del self._trainer.step
            session.joins -= 1

    def _fail(self, error: BaseException) -> None:
        self._store.fail(f"rank {self._store.rank} left gluon_syncbn.join with {type(error).__name__}: {error}")

    def _called(self, net: gluon.Block, inputs: Tuple[Any, ...]) -> None:
        if not autograd.is_training():
            return
        if not self._in_step:
            self._calls, self._in_step = [], True
            self._others_train(True)
        self._calls.append(inputs)

    def _stepped(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        samples = arguments.whole("batch_size", batch_size, 0, 2**53)
        parts = self._store.allgather("samples of a step", np.array([samples], np.int64))
        self._step(int(np.sum(parts)), ignore_stale_grad)
        self._in_step = False

    def _others_train(self, this_one: bool) -> bool:
        """Whether any process begins a step now."""
        parts = self._store.allgather("processes with a batch", np.array([this_one], np.int64))
        return bool(np.sum(parts))

    def _step_without_samples(self) -> None:
        if not self._calls:
            raise mx.MXNetError(
                f"rank {self._store.rank} never called the net within gluon_syncbn.join, so it cannot take part in the "
                "steps of the others. Give each process at least one batch."
            )
        mx.nd.waitall()
        _native.out_of_batches(True)
        try:
            with autograd.record():
                outputs = [array for call in self._calls for array in _arrays(self._net(*call))]
            autograd.backward(outputs, [mx.nd.zeros_like(array) for array in outputs])
            mx.nd.waitall()
        finally:
            _native.out_of_batches(False)
        for parameter in self._net.collect_params().values():
            parameter.zero_grad()
        self._stepped(0, True)


def _arrays(outputs: Any) -> List[mx.nd.NDArray]:
    if isinstance(outputs, (list, tuple)):
        return [array for part in outputs for array in _arrays(part)]
    return [outputs]

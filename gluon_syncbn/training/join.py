"""Lets a process without further batches take part in the steps of the others, with an empty shard."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from .. import _native
from ..exchange.store import ProcessStore
from ..system import arguments, kinds
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

    Within the block, ``trainer.step(n)`` takes the number of samples of this process, not of all as elsewhere. It
    divides the gradients by the samples of all processes. Each step costs two small messages. To clip the sums of
    gradients, do so in the ``step`` of a subclass of ``gluon.Trainer``, which all processes call. Plain BatchNorm in
    the net would see the repeated batch, so convert the net first. `contrastive.gather` raises an error within the
    block, because a process without a batch has no rows.

    Parameters
    ----------
    net : Block
        The network that each step calls, in every context of this process.
    trainer : gluon.Trainer
        With ``kvstore=gluon_syncbn.kvstore(...)``.

    Raises
    ------
    ValueError
        If an argument has another type, or ``trainer.step`` gets the samples of all processes.
    MXNetError
        If ``allreduce_grads`` or ``update`` is called outside of ``step``. At the end of the block, if this process
        never called the net, and others still train. If an exception leaves the block, the other processes end with an
        error that names this rank and the exception.
    """

    def __init__(self, net: gluon.Block, trainer: gluon.Trainer) -> None:
        self._net = arguments.block("net", net)
        self._store: Any = trainer._kvstore_params["kvstore"] if isinstance(trainer, gluon.Trainer) else None
        if not isinstance(self._store, ProcessStore):
            arguments.refuse("trainer", trainer, "a gluon.Trainer(..., kvstore=gluon_syncbn.kvstore(...))")
        self._trainer, self._take = trainer, trainer.step
        self._calls: List[Tuple[Any, ...]] = []  # of the net, in the step that goes on or was the last
        self._unused: List[mx.nd.NDArray] = []  # parameters that got no gradient in the last step
        self._is_open = False
        self.in_step = False  # of the Trainer

    def __enter__(self) -> None:
        self._own = vars(self._trainer).get("step")  # which may be the user's
        self._hook = self._net.register_forward_pre_hook(self._call)
        self._trainer.step = self._step
        session.trainers(self._trainer).joined = self
        self._store.joins += 1

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        try:
            self._hook.detach()
            if error is None:
                self._follow()
        except BaseException as other:
            error = other
            raise
        finally:
            if error is not None:
                self._store.fail(f"rank {self._store.rank} left gluon_syncbn.join with {type(error).__name__}: {error}")
            session.trainers(self._trainer).joined = None
            trainer = vars(self._trainer)
            if trainer.get("step") == self._step:
                del trainer["step"]
                if self._own is not None:
                    trainer["step"] = self._own
            self._store.joins -= 1

    def _call(self, net: gluon.Block, inputs: Tuple[Any, ...]) -> None:
        if not autograd.is_training():
            return
        if not self._is_open:
            self._calls.clear()
            self._is_open = True
            self._store.tell_all("whether there is a batch", True)
        self._calls.append(inputs)

    def _step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        if session.trainers(self._trainer).joined is None:  # a wrapper that was made within the block calls this still
            self._take(batch_size, ignore_stale_grad)
            return
        trained = [array for p in self._trainer._params if p.grad_req != "null" for array in p.list_data()]
        self._unused = [array for array in trained if not array._fresh_grad]
        samples = arguments.whole("batch_size", batch_size, 0, 2**53)
        if samples and _are_of_all(samples, self._calls, self._store.num_workers):
            arguments.refuse("batch_size", samples, "the samples of this process within gluon_syncbn.join, not of all")
        total = sum(self._store.tell_all("the samples of a step", samples))
        self.in_step = True
        self._take(total, ignore_stale_grad)
        self._is_open = self.in_step = False

    def _follow(self) -> None:
        """Takes part in the steps of the others, until no process has a batch."""
        if self._is_open:
            arguments.refuse("trainer", self._trainer, "trainer.step(...) after the last call of the net")
        while any(self._store.tell_all("whether there is a batch", False)):
            if not self._calls:
                raise mx.MXNetError(
                    f"rank {self._store.rank} never called the net within gluon_syncbn.join, so it cannot take part in "
                    "the steps of the others. Give each process at least one batch."
                )
            _repeat_without_samples(self._net, self._calls)
            for array in self._unused:
                array._fresh_grad = False
            self._step(0, True)


def _are_of_all(samples: int, calls: List[Tuple[Any, ...]], processes: int) -> bool:
    """Whether this process has an equal share of so many samples, and not all, in its calls of the net. A batch of
    images is along the first dimension, one of sequences also along the second. A program may count words, or the
    images of videos. Each call may have samples of its own, or another view of the same.
    """
    given = [arrays[0] for arrays in map(kinds.arrays_of, calls) if arrays]
    on_each = list({array.context: array for array in given}.values())
    own = {sum(len(x) for x in xs if x.ndim) for xs in (given, on_each)}
    own |= {sum(x.shape[1] for x in xs if 1 < x.ndim < 4) for xs in (given, on_each)}
    own |= {sum(x.shape[0] * x.shape[1] for x in xs if 1 < x.ndim != 4) for xs in (given, on_each)}
    return samples not in own and samples / processes in own


def _repeat_without_samples(net: gluon.Block, calls: List[Tuple[Any, ...]]) -> None:
    mx.nd.waitall()
    _native.out_of_batches(True)
    try:
        with autograd.record():
            outputs = [array for call in calls for array in kinds.arrays_of(net(*call))]
        autograd.backward(outputs, [mx.nd.zeros_like(array) for array in outputs])
        mx.nd.waitall()
    finally:
        _native.out_of_batches(False)
    for parameter in net.collect_params().values():
        parameter.zero_grad()

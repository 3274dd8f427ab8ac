"""Lets a process without further batches take part in the steps of the others, with an empty shard."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from .. import _native
from ..exchange.store import ProcessStore
from ..system import arguments, kinds

_PARTS = ("allreduce_grads", "update")  # of a step


@contextmanager
def join(net: gluon.Block, trainer: gluon.Trainer) -> Iterator[None]:
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
    arguments.block("net", net)
    store: Any = trainer._kvstore_params["kvstore"] if isinstance(trainer, gluon.Trainer) else None
    if not isinstance(store, ProcessStore):
        arguments.refuse("trainer", trainer, "a gluon.Trainer(..., kvstore=gluon_syncbn.kvstore(...))")
    steps = _Steps(trainer, store)
    hook = net.register_forward_pre_hook(steps.call)
    own = {name: vars(trainer).get(name) for name in ("step", *_PARTS)}  # which may be the user's
    ours = {"step": steps.step, **{name: steps.part(name, getattr(trainer, name)) for name in _PARTS}}
    vars(trainer).update(ours)
    store.joins += 1
    try:
        yield
        hook.detach()
        steps.follow(net)
    except BaseException as error:
        store.fail(f"rank {store.rank} left gluon_syncbn.join with {type(error).__name__}: {error}")
        raise
    finally:
        hook.detach()
        steps.ended = True
        for name in ours:
            if vars(trainer).get(name) is ours[name]:
                del vars(trainer)[name]
                if own[name] is not None:
                    setattr(trainer, name, own[name])
        store.joins -= 1


class _Steps:
    """The steps of this process within a block. Its methods take the places of those of the Trainer."""

    def __init__(self, trainer: gluon.Trainer, store: ProcessStore) -> None:
        self.trainer, self.store, self.take = trainer, store, trainer.step
        self.calls: List[Tuple[Any, ...]] = []  # of the net, in the step that goes on or was the last
        self.unused: List[mx.nd.NDArray] = []  # parameters that got no gradient in the last step
        self.is_open = self.in_update = False
        self.ended = False  # the block: a wrapper that was made within it calls the methods still

    def call(self, net: gluon.Block, inputs: Tuple[Any, ...]) -> None:
        if not autograd.is_training():
            return
        if not self.is_open:
            self.calls.clear()
            self.is_open = True
            self.store.tell_all("whether there is a batch", True)
        self.calls.append(inputs)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        if self.ended:
            self.take(batch_size, ignore_stale_grad)
            return
        trained = [array for p in self.trainer._params if p.grad_req != "null" for array in p.list_data()]
        self.unused = [array for array in trained if not array._fresh_grad]
        samples = arguments.whole("batch_size", batch_size, 0, 2**53)
        if samples and _are_of_all(samples, self.calls, self.store.num_workers):
            arguments.refuse("batch_size", samples, "the samples of this process within gluon_syncbn.join, not of all")
        total = sum(self.store.tell_all("the samples of a step", samples))
        self.in_update = True
        self.take(total, ignore_stale_grad)
        self.is_open = self.in_update = False

    def part(self, name: str, method: Callable[..., None]) -> Callable[..., None]:
        def part(*args: Any, **kwargs: Any) -> None:
            if not (self.in_update or self.ended):
                raise mx.MXNetError(
                    f"trainer.{name} was called within gluon_syncbn.join, where a process without a batch calls "
                    "trainer.step alone, and would not do what comes between the parts of a step. Do it in the step of "
                    "a subclass of gluon.Trainer."
                )
            method(*args, **kwargs)

        return part

    def follow(self, net: gluon.Block) -> None:
        """Takes part in the steps of the others, until no process has a batch."""
        if self.is_open:
            arguments.refuse("trainer", self.trainer, "trainer.step(...) after the last call of the net")
        while any(self.store.tell_all("whether there is a batch", False)):
            if not self.calls:
                raise mx.MXNetError(
                    f"rank {self.store.rank} never called the net within gluon_syncbn.join, so it cannot take part in "
                    "the steps of the others. Give each process at least one batch."
                )
            _repeat_without_samples(net, self.calls)
            for array in self.unused:
                array._fresh_grad = False
            self.step(0, True)


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

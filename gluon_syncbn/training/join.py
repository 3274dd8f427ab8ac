"""Lets a process without further batches take part in the steps of the others, with an empty shard."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from .. import _native
from ..exchange.store import ProcessStore
from ..system import arguments, kinds


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
    arguments.block("net", net)
    store: Any = trainer._kvstore_params["kvstore"] if isinstance(trainer, gluon.Trainer) else None
    if not isinstance(store, ProcessStore):
        arguments.refuse("trainer", trainer, "a gluon.Trainer(..., kvstore=gluon_syncbn.kvstore(...))")
    calls: List[Tuple[Any, ...]] = []  # of the net, in the step that goes on or was the last
    unused: List[mx.nd.NDArray] = []  # parameters that got no gradient in the last step
    in_step, ended, own_step = False, False, vars(trainer).get("step")  # which may be the user's

    def call(net: gluon.Block, inputs: Tuple[Any, ...]) -> None:
        nonlocal in_step
        if not autograd.is_training():
            return
        if not in_step:
            calls.clear()
            in_step = True
            store.tell_all("whether there is a batch", True)
        calls.append(inputs)

    def step(batch_size: int, ignore_stale_grad: bool = False) -> None:
        nonlocal in_step
        if ended:  # a wrapper that was made within the block calls it still
            take_step(batch_size, ignore_stale_grad)
            return
        trained = [array for p in trainer._params if p.grad_req != "null" for array in p.list_data()]
        unused[:] = [array for array in trained if not array._fresh_grad]
        samples = arguments.whole("batch_size", batch_size, 0, 2**53)
        take_step(sum(store.tell_all("the samples of a step", samples)), ignore_stale_grad)
        in_step = False

    hook = net.register_forward_pre_hook(call)
    take_step, trainer.step = trainer.step, step
    store.joins += 1
    try:
        yield
        if in_step:
            arguments.refuse("trainer", trainer, "trainer.step(...) after the last call of the net")
        hook.detach()
        while any(store.tell_all("whether there is a batch", False)):
            if not calls:
                raise mx.MXNetError(
                    f"rank {store.rank} never called the net within gluon_syncbn.join, so it cannot take part in the "
                    "steps of the others. Give each process at least one batch."
                )
            _repeat_without_samples(net, calls)
            for array in unused:
                array._fresh_grad = False
            step(0, True)
    except BaseException as error:
        store.fail(f"rank {store.rank} left gluon_syncbn.join with {type(error).__name__}: {error}")
        raise
    finally:
        hook.detach()
        ended = True
        if trainer.step is step:
            del trainer.step
            if own_step is not None:
                trainer.step = own_step
        store.joins -= 1


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

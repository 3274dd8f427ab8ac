"""What one process of a job does that is about Horovod alone, or about how it begins."""

import os
import sys
import threading
import time

import numpy as np
from reports import report

import gluon_syncbn


def beside_distributed_trainer():
    """Horovod's own Trainer adds the gradients: three steps against one process with the whole batch."""
    contexts = gluon_syncbn.cpu_devices(1)
    import horovod.mxnet as hvd
    import mxnet as mx
    from mxnet import autograd, gluon, nd
    from mxnet.gluon import nn

    kv = gluon_syncbn.kvstore("horovod")

    def make(norm, **settings):
        net = nn.HybridSequential()
        for _ in range(3):
            net.add(nn.Conv2D(6, 3, padding=1, in_channels=6), norm(in_channels=6, **settings), nn.Activation("tanh"))
        net.add(nn.Dense(4, in_units=6 * 16))
        net.initialize(ctx=contexts)
        values = np.random.RandomState(7 + (hvd.rank() if settings else 0))
        for p in net.collect_params().values():
            if p.grad_req != "null":
                p.set_data(nd.array(values.randn(*p.shape) * 0.2 + (p.name.endswith("gamma"))))
        net.cast("float64")
        return net

    net, plain = make(gluon_syncbn.SyncBatchNorm, kvstore=kv), make(nn.BatchNorm)
    hvd.broadcast_parameters(net.collect_params())
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", settings)
    alone = gluon.Trainer(plain.collect_params(), "sgd", settings, kvstore=None)
    rng = np.random.RandomState(2)
    for _ in range(3):
        x, head = rng.randn(8, 6, 4, 4), rng.randn(8, 4)
        x[4:] *= 3
        mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        for model, part, samples, update in ((net, mine, 4, trainer), (plain, slice(None), 8, alone)):
            with autograd.record():
                y = model(nd.array(x[part], dtype="float64"))
            y.backward(nd.array(head[part], dtype="float64"))
            update.step(samples)
    mx.nd.waitall()
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        got, want = p.data().asnumpy(), q.data().asnumpy()
        assert np.abs(got - want).max() < 1e-10 * max(1, np.abs(want).max()), p.name


def initialised_by_the_script():
    import horovod.mxnet as hvd

    hvd.init()
    import mxnet as mx

    made = []
    thread = threading.Thread(target=lambda: made.append(gluon_syncbn.kvstore("horovod")))
    thread.start()
    thread.join()
    kv = made[0]
    assert (kv.rank, kv.num_workers) == (hvd.rank(), 2)
    total = mx.nd.full((3,), kv.rank + 1)
    kv.pushpull("x", total)
    assert total.asnumpy().tolist() == [3, 3, 3]


def large_sums():
    """Added up in the order of the ranks, whatever their size."""
    import mxnet as mx

    from gluon_syncbn.exchange import store

    if "MACHINES" in os.environ:  # those of the ranks
        store._machine = lambda: os.environ["MACHINES"][int(os.environ["HOROVOD_RANK"])]
    kv = gluon_syncbn.kvstore("horovod")
    assert repr(kv).endswith("; gradients: horovod>") or len(kv.machines) == 1, kv
    added, add = [], kv._transport._add
    kv._transport._add = lambda message: added.append(message) or add(message)

    for size in (1, 1000, 33_000, 500_003):
        parts = [np.random.RandomState(rank).randn(size, 2) * 10**rank for rank in range(kv.num_workers)]
        total = mx.nd.array(parts[kv.rank], dtype="float64")
        kv.pushpull(size, total)
        assert (total.asnumpy() == parts[0] + parts[1] + parts[2]).all()
    assert len(added) > 16  # pieces of the largest, which Horovod has added


def fault_in_a_sum(fault):
    """While Horovod adds."""
    import mxnet as mx

    kv = gluon_syncbn.kvstore("horovod")
    total = mx.nd.ones(100_000)
    kv.pushpull("all come", total)
    assert (total.asnumpy() == kv.num_workers).all()
    gluon_syncbn.configure(timeout=3 if fault in ("late", "stuck") else 60)
    start = time.monotonic()
    if kv.rank == 1:
        if fault == "late":
            time.sleep(60)
        elif fault == "killed":
            os.kill(os.getpid(), 9)
        elif fault == "ends":
            return
        elif fault == "without Horovod":
            kv._transport._hvd.shutdown()
        else:
            kv._transport._hvd.alltoall = {"stuck": lambda *_, **__: time.sleep(60), "raises": "a text"}[fault]
    try:
        kv.pushpull("not all come", total)
        mx.nd.waitall()
    except mx.MXNetError as error:
        report(kv.rank, start, error)
        raise SystemExit(3) from None


def another_thread():
    import mxnet as mx

    errors = []

    def create():
        try:
            gluon_syncbn.kvstore("horovod")
        except mx.MXNetError as error:
            errors.append(str(error))

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert "initialised on the main thread" in errors[0]
    kv = gluon_syncbn.kvstore("horovod")
    value = mx.nd.ones(2)
    kv.pushpull(0, value)
    kv.broadcast(1, value, out=value)
    assert (kv.rank, kv.num_workers, value.asnumpy().tolist()) == (0, 1, [1, 1])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print(f"OK {os.environ['HOROVOD_RANK']}", flush=True)

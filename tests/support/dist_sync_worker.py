"""What one of two workers of MXNet's own cluster does, or one of two processes of MPI with a Trainer of Horovod's."""

import os
import signal
import sys
import threading
import time

import light  # noqa: F401
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from ranks import leave, raises

import gluon_syncbn

HOROVOD = sys.argv[2] == "horovod"  # whose Trainer has one context for each process
SIZES = [3, 5] if HOROVOD else [3, 5, 2, 4]  # of the shards of all contexts
SETTINGS = {"learning_rate": 0.1, "momentum": 0.9}
contexts = gluon_syncbn.cpu_devices(len(SIZES) // 2)


class Twice(gluon.HybridBlock):
    """Calls a layer twice in a step, in this order."""

    def __init__(self, norm, **settings):
        super().__init__()
        self.norm, self.last = norm(in_channels=3, **settings), nn.Dense(2, in_units=6)

    def hybrid_forward(self, F, x):
        first = self.norm(x)
        return self.last(F.concat(F.tanh(first), self.norm(x * x + 0 * first), dim=1))


def made(norm, ctx, seed, **settings):
    net = Twice(norm, **settings)
    net.initialize(ctx=ctx)
    values = np.random.RandomState(seed)
    for p in net.collect_params().values():
        if p.grad_req != "null":
            p.set_data(nd.array(values.randn(*p.shape) * 0.3 + ("gamma" in p.name)))
    return net


class Job:
    def __init__(self, way):
        if HOROVOD:
            import horovod.mxnet as hvd

            self.net = made(gluon_syncbn.SyncBatchNorm, contexts, 7, kvstore="mpi")
            hvd.init()
            self.rank, self.trainer = hvd.rank(), hvd.DistributedTrainer(self.net.collect_params(), "sgd", SETTINGS)
            return
        self.store = mx.kv.create("dist_device_sync") if way == "object" else way
        self.net = made(gluon_syncbn.SyncBatchNorm, contexts, 7, kvstore=self.store)
        settings = {"kvstore": self.store, "update_on_kvstore": False}
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", SETTINGS, **settings)
        self.rank = self.trainer._kvstore_params["kvstore"].rank

    def backward(self, xs, heads):
        mine = [len(contexts) * self.rank + i for i in range(len(contexts))]
        with autograd.record():
            ys = [self.net(nd.array(xs[i], ctx=ctx)) for i, ctx in zip(mine, contexts)]
        autograd.backward(ys, [nd.array(heads[i], ctx=ctx) for i, ctx in zip(mine, contexts)])


def batches(count):
    values = np.random.RandomState(3)
    for _ in range(count):
        yield [values.randn(n, 3) * (1 + i) + i for i, n in enumerate(SIZES)], [values.randn(n, 2) for n in SIZES]


def equals_one_device(job):
    """Eager, and then as a graph."""
    plain = made(nn.BatchNorm, [mx.cpu()], 7)
    alone = gluon.Trainer(plain.collect_params(), "sgd", SETTINGS, kvstore=None)
    mean, variance = np.zeros(3), np.ones(3)  # plain BatchNorm updates them in the order of the backwards
    for step, (xs, heads) in enumerate(batches(6)):
        if step == 3:
            job.net.hybridize(static_alloc=True, static_shape=True)
        x = np.concatenate(xs)
        for values in (x, x * x):
            mean, variance = 0.9 * mean + 0.1 * values.mean(0), 0.9 * variance + 0.1 * values.var(0)
        job.backward(xs, heads)
        job.trainer.step(sum(SIZES) / (2 if HOROVOD else 1))  # Horovod's takes the mean of a process
        with autograd.record():
            y = plain(nd.array(x))
        y.backward(nd.array(np.concatenate(heads)))
        alone.step(sum(SIZES))
        mx.nd.waitall()
        for p, q in zip(job.net.collect_params().values(), plain.collect_params().values()):
            of_running = {"mean": mean, "_var": variance}.get(p.name[-4:])
            want = q.data().asnumpy() if of_running is None else of_running
            for array in p.list_data():
                assert np.abs(array.asnumpy() - want).max() < 1e-5 * max(1, np.abs(want).max()), p.name
    running = [
        p.data(contexts[-1]).asnumpy().tobytes().hex() for p in (job.net.norm.running_mean, job.net.norm.running_var)
    ]
    print(f"running {'-'.join(running)}", flush=True)


def rows_arrive(job):
    """As they are."""
    exchange, found = job.net.norm._replicas.exchange, {}
    rank = exchange.rank

    def call(number):
        row = np.array([[rank + 10.0 * number, np.nan, -0.0, 1e-310]])
        found[number] = exchange.add("", row, 20, (0, -1, 100 + number, 0))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    for number, rows in found.items():
        assert rows[:, 0].tolist() == [10 * number, 1 + 10 * number]
        assert (np.signbit(rows[:, 2]) & (rows[:, 3] == 1e-310) & np.isnan(rows[:, 1])).all()
    assert len(found) == 3


def fault(job, kind):
    gluon_syncbn.configure(timeout=4 if kind == "other net" else 60)  # seconds, of a first step on a busy machine
    start = time.monotonic()
    try:
        for step, (xs, heads) in enumerate(batches(3)):
            if step == 1 and kind != "killed at the end":
                gluon_syncbn.configure(timeout=4)
            if kind == "other net" and job.rank == 1:
                job.net.norm = gluon_syncbn.SyncBatchNorm(in_channels=3, momentum=0.5, kvstore=job.store)
                job.net.norm.initialize(ctx=contexts)
            if step == 1 and job.rank == 1:
                if kind == "skips":
                    continue
                if kind == "another order":
                    job.net.norm._replicas.exchange.add("", np.ones((1, 7)), 4, (0, -1, 9, 0))
                if kind == "hangs":
                    leave(job.rank, "hangs")
                    time.sleep(600)
            start = time.monotonic()
            if step == 1 and job.rank == 1 and kind == "raises":
                with autograd.record():
                    raise OSError("of the script")
            job.backward(xs, heads)
            if not (step == 1 and job.rank == 1 and kind == "no step"):
                job.trainer.step(sum(SIZES))
            mx.nd.waitall()
        gluon_syncbn.configure(timeout=4)
        if kind == "killed at the end" and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    except (mx.MXNetError, gluon_syncbn.StepError) as error:
        leave(job.rank, f"FAILED rank {job.rank} after {time.monotonic() - start:.1f} s: {error}\n")
        raise SystemExit(3) from None


def refuses(job):
    for value in (True, None):
        with raises(ValueError, r"update_on_kvstore: .*the servers' optimizer would run on the statistics"):
            gluon.Trainer(job.net.collect_params(), "sgd", kvstore=job.store, update_on_kvstore=value)
    for call in (
        lambda: gluon_syncbn.SyncBatchNorm(kvstore=job.store, group_size=2),
        lambda: gluon_syncbn.SyncBatchNorm(kvstore=job.store, mode="shuffle"),
        lambda: gluon_syncbn.broadcast_parameters(job.net),
        lambda: gluon_syncbn.contrastive.gather(nd.ones((2, 2)), kvstore=job.store),
        lambda: gluon_syncbn.kvstore("dist_sync"),
    ):
        with raises(ValueError, "'mpi'"):
            call()


if __name__ == "__main__":
    scenarios, of_store, *rest = sys.argv[1:]
    made_once = Job(of_store)
    for scenario in scenarios.split("+"):
        globals()[scenario](made_once, *rest)
    print(f"OK {made_once.rank}", flush=True)

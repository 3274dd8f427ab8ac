"""One process of a job in which a rank leaves out an exchange, repeats it, or makes it before another one.

``exchanges_worker.py FILE``: in each case of the list in this file of JSON, all ranks make calls with a store of its
own. Each rank leaves a line of JSON with what it got.
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import light  # noqa: F401
import numpy as np

import gluon_syncbn

CONTEXT = gluon_syncbn.cpu_devices(1)[0]

import mxnet as mx  # noqa: E402
from exchanges import EXCHANGES, LIMIT, SIGNALS  # noqa: E402
from moments import moments  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from ranks import leave, meet  # noqa: E402

from gluon_syncbn import contrastive  # noqa: E402
from gluon_syncbn.training.session import session  # noqa: E402

earlier = []  # stores
HANGS = 60  # seconds, of a case; then this process ends with the lines where its threads are


class Calls:
    """What each method gives is known: of the k-th call in each rank, whatever is called between."""

    def __init__(self, kv):
        self.kv, self.counts = kv, dict.fromkeys([*EXCHANGES, "backward", "raises"], 0)
        names = "first", "second", "third", "fourth"
        self.nets = [nn.Dense(1, use_bias=False, in_units=3, prefix=f"{name}_") for name in names]
        for net in self.nets:
            net.initialize(mx.init.One(), ctx=CONTEXT)
            net.cast("float64")
        self.trainers = [self.trainer_of(net) for net in self.nets]
        self.layers = [gluon_syncbn.SyncBatchNorm(in_channels=2, prefix=f"{name}_") for name in ("norm", "another")]
        self.parts = nn.HybridSequential(), nn.HybridSequential()
        self.parts[0].add(nn.Dense(2, in_units=1))
        self.parts[1].add(gluon_syncbn.SyncBatchNorm(in_channels=2, mode="local"), nn.BatchNorm(in_channels=2))
        for block in (*self.layers, *self.parts):
            block.initialize(ctx=CONTEXT)
            block.cast("float64")
        # Their first steps are to come. What a rank leaves out does not number the next one otherwise.
        self.fresh = [self.trainer_of(net) for net in self.nets[:1] * 24]
        self.states = str(Path(tempfile.mkdtemp("", ".", Path(sys.argv[1]).parent), "states"))
        self.nets[0](nd.ones((1, 3), dtype="float64"))
        gluon.Trainer(self.nets[0].collect_params(), "sgd", kvstore=None).save_states(self.states)

    def trainer_of(self, net):
        return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, kvstore=self.kv)

    def __call__(self, name):
        self.counts[name] += 1
        getattr(self, name)(self.counts[name])

    def value(self, k, rank=None):
        return 10.0 * k + (self.kv.rank if rank is None else rank) + 1

    def of_all(self, k):
        return [self.value(k, rank) for rank in range(self.kv.num_workers)]

    def end(self):
        """All that is under way ends, and is right."""
        nd.waitall()
        for net, name in zip(self.nets, ("step", "step_unread", "update")):
            want = 1 - sum(sum(self.of_all(k + 1)) for k in range(self.counts[name]))
            got = net.weight.data().asnumpy()
            assert (got == want).all(), (name, got, want)

    def raises(self, _):
        with autograd.record():
            raise OSError("the disk is full")

    # ---- a Trainer

    def backward(self, k, number=2):
        x = nd.full((1, 3), self.value(k), dtype="float64")
        if number < 2:  # as of a GAN: without a read, the gradients of each wait for the sums of the other
            x = x + 0 * self.nets[1 - number].weight.data()
        with autograd.record():
            y = self.nets[number](x)
        y.backward()

    def step(self, k):
        self.step_unread(k, 0)
        self.nets[0].weight.data().asnumpy()

    def step_unread(self, k, number=1):
        self.backward(k, number)
        self.trainers[number].step(1)

    def allreduce_grads(self, k):
        self.trainers[2].allreduce_grads()

    def update(self, k):
        self.trainers[2].update(1)

    def save_states(self, k):
        self.fresh[2 * k].save_states(self.states + " saved")

    def load_states(self, k):
        self.fresh[2 * k + 1].load_states(self.states)

    def join(self, k):
        net, trainer = self.nets[3], self.trainers[3]
        before = net.weight.data().asnumpy()
        with gluon_syncbn.join(net, trainer):
            for _ in range(1 + self.kv.rank):
                self.backward(k, 3)
                trainer.step(1)
        moved = before - net.weight.data().asnumpy()
        steps = range(self.kv.num_workers)  # of which the ranks from n on take part in that of n, with a sample each
        want = sum(np.mean(self.of_all(k)[n:]) for n in steps)
        assert np.allclose(moved, want, rtol=1e-6), (moved, want)

    # ---- a store

    def allgather(self, k):
        got = self.kv.allgather("an array", np.full(2, self.value(k)))
        assert [part.tolist() for part in got] == [[value] * 2 for value in self.of_all(k)]

    def pushpull(self, k):
        total = nd.full((3,), self.value(k))
        self.kv.pushpull("a sum", total)
        assert (total.asnumpy() == sum(self.of_all(k))).all()

    def broadcast(self, k):
        out = nd.zeros((3,))
        self.kv.broadcast("a value", nd.full((3,), self.value(k)), out=out)
        assert (out.asnumpy() == self.value(k, 0)).all()

    def gather(self, k):
        x = nd.full((1, 2), self.value(k))
        x.attach_grad()
        with autograd.record():
            rows = contrastive.gather(x, name="some rows")
        rows.backward(nd.full(rows.shape, self.value(k)))
        assert rows.asnumpy().tolist() == [[value] * 2 for value in self.of_all(k)]
        assert (x.grad.asnumpy() == sum(self.of_all(k))).all()

    # ---- nets

    def layer(self, k):
        self.layer_unread(k, 0)[0].asnumpy()

    def layer_unread(self, k, number=1):
        layer, everyone = self.layers[number], [self.batch(k, rank) for rank in range(self.kv.num_workers)]
        x = nd.array(everyone[self.kv.rank], dtype="float64")
        x.attach_grad()
        with autograd.record():
            y = layer(x)
        y.backward(x)
        if number == 0:
            mean, var, _ = moments(everyone)
            want = (everyone[self.kv.rank] - mean) / np.sqrt(var + 1e-5)
            assert np.allclose(y.asnumpy(), want, rtol=1e-9, atol=1e-9)
        return x.grad, y

    def batch(self, k, rank):
        return np.random.RandomState(10 * k + rank).randn(2 + rank, 2) + rank

    def broadcast_parameters(self, k):
        net = self.parts[0]
        for parameter in net.collect_params().values():
            parameter.set_data(nd.full(parameter.shape, self.value(k)))
        gluon_syncbn.broadcast_parameters(net, kvstore=self.kv)
        assert all((p.data().asnumpy() == self.value(k, 0)).all() for p in net.collect_params().values())

    def average_running_stats(self, k):
        """By the store that is the default. The variances are those of all within, and of the means."""
        net, values = self.parts[1], self.of_all(k)
        for sign, layer in zip((1, -1), net):
            layer.running_mean.set_data(nd.full((2,), sign * self.value(k)))
            layer.running_var.set_data(nd.full((2,), self.value(k)))
        gluon_syncbn.average_running_stats(net)
        mean = np.mean(values)
        var = np.mean(values + (values - mean) ** 2)
        for sign, layer in zip((1, -1), net):
            assert np.allclose(layer.running_mean.data().asnumpy(), sign * mean, rtol=1e-6)
            assert np.allclose(layer.running_var.data().asnumpy(), var, rtol=1e-6)

    def update_bn_stats(self, k):
        net, everyone = self.parts[1], [self.batch(k, rank) for rank in range(self.kv.num_workers)]
        gluon_syncbn.update_bn_stats(net, [[nd.array(everyone[self.kv.rank], dtype="float64")]], kvstore=self.kv)
        for got, want in zip((net[0].running_mean, net[0].running_var), moments(everyone)):
            assert np.allclose(got.data().asnumpy(), want, rtol=1e-5)


def run(case):
    earlier.extend(session.stores)
    kv = meet()
    gluon_syncbn.configure(kvstore=kv)
    calls = Calls(kv)
    if case["when"] == "later":
        for one in dict.fromkeys(case["calls"]):
            calls(one)
        nd.waitall()
    kv.allgather("all are ready", np.ones(1))
    gluon_syncbn.configure(timeout=LIMIT)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    start, problem, is_faulty = time.monotonic(), "", kv.rank == case["rank"]
    if is_faulty and case["fault"] in SIGNALS:
        threading.Timer(case["delay"], os.kill, [os.getpid(), getattr(signal, case["fault"])]).start()
    try:
        for one in case["own" if is_faulty else "calls"]:
            calls(one)
        calls.end()
        time.sleep(2 * (case["fault"] in SIGNALS))  # of which one comes behind the calls
    except (mx.MXNetError, ValueError, UserWarning, OSError) as error:
        problem = str(error).strip().splitlines()[-1]
    told = {**case, "rank": kv.rank, "problem": problem, "seconds": time.monotonic() - start}
    leave(f"{case['title']} {kv.rank}"[-200:], f"TOLD {json.dumps(told)}\n")


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
        faulthandler.cancel_dump_traceback_later()
    gluon_syncbn.reset()
    session.stores[:0] = earlier  # all end as after a failure: in MPI_Finalize, some would wait for what has not come

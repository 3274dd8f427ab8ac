"""One rank of a job of jobs.py: ``python -m soak.rank FIRST COUNT``, with the seeds of its trials."""

import faulthandler
import gc
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time

import light  # noqa: F401
import numpy as np

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(6)

import mxnet as mx  # noqa: E402
from mpi4py import MPI  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from reports import leave, leave_memory, path_of, wait_for  # noqa: E402

from gluon_syncbn import contrastive  # noqa: E402
from gluon_syncbn.training.session import session  # noqa: E402

from .jobs import HANGS, LIMIT, MISCOUNTS, SIGNALS, Trial  # noqa: E402

WIDTH = 4
ENDS = OSError("the disk is full")


class Net(gluon.HybridBlock):
    """Two branches come in an order of this rank's own."""

    def __init__(self, layers, store, order):
        super().__init__(prefix="")
        self.layers, self.order, number = layers, order, itertools.count()
        for kind, settings, _ in layers:
            own = {"in_channels": WIDTH, "kvstore": store, **settings}
            if kind == "dense":
                self.register_child(nn.Dense(WIDTH, in_units=WIDTH, prefix=f"dense{next(number)}_"))
            for _ in range({"norm": 1, "branches": 2}.get(kind, 0)):
                self.register_child(gluon_syncbn.SyncBatchNorm(prefix=f"norm{next(number)}_", **own))
            if kind == "add":
                self.register_child(gluon_syncbn.SyncBatchNormAdd(prefix=f"norm{next(number)}_", **own))

    def hybrid_forward(self, F, x, mask):
        layers = iter(self._children.values())
        for kind, _, masked in self.layers:
            masks = [mask] if masked else []
            if kind == "tanh":
                x = F.tanh(x)
            elif kind == "branches":
                pair = [next(layers), next(layers)]
                ys = {i: pair[i](x * (i + 1), *masks) for i in self.order}
                x = ys[0] + F.tanh(ys[1])
            else:
                x = next(layers)(x, *([x * x] if kind == "add" else []), *masks)
        return x


class Member:
    """A net and its Trainer on these contexts. Theirs are the shards from ``first`` on."""

    def __init__(self, trial, number, store, places, first=0, order=(0, 1)):
        self.trial, self.number, self.places, self.first, self.steps = trial, number, places, first, 0
        self.net = Net(trial.nets[number], store, order)
        self.net.initialize(ctx=places)
        self.net.cast("float64")
        values = np.random.RandomState([trial.seed, number])
        self.trained = [p for p in self.net.collect_params().values() if p.grad_req != "null"]
        for p in self.trained:
            p.set_data(nd.array(values.randn(*p.shape) * 0.5 + p.name.endswith("gamma"), dtype="float64"))
        if trial.hybrid:
            self.net.hybridize()
        settings = {"learning_rate": 0.05, "momentum": 0.9}
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", settings, kvstore=store or "device")

    def data(self, step):
        """Of each context: samples, head gradients and a mask."""
        rng = np.random.RandomState([self.trial.seed, self.number, step])
        parts = []
        for i, n in enumerate(self.trial.sizes):
            parts.append((rng.randn(n, WIDTH) * (1 + i) + i, rng.randn(n, WIDTH), np.r_[1, rng.rand(n - 1) < 0.7]))
        if self.trainer._kvstore_params["kvstore"] == "device" and len(self.places) == 1:
            parts = [tuple(map(np.concatenate, zip(*parts)))]
        types = "float64", "float64", "float32"
        parts = parts[self.first : self.first + len(self.places)]
        return [
            [nd.array(array, ctx=c, dtype=dtype) for array, dtype in zip(part, types)]
            for part, c in zip(parts, self.places)
        ]

    def forward(self, step, fails=False):
        data = self.data(step)
        with autograd.record():
            ys = []
            for x, _, mask in data:
                ys.append(self.net(x, mask))
                if fails:
                    raise ENDS
        return ys, [head for _, head, _ in data]

    def backward(self, step):
        autograd.backward(*self.forward(step))

    def step(self):
        self.trainer.step(sum(self.trial.sizes))
        self.steps += 1

    def weights(self):
        """The same bits on each context."""
        found = [np.concatenate([p.data(c).asnumpy().ravel() for p in self.trained]) for c in self.places]
        assert all((one == found[0]).all() for one in found), "the contexts have other weights"
        return found[0]

    def between(self, what, step):
        """Leaves the weights as they are."""
        store = self.trainer._kvstore_params["kvstore"]
        if what == "gather":
            rows = [nd.full((1, 2), self.first + i, ctx=c) for i, c in enumerate(self.places)]
            for every in contrastive.gather(rows, name="rows", kvstore=store):
                assert every.asnumpy()[:, 0].tolist() == list(range(len(self.trial.sizes)))
        elif what == "broadcast":
            gluon_syncbn.broadcast_parameters(self.net, kvstore=store)
        elif what == "average":
            gluon_syncbn.average_running_stats(self.net, kvstore=store)
        elif what == "pushpull":
            total = nd.full((3,), store.rank)
            store.pushpull("a sum", total)
            assert (total.asnumpy() == sum(range(store.num_workers))).all()
        elif what == "save":
            self.net.save_parameters(str(path_of(f".net {store.rank}")))
            self.trainer.save_states(str(path_of(f".states {store.rank}")))
        elif what == "predict":
            assert all(np.isfinite(self.net(x, mask).asnumpy()).all() for x, _, mask in self.data(step))
        elif what == "join":
            with gluon_syncbn.join(self.net, self.trainer):
                pass


def expected(trial):
    """The weights of each net after each number of steps, of one process; None where it draws another shuffle."""
    if trial.shuffles:
        return None
    alone = not trial.has("mode", "group_size", "groups")
    found = []
    for number in range(len(trial.nets)):
        member = Member(trial, number, None, CONTEXTS[: 1 if alone else len(trial.sizes)])
        found.append([member.weights()])
        for step in range(trial.steps):
            member.backward(step)
            member.step()
            found[-1].append(member.weights())
    return found


def train(trial, store, members, told):
    rng = np.random.RandomState([trial.seed, store.rank])
    for step in range(trial.steps):
        event = trial.event if (store.rank, step) == (trial.rank, trial.at) else ""
        time.sleep(0.01 * rng.rand())
        if event == "ends early":
            raise SystemExit(0)
        if event == "raises before":
            raise ENDS
        if event in SIGNALS and trial.delay is not None:
            threading.Timer(trial.delay, signalled, [event]).start()
        # Each rank has an order of its own where nothing is read between, but in the first step.
        for i, order in enumerate(rng.permutation(len(members)) if step else range(len(members))):
            one_step(members[order], step, event if i == 0 else "", trial.together)
        if trial.together:
            for i, order in enumerate(rng.permutation(len(members)) if step else range(len(members))):
                if i or event != "skips a step":
                    members[order].step()
        if event in SIGNALS:
            for member in members:
                member.weights()
            if trial.delay is None:
                signalled(event)
            time.sleep(1)
        members[0].between(trial.between[step], step)
        if trial.reads[step] or step == trial.steps - 1:
            for i, member in enumerate(members):
                told["weights"][f"{i} {member.steps}"] = hashlib.md5(member.weights().tobytes()).hexdigest()
    store.allgather("the end", np.ones(1))


def one_step(member, step, event, together):
    if event == "half a backward":
        ys, heads = member.forward(step)
        autograd.backward(ys[:1], heads[:1])
        raise ENDS
    if event == "raises in record":
        member.forward(step, fails=True)
    if event != "skips a forward":
        member.backward(step)
    if event == "calls twice":
        member.backward(step)
    if event == "raises after the backward":
        raise ENDS
    if not together and event != "skips a step":
        member.step()


def signalled(event):
    os.kill(os.getpid(), getattr(signal, event))


def run(trial):
    faulthandler.dump_traceback_later(HANGS, exit=True)
    session.stores.clear()
    gluon_syncbn.configure(timeout=HANGS - 10, kvstore=None)
    want = expected(trial)
    gc.collect()  # `gather` looks at all layers
    store = gluon_syncbn.kvstore("mpi")
    leave_memory()
    first, order = sum(trial.devices[: store.rank]), (0, 1) if trial.hybrid or store.rank % 2 else (1, 0)
    places = CONTEXTS[: trial.devices[store.rank]]
    members = [Member(trial, i, store, places, first, order) for i in range(len(trial.nets))]
    store.allgather("all are ready", np.ones(1))
    gluon_syncbn.configure(timeout=LIMIT)
    told, start = {"problem": "", "wrong": "", "weights": {}}, time.monotonic()
    try:
        train(trial, store, members, told)
    except (Exception, KeyboardInterrupt) as error:
        if trial.last and trial.event != "nothing" and store.rank == trial.rank:
            raise
        told["problem"] = f"{type(error).__name__}: {error}"
    told["seconds"] = time.monotonic() - start
    for i, (member, steps) in enumerate(zip(members, want or [])):
        try:
            got = member.weights()
        except mx.MXNetError:  # the first reader gets the error of a step
            got = member.weights()
        near = [np.abs(got - one).max() < 1e-6 * max(1, np.abs(one).max()) for one in steps]
        if trial.event not in MISCOUNTS and not any(near if told["problem"] else near[-1:]):
            told["wrong"] = f"net {i} has the weights {got}, expected one of {steps}"
    leave(f"{trial.seed} {store.rank}", json.dumps(told))
    if told["problem"] and trial.last:
        wait_for([f"{trial.seed} {rank}" for rank in range(trial.ranks) if rank != trial.rank])
        raise SystemExit(3)
    gluon_syncbn.reset()
    return store


def main(first, count):
    # All stores stay, so that the job ends as after a failure: MPI_Finalize would wait for what has not come.
    stores = [run(Trial(n, MPI.COMM_WORLD.Get_size(), n == first + count - 1)) for n in range(first, first + count)]
    faulthandler.cancel_dump_traceback_later()
    session.stores[:0] = stores


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

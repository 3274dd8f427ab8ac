"""One process of a job whose trainers sum gradients; each scenario compares with one process that has all samples."""

import os
import sys
import threading
import time
from pathlib import Path

import light  # noqa: F401
import numpy as np

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(4)

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.contrib.amp.loss_scaler import LossScaler  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from replicas import on_devices  # noqa: E402

from gluon_syncbn.exchange import store  # noqa: E402
from gluon_syncbn.system import bfloat16  # noqa: E402

if "MPI_WORKER_MACHINES" in os.environ:  # those of the ranks
    from mpi4py import MPI

    own_machine = os.environ["MPI_WORKER_MACHINES"].split(",")[MPI.COMM_WORLD.Get_rank()]
    store._machine = lambda: own_machine

kv = gluon_syncbn.kvstore("mpi")
DEVICES = [1 + rank % 2 for rank in range(kv.num_workers)]
FIRST = sum(DEVICES[: kv.rank])
HERE = slice(FIRST, FIRST + DEVICES[kv.rank])
OWN = CONTEXTS[: DEVICES[kv.rank]]


class Pair:
    """A net of this process and its twin, which sees the samples of all; both have a Trainer."""

    def __init__(self, seed=0, grad_req="write"):
        self.rng = np.random.RandomState(seed)
        self.net, self.alone = self._net(gluon_syncbn.SyncBatchNorm, OWN), self._net(nn.BatchNorm, CONTEXTS[3:])
        values = np.random.RandomState(7 + seed)
        for p, q in zip(self.parameters(self.net), self.parameters(self.alone)):
            p.grad_req = q.grad_req = grad_req
            value = values.randn(*p.shape) * 0.3 + p.name.endswith("gamma")
            p.set_data(nd.array(value, dtype="float64"))
            q.set_data(nd.array(value, dtype="float64"))
        self.trainer, self.twin = self._trainer(self.net, kv), self._trainer(self.alone, None)

    @staticmethod
    def _net(norm, contexts):
        for _ in range(kv.rank):
            nn.Dense(1)  # so that Gluon's counters differ among the processes
        net = nn.HybridSequential()
        net.add(nn.Dense(6, in_units=3), norm(in_channels=6), nn.Activation("tanh"), nn.Dense(70_000, in_units=6))
        net.initialize(ctx=contexts)
        net.cast("float64")
        return net

    @staticmethod
    def _trainer(net, kvstore):
        return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kvstore)

    @staticmethod
    def parameters(net):
        return [p for p in net.collect_params().values() if p.grad_req != "null"]

    def backward(self):
        sizes = [2 + i % 3 for i in range(sum(DEVICES))]
        shards = [self.rng.randn(n, 3) * (i + 1) for i, n in enumerate(sizes)]
        heads = [self.rng.randn(n, 70_000) / 300 for n in sizes]
        with autograd.record():
            ys = [self.net(x) for x in on_devices(shards[HERE], OWN, "float64")]
        autograd.backward(ys, on_devices(heads[HERE], OWN, "float64"))
        x, head = (nd.array(np.concatenate(a), ctx=CONTEXTS[3], dtype="float64") for a in (shards, heads))
        with autograd.record():
            y = self.alone(x)
        y.backward(head)
        return sum(sizes)

    def step(self, **settings):
        samples = self.backward()
        self.trainer.step(samples, **settings)
        self.twin.step(samples, **settings)

    def assert_same(self):
        for p, q in zip(self.parameters(self.net), self.parameters(self.alone)):
            for context in OWN:
                got, want = p.data(context).asnumpy(), q.data().asnumpy()
                assert np.abs(got - want).max() < 1e-9 * max(1, np.abs(want).max()), p.name
            first = kv.allgather("a test", p.data(OWN[0]).asnumpy().ravel())[0]
            assert (p.data(OWN[-1]).asnumpy().ravel() == first).all(), "other bits"


def accumulates():
    pair = Pair(grad_req="add")
    for _ in range(2):
        pair.backward()
        pair.step()
        for net in (pair.net, pair.alone):
            net.collect_params().zero_grad()
    pair.assert_same()


def clips():
    pair = Pair()
    for _ in range(2):
        samples = pair.backward()
        pair.trainer.allreduce_grads()
        for net, contexts in ((pair.net, OWN), (pair.alone, CONTEXTS[3:])):
            for context in contexts:
                gradients = [p.grad(context) for p in pair.parameters(net)]
                norm = float(sum((g * g).sum() for g in gradients).sqrt().asscalar())  # MXNet's takes no float64
                for g in gradients:
                    g *= min(1, 0.5 / norm)
        pair.trainer.update(samples)
        pair.twin.update(samples)
    pair.assert_same()


def scales_the_loss():
    """One rank has an infinite gradient: all skip the step, and the next one is right."""
    pair = Pair()
    pair.trainer._amp_loss_scaler, pair.twin._amp_loss_scaler = LossScaler(), LossScaler()
    pair.step()
    before = pair.net[3].weight.data(OWN[0]).asnumpy()
    samples = pair.backward()
    pair.net[0].weight.grad(OWN[0])[:1] = np.inf if kv.rank == 1 else 1
    pair.trainer.step(samples)
    assert (pair.net[3].weight.data(OWN[0]).asnumpy() == before).all()
    pair.twin._amp_loss_scaler._loss_scale = pair.trainer._amp_loss_scaler._loss_scale
    pair.step()
    pair.assert_same()


def leaves_out_what_is_stale():
    """A parameter that no process has used in the step stays as it is, and so does one that all have frozen."""
    pair = Pair()
    extra, frozen = nn.Dense(2, in_units=3), pair.parameters(pair.net)[0]
    extra.initialize(mx.init.One(), ctx=OWN)
    frozen.grad_req = pair.parameters(pair.alone)[0].grad_req = "null"
    parameters = [*pair.net.collect_params().values(), *extra.collect_params().values()]
    pair.trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
    for _ in range(2):
        pair.step(ignore_stale_grad=True)
    pair.assert_same()
    assert (extra.weight.data(OWN[0]).asnumpy() == 1).all()


def trains_two_nets():
    """As a GAN: each Trainer steps in turn, and nobody reads anything between."""
    pairs = [Pair(1), Pair(2)]
    for k in range(6):
        pairs[k % 2].step()
    for pair in pairs:
        pair.assert_same()


def trains_in_threads():
    """A Trainer for each thread; which is first depends on the process."""
    pairs = [Pair(3), Pair(4)]
    pause = np.random.RandomState(kv.rank)

    def train(pair):
        for _ in range(4):
            time.sleep(0.02 * pause.rand())
            pair.step()

    threads = [threading.Thread(target=train, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in pairs:
        pair.assert_same()


def rounded(values, dtype):
    """As the type has them, to nearest; MXNet truncates to bfloat16."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(values.dtype)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def adds_in_the_order_of_the_ranks():
    """All types and sizes, several contexts, many rounds under way; to the bit on a single machine."""
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32"):
        kind = bfloat16.DTYPE if dtype == "bfloat16" else dtype
        wide = np.float64 if dtype in ("float64", "int32") else np.float32
        for sizes in ([1], [5, 1, 300_001, 2], [131_072, 131_073]):
            arrays = [[np.random.RandomState(99 * d + i).randn(n) * 9 for i, n in enumerate(sizes)] for d in range(8)]
            given = [[nd.array(a, ctx=c).astype(kind) for a in arrays[FIRST + k]] for k, c in enumerate(OWN)]
            parts = [[nd.array(a).astype(kind).astype(wide).asnumpy() for a in arrays[d]] for d in range(sum(DEVICES))]
            for i in range(len(sizes)):
                kv.pushpull(f"sum {i}", [on_one[i] for on_one in given])
            for i in range(len(sizes)):
                ranks = np.cumsum([0, *DEVICES])
                of_ranks = [sum(part[i] for part in parts[a:b]) for a, b in zip(ranks, ranks[1:])]
                want = rounded(sum(of_ranks), dtype)
                for on_one in given:
                    got = on_one[i].astype(wide).asnumpy()
                    if len(kv.machines) == 1:
                        assert (got == want).all(), (dtype, sizes, i)
                    else:
                        tolerance = {"float16": 2e-2, "bfloat16": 0.2, "float32": 1e-5}.get(dtype, 1e-12)
                        assert np.allclose(got, want, rtol=tolerance, atol=tolerance), (dtype, sizes, i)
    out = [nd.zeros(3, ctx=context) for context in OWN]
    value = nd.ones(3) * (kv.rank + 1)
    kv.pushpull("out", value, out=out)
    assert all((array.asnumpy() == sum(range(1, 1 + kv.num_workers))).all() for array in out)
    assert (value.asnumpy() == kv.rank + 1).all()


# ---- the store of the one is that of the other -------------------------------------------------------------------


def takes_many_small_steps():
    """The core looks again and again whether a round has begun, and it begins at any moment."""
    net = nn.HybridSequential()
    for _ in range(6):
        net.add(nn.Dense(3, in_units=3))
    net.initialize(ctx=OWN)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=kv)
    gluon_syncbn.broadcast_parameters(net)
    x = nd.ones((2, 3), ctx=OWN[0]) * (1 + kv.rank)
    for _ in range(1500):
        with autograd.record():
            ys = [net(x.as_in_context(context)).square().mean() for context in OWN]
        autograd.backward(ys)
        trainer.step(10)
        net[0].weight.data(OWN[0]).wait_to_read()
    values = np.concatenate([p.data(OWN[0]).asnumpy().ravel() for p in net.collect_params().values()])
    assert all((theirs == values).all() for theirs in kv.allgather("the parameters", values))


def shares_the_store():
    """First a layer names it and the Trainer nothing, then the reverse; neither calls `configure`."""
    for of_layer, settings in ((kv, {}), (None, {"kvstore": kv})):
        net = nn.HybridSequential()
        net.add(gluon_syncbn.SyncBatchNorm(in_channels=3, kvstore=of_layer), nn.Dense(2, in_units=3))
        net.initialize(mx.init.One(), ctx=OWN)
        trainer = gluon.Trainer(net.collect_params(), "sgd", **settings)
        with autograd.record():
            losses = [net(nd.random.normal(shape=(2, 3), ctx=c) * (1 + kv.rank)).square().sum() for c in OWN]
        autograd.backward(losses)
        trainer.step(1)
        for parameter in net.collect_params().values():
            own = parameter.data(OWN[0]).asnumpy()
            assert all((theirs == own.ravel()).all() for theirs in kv.allgather("a test", own.ravel())), parameter.name
        gluon_syncbn.summary(net)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def fails(spoil):
    """A step that fails changes no parameter, and all processes learn why."""
    gluon_syncbn.configure(timeout=3)
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), nn.Dense(300_000, in_units=4))
    net.initialize(ctx=OWN)
    if spoil is begins_elsewhere:
        spoil(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)

    def step():
        with autograd.record():
            ys = [net(nd.ones((2, 3), ctx=context)) for context in OWN]
        autograd.backward(ys)
        trainer.step(1)
        nd.waitall()

    if spoil is not begins_elsewhere:
        step()
    before = [p.data(OWN[0]).asnumpy() for p in net.collect_params().values()]
    since = time.monotonic()
    if kv.rank == 1:
        spoil(net)
    try:
        step()
    except mx.MXNetError as error:
        for p, value in zip(net.collect_params().values(), before):
            for _ in range(2):  # the first reader may get the error once more
                try:
                    assert (p.data(OWN[0]).asnumpy() == value).all(), p.name
                    break
                except mx.MXNetError:
                    pass
        text = f"FAILED rank {kv.rank} after {time.monotonic() - since:.1f} s: {error}\n"
        Path(os.environ["MPI_WORKER_REPORTS"], str(kv.rank)).write_text(text)
        others = [r for r in range(kv.num_workers) if SPOILS[sys.argv[1]][1] or r != 1]
        until = time.monotonic() + 30
        while not all(Path(os.environ["MPI_WORKER_REPORTS"], str(r)).exists() for r in others):
            assert time.monotonic() < until
            time.sleep(0.05)
        raise SystemExit(3) from None
    raise AssertionError("nothing has failed")


def freezes(net):
    net[1].bias.grad_req = "null"


def begins_elsewhere(net):
    net[1].bias.set_data(net[1].bias.data(OWN[0]) + kv.rank)


def ends(net):
    raise SystemExit(0)


def is_late(net):
    until = time.monotonic() + 60
    while not Path(os.environ["MPI_WORKER_REPORTS"], "0").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(1)


# And whether rank 1 has an error, too.
SPOILS = {
    "freezes": (freezes, True),
    "begins_elsewhere": (begins_elsewhere, True),
    "ends": (ends, False),
    "is_late": (is_late, False),
}

if __name__ == "__main__":
    if sys.argv[1] in SPOILS:
        fails(SPOILS[sys.argv[1]][0])
    for scenario in sys.argv[1].split("+"):
        if scenario != "shares_the_store":
            gluon_syncbn.configure(kvstore=kv, timeout=60)
        globals()[scenario]()
        print(f"DONE {kv.rank} {scenario}", flush=True)
    print(f"OK {kv.rank}", flush=True)

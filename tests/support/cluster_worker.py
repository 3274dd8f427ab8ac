"""What one worker of a job does that is about MXNet's own cluster alone."""

import importlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import light  # noqa: F401
import numpy as np

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(4)

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402

from gluon_syncbn.exchange import store  # noqa: E402
from gluon_syncbn.exchange.transport import Label  # noqa: E402


def report(kv, since, error):
    text = f"FAILED rank {kv.rank} after {time.monotonic() - since:.1f} s: {error}\n"
    Path(os.environ["MPI_WORKER_REPORTS"], str(kv.rank)).write_text(text)


def every_bit():
    """Every value of every type arrives as it was sent, in arrays of any size, in any thread."""
    kv = gluon_syncbn.kvstore("dist_sync")
    bits = np.random.RandomState(kv.rank)
    for call, size in enumerate([0, 1, 7, 8 * 900, 8 * 30_000, 8 * 600_000, 8 * 20]):
        parts = [np.random.RandomState(100 * call + r).randint(256, size=size).astype(np.uint8) for r in range(3)]
        for dtype in ("uint8", "float16", "float32", "float64", "int64")[: 5 if size % 8 == 0 else 1]:
            label = Label("exchange", 7, call=call, what=f"call {call}", phase=np.dtype(dtype).num)
            got = kv._transport.allgather(label, parts[kv.rank].view(dtype), equal=True)
            assert [array.dtype for array in got] == [np.dtype(dtype)] * 3
            assert all((a.view(np.uint8) == b).all() for a, b in zip(got, parts)), (size, dtype)
            time.sleep(0.002 * bits.rand())
    zero = kv._transport.allgather(Label("exchange", 8, what="zeros"), np.array([-0.0]), equal=True)
    assert all(np.signbit(array[0]) for array in zero)


def large_sums():
    """Gradients that the relay adds up: right, of the same bits everywhere, and no other sum is in between."""
    kv = gluon_syncbn.kvstore("dist_sync")
    for call, size in itertools.product(range(3), (5_000, 70_000, 2_500_000)):
        parts = [np.random.RandomState(10 * call + r).randn(size).astype(np.float32) for r in range(kv.num_workers)]
        values = nd.array(parts[kv.rank])
        kv.pushpull(size, values)
        assert np.abs(values.asnumpy() - np.sum(parts, axis=0)).max() < 1e-5
        everyone = kv.allgather("the bits", values.asnumpy()[:1000])
        assert all((array == everyone[0]).all() for array in everyone)


class Scaled(gluon.HybridBlock):
    """Weights and a layer, of operators that MXNet has for float16 on CPUs: it has no products of matrices there."""

    def __init__(self, store):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, 8, 6, 6), init=mx.init.Constant(0.5))
            self.norm = gluon_syncbn.SyncBatchNorm(in_channels=8, kvstore=store)

    def hybrid_forward(self, F, x, weight):
        return self.norm(F.tanh(F.broadcast_mul(x, weight)))


def resumes():
    """Weights and momentum are saved half way and loaded into another net: as one process does without a break. In
    float16 the weights of the layers stay float32, and the Trainer keeps a copy in float32 of the others."""
    kv = gluon_syncbn.kvstore("dist_sync")
    folder = tempfile.mkdtemp()
    for dtype, tolerance in (("float32", 1e-4), ("float16", 2e-2)):
        settings = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3, "multi_precision": dtype == "float16"}

        def begin(store, dtype=dtype, settings=settings):
            net = Scaled(store)
            net.cast(dtype)
            net.initialize(ctx=CONTEXTS[:1])
            return net, gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=store)

        (net, trainer), (whole, alone) = begin(kv), begin(None)
        rng, files = np.random.RandomState(7), [str(Path(folder, name)) for name in ("net", "trainer")]
        for k in range(4):
            if k == 2:
                net.save_parameters(files[0])
                trainer.save_states(files[1])
                net, trainer = begin(kv)
                net.load_parameters(files[0])
                trainer.load_states(files[1])
            x, head = rng.randn(6, 8, 6, 6) * 2 + 1, rng.randn(6, 8, 6, 6)
            own = slice(2 * kv.rank, 2 + 4 * kv.rank)  # two samples and four
            for model, part, update in ((net, own, trainer), (whole, slice(None), alone)):
                with autograd.record():
                    y = model(nd.array(x[part], dtype=dtype))
                y.backward(nd.array(head[part], dtype=dtype))
                update.step(6)
        for p, q in zip(net.collect_params().values(), whole.collect_params().values()):
            got, want = (one.data().asnumpy().astype("float64") for one in (p, q))
            assert p.dtype == ("float32" if "norm" in p.name else np.dtype(dtype)), p.name
            assert np.abs(got - want).max() < tolerance * max(1, np.abs(want).max()), (dtype, p.name)
    shutil.rmtree(folder)


def levels():
    """Two machines, the first with two workers: their leaders exchange statistics and gradients."""
    store._machine = lambda: os.environ["CLUSTER_WORKER_MACHINE"]
    of_every_transport("one_store_for_gradients_and_statistics")()
    kv = gluon_syncbn.kvstore("dist_sync")
    assert kv.why_not_in_memory is None, kv.why_not_in_memory
    assert sorted(map(len, kv.machines)) == [1, 2]


def groups_of_some():
    """Ranks 0 and 1 share one group, 1 and 2 another: nobody waits for a rank without a replica in his groups."""
    kv = gluon_syncbn.kvstore("dist_sync")
    for call in range(3):
        ranks = [[0, 1], [0, 1, 2], [1, 2]][kv.rank]
        label = Label("exchange", 9, call=call, what="some")
        got = kv._transport.allgather(label, np.full(1 + kv.rank, call), equal=False, ranks=ranks)
        assert [part.tolist() for part in got] == [[call] * (1 + rank) for rank in ranks]


def steps_until_one_fails():
    """Rank 1 has a child, as a DataLoader makes them, which lives on when rank 1 is killed."""
    limit, folder = float(sys.argv[2]), Path(os.environ["MPI_WORKER_REPORTS"])
    gluon_syncbn.configure(timeout=60)
    kv = gluon_syncbn.kvstore("dist_sync")
    gluon_syncbn.configure(timeout=limit)
    child = os.fork() if kv.rank == 1 else 0
    if kv.rank == 1 and child == 0:
        time.sleep(60)
        os._exit(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1, in_channels=3), gluon_syncbn.SyncBatchNorm(in_channels=8, kvstore=kv))
    net.add(nn.Dense(16, in_units=8 * 36))
    net.initialize(ctx=CONTEXTS[:1])
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)
    try:
        for k in itertools.count():
            since = time.monotonic()
            with autograd.record():
                y = net(nd.ones((2, 3, 6, 6)))
            y.backward()
            trainer.step(2 * kv.num_workers)
            mx.nd.waitall()
            if k == 2:
                Path(folder, f"running {kv.rank}").write_text(f"{os.getpid()} {child}")
            if kv.allgather("whether to end", np.array([Path(folder, "end").exists()]))[0][0]:
                break
    except mx.MXNetError as error:
        report(kv, since, error)
        raise SystemExit(3) from None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def not_all_come():
    gluon_syncbn.configure(timeout=float(sys.argv[2]))
    gluon_syncbn.kvstore("dist_sync")


def of_every_transport(scenario):
    """Of mpi_worker.py, which connects as it is imported."""
    return getattr(importlib.import_module("mpi_worker"), scenario)


if __name__ == "__main__":
    for scenario in sys.argv[1].split("+"):
        (globals().get(scenario) or of_every_transport(scenario))()
    if scenario != "not_all_come":
        print(f"OK {gluon_syncbn.kvstore('dist_sync').rank}", flush=True)

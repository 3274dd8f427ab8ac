"""A process with the core of points.py: a step is hit at one point, and the process tells what became of it.

``points_worker.py REPLICAS``: for each case a line of JSON from stdin, and one to stdout.
``mpiexec -n 2 points_worker.py mpi CASES``: in each, rank 1 is hit in its second step, with a store of its own.
``mpiexec -n 2 points_worker.py seeds``: each call has a seed of its own.
"""

import ctypes
import gc
import json
import os
import sys
import time

import light  # noqa: F401

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(4)

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from replicas import Batch, make_batch, on_devices, prepare, truth  # noqa: E402
from reports import leave, leave_memory, wait_for  # noqa: E402

from gluon_syncbn import _native  # noqa: E402
from gluon_syncbn.exchange import mpi  # noqa: E402
from gluon_syncbn.training.session import session  # noqa: E402

_native._core.syncbn_points_arm.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_double]

LIMIT = 60  # seconds that a step waits that nothing hits
mpi._GRACE = 1.0  # seconds; of two ranks, one that is stopped never ends


def arm(point, action, times, seconds):
    _native._core.syncbn_points_arm(point.encode(), action.encode(), times, seconds)


def reached(point):
    return _native._core.syncbn_points_reached(point.encode())


class Net:
    """A layer, its trainer and a batch; of each replica in this process a context."""

    def __init__(self, batch: Batch, part=slice(None), kvstore=None):
        self.batch, self.want = batch, truth(batch)
        self.want_outputs, self.want_dxs = self.want.outputs[part], self.want.dxs[part]
        count = len(self.want_outputs)
        self.contexts = CONTEXTS[:count]
        self.layer = prepare(gluon_syncbn.SyncBatchNorm(in_channels=5), batch, self.contexts, "float64")
        parameters = self.layer.collect_params()
        self.trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.0625}, kvstore=kvstore)
        self.xs = on_devices(batch.shards[part], self.contexts, "float64")
        self.heads = on_devices(batch.heads[part], self.contexts, "float64")
        self.keep = float(np.float32(0.9))
        for x in self.xs:
            x.attach_grad()

    def values(self, *names):
        """Of these parameters on each context."""
        return [[getattr(self.layer, name).data(c).asnumpy() for name in names] for c in self.contexts]

    def step(self):
        """The errors of a step, as a training loop finds them: of the outputs, of the gradients, of the parameters."""
        errors = []

        def read(array):
            try:
                return array.asnumpy()
            except mx.MXNetError as error:
                errors.append(str(error))

        try:
            with autograd.record():
                ys = [self.layer(x) for x in self.xs]
            autograd.backward(ys, self.heads)
            self.trainer.step(1)
        except mx.MXNetError as error:
            errors.append(str(error))
            ys = []
        outputs = [read(y) for y in ys]
        dxs = [read(x.grad) for x in self.xs]
        for context in self.contexts:
            read(self.layer.gamma.data(context))
            read(self.layer.running_mean.data(context))
        return errors, outputs, dxs

    def tracked(self, before):
        """Running statistics after the batch."""
        x = np.concatenate(self.batch.shards)
        batch = x.mean((0, 2, 3)), x.var((0, 2, 3))
        return [[self.keep * old + (1 - self.keep) * new for old, new in zip(olds, batch)] for olds in before]

    def restore(self):
        for name in ("gamma", "beta"):
            getattr(self.layer, name).set_data(nd.array(getattr(self.batch, name), dtype="float64"))

    def hit(self, point, action, times, seconds, limit, here=True, then=lambda: None):
        """What comes of a step that is hit; ``here``: in this process."""
        gluon_syncbn.configure(timeout=limit)
        nd.waitall()
        running, affine = self.values("running_mean", "running_var"), self.values("gamma", "beta")
        if here:
            arm(point, action, times, seconds)
        start = time.monotonic()
        errors, outputs, dxs = self.step()
        took = time.monotonic() - start
        then()
        after = self.values("running_mean", "running_var")
        return {
            "reached": reached(point),
            "errors": errors,
            "seconds": took,
            "parameters kept": _equal(self.values("gamma", "beta"), affine),
            "statistics": [_kind(*each) for each in zip(after, running, self.tracked(running))],
            "right": not errors and self.is_right(outputs, dxs),
        }

    def case(self, **case):
        """That, and what comes of the next step."""
        result = self.hit(**case, then=gluon_syncbn.reset)  # whoever sleeps is awake after that
        arm("", "", 0, 0)
        gluon_syncbn.configure(timeout=LIMIT)
        self.restore()
        before = self.values("running_mean", "running_var")
        errors, outputs, dxs = self.step()
        result["next"] = errors or (
            self.is_right(outputs, dxs) and _near(self.values("running_mean", "running_var"), self.tracked(before))
        )
        self.restore()
        return result

    def is_right(self, outputs, dxs):
        return _near(outputs, self.want_outputs) and _near(dxs, self.want_dxs)


def _kind(after, before, tracked):
    return "old" if _equal(after, before) else "new" if _near(after, tracked) else "wrong"


def _equal(a, b):
    return all(_equal(x, y) for x, y in zip(a, b)) if isinstance(a, list) else bool((a == b).all())


def _near(a, b):
    if isinstance(a, list):
        return all(_near(x, y) for x, y in zip(a, b))
    return bool(np.allclose(a, b, rtol=1e-9, atol=1e-9))


# ---- several replicas in one process ---------------------------------------------------------------------------


def within_a_process(replicas):
    gluon_syncbn.configure(timeout=LIMIT)
    net = Net(make_batch(np.random.RandomState(3), replicas))
    for line in sys.stdin:
        print(json.dumps(net.case(**json.loads(line))), flush=True)


# ---- one replica in each of two processes ----------------------------------------------------------------------


def between_processes(point, action, times, seconds, limit):
    session.stores.clear()
    gc.collect()  # the layer of the case before, which one rank may still have
    gluon_syncbn.configure(timeout=LIMIT)
    kv = gluon_syncbn.kvstore("mpi")
    leave_memory()
    gluon_syncbn.configure(kvstore=kv)
    net = Net(make_batch(np.random.RandomState(3), 2), slice(kv.rank, kv.rank + 1), kv)
    errors, outputs, dxs = net.step()
    assert not errors and net.is_right(outputs, dxs), errors
    result = net.hit(point, action, times, seconds, limit, here=kv.rank == 1)
    case = f"{point} {action}"
    leave(f"told {case} {kv.rank}", f"TOLD {kv.rank} {case} {json.dumps(result)}\n")
    if action == "raise":
        wait_for([f"told {case} {1 - kv.rank}"])
        arm("", "", 0, 0)
        gluon_syncbn.reset()
    elif result["errors"]:
        raise SystemExit(3)


def with_a_seed_for_each_call():
    """Rank 1 is late to look for a vector, so that rank 0 has set another seed and sent the next one."""
    kv = gluon_syncbn.kvstore("mpi")
    gluon_syncbn.configure(kvstore=kv, timeout=LIMIT)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5)
    layer.initialize()
    for call in range(5):
        xs = [(1 + call) * np.random.RandomState(2 * call + rank).randn(3, 5, 2) for rank in range(2)]
        mean, var = np.mean(xs, (0, 1, 3)), np.var(xs, (0, 1, 3))
        gluon_syncbn.configure(seed=call)
        if kv.rank == 1:
            arm("after_post", "delay", 1, 0.5)
        with autograd.train_mode():
            y = layer(nd.array(xs[kv.rank])).asnumpy()
        want = (xs[kv.rank] - mean[:, None]) / np.sqrt(var[:, None] + 1e-5)
        assert np.allclose(y, want, atol=1e-4), f"call {call} of rank {kv.rank}: {np.abs(y - want).max()}"
    print(f"OK {kv.rank}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "seeds":
        with_a_seed_for_each_call()
    elif sys.argv[1] == "mpi":
        for one in json.loads(sys.argv[2]):
            between_processes(**one)
        session.stores.clear()  # not all have failed in both ranks, which end together
        print(f"OK {os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))}", flush=True)
    else:
        within_a_process(int(sys.argv[1]))

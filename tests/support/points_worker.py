"""A process with the core of points.py: a step is hit at one point, and the process tells what became of it.

``pytest points_worker.py``: of several replicas, one is hit.
``mpiexec -n 2 points_worker.py is_hit CASES``: in each, rank 1 is hit in its second step, with a store of its own.
``mpiexec -n 2 points_worker.py has_a_seed_for_each_call``
"""

import ctypes
import functools
import json
import sys
import time
from typing import List, NamedTuple, Set

import light  # noqa: F401

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(4)

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import points  # noqa: E402
import pytest  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from ranks import leave, main, meet, wait_for  # noqa: E402
from replicas import Batch, make_batch, on_devices, prepare, truth  # noqa: E402

from gluon_syncbn import _native  # noqa: E402
from gluon_syncbn.exchange import mpi  # noqa: E402

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

    def hit(self, point, action, times=1, seconds=0.0, limit=60.0, here=True, then=lambda: None):
        """What comes of a step that is hit; ``here``: in this process. If it fails, no parameter changes."""
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
        hit = Hit(reached(point), errors, {_kind(*each) for each in zip(after, running, self.tracked(running))})
        assert took < points.HANGS
        assert hit.statistics <= ({"old", "new"} if errors else {"new"}), hit
        assert _equal(self.values("gamma", "beta"), affine) if errors else self.is_right(outputs, dxs), hit
        arm("", "", 0, 0)
        return hit

    def restore(self):
        for name in ("gamma", "beta"):
            getattr(self.layer, name).set_data(nd.array(getattr(self.batch, name), dtype="float64"))

    def is_right(self, outputs, dxs):
        return _near(outputs, self.want_outputs) and _near(dxs, self.want_dxs)


class Hit(NamedTuple):
    reached: int
    errors: List[str]
    statistics: Set[str]  # "old" or "new", of all contexts


def _kind(after, before, tracked):
    return "old" if _equal(after, before) else "new" if _near(after, tracked) else "wrong"


def _equal(a, b):
    return all(_equal(x, y) for x, y in zip(a, b)) if isinstance(a, list) else bool((a == b).all())


def _near(a, b):
    if isinstance(a, list):
        return all(_near(x, y) for x, y in zip(a, b))
    return bool(np.allclose(a, b, rtol=1e-9, atol=1e-9))


# ---- several replicas in one process ---------------------------------------------------------------------------


@functools.lru_cache(None)
def net_of(replicas):
    gluon_syncbn.configure(timeout=LIMIT)
    return Net(make_batch(np.random.RandomState(3), replicas))


def hit(replicas, point, action, *how, told=True, **limit):
    """And the next step is right."""
    net = net_of(replicas)
    result = net.hit(point, action, *how, **limit, then=gluon_syncbn.reset)  # whoever sleeps is awake after that
    if result.reached or point not in points.NOT_ALWAYS:
        assert result.reached
        assert result.errors or not told, f"nobody was told of: {action} {point}"
    net.restore()
    assert not net.hit("", "", limit=LIMIT).errors
    net.restore()
    return result


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("point", points.WITHIN)
def test_a_replica_that_is_hit(replicas, point):
    """It raises, in the forward and in the backward, when the others have come as far as they can; it is late; of two,
    it hangs for longer than the time limit, while the other one waits for it, or does not.
    """
    result = hit(replicas, point, "raise", 1, 0.05)
    if point in points.BEFORE_THE_TOTAL:
        assert result.statistics == {"old"}
    count = hit(replicas, point, "none", told=False).reached
    if (count > replicas or "reduce" in point) and point not in points.NOT_ALWAYS:  # also in the backward
        # Its own. Another replica on a busy machine may still be in its forward, which fails then.
        assert "new" in hit(replicas, point, "raise", count // 2 + 1, 0.05).statistics
    assert not hit(replicas, point, "delay", 1, 0.1, told=False).errors
    if replicas == 2:
        waited_for = point in ("before_join", "before_contribution")  # elsewhere there is a grace beside the limit
        result = hit(replicas, point, "delay", 1, 2.0, told=waited_for, limit=0.4)
        if waited_for:
            assert any("missing cpu(" in error and "after 0.4 s" in error for error in result.errors)
            assert result.statistics == {"old"}


# ---- one replica in each of two processes ----------------------------------------------------------------------


def is_hit():
    """``names``: rank 0 learns of rank 1, for sure."""
    for point, action, limit, names in json.loads(sys.argv[2]):
        meet()
        gluon_syncbn.configure(timeout=LIMIT, kvstore=kv)
        net = Net(make_batch(np.random.RandomState(3), 2), slice(kv.rank, kv.rank + 1), kv)
        errors, outputs, dxs = net.step()
        assert not errors and net.is_right(outputs, dxs), errors
        hit = net.hit(point, action, limit=limit, here=kv.rank == 1)
        if kv.rank == 1:
            assert action == "none" or (hit.reached and hit.errors), f"{point}: {hit}"
        elif names:
            assert any("rank 1" in error for error in hit.errors) or point.startswith("after_"), f"{point}: {hit}"
            assert hit.statistics == {"old"} or point not in ("before_post", "before_join"), f"{point}: {hit}"
        leave(f"sound {point} {kv.rank}", f"SOUND {kv.rank} {point}\n")
        if action == "raise":
            wait_for([f"sound {point} {1 - kv.rank}"])
        elif action == "stop":
            raise SystemExit(3)


def has_a_seed_for_each_call():
    """Rank 1 is late to look for a vector, so that rank 0 has set another seed and sent the next one."""
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


if __name__ == "__main__":
    kv = meet()
    main(globals())

"""A process with the core of points.py: a step is hit at one point, and the process tells what became of it.

``pytest points_worker.py``: of several replicas, one is hit.
``mpiexec -n 2 points_worker.py is_hit ACTION LIMIT POINT ...``: at each, rank 1 is hit, with a store of its own.
"""

import ctypes
import functools
import sys
import time

import light  # noqa: F401

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(4)

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import points  # noqa: E402
import pytest  # noqa: E402
from mxnet import gluon, nd  # noqa: E402
from ranks import leave, main, meet, wait_for  # noqa: E402
from replicas import make_batch, prepare, step, truth  # noqa: E402

from gluon_syncbn import _native  # noqa: E402
from gluon_syncbn.exchange import mpi  # noqa: E402

arm, reached = _native._core.syncbn_points_arm, _native._core.syncbn_points_reached
arm.argtypes, reached.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_double], [ctypes.c_char_p]

LIMIT = 60  # seconds that a step waits that nothing hits
mpi._GRACE = 1.0  # seconds; of two ranks, one that is stopped never ends
#: Whether a call is handed to a worker is a matter of time.
NOT_ALWAYS = {"before_worker"}
#: Where a replica that is hit in the forward keeps the others from a total.
BEFORE_THE_TOTAL = {"before_join", "before_contribution", "before_reduce", "after_reduce"}
#: Where a rank that is hit keeps the other one from what it waits for.
BEFORE_THE_OTHER = {"before_join", "before_post", "before_copy_in", "before_add_part"}


class Net:
    """A layer, its trainer and a batch; of each replica in this process a context."""

    def __init__(self, replicas, part=slice(None), kvstore=None):
        gluon_syncbn.configure(timeout=LIMIT)
        batch = make_batch(np.random.RandomState(3), replicas)
        whole = truth(batch, momentum=0)
        self.batch = batch._replace(shards=batch.shards[part], heads=batch.heads[part])
        self.outputs, self.dxs, self.running = whole.outputs[part], whole.dxs[part], (whole[4][0], whole[5][0])
        self.contexts = CONTEXTS[: len(self.batch.shards)]
        self.layer = prepare(gluon_syncbn.SyncBatchNorm(in_channels=5, momentum=0), batch, self.contexts, "float64")
        self.trainer = gluon.Trainer(self.layer.collect_params(), "sgd", {"learning_rate": 1}, kvstore=kvstore)
        self.begin = {name: p.data(CONTEXTS[0]).copy() for name, p in self.layer.collect_params().items()}

    def hit(self, point="", action="", times=1, seconds=0.0, limit=LIMIT, here=True):
        """How often the point was reached, the error, and whether statistics are old or new. What is there is right."""
        gluon_syncbn.configure(timeout=limit)
        for name, value in self.begin.items():
            self.layer.collect_params()[name].set_data(value)
        nd.waitall()
        if here:
            arm(point.encode(), action.encode(), times, seconds)
        start, error = time.monotonic(), ""
        try:
            got = step(self.layer, self.batch, self.contexts, "float64")
            self.trainer.step(1)
            nd.waitall()
            assert all(np.allclose(*both) for both in zip(got.outputs + got.dxs, self.outputs + self.dxs))
        except mx.MXNetError as problem:
            error = str(problem)
        assert time.monotonic() - start < 30
        gluon_syncbn.reset()  # whoever sleeps is awake after that
        kinds = set()
        for context in self.contexts:
            mean, var, gamma = (
                getattr(self.layer, name).data(context).asnumpy() for name in ("running_mean", "running_var", "gamma")
            )
            is_old, is_new = not mean.any() and (var == 1).all(), np.allclose([mean, var], self.running)
            kinds.add("old" if is_old else "new" if is_new else "wrong")
            assert bool((gamma == self.batch.gamma).all()) is bool(error), (point, error)
        assert kinds <= ({"old", "new"} if error else {"new"}), (point, error)
        return reached(point.encode()), error, kinds


# ---- several replicas in one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("point", points.WITHIN)
def test_a_replica_that_is_hit(replicas, point):
    """It raises, in the forward and in the backward, when the others have come as far as they can; it is late; of two,
    it hangs for longer than the time limit, while the other one waits for it, or does not. The next step is right.
    """
    net = net_of(replicas)

    def hit(*how, **limit):
        found = net.hit(point, *how, **limit)
        assert found[0] or point in NOT_ALWAYS
        assert not net.hit()[1]
        return found

    times, error, kinds = hit("raise", 1, 0.05)
    assert error or not times, "nobody was told"
    assert kinds == {"old"} or point not in BEFORE_THE_TOTAL
    count, error, _ = hit("delay", 1, 0.1)
    assert not error
    if (count > replicas or "reduce" in point) and point not in NOT_ALWAYS:  # also in the backward
        # Its own. Another replica on a busy machine may still be in its forward, which fails then.
        _, error, kinds = hit("raise", count // 2 + 1, 0.05)
        assert error and "new" in kinds
    if replicas == 2:
        _, error, kinds = hit("delay", 1, 2.0, limit=0.4)
        if point in ("before_join", "before_contribution"):  # elsewhere there is a grace beside the limit
            assert "missing cpu(" in error and "after 0.4 s" in error
            assert kinds == {"old"}


@functools.lru_cache(None)
def net_of(replicas):
    return Net(replicas)


# ---- one replica in each of two processes ----------------------------------------------------------------------


def is_hit():
    action, limit, *asked = sys.argv[2:]
    for point in asked:
        gluon_syncbn.configure(kvstore=meet())
        net = Net(2, slice(kv.rank, kv.rank + 1), kv)
        assert not net.hit()[1]
        times, error, kinds = net.hit(point, action, limit=float(limit), here=kv.rank == 1)
        if kv.rank == 1:
            assert times and error, point
        elif point in BEFORE_THE_OTHER:
            assert "rank 1" in error, f"{point}: {error}"
            assert kinds == {"old"} or point not in ("before_join", "before_post"), point
        leave(f"sound {point} {kv.rank}", f"SOUND {kv.rank} {point}\n")
        if action == "raise":
            wait_for([f"sound {point} {1 - kv.rank}"])
        elif action == "stop":
            raise SystemExit(3)


if __name__ == "__main__":
    kv = meet()
    main(globals())

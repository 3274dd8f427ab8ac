"""A process of a job whose layers share statistics in groups that are named by the ranks of their replicas."""

import itertools
import sys
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest
from allreduce import sent
from mpi_worker import (
    DEVICES,
    HERE,
    OWN,
    equals_the_specification,
    kv,
    make_layer,
    own,
    part_of,
    specified,
    summed,
)
from poolings import specification
from ranks import learns, main
from replicas import assert_same, collect, make_batch, on_devices, prepare, step, step_in_any_order

import gluon_syncbn

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

NAMED = [[[0, 2], [1, 3]], [[0, 3], [1], [2]], [[1, 2, 3], [0]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]]


def groups_equal_the_specification():
    poolings = {str(groups): {"groups": groups} for groups in NAMED}
    equals_the_specification({**poolings, "groups of 1": {"group_size": 1}})


def empty_shards():
    """Of one member, and of a whole group, which keeps its running statistics."""
    for empty in ([3], [0, 2]):
        batch = make_batch(np.random.RandomState(1), DEVICES)
        for i in empty:
            batch.shards[i], batch.heads[i] = batch.shards[i][:0], batch.heads[i][:0]
        with mx.util.np_shape(True):
            layer = make_layer(batch, groups=NAMED[0])
            got = step(layer, own(batch), OWN, "float64")
        assert_same(summed(got), part_of(specification(layer, batch)), 1e-11)


def layers_in_any_order():
    """Side by side with groups of their own, in an order of its own in each process and on each context; so are the
    sums of their gradients over all processes."""
    rng, mine = np.random.RandomState(2), np.random.RandomState(100 + kv.rank)
    settings = [*({"groups": groups} for groups in NAMED), *[{}] * 8, {"group_size": 2}, {"mode": "shuffle"}]
    first = make_batch(rng, DEVICES)
    layers = [make_layer(first, timeout=60, **one) for one in settings]
    trainers = [gluon.Trainer(layer.collect_params(), "sgd", kvstore=kv) for layer in layers]
    for call in range(int(sys.argv[2]) if sys.argv[2:] else 5):
        batches = [make_batch(rng, DEVICES)._replace(gamma=first.gamma, beta=first.beta) for _ in settings]
        xs, heads = (
            [on_devices(getattr(own(batch), name), OWN, "float64") for batch in batches] for name in ("shards", "heads")
        )
        for x in [x for of_layer in xs for x in of_layer]:
            x.attach_grad()
        ys = step_in_any_order(mine, layers, xs, heads, pause=0.002)
        # The first step compares the weights, and waits for it.
        for i in mine.permutation(len(layers)) if call else range(len(layers)):
            trainers[i].allreduce_grads()
        for i, (layer, batch) in enumerate(zip(layers, batches)):
            got = collect(layer, ys[i], [x.grad for x in xs[i]], OWN)
            want = specified(layer, batch, call=call)
            for name in ("outputs", "dxs"):
                for g, w in zip(getattr(got, name), getattr(want, name)[HERE]):
                    assert np.abs(g - w).max() <= 1e-10 * np.abs(w).max(), (settings[i], call, name)
            for context, name in itertools.product(OWN, ("gamma", "beta")):
                total = getattr(layer, name).grad(context).asnumpy()
                np.testing.assert_allclose(total, getattr(want, "d" + name), 1e-10, 1e-10)


def messages_to_members_only():
    """Each phase sends one message to each process that shares a group, and none to others."""
    cases = [*(({"groups": groups}, groups) for groups in NAMED), ({"mode": "shuffle"}, [range(DEVICES)])]
    for settings, groups in cases:
        batch = make_batch(np.random.RandomState(3), DEVICES)
        layer = make_layer(batch, **settings)
        step(layer, own(batch), OWN, "float64")  # in which all agree
        before = sent(kv.handle)
        step(layer, own(batch), OWN, "float64")
        shared = [group for group in groups if set(group) & set(range(DEVICES)[HERE])]
        others = {replica // len(OWN) for group in shared for replica in group} - {kv.rank}
        assert sent(kv.handle) - before == 2 * len(others), settings


def members_do_not_wait_for_others():
    """The members of one group take a step while the other processes do something else."""
    gluon_syncbn.configure(timeout=20)
    pairs = {"group_size": 2}, [[0, 1], [2, 3]]
    for settings, groups in (pairs, *(({"groups": groups}, groups) for groups in NAMED)):
        batch = make_batch(np.random.RandomState(4), DEVICES)
        layer = make_layer(batch, **settings)
        step(layer, own(batch), OWN, "float64")  # in which all agree
        for group in groups:
            if kv.rank in group:
                got = step(layer, own(batch), OWN, "float64")
            kv.allgather("the next group", np.zeros(1))
        want = specification(layer, batch, call=1)
        for g, w in zip((got.outputs[0], got.dxs[0]), (want.outputs[kv.rank], want.dxs[kv.rank])):
            assert np.abs(g - w).max() / np.abs(w).max() < 1e-11
        for x in (layer.running_mean, layer.running_var):
            assert np.isfinite(x.data().asnumpy()).all()


def other_devices():
    """Replicas on fewer devices than the processes have agreed on form other groups."""
    for settings in ({"group_size": 2}, {"mode": "shuffle"}):
        batch = make_batch(np.random.RandomState(8), DEVICES)
        layer = make_layer(batch, **settings)
        step(layer, own(batch), OWN, "float64")
        layer.collect_params().reset_ctx(OWN[:1])
        batch = make_batch(np.random.RandomState(9), kv.num_workers)._replace(gamma=batch.gamma, beta=batch.beta)
        here = batch._replace(shards=[batch.shards[kv.rank]], heads=[batch.heads[kv.rank]])
        got, want = step(layer, here, OWN[:1], "float64"), specified(layer, batch)
        for g, w in zip((got.outputs[0], got.dxs[0]), (want.outputs[kv.rank], want.dxs[kv.rank])):
            assert np.abs(g - w).max() / np.abs(w).max() < 1e-11, settings


def fewer_devices():
    """Groups within a process are those of the devices that take part, if they divide these. Others need all."""
    batch = own(make_batch(np.random.RandomState(6), DEVICES))
    text = "so all 2 devices of this process take part in"
    one = batch._replace(shards=batch.shards[1:], heads=batch.heads[1:])
    alone = gluon_syncbn.SyncBatchNorm(in_channels=5, mode="local")
    want = step(prepare(alone, one, OWN[1:], "float64"), one, OWN[1:], "float64")
    for settings, error in (
        ({"group_size": 1}, ""),
        ({"group_size": len(OWN)}, f"groups do not divide these, {text} every step, not 1: call"),
        ({"groups": NAMED[3]}, f"groups do not divide these, {text} every step, not 1: call"),
        ({"groups": NAMED[0]}, f"groups reach from rank {kv.rank} of 2 to others, {text} every step, not 1: call"),
    ):
        layer = make_layer(batch, **settings)
        step(layer, batch, OWN, "float64")
        # The end of `only_on` raises an error of gradients that nobody has read.
        with pytest.raises(mx.MXNetError, match=error) if error else nullcontext(), gluon_syncbn.only_on(OWN[1:]):
            got = step(layer, one, OWN[1:], "float64")
        gluon_syncbn.reset()
    for name in ("outputs", "dxs"):
        np.testing.assert_allclose(getattr(got, name)[0], getattr(want, name)[0], rtol=0, atol=1e-11)


def a_member_fails(raises):
    """Rank 2 of groups [0, 2] and [1, 3] leaves its second step, or does not come to it: rank 0 learns of it."""
    part = own(make_batch(np.random.RandomState(5), DEVICES))
    layer = make_layer(part, groups=NAMED[0])
    step(layer, part, OWN, "float64")
    kv.allgather("before the fault", np.zeros(1))
    gluon_syncbn.configure(timeout=60 if raises else 3)
    if kv.rank == 0:
        late = "rank 0 of 4 waits for rank 2 in the forward of call 2 of SyncBatchNorm"
        with learns(r"rank 2 of 4 has failed: OSError left the recorded step \(disk full\)" if raises else late):
            step(layer, part, OWN, "float64")
    elif kv.rank == 2 and raises:
        with pytest.raises(OSError, match="disk full"), autograd.record():
            raise OSError("disk full")
    elif kv.rank in (1, 3):
        with suppress(mx.MXNetError):
            step(layer, part, OWN, "float64")


raises, stays_away = (partial(a_member_fails, fault) for fault in (True, False))

if __name__ == "__main__":
    main(globals())

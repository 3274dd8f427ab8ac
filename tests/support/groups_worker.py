"""A process of a job whose layers share statistics in groups that are named by the ranks of their replicas."""

import itertools
import os
import time
from contextlib import nullcontext

import numpy as np
import pytest
from allreduce import sent
from mpi_worker import CONTEXTS, kv, main, specified, summed
from poolings import specification
from replicas import WAYS, assert_same, collect, make_batch, on_devices, prepare, step, step_in_any_order
from reports import report, wait_for

import gluon_syncbn

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

HERE = int(os.environ.get("GROUPS_WORKER_CONTEXTS", "1"))  # of each process
REPLICAS = HERE * kv.num_workers
OWN = range(HERE * kv.rank, HERE * (kv.rank + 1))
CONTEXTS = CONTEXTS[:HERE]
NAMED = [[[0, 2], [1, 3]], [[0, 3], [1], [2]], [[1, 2, 3], [0]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]]


def part_of(batch):
    return batch._replace(shards=[batch.shards[i] for i in OWN], heads=[batch.heads[i] for i in OWN])


def make_layer(batch, dtype="float64", way="eager", **settings):
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5, kvstore=kv, **settings)
    return prepare(layer, batch, CONTEXTS, dtype, WAYS[way])


def assert_right(got, layer, batch, tolerance, **settings):
    """Of this process; gamma and beta have the sums over all processes."""
    want = specification(layer, batch, **settings)
    mine = {name: [getattr(want, name)[i] for i in OWN] for name in ("outputs", "dxs", "running_mean", "running_var")}
    assert_same(summed(got), want._replace(**mine), tolerance)


def processes_of(groups):
    """The other processes with which this one shares a group."""
    mine = [group for group in groups if set(group) & set(OWN)]
    return {rank // HERE for group in mine for rank in group} - {kv.rank}


def equals_the_specification():
    rng = np.random.RandomState(0)
    for settings in (*({"groups": groups} for groups in NAMED), {"group_size": 1}):
        groups = settings.get("groups", NAMED[-1])
        for dtype, tolerance in (("float64", 1e-11), ("float32", 1e-5)):
            for way in ("eager", "hybrid", "static_shape"):
                batch = make_batch(rng, REPLICAS, dtype=dtype)
                layer = make_layer(batch, dtype, way, **settings)
                got = step(layer, part_of(batch), CONTEXTS, dtype)
                assert_right(got, layer, batch, tolerance, node=-1 if way == "eager" else 0)
                for statistic in (got.running_mean, got.running_var):
                    of_all = np.concatenate(kv.allgather("running", np.concatenate(statistic))).reshape(REPLICAS, -1)
                    for group in groups:  # members have the same bits
                        assert (of_all[group] == of_all[group[0]]).all(), (groups, of_all)
                        others = [rank for rank in range(REPLICAS) if rank not in group]
                        assert (of_all[others] != of_all[group[0]]).any(axis=1).all(), (groups, of_all)


def empty_shards():
    """Of one member, and of a whole group, which keeps its running statistics."""
    for empty in ([3], [0, 2]):
        batch = make_batch(np.random.RandomState(1), REPLICAS)
        for i in empty:
            batch.shards[i], batch.heads[i] = batch.shards[i][:0], batch.heads[i][:0]
        with mx.util.np_shape(True):
            layer = make_layer(batch, groups=NAMED[0])
            got = step(layer, part_of(batch), CONTEXTS, "float64")
        assert_right(got, layer, batch, 1e-11)


def layers_in_any_order():
    """Side by side with groups of their own, in an order of its own in each process and on each context; so are the
    sums of their gradients over all processes."""
    rng, mine = np.random.RandomState(2), np.random.RandomState(100 + kv.rank)
    settings = [*({"groups": groups} for groups in NAMED), {}, {"group_size": 2}, {"mode": "shuffle"}]
    batches = [make_batch(rng, REPLICAS) for _ in settings]
    layers = [make_layer(batch, timeout=60, **one) for batch, one in zip(batches, settings)]
    parts = [part_of(batch) for batch in batches]
    xs, heads = (
        [on_devices(getattr(part, name), CONTEXTS, "float64") for part in parts] for name in ("shards", "heads")
    )
    for x in [x for of_layer in xs for x in of_layer]:
        x.attach_grad()
    trainers = [gluon.Trainer(layer.collect_params(), "sgd", kvstore=kv) for layer in layers]
    for trainer in trainers:  # the first step compares the weights, and waits for it
        trainer.allreduce_grads()
    for call in range(5):
        ys = step_in_any_order(mine, layers, xs, heads, pause=0.002)
        for i in mine.permutation(len(layers)):
            trainers[i].allreduce_grads()
        for i, (layer, batch) in enumerate(zip(layers, batches)):
            got = collect(layer, ys[i], [x.grad for x in xs[i]], CONTEXTS)
            want = specified(layer, batch, call=call)
            for name in ("outputs", "dxs"):
                for g, w in zip(getattr(got, name), [getattr(want, name)[k] for k in OWN]):
                    assert np.abs(g - w).max() <= 1e-10 * np.abs(w).max(), (settings[i], call, name)
            for context, name in itertools.product(CONTEXTS, ("gamma", "beta")):
                total = getattr(layer, name).grad(context).asnumpy()
                np.testing.assert_allclose(total, getattr(want, "d" + name), 1e-10, 1e-10)
    assert CONTEXTS[0].device_type == "cpu" or all(one.way is not None for one in kv._trainers.values())


def messages_to_members_only():
    """Over the transport: each phase sends one message to each process that shares a group, and none to others."""
    assert kv.why_not_in_memory is not None
    for groups in NAMED:
        batch = make_batch(np.random.RandomState(3), REPLICAS)
        layer = make_layer(batch, groups=groups)
        step(layer, part_of(batch), CONTEXTS, "float64")  # in which all agree
        before = sent(kv.handle)
        step(layer, part_of(batch), CONTEXTS, "float64")
        assert sent(kv.handle) - before == 2 * len(processes_of(groups)), groups


def members_do_not_wait_for_others():
    """The members of one group take a step while the other processes do something else."""
    in_memory = os.environ.get("GLUON_SYNCBN_SHARED_MEMORY") != "off"
    assert (kv.why_not_in_memory is None) == in_memory, kv.why_not_in_memory
    gluon_syncbn.configure(timeout=20)
    pairs = {"group_size": 2}, [[0, 1], [2, 3]]
    for settings, groups in (pairs, *(({"groups": groups}, groups) for groups in NAMED)):
        batch = make_batch(np.random.RandomState(4), REPLICAS)
        layer = make_layer(batch, **settings)
        step(layer, part_of(batch), CONTEXTS, "float64")  # in which all agree
        for group in groups:
            if kv.rank in group:
                got = step(layer, part_of(batch), CONTEXTS, "float64")
            kv.allgather("the next group", np.zeros(1))
        want = specification(layer, batch, call=1)
        for g, w in zip((got.outputs[0], got.dxs[0]), (want.outputs[kv.rank], want.dxs[kv.rank])):
            assert np.abs(g - w).max() / np.abs(w).max() < 1e-11
        for x in (layer.running_mean, layer.running_var):
            assert np.isfinite(x.data().asnumpy()).all()


def fewer_devices():
    """Groups within a process are those of the devices that take part, if they divide these. Others need all."""
    batch = part_of(make_batch(np.random.RandomState(6), REPLICAS))
    text = "so all 2 devices of this process take part in"
    one = batch._replace(shards=batch.shards[1:], heads=batch.heads[1:])
    alone = gluon_syncbn.SyncBatchNorm(in_channels=5, mode="local")
    want = step(prepare(alone, one, CONTEXTS[1:], "float64"), one, CONTEXTS[1:], "float64")
    for settings, error in (
        ({"group_size": 1}, ""),
        ({"group_size": HERE}, f"groups do not divide these, {text} every step, not 1: call"),
        ({"groups": NAMED[3]}, f"groups do not divide these, {text} every step, not 1: call"),
        ({"groups": NAMED[0]}, f"groups reach from rank {kv.rank} of 2 to others, {text} every step, not 1: call"),
    ):
        layer = make_layer(batch, **settings)
        step(layer, batch, CONTEXTS, "float64")
        # The end of `only_on` raises an error of gradients that nobody has read.
        with pytest.raises(mx.MXNetError, match=error) if error else nullcontext(), gluon_syncbn.only_on(CONTEXTS[1:]):
            got = step(layer, one, CONTEXTS[1:], "float64")
        gluon_syncbn.reset()
    for name in ("outputs", "dxs"):
        np.testing.assert_allclose(getattr(got, name)[0], getattr(want, name)[0], rtol=0, atol=1e-11)


def raises():
    a_member_fails("raises")


def stays_away():
    a_member_fails("stays away")


def a_member_fails(fault):
    """Rank 2 of groups [0, 2] and [1, 3] leaves its second step; says what the others learn."""
    batch = make_batch(np.random.RandomState(5), REPLICAS)
    layer = make_layer(batch, groups=[[0, 2], [1, 3]])
    since = time.monotonic()
    try:
        for k in range(4):
            if k == 1:
                kv.allgather("before the fault", np.zeros(1))
                gluon_syncbn.configure(timeout=60 if fault == "raises" else 3)
                since = time.monotonic()
            if k == 1 and kv.rank == 2:
                if fault == "raises":
                    with autograd.record():
                        raise OSError("disk full")
                wait_for([0, 1, 3])  # it does not come
                raise SystemExit(3)
            step(layer, part_of(batch), CONTEXTS, "float64")
    except (OSError, mx.MXNetError) as error:
        report(kv.rank, since, error)
    else:
        report(kv.rank, since, "nothing")
    wait_for(range(kv.num_workers) if fault == "raises" else [0, 1, 3])
    raise SystemExit(3)


if __name__ == "__main__":
    main(globals())

"""A process of a job whose layers share statistics in groups that are named by the ranks of their replicas."""

import itertools
import sys
from contextlib import nullcontext

import numpy as np
from allreduce import sent
from mpi_worker import (
    DEVICES,
    HERE,
    OWN,
    kv,
    make_layer,
    own,
    specified,
)
from poolings import specification
from ranks import main, raises
from replicas import collect, make_batch, on_devices, prepare, step, step_in_any_order

import gluon_syncbn

import mxnet as mx  # isort: skip
from mxnet import gluon  # isort: skip

NAMED = [[[0, 2], [1, 3]], [[0, 3], [1], [2]], [[1, 2, 3], [0]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]]


def layers_in_any_order():
    """Side by side with groups of their own, in an order of its own in each process and on each context; so are the
    sums of their gradients over all processes."""
    rng, mine = np.random.RandomState(2), np.random.RandomState(100 + kv.rank)
    settings = [*({"groups": groups} for groups in NAMED), *[{}] * 8, {"group_size": 2}, {"mode": "shuffle"}]
    first = make_batch(rng, DEVICES)
    layers = [make_layer(first, timeout=60, **one) for one in settings]
    trainers = [gluon.Trainer(layer.collect_params(), "sgd", kvstore=kv) for layer in layers]
    for call in range(int(sys.argv[2]) if sys.argv[2:] else 3):
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


def members_do_not_wait_for_others():
    """The members of one group take a step, and send to each other only, while the others do something else."""
    gluon_syncbn.configure(timeout=20)
    pairs = {"group_size": 2}, [[0, 1], [2, 3]]
    for settings, groups in (pairs, *(({"groups": groups}, groups) for groups in NAMED)):
        batch = make_batch(np.random.RandomState(4), DEVICES)
        layer = make_layer(batch, **settings)
        step(layer, own(batch), OWN, "float64")  # in which all agree
        for group in groups:
            if kv.rank in group:
                before = sent(kv.handle)
                got = step(layer, own(batch), OWN, "float64")
                assert sent(kv.handle) - before == 2 * (len(group) - 1), settings
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
        with raises(mx.MXNetError, error) if error else nullcontext(), gluon_syncbn.only_on(OWN[1:]):
            got = step(layer, one, OWN[1:], "float64")
        gluon_syncbn.reset()
    for name in ("outputs", "dxs"):
        np.testing.assert_allclose(getattr(got, name)[0], getattr(want, name)[0], rtol=0, atol=1e-11)


if __name__ == "__main__":
    main(globals())

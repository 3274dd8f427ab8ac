"""What MXNet's resources hold and cost, and random numbers of replicas. Whether operators get them: test_joined.py."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from internals import core_count
from mxnet import autograd, nd
from mxnet.gluon import nn
from replicas import forward_and_backward, ready

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm


def a_net(contexts):
    def part():
        return nn.Conv2D(4, 3, padding=1, in_channels=4), SyncBatchNorm(in_channels=4), nn.Dropout(0.1)

    return ready(*part(), *part(), *part(), contexts=contexts)


# ---- temporary space ---------------------------------------------------------------------------------------------


def test_resources_do_not_grow(contexts):
    """Neither with the steps, nor with the threads that a program starts for each."""
    places = contexts[:2]
    net, xs = a_net(places), [nd.random.normal(shape=(2, 4, 8, 8), ctx=place) for place in places]

    def run(x):
        with autograd.record():
            y = net(x)
        y.backward()
        y.wait_to_read()

    def in_threads():
        threads = [threading.Thread(target=run, args=(x,)) for x in xs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # Python's part ends first
                time.sleep(0.001)

    for one_step in (lambda: (forward_and_backward(net, xs, None), nd.waitall()), in_threads):
        for _ in range(2):
            one_step()
        before = core_count("resources")
        for _ in range(4):
            one_step()
        assert core_count("resources") == before


def test_space_is_not_shared_memory(contexts):
    """Where a graph reads arrays of a DataLoader's workers. A container may have little shared memory."""

    def pieces():
        with open("/proc/self/maps") as maps:
            return sum("/dev/shm/mx" in line for line in maps)

    forward_and_backward(a_net(contexts[:2]), [nd.ones((2, 4, 8, 8), ctx=c) for c in contexts[:2]], None)
    largest = nn.HybridLambda(lambda F, x: F.topk(x, axis=0, k=3))
    largest.hybridize()
    x = nd.ones((2000, 1000), ctx=mx.Context("cpu_shared", 77))  # of a thread without space
    x.wait_to_read()
    before = pieces()
    largest(x).wait_to_read()
    until = time.monotonic() + 10  # MXNet frees the result, which has been in shared memory, when it likes
    while pieces() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert pieces() == before


def test_a_static_graph_keeps_its_space(contexts):
    """While it waits for a replica that needs space for other operators first."""
    gluon_syncbn.configure(timeout=10)
    net, xs = nn.HybridSequential(), [nd.ones((2, 4, 3, 3), ctx=c, dtype="float64") for c in contexts[:2]]
    # With float64, oneDNN, which has space of its own, does not compute the convolution.
    net.add(SyncBatchNorm(in_channels=4), nn.Conv2D(4, 1, in_channels=4), nn.HybridLambda("square"))
    net.initialize(ctx=contexts[:2])
    net.cast("float64")
    net.hybridize(static_alloc=True, static_shape=True)
    for _ in range(2):
        with autograd.record():
            for x in xs:
                for _ in range(20):
                    nd.topk(x).wait_to_read()
                y = net(x)
            y.wait_to_read()


# ---- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True])
def test_initial_weights_are_those_of_plain_batch_normalisation(contexts, hybrid):
    """On one device, without this package's layers; some weights are drawn in the first call, in training."""

    def weights(norm, places):
        mx.random.seed(7)
        net = nn.HybridSequential()
        net.add(nn.Dense(5, in_units=4), norm(), nn.Dense(6), norm(), nn.Dense(3))
        net.initialize(mx.init.Xavier(), ctx=places)
        net.hybridize(hybrid)
        with autograd.record():
            for y in [net(nd.ones((4, 4), ctx=place)) for place in places]:
                y.wait_to_read()
        return [p.data(places[0]).asnumpy() for p in net.collect_params(".*weight").values()], nd.random.normal(
            shape=8
        ).asnumpy()

    (got, noise), (want, plain_noise) = weights(SyncBatchNorm, contexts[:3]), weights(nn.BatchNorm, contexts[:1])
    for one, other in zip([*got, noise], [*want, plain_noise]):
        np.testing.assert_array_equal(one, other)


def masks_of(places):
    """Returns a function that draws masks as Dropout does in training, one for each place."""
    net = ready(SyncBatchNorm(in_channels=64), nn.Dropout(0.5), contexts=places)
    xs = [nd.random.normal(shape=(4, 64), ctx=place) for place in places]

    def draw():
        with autograd.record():
            ys = [net(x) for x in xs]
        return [y.asnumpy() != 0 for y in ys]

    return draw


def test_outside_of_blocks(contexts):
    """While recording, noise on a later context is its own, which noise on the first one does not change."""
    a_net(contexts[:2])

    def noise(before):
        mx.random.seed(3)
        with autograd.record():
            drawn = [nd.random.normal(shape=4, ctx=contexts[0]) for _ in range(before)]
            return [*drawn, nd.random.normal(shape=4, ctx=contexts[1])]

    few, many = noise(1), noise(3)
    np.testing.assert_array_equal(few[-1].asnumpy(), many[-1].asnumpy())
    assert (few[0].asnumpy() != few[-1].asnumpy()).all()


@pytest.mark.parametrize("seed", [mx.random.seed, mx.npx.random.seed], ids=["mx.random", "mx.npx.random"])
def test_a_seed_reaches_all_contexts(contexts, seed):
    """Each draws other numbers, the same after the same seed."""
    draw = masks_of(contexts[:3])
    seed(1)
    first, second = draw(), draw()
    for one, other in [(0, 1), (1, 2), (0, 2)]:
        assert (first[one] != first[other]).any()
    seed(1)
    for again, before in ((draw(), first), (draw(), second)):
        np.testing.assert_array_equal(again, before)
    seed(2)
    assert (np.array(draw()) != first).any((1, 2)).all()


def test_the_seed_of_a_context_is_that_of_a_process_with_one(contexts):
    """So the processes of a job may draw what the contexts of one process draw."""
    draw = masks_of(contexts[:2])
    for number, place in enumerate(contexts[:2]):
        mx.random.seed(5 + number, ctx=place)
    drawn = draw()

    def alone(seed):
        mx.random.seed(seed)
        return nd.Dropout(nd.ones((4, 64)), p=0.5, mode="always").asnumpy() != 0  # of no replica

    for number, mask in enumerate(drawn):
        with ThreadPoolExecutor(1) as pool:  # a new thread has MXNet's resources of now
            np.testing.assert_array_equal(mask, pool.submit(alone, 5 + number).result())

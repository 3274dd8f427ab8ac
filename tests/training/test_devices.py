"""Batches on fewer devices: a loop of them is that of one device with plain BatchNorm."""

import contextlib
import copy
import itertools

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import SAMPLE, body, filled
from replicas import WAYS, forward_and_backward, on_devices, ready
from thread_transport import Job

import gluon_syncbn

GIVEN = (5, 4, 4)  # the shape of a sample behind the net
#: The samples of each device in each batch; 0: it takes no part.
EPOCH = [(3, 2, 0), (4, 3, 2), (2, 1, 5), (3, 1, 2), (2, 4, 1), (0, 5, 0), (2, 3, 1), (1, 0, 3)]
STORES = [("device", True), ("device", False), ("local", True), ("local", False), ("ours", False), (None, False)]
IN_TURN = itertools.cycle(["eager", "hybrid", "static_alloc"])
CASES = [(*store, req, next(IN_TURN)) for store in STORES for req in ("write", "add")]


def a_net(norm, contexts):
    return filled(body(norm), contexts)


def values_of(net, context):
    """Without a gamma that does not count."""
    kept = {name: p for name, p in net.collect_params().items() if p.grad_req != "null" or "running" in name}
    return {name: p.data(context).asnumpy() for name, p in kept.items()}


def assert_values(values, wanted, where=""):
    for name, value in values.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-9, atol=1e-10, err_msg=f"{name} {where}")


def batches_of(rng, sizes, places):
    """Of another distribution on each device, with head gradients. And the same as one batch on the first."""
    xs = [(i + 1) * rng.randn(n, *SAMPLE) + i for i, n in enumerate(sizes) if n]
    both, used = [xs, [rng.randn(len(x), *GIVEN) for x in xs]], [place for place, n in zip(places, sizes) if n]
    whole = [on_devices([np.concatenate(arrays)], places, "float64") for arrays in both]
    return [on_devices(arrays, used, "float64") for arrays in both], whole


def add_by_hand(net):
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            total = sum(g.asnumpy() for g in parameter.list_grad())
            for gradient in parameter.list_grad():
                gradient[:] = total


@pytest.mark.parametrize("store, updates, req, way", CASES)
def test_an_epoch_of_uneven_batches(contexts, rng, tmp_path, store, updates, req, way):
    places = contexts[:3]
    plain = a_net(nn.BatchNorm, places[:1])
    net = a_net(gluon_syncbn.SyncBatchNorm, places)
    net.hybridize(**WAYS[way])
    kvstore = Job(1).stores[0] if store == "ours" else store
    if (store, updates) == ("device", False):
        kvstore = mx.kv.create(store)
        gluon_syncbn.configure(kvstore=kvstore)  # of statistics, too
    settings = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=kvstore, update_on_kvstore=updates)
    single = gluon.Trainer(plain.collect_params(), "sgd", settings)
    for each in (net, plain):
        each.collect_params("(?!.*running).*").setattr("grad_req", req)

    def update(samples):
        if store is None:
            trainer.allreduce_grads()
            add_by_hand(net)
            trainer.update(samples)
        else:
            trainer.step(samples)

    for number, sizes in enumerate(EPOCH):
        batch, whole = batches_of(rng, sizes, places)
        used = [x.context for x in batch[0]]
        updates_now = req == "write" or number % 2 == 1  # otherwise the next batch adds to this one
        with contextlib.ExitStack() as block:
            if len(used) < len(places):
                block.enter_context(gluon_syncbn.only_on(used))
            forward_and_backward(net, *batch)
            if number % 2 and updates_now:
                update(sum(sizes))
        forward_and_backward(plain, *whole)  # which is a step on all contexts, too
        if not updates_now:
            continue
        if number % 2 == 0:
            update(sum(sizes))
        single.step(sum(sizes))
        if req == "add":
            for each in (net, plain):
                each.collect_params("(?!.*running).*").zero_grad()
        wanted = values_of(plain, places[0])
        for place in places:
            assert_values(values_of(net, place), wanted, f"after batch {number}")
    net.save_parameters(str(tmp_path / "net.params"))
    plain.load_parameters(str(tmp_path / "net.params"))
    assert_values(values_of(plain, places[0]), wanted, "in the file")


@pytest.mark.parametrize("updates", [True, False])
def test_a_gradient_from_before_the_block(contexts, rng, updates):
    """Of another net, which no short batch has been through: it counts on all contexts."""
    places = contexts[:3]
    nets = [a_net(gluon_syncbn.SyncBatchNorm, places) for _ in range(2)]
    trainers = [
        gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, "device", update_on_kvstore=updates)
        for net in nets
    ]
    for inside in (False, True):
        forward_and_backward(nets[0], *batches_of(rng, (2, 2, 2), places)[0])
        before = nets[0][1].gamma.data(places[0]).asnumpy()
        gradients = [g.asnumpy() for g in nets[0][1].gamma.list_grad()]
        with gluon_syncbn.only_on(places[:2]):
            forward_and_backward(nets[1], *batches_of(rng, (2, 2), places)[0])
            if inside:
                trainers[0].step(1)
        if not inside:
            trainers[0].step(1)
        trainers[1].step(1)
        assert all(np.abs(gradient).max() > 1e-3 for gradient in gradients)
        now = nets[0][1].gamma.data(places[0]).asnumpy()
        np.testing.assert_allclose(now, before - sum(gradients), rtol=1e-12)


def test_running_statistics_that_a_device_has_to_itself(contexts, rng):
    """In other modes and in groups the statistics of a context are those of its own batches. A net may be a copy."""
    places = contexts[:4]
    for settings in ({}, {"mode": "local"}, {"mode": "shuffle"}, {"group_size": 2}):
        layer = copy.deepcopy(ready(gluon_syncbn.SyncBatchNorm(in_channels=3, **settings), contexts=places))
        with gluon_syncbn.only_on(places[:2]), autograd.record():
            for place in places[:2]:
                layer(nd.array(rng.randn(4, 3), ctx=place))
        moved = [np.abs(mean.asnumpy()).max() > 0 for mean in layer.running_mean.list_data()]
        assert moved == [True, True, not settings, not settings], settings

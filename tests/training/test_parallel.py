"""`gluon_syncbn.parallel` beside GluonCV's helpers, whose signatures and results it has."""

import threading

import mxnet as mx
import numpy as np
import pytest
from gluoncv.utils import parallel as gluoncv
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from nets import SAMPLE, body, filled
from replicas import WAYS, assert_same, make_batch, prepare, ready, short_waits, step, truth

from gluon_syncbn import SyncBatchNorm, parallel

BOTH = pytest.mark.parametrize("helpers", [gluoncv, parallel], ids=["gluoncv", "ours"])


def make_net(contexts, norm=SyncBatchNorm):
    return filled(body(norm), contexts, "float32")


def make_batches(rng, samples=5, count=3):
    return [(rng.rand(samples, *SAMPLE), rng.randn(samples, 5, 4, 4)) for _ in range(count)]


def train(helpers, net, contexts, batches, sync):
    """Losses, and the parameters after a step with each batch."""
    model = helpers.DataParallelModel(net, contexts, sync=sync)
    criterion = helpers.DataParallelCriterion(gluon.loss.L2Loss(), contexts, sync=sync)
    trainer, losses = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}), []
    for x, t in batches:
        with autograd.record():
            loss = criterion(model(nd.array(x)), nd.array(t))
            autograd.backward(loss)
        losses.append(np.concatenate([part.asnumpy() for part in loss]))
        trainer.step(1, ignore_stale_grad=len(set(contexts)) < len(contexts))
    return losses, {name: p.data(p.list_ctx()[0]).asnumpy() for name, p in net.collect_params().items()}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("replicas, way", [(1, "hybrid"), (2, "eager"), (2, "static_alloc"), (3, "hybrid")])
def test_trains_as_gluoncvs_do(contexts, rng, way, sync, replicas):
    batches, results = make_batches(rng), []
    for helpers in (gluoncv, parallel):
        net = make_net(contexts[:replicas])
        if way != "eager" and helpers is parallel:  # GluonCV's threads do not trace a graph at the same time
            net.hybridize(**WAYS[way])
        results.append(train(helpers, net, contexts[:replicas], batches, sync))
    (losses, parameters), (got_losses, got_parameters) = results
    np.testing.assert_allclose(got_losses, losses, rtol=1e-4)
    for name, value in parameters.items():
        np.testing.assert_allclose(got_parameters[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@BOTH
def test_contexts_that_are_one(helpers):
    """GluonCV's own test of its helpers names cpu(0) twice, for a net without a layer that waits for another device."""
    twice, batches = [mx.cpu(0), mx.cpu(0)], make_batches(np.random.RandomState(0), samples=4)
    train(helpers, make_net(twice[:1], nn.BatchNorm), twice, batches, True)
    with pytest.raises(ValueError, match=r"ctx: .* are on cpu\(0\), cpu\(0\), expected each context once"):
        train(helpers, make_net(twice[:1]), twice, batches, False)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_batch_of_fewer_samples_than_replicas(contexts, samples):
    layer = ready(SyncBatchNorm(in_channels=3))
    model = parallel.DataParallelModel(layer, contexts[:3])
    criterion = parallel.DataParallelCriterion(gluon.loss.L2Loss(), contexts[:3])
    said = rf"batch: {samples} samples were given, expected at least 3, one for each replica.*last_batch='discard'"
    with pytest.raises(ValueError, match=said):
        model(nd.ones((samples, 3)))
    outputs = model(nd.ones((3, 3)))
    with pytest.raises(ValueError, match=said):
        criterion(outputs, nd.ones((samples, 3)))
    with pytest.raises(ValueError, match="inputs: '1 of them' was given, expected outputs of 3 replicas"):
        criterion(outputs[:1], nd.ones((samples, 3)))
    with mx.util.np_shape(True), autograd.record():
        assert [y.shape for (y,) in model(nd.ones((samples, 3)))] == [(1, 3)] * samples + [(0, 3)] * (3 - samples)


@BOTH
def test_arguments_are_cut_wherever_they_stand(contexts, helpers):
    class Mixed(gluon.Block):
        def forward(self, x, pair, scale, named):
            return [x * scale + pair[0], named["y"] - pair[1][0]]

    x, y = nd.arange(10).reshape((5, 2)), nd.arange(5).reshape((5, 1))
    model = helpers.DataParallelModel(Mixed(), contexts[:2])
    outputs = model(x, (x, [y]), 3, {"y": y * 2})
    assert [type(part) for part in outputs] == [tuple, tuple]
    np.testing.assert_array_equal(np.concatenate([a.asnumpy() for a, _ in outputs]), 4 * x.asnumpy())
    np.testing.assert_array_equal(np.concatenate([b.asnumpy() for _, b in outputs]), y.asnumpy())
    assert [a.context for a, _ in outputs] == contexts[:2]


@BOTH
def test_without_contexts_the_net_is_called_as_it_is(helpers):
    net = ready(nn.Dense(3, in_units=2))
    x = nd.ones((4, 2))
    assert helpers.DataParallelModel(net)(x).shape == (4, 3)
    assert helpers.DataParallelCriterion(gluon.loss.L2Loss())(x, x).shape == (4,)


@BOTH
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_in_a_replica(contexts, rng, helpers, failing):
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:2], "float64")

    def fail(block, inputs):
        if inputs[0].context == contexts[failing]:
            raise OSError(f"replica {failing}")

    handle = layer.register_forward_pre_hook(fail)
    model = helpers.DataParallelModel(layer, contexts[:2], sync=True)
    with pytest.raises((OSError, mx.MXNetError), match=f"replica {failing}"), autograd.record():
        model(nd.array(np.concatenate(batch.shards), dtype="float64"))
    handle.detach()
    assert_same(step(layer, batch, contexts, "float64"), truth(batch), 1e-11)


@pytest.mark.parametrize("sync", [True, False])
def test_a_replica_that_fails_later(contexts, rng, sync):
    """What only the engine finds is raised by the call with `sync`, and otherwise by whoever reads the result."""
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:3], "float64")
    model = parallel.DataParallelModel(layer, contexts[:2], sync=sync)
    layer.collect_params().reset_ctx(contexts[:3])
    x = nd.array(np.concatenate(batch.shards), dtype="float64")
    with short_waits(2), autograd.record(), pytest.raises(mx.MXNetError, match="2 of 3 replicas"):
        ys = model(x)  # the other replica comes in time
        assert not sync
        ys[0][0].asnumpy()


def test_no_thread_is_left(contexts, rng):
    """GluonCV's leave some, each of them with two times 20 MB of random states."""
    net, batches = make_net(contexts[:2]), make_batches(rng)
    train(parallel, net, contexts[:2], batches, True)
    threads = threading.active_count()
    for _ in range(4):
        train(parallel, net, contexts[:2], batches, True)
    assert threading.active_count() == threads

"""grad_req='add' over small batches, and what has the statistics of the whole one."""

import numpy as np
import pytest
from mxnet import autograd
from replicas import Batch, assert_same, make_batch, on_devices, prepare, step, truth

from gluon_syncbn import SyncBatchNorm, reference

ROUNDS = 3
MOMENTUM = 0.75


def small_batches(rng, replicas):
    """Of other sizes and distributions, with one gamma and beta."""
    batches = [make_batch(rng, replicas) for _ in range(ROUNDS)]
    return [
        Batch([x * (k + 1) + k for x in batch.shards], batch.heads, batches[0].gamma, batches[0].beta)
        for k, batch in enumerate(batches)
    ]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_small_batch_has_statistics_of_its_own(contexts, rng, replicas):
    """The gradient is the sum of theirs, and the running statistics take each of them."""
    batches, contexts = small_batches(rng, replicas), contexts[:replicas]
    layer = prepare(SyncBatchNorm(in_channels=5, momentum=MOMENTUM), batches[0], contexts, "float64")
    for parameter in (layer.gamma, layer.beta):
        parameter.grad_req = "add"
        parameter.zero_grad()
    mean, var = np.zeros(5), np.ones(5)
    dgamma = np.zeros(5)
    for batch in batches:
        xs = on_devices(batch.shards, contexts, "float64")
        for x in xs:
            x.attach_grad()
        with autograd.record():
            ys = [layer(x) for x in xs]
        autograd.backward(ys, on_devices(batch.heads, contexts, "float64"))
        want = reference.forward(batch.shards, batch.gamma, batch.beta, mean, var, momentum=MOMENTUM)
        gradients = reference.backward(batch.shards, batch.heads, batch.gamma, want.state)
        for x, dx in zip(xs, gradients.dxs):
            np.testing.assert_allclose(x.grad.asnumpy(), dx, atol=1e-11 * np.abs(dx).max())
        (mean, *_), (var, *_) = want.running_mean, want.running_var
        dgamma += sum(gradients.dgammas)
    np.testing.assert_allclose(sum(g.asnumpy() for g in layer.gamma.list_grad()), dgamma, rtol=1e-10)
    for context in contexts:
        np.testing.assert_allclose(layer.running_mean.data(context).asnumpy(), mean, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(layer.running_var.data(context).asnumpy(), var, rtol=1e-11)
    whole = reference.forward(
        [x for batch in batches for x in batch.shards],
        batch.gamma,
        batch.beta,
        np.zeros(5),
        np.ones(5),
        momentum=MOMENTUM,
    )
    assert np.abs(whole.running_var[0] - var).max() > 1e-2  # which is not what the whole batch would have given


@pytest.mark.parametrize("virtual_devices", [1, 3])
def test_small_batches_as_replicas_of_a_context_are_the_whole_batch(contexts, rng, virtual_devices):
    """Called before anything is read, as replicas are. `virtual_devices` are parts of one batch, and change nothing."""
    batches = small_batches(rng, 1)
    joined = Batch(*[[part for b in batches for part in b[field]] for field in (0, 1)], *batches[0][2:])
    layer = SyncBatchNorm(in_channels=5, num_devices=ROUNDS, virtual_devices=virtual_devices)
    prepare(layer, joined, contexts[:1], "float64")
    for parameter in (layer.gamma, layer.beta):
        parameter.grad_req = "add"
        parameter.zero_grad()
    assert_same(step(layer, joined, contexts[:1] * ROUNDS, "float64"), truth(joined), 1e-10)

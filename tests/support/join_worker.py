"""A process of a job whose batches run out at different times in different processes."""

from functools import partial

import numpy as np
from mpi_worker import CONTEXTS, DEVICES, HERE, OWN, devices_of, kv, main, reporting
from replicas import WAYS

import gluon_syncbn
from gluon_syncbn import contrastive

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon, nd  # isort: skip
from mxnet.gluon import nn  # isort: skip

STEPS = (2, 5, 3)  # of each rank


def build(norm, residual):
    class Block(gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.convolution = nn.Conv2D(5, 3, padding=1, in_channels=4)
                self.norm = norm(in_channels=5)
                self.last = residual(in_channels=5) if residual else nn.BatchNorm(in_channels=5)
                self.dense = nn.Dense(3)

        def hybrid_forward(self, F, x, *masks):
            y = F.relu(self.norm(self.convolution(x), *masks))
            z = self.last(y, y, *masks) if residual else F.relu(self.last(y) + y)
            return self.dense(z), z

    return Block()


def shards(step):
    """[(x, heads)] of all devices of all ranks in a step; None where the rank has no batch any more."""
    random = np.random.RandomState(100 + step)
    parts = []
    for rank in range(kv.num_workers):
        for device in range(devices_of(rank)):
            n = 1 + (rank + device + step) % 3
            x = random.randn(n, 4, 3, 3) * (1 + rank) + device
            heads = random.randn(n, 3), random.randn(n, 5, 3, 3)
            parts.append((rank, x, heads) if step < STEPS[rank] else None)
    return parts


def masks_of(x):
    """Of some shards, nothing counts; in the first step, of all that rank 0 has."""
    return nd.array((x.sum(1) > 0) & (x.sum((1, 2, 3)) > 5)[:, None, None], dtype="float64")


class Clips(gluon.Trainer):
    """Clips the sums of all processes, in each of them."""

    def step(self, batch_size, ignore_stale_grad=False):
        self.allreduce_grads()
        for gradients in (p.list_grad() for p in self._params if p.grad_req != "null"):
            for gradient in gradients:
                nd.clip(gradient, -0.5, 0.5, out=gradient)
        self.update(batch_size, ignore_stale_grad)


def train(net, trainer, contexts, parts, masked=False):
    xs = [nd.array(x, ctx=c, dtype="float64") for (_, x, _), c in zip(parts, contexts)]
    masks = [[masks_of(x).as_in_context(c)] if masked else [] for (_, x, _), c in zip(parts, contexts)]
    with autograd.record():
        outputs = [net(x, *own) for x, own in zip(xs, masks)]
    heads = [nd.array(h, ctx=c, dtype="float64") for (_, _, hs), c in zip(parts, contexts) for h in hs]
    autograd.backward([array for pair in outputs for array in pair], heads)
    trainer.step(sum(x.shape[0] for x in xs))


def ready(net, contexts, way, store=None, masked=False):
    net.cast("float64")
    net.initialize(ctx=contexts)
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    x = nd.ones((2, 4, 3, 3), ctx=contexts[0], dtype="float64")
    net(x, *([x[:, 0]] if masked else []))
    random = np.random.RandomState(3)
    for name, parameter in sorted(net.collect_params().items()):
        values = random.randn(*parameter.shape) * 0.5 + name.endswith(("gamma", "running_var"))
        parameter.set_data(nd.array(np.abs(values) if name.endswith("running_var") else values, dtype="float64"))
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    kind = Clips if way == "hybrid" else gluon.Trainer
    return kind(net.collect_params(), "sgd", settings, kvstore=store, update_on_kvstore=False)


def equal_one_process(norm=gluon_syncbn.SyncBatchNorm, residual=gluon_syncbn.SyncBatchNormAdd, masked=False):
    """With masks, which plain BatchNorm does not take, that process has the layers of this package."""
    for way in ("eager", "hybrid", "static_shape"):
        gluon_syncbn.configure(kvstore=kv)
        net = build(norm, residual)
        trainer = ready(net, OWN, way, kv, masked)
        with gluon_syncbn.join(net, trainer):
            for step in range(STEPS[kv.rank]):
                train(net, trainer, OWN, shards(step)[HERE], masked)

        gluon_syncbn.configure(kvstore=None)
        kinds = (gluon_syncbn.SyncBatchNorm, gluon_syncbn.SyncBatchNormAdd) if masked else (nn.BatchNorm, None)
        plain = build(*kinds)
        one = ready(plain, CONTEXTS[3:], way, masked=masked)
        for step in range(max(STEPS[: kv.num_workers])):
            parts = [part for part in shards(step) if part is not None]
            x = np.concatenate([x for _, x, _ in parts])
            heads = [np.concatenate([hs[i] for *_, hs in parts]) for i in range(2)]
            train(plain, one, CONTEXTS[3:], [(0, x, heads)], masked)
        for (name, ours), expected in zip(sorted(net.collect_params().items()), sorted(plain.collect_params().items())):
            for array in ours.list_data():
                # MXNet's BatchNorm keeps its running statistics, and computes, in float32 here and there
                np.testing.assert_allclose(array.asnumpy(), expected[1].data().asnumpy(), 1e-6, 1e-6, err_msg=name)


def leave_out_an_output():
    """The layer before it gets no gradient in any process, and stays as it is. Others wrap ``trainer.step``, too."""
    gluon_syncbn.configure(kvstore=kv)
    net = build(gluon_syncbn.SyncBatchNorm, gluon_syncbn.SyncBatchNormAdd)
    trainer = ready(net, CONTEXTS[:1], "eager", kv)
    before = net.dense.weight.data().asnumpy()
    counted = []

    def counting():
        step = trainer.step
        trainer.step = lambda *args, **kwargs: (counted.append(args[0]), step(*args, **kwargs))
        return trainer.step

    def one_step():
        with autograd.record():
            y = net(nd.ones((2, 4, 3, 3), dtype="float64"))[1]
        y.backward()
        trainer.step(2, ignore_stale_grad=True)

    outer = counting()
    with gluon_syncbn.join(net, trainer):
        for _ in range(STEPS[kv.rank]):
            one_step()
    assert trainer.step is outer and len(counted) == max(STEPS[: kv.num_workers])
    with gluon_syncbn.join(net, trainer):
        inner = counting()
        one_step()
    one_step()
    assert trainer.step is inner and counted[-4:] == [2, 2 * kv.num_workers, 2, 2]
    assert (net.dense.weight.data().asnumpy() == before).all()


def errors_end_all():
    gluon_syncbn.configure(kvstore=kv)
    net = build(gluon_syncbn.SyncBatchNorm, gluon_syncbn.SyncBatchNormAdd)
    trainer = ready(net, OWN, "hybrid", kv)
    with reporting(range(kv.num_workers), (OSError, mx.MXNetError)), gluon_syncbn.join(net, trainer):
        for step in range(STEPS[kv.rank]):
            train(net, trainer, OWN, shards(step)[HERE])
            if kv.rank == 1 and step == 3:
                raise OSError("disk full")


def refused(end_step):
    """In the first step of the block. Outside of it, the samples of all are what a step takes."""
    gluon_syncbn.configure(kvstore=kv)
    net = build(gluon_syncbn.SyncBatchNorm, gluon_syncbn.SyncBatchNormAdd)
    trainer = ready(net, OWN, "eager", kv)
    with reporting(range(kv.num_workers), (ValueError, mx.MXNetError)), gluon_syncbn.join(net, trainer):
        with autograd.record():
            outputs = [array for c in OWN for array in net(nd.ones((2, 4, 3, 3), c, dtype="float64"))]
        autograd.backward(outputs)
        end_step(trainer)
        for later in range(STEPS[kv.rank]):
            train(net, trainer, OWN, shards(later)[HERE])


def gathers():
    gluon_syncbn.configure(kvstore=kv, timeout=20)
    x = nd.ones((2, 4), ctx=CONTEXTS[0], dtype="float64")
    net = nn.Dense(3, in_units=4, dtype="float64")
    net.initialize(ctx=CONTEXTS[:1])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    net.hybridize()
    with reporting(range(kv.num_workers), mx.MXNetError), gluon_syncbn.join(net, trainer):
        for _ in range(STEPS[kv.rank]):
            with autograd.record():
                loss = contrastive.gather(net(x)).square()
            loss.backward()
            trainer.step(2)


ONE_GROUP = {"groups": [range(DEVICES)]}  # by name: a process without a batch is an empty member
SCENARIOS = {
    "masks_equal_one_process": partial(equal_one_process, masked=True),
    "masks_in_groups_equal_one_process": partial(
        equal_one_process,
        partial(gluon_syncbn.SyncBatchNorm, **ONE_GROUP),
        partial(gluon_syncbn.SyncBatchNormAdd, **ONE_GROUP),
        masked=True,
    ),
    "samples_of_all": partial(refused, lambda trainer: trainer.step(2 * len(OWN) * kv.num_workers)),
    "clips_alone": partial(refused, lambda trainer: trainer.allreduce_grads()),
    "updates_alone": partial(refused, lambda trainer: trainer.update(2)),
}

if __name__ == "__main__":
    main({**globals(), **SCENARIOS})

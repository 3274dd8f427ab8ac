"""One process of a job whose trainers sum gradients; each scenario compares with one process that has all samples."""

import copy
import functools
import itertools
import os
import pickle
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mpi_worker
import numpy as np
import pytest
from mpi_worker import CONTEXTS, DEVICES, HERE, OWN, kv, main, reporting
from replicas import on_devices
from reports import leave, report, wait_for

import gluon_syncbn

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon, nd  # isort: skip
from mxnet.contrib.amp.loss_scaler import LossScaler  # isort: skip
from mxnet.gluon import nn  # isort: skip


class Pair:
    """A net of this process and its twin, which sees the samples of all; both have a Trainer."""

    LONG = 70_000  # a width with which each rank adds a part of a sum

    def __init__(self, seed=0, grad_req="write", width=50, optimizer="sgd", dtype="float64"):
        gluon_syncbn.configure(kvstore=kv)
        self.width, self.dtype = width, dtype
        self.rng = np.random.RandomState(seed)
        self.net, self.alone = self._net(gluon_syncbn.SyncBatchNorm, OWN), self._net(nn.BatchNorm, CONTEXTS[3:])
        values = np.random.RandomState(7 + seed)
        for p, q in zip(self.parameters(self.net), self.parameters(self.alone)):
            p.grad_req = q.grad_req = grad_req
            value = values.randn(*p.shape) * 0.3 + p.name.endswith("gamma")
            p.set_data(nd.array(value, dtype=self.dtype))
            q.set_data(nd.array(value, dtype=self.dtype))
        self.trainer, self.twin = (
            self._trainer(net, store, optimizer) for net, store in ((self.net, kv), (self.alone, None))
        )

    def _net(self, norm, contexts):
        for _ in range(kv.rank):
            nn.Dense(1)  # so that Gluon's counters differ among the processes
        net = nn.HybridSequential()
        net.add(nn.Dense(6, in_units=3), norm(in_channels=6), nn.Activation("tanh"), nn.Dense(self.width, in_units=6))
        net.initialize(ctx=contexts)
        net.cast(self.dtype)
        return net

    @staticmethod
    def _trainer(net, kvstore, optimizer="sgd"):
        settings = {"learning_rate": 0.1, **({"momentum": 0.9} if optimizer in ("sgd", "lars") else {})}
        return gluon.Trainer(net.collect_params(), optimizer, settings, kvstore=kvstore)

    @staticmethod
    def parameters(net):
        return [p for p in net.collect_params().values() if p.grad_req != "null"]

    def backward(self):
        sizes = [2 + i % 3 for i in range(DEVICES)]
        shards = [self.rng.randn(n, 3) * (i + 1) for i, n in enumerate(sizes)]
        heads = [self.rng.randn(n, self.width) / self.width**0.5 for n in sizes]
        with autograd.record():
            ys = [self.net(x) for x in on_devices(shards[HERE], OWN, self.dtype)]
        autograd.backward(ys, on_devices(heads[HERE], OWN, self.dtype))
        x, head = (nd.array(np.concatenate(a), ctx=CONTEXTS[3], dtype=self.dtype) for a in (shards, heads))
        with autograd.record():
            y = self.alone(x)
        y.backward(head)
        return sum(sizes)

    def step(self, **settings):
        samples = self.backward()
        self.trainer.step(samples, **settings)
        self.twin.step(samples, **settings)

    def assert_same(self, tolerance=1e-9):
        for p, q in zip(self.parameters(self.net), self.parameters(self.alone)):
            for context in OWN:
                got, want = p.data(context).asnumpy(), q.data().asnumpy()
                assert np.abs(got - want).max() < tolerance * max(1, np.abs(want).max()), p.name
            first = kv.allgather("a test", p.data(OWN[0]).asnumpy().ravel())[0]
            assert (p.data(OWN[-1]).asnumpy().ravel() == first).all(), "other bits"


def accumulates():
    pair = Pair(grad_req="add", width=Pair.LONG)
    for _ in range(2):
        pair.backward()
        pair.step()
        for net in (pair.net, pair.alone):
            net.collect_params().zero_grad()
    pair.assert_same()


def clips():
    pair = Pair(width=Pair.LONG)
    for _ in range(2):
        samples = pair.backward()
        pair.trainer.allreduce_grads()
        for net, contexts in ((pair.net, OWN), (pair.alone, CONTEXTS[3:])):
            for context in contexts:
                gradients = [p.grad(context) for p in pair.parameters(net)]
                norm = float(sum((g * g).sum() for g in gradients).sqrt().asscalar())  # MXNet's takes no float64
                for g in gradients:
                    g *= min(1, 0.5 / norm)
        pair.trainer.update(samples)
        pair.twin.update(samples)
    pair.assert_same()


def scales_the_loss():
    """One rank has an infinite gradient: all skip the step, and the next one is right."""
    pair = Pair()
    pair.trainer._amp_loss_scaler, pair.twin._amp_loss_scaler = LossScaler(), LossScaler()
    pair.step()
    before = pair.net[3].weight.data(OWN[0]).asnumpy()
    samples = pair.backward()
    pair.net[0].weight.grad(OWN[0])[:1] = np.inf if kv.rank == 1 else 1
    pair.trainer.step(samples)
    assert (pair.net[3].weight.data(OWN[0]).asnumpy() == before).all()
    pair.twin._amp_loss_scaler._loss_scale = pair.trainer._amp_loss_scaler._loss_scale
    pair.step()
    pair.assert_same()


def leaves_out_what_is_stale():
    """A parameter that no process has used in the step stays as it is, and so does one that all have frozen."""
    pair = Pair()
    extra, frozen = nn.Dense(2, in_units=3), pair.parameters(pair.net)[0]
    extra.initialize(mx.init.One(), ctx=OWN)
    frozen.grad_req = pair.parameters(pair.alone)[0].grad_req = "null"
    parameters = [*pair.net.collect_params().values(), *extra.collect_params().values()]
    pair.trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
    for _ in range(2):
        pair.step(ignore_stale_grad=True)
    pair.assert_same()
    assert (extra.weight.data(OWN[0]).asnumpy() == 1).all()


def updates_alike():
    """By every optimizer, on all devices of all processes; those that keep numbers of their own do as on one device."""
    for name in sorted(mx.optimizer.Optimizer.opt_registry.keys() - REFUSED.keys() - UNFIT):
        own_numbers = name in ("nadam", "lars")
        while name == "nadam" and set(str(int(nn.Dense(1).prefix[5:-1]) + 1)) != {"9"}:
            pass  # until one net has dense9 and dense10, or dense99 and dense100, whose order among names is another
        pair = Pair(optimizer=name, dtype="float64" if own_numbers else "float32")  # which all have
        for k in range(3):
            for trainer in (pair.trainer, pair.twin):
                trainer.set_learning_rate(0.1 / (k + 1))
            pair.step()
        pair.assert_same(1e-3 if own_numbers else np.inf)  # the gradient of a bias before a layer is of rounding
    for name, text in REFUSED.items():
        net = nn.Dense(2, in_units=3)
        net.initialize(ctx=CONTEXTS[:2])
        with pytest.raises(ValueError, match=f"optimizer: '{name.upper()}' was given, expected {text}"):
            gluon.Trainer(net.collect_params(), name, kvstore=kv)


UNFIT = {"groupadagrad", "adamax"}  # takes matrices only; makes a NaN of a gradient that is always 0
REFUSED = {"sgld": "an optimizer without noise", "lbsgd": "one device for each process"}


def refuses_equal_names():
    """The sums of two parameters of one name would be those of one."""
    nets = [nn.Dense(2, in_units=3, prefix="same_") for _ in range(2)]
    for net in nets:
        net.initialize()
    trainer = gluon.Trainer([p for net in nets for p in net.collect_params().values()], "sgd", kvstore=kv)
    with autograd.record():
        y = nets[1](nets[0](nd.ones((2, 3)))[:, :1] * nd.ones((1, 3)))
    y.backward()
    with pytest.raises(ValueError, match="params: 'same_bias' was given, expected parameters with different names"):
        trainer.step(2)


def trains_two_nets():
    """As a GAN: each Trainer steps in turn, and nobody reads anything between."""
    pairs = [Pair(1), Pair(2)]
    for k in range(6):
        pairs[k % 2].step()
    for pair in pairs:
        pair.assert_same()


def trains_in_threads():
    """A Trainer for each thread; which is first depends on the process."""
    pairs = [Pair(3, width=Pair.LONG), Pair(4, width=Pair.LONG)]
    pause = np.random.RandomState(kv.rank)

    def train(pair):
        for _ in range(4):
            time.sleep(0.02 * pause.rand())
            pair.step()

    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(train, pairs))
    for pair in pairs:
        pair.assert_same()


def copies_a_net():
    """An average that rank 0 alone has never trains, and stays as it is. Copies in all processes train as any net."""
    pair = Pair(5)
    average = copy.deepcopy(pair.net) if kv.rank == 0 else None
    before = [p.data(OWN[0]).asnumpy() for p in pair.net.collect_params().values()]
    for _ in range(2):
        pair.step()
    pair.assert_same()
    if average is not None:
        average(nd.ones((2, 3), ctx=OWN[0], dtype="float64"))
        for p, value in zip(average.collect_params().values(), before):
            assert (p.data(OWN[0]).asnumpy() == value).all(), p.name
    pair.net = copy.deepcopy(pair.net)
    for p in pair.parameters(pair.net):  # MXNet copies no marks of autograd
        p.grad_req = "null"
        p.grad_req = "write"
    pair.trainer, pair.twin = pair._trainer(pair.net, kv), pair._trainer(pair.alone, None)
    pair.step()
    pair.assert_same()
    assert copy.deepcopy(kv) is kv
    with pytest.raises(TypeError, match=r"cannot be pickled.*net.save_parameters"):
        pickle.dumps(pair.net)


# ---- the store of the one is that of the other -------------------------------------------------------------------


def takes_many_small_steps():
    """The core looks again and again whether a round has begun, and it begins at any moment."""
    net = nn.HybridSequential()
    for _ in range(6):
        net.add(nn.Dense(3, in_units=3))
    net.initialize(ctx=OWN)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=kv)
    gluon_syncbn.broadcast_parameters(net, kvstore=kv)
    x = nd.ones((2, 3), ctx=OWN[0]) * (1 + kv.rank)
    for _ in range(1500):
        with autograd.record():
            ys = [net(x.as_in_context(context)).square().mean() for context in OWN]
        autograd.backward(ys)
        trainer.step(10)
        net[0].weight.data(OWN[0]).wait_to_read()
    values = np.concatenate([p.data(OWN[0]).asnumpy().ravel() for p in net.collect_params().values()])
    assert all((theirs == values).all() for theirs in kv.allgather("the parameters", values))


def shares_the_store():
    """First a layer names it and the Trainer nothing, then the reverse; neither calls `configure`. A name is enough."""
    name = kv.type[len("gluon_syncbn_") :]
    for of_layer, settings in ((name, {}), (kv, {}), (None, {"kvstore": kv}), (None, {"kvstore": name})):
        net = nn.HybridSequential()
        net.add(gluon_syncbn.SyncBatchNorm(in_channels=3, kvstore=of_layer), nn.Dense(2, in_units=3))
        net.initialize(mx.init.One(), ctx=OWN)
        trainer = gluon.Trainer(net.collect_params(), "sgd", **settings)
        with autograd.record():
            losses = [net(nd.random.normal(shape=(2, 3), ctx=c) * (1 + kv.rank)).square().sum() for c in OWN]
        autograd.backward(losses)
        trainer.step(1)
        for parameter in net.collect_params().values():
            own = parameter.data(OWN[0]).asnumpy()
            assert all((theirs == own.ravel()).all() for theirs in kv.allgather("a test", own.ravel())), parameter.name
        gluon_syncbn.summary(net)


class Scaled(gluon.HybridBlock):
    """Weights and a layer, of operators that MXNet has for float16 on CPUs: it has no products of matrices there."""

    def __init__(self, store):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, 8, 6, 6), init=mx.init.Constant(0.5))
            self.norm = gluon_syncbn.SyncBatchNorm(in_channels=8, kvstore=store)

    def hybrid_forward(self, F, x, weight):
        return self.norm(F.tanh(F.broadcast_mul(x, weight)))


def resumes():
    """Weights and momentum are saved half way and loaded into another net: as one process does without a break. In
    float16 the weights of the layers stay float32, and the Trainer keeps a copy in float32 of the others."""
    folder = tempfile.mkdtemp()
    for dtype, tolerance in (("float32", 1e-4), ("float16", 2e-2)):
        settings = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3, "multi_precision": dtype == "float16"}

        def begin(store, dtype=dtype, settings=settings):
            net = Scaled(store)
            net.cast(dtype)
            net.initialize(ctx=CONTEXTS[:1])
            return net, gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=store)

        (net, trainer), (whole, alone) = begin(kv), begin(None)
        rng, files = np.random.RandomState(7), [str(Path(folder, name)) for name in ("net", "trainer")]
        samples = kv.num_workers * (kv.num_workers + 1)  # two of rank 0, four of rank 1, ...
        own = slice(kv.rank * (kv.rank + 1), (kv.rank + 1) * (kv.rank + 2))
        for k in range(4):
            if k == 2:
                net.save_parameters(files[0])
                trainer.save_states(files[1])
                net, trainer = begin(kv)
                net.load_parameters(files[0])
                trainer.load_states(files[1])
            if k == 0 and kv.rank == 0:  # no exchange, for which nobody would come
                trainer.save_states(files[1])
                trainer.load_states(files[1])
            x, head = rng.randn(samples, 8, 6, 6) * 2 + 1, rng.randn(samples, 8, 6, 6)
            for model, part, update in ((net, own, trainer), (whole, slice(None), alone)):
                with autograd.record():
                    y = model(nd.array(x[part], dtype=dtype))
                y.backward(nd.array(head[part], dtype=dtype))
                update.step(samples)
        for p, q in zip(net.collect_params().values(), whole.collect_params().values()):
            got, want = (one.data().asnumpy().astype("float64") for one in (p, q))
            assert p.dtype == ("float32" if "norm" in p.name else np.dtype(dtype)), p.name
            assert np.abs(got - want).max() < tolerance * max(1, np.abs(want).max()), (dtype, p.name)
    shutil.rmtree(folder)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def fails(fault):
    """A step that fails changes no parameter, and all processes learn why."""
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3, prefix="dense0_"), nn.Dense(300_000, in_units=4, prefix="dense1_"))
    net.initialize(ctx=OWN)
    net.samples = 1  # of a step
    if fault == "begins_frozen":
        net[1].bias.grad_req = "null"
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)

    def step():
        with autograd.record():
            ys = [net(nd.ones((2, 3), ctx=context)) for context in OWN]
        autograd.backward(ys)
        if fault == "divides_apart":
            trainer.allreduce_grads()
            trainer.update(net.samples)
        else:
            trainer.step(net.samples, ignore_stale_grad=True)

    if not fault.startswith("begins"):
        step()
    since = time.monotonic()
    if kv.rank == 1:
        SPOILS[fault](net)
    parameters = list(net.collect_params().values())
    before = [p.data(OWN[0]).asnumpy() for p in parameters]
    try:
        step()
        raise KeyboardInterrupt  # as Ctrl-C, with the step in flight
    except (mx.MXNetError, KeyboardInterrupt):
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("net", "trainer", "arrays")]
            net.save_parameters(files[0])
            trainer.save_states(files[1])
            nd.save(files[2], [p.data(OWN[0]) for p in parameters])
            saved = list(nd.load(files[0]).values())
            for arrays in (saved, nd.load(files[2]), [p.data(OWN[0]) for p in parameters]):
                assert all((a.asnumpy() == value).all() for a, value in zip(arrays, before))
    try:
        net[1].weight.grad(OWN[0]).asnumpy()
        step()
    except gluon_syncbn.StepError as error:
        report(kv.rank, since, error)
        wait_for(range(kv.num_workers))
        raise SystemExit(3) from None
    raise AssertionError("nothing has failed")


def load_other_states(net):
    """As those of other parameters: MXNet's file has places instead of names."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps({2: nd.ones((300_000, 4))}))
        file.flush()
        net[1].weight._trainer.load_states(file.name)


def steps_until_a_link_is_cut():
    gluon_syncbn.configure(timeout=5)
    pair = Pair()
    with reporting(range(2)):
        for k in itertools.count():
            pair.step()
            nd.waitall()
            if k == 2:
                leave(f"running {kv.rank}", str(os.getpid()))


# What rank 1 does before the step.
SPOILS = {
    "freezes": lambda net: setattr(net[1].bias, "grad_req", "null"),
    **dict.fromkeys(("divides_otherwise", "divides_apart"), lambda net: setattr(net, "samples", 2)),
    "leaves_out_the_second": lambda net: setattr(net, "forward", net[0].forward),
    **dict.fromkeys(
        ("begins_elsewhere", "begins_frozen"), lambda net: net[1].bias.set_data(net[1].bias.data(OWN[0]) + 1)
    ),
    **dict.fromkeys(("begins_with_other_states", "loads_other_states"), load_other_states),
}

if __name__ == "__main__":
    faults = {fault: functools.partial(fails, fault) for fault in SPOILS}
    main({**vars(mpi_worker), **globals(), **faults})

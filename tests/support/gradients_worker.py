"""One process of a job whose trainers sum gradients; each scenario compares with one process that has all samples."""

import copy
import functools
import os
import pickle
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import mpi_worker
import numpy as np
from mpi_worker import CONTEXTS, DEVICES, HERE, OWN, devices_of, kv
from ranks import learns, main, raises
from replicas import WAYS

import gluon_syncbn
from gluon_syncbn import contrastive

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon, nd  # isort: skip
from mxnet.contrib.amp.loss_scaler import LossScaler  # isort: skip
from mxnet.gluon import nn  # isort: skip


class Net(gluon.HybridBlock):
    """With the layers of this package, with these settings, or plain ones."""

    def __init__(self, width, settings):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(6, in_units=3)
            self.norm, self.add = nn.BatchNorm(in_channels=6), nn.BatchNorm(in_channels=6)
            if settings is not None:
                self.norm = gluon_syncbn.SyncBatchNorm(in_channels=6, **settings)
                self.add = gluon_syncbn.SyncBatchNormAdd(in_channels=6, **settings)
            self.last = nn.Dense(width, in_units=6)

    def hybrid_forward(self, F, x, *masks):
        y = F.tanh(self.norm(self.dense(x), *masks))
        z = F.relu(self.add(y) + y) if type(self.add) is nn.BatchNorm else self.add(y, y, *masks)
        return self.last(z), z


class Pair:
    """A net of this process and its twin, which sees the samples of all; both have a Trainer. With masks, which plain
    BatchNorm does not take, the twin has the layers of this package.
    """

    LONG = 70_000  # a width with which each rank adds a part of a sum

    def __init__(
        self,
        seed=0,
        grad_req="write",
        width=50,
        optimizer="sgd",
        dtype="float64",
        way="eager",
        masked=False,
        **settings,
    ):
        self.seed, self.width, self.optimizer, self.dtype = seed, width, optimizer, dtype
        self.way, self.masked, self.steps = WAYS[way], masked, 0
        self.net = self._net({"kvstore": kv, **settings}, OWN)
        self.alone = self._net({"kvstore": "host"} if masked else None, CONTEXTS[3:])
        values = np.random.RandomState(7 + seed)
        for p, q in self.parameters():
            p.grad_req = q.grad_req = grad_req if p.grad_req == "write" else "null"
            value = values.rand(*p.shape) * 0.3 + p.name.endswith(("gamma", "running_var"))
            p.set_data(nd.array(value, dtype=p.dtype))
            q.set_data(nd.array(value, dtype=q.dtype))
        self.trainer, self.twin = self._trainer(self.net, kv), self._trainer(self.alone, None)

    def _net(self, settings, contexts):
        for _ in range(kv.rank):
            nn.Dense(1)  # so that Gluon's counters differ among the processes
        net = Net(self.width, settings)
        net.initialize(ctx=contexts)
        net.cast(self.dtype)
        net.hybridize(**self.way)
        return net

    def _trainer(self, net, kvstore, kind=gluon.Trainer):
        settings = {"learning_rate": 0.1, **({"momentum": 0.9} if self.optimizer in ("sgd", "lars") else {})}
        return kind(net.collect_params(), self.optimizer, settings, kvstore=kvstore, update_on_kvstore=False)

    def parameters(self):
        return list(zip(self.net.collect_params().values(), self.alone.collect_params().values()))

    def data(self, step):
        """Of each device of all ranks: samples, the gradients of both outputs, and maybe a mask."""
        rng, parts = np.random.RandomState([self.seed, step]), []
        for device in range(DEVICES):
            n = 2 + (device + step) % 3
            heads = rng.randn(n, self.width) / self.width**0.5, rng.randn(n, 6)
            mask = (rng.rand(n) < 0.7) * (device + step > 0)  # of a shard, nothing counts
            parts.append([rng.randn(n, 3) * (device + 1), *heads, *[mask] * self.masked])
        return parts

    def backward_of(self, net, parts, contexts):
        """Returns the number of samples."""
        arrays = [[nd.array(a, ctx=c, dtype=self.dtype) for a in part] for part, c in zip(parts, contexts)]
        with autograd.record():
            ys = [net(x, *masks) for x, _, _, *masks in arrays]
        heads = [head for _, *two in arrays for head in two[:2]]
        autograd.backward([y for both in ys for y in both], heads)
        return sum(map(len, (x for x, *_ in parts)))

    def backward_here(self, step):
        return self.backward_of(self.net, self.data(step)[HERE], OWN)

    def backward_alone(self, step, ranks=range(kv.num_workers)):
        """Of the samples of these ranks."""
        parts = [part for part, rank in zip(self.data(step), RANKS) if rank in ranks]
        return self.backward_of(self.alone, [list(map(np.concatenate, zip(*parts)))], CONTEXTS[3:])

    def backward(self):
        self.steps += 1
        self.backward_here(self.steps)
        return self.backward_alone(self.steps)

    def step(self, **settings):
        samples = self.backward()
        self.trainer.step(samples, **settings)
        self.twin.step(samples, **settings)

    def assert_same(self, tolerance=1e-9):
        """MXNet's BatchNorm keeps its running statistics in float32 here and there."""
        for p, q in self.parameters():
            got, want = [p.data(context).asnumpy() for context in OWN], q.data().asnumpy()
            allowed = max(tolerance, 1e-6 * ("running" in p.name)) * max(1, np.abs(want).max())
            assert np.abs(got[0] - want).max() < allowed, p.name
            first = kv.allgather("a test", got[0])[0]
            assert all((one == first).all() for one in got), f"{p.name}: other bits"


RANKS = [rank for rank in range(kv.num_workers) for _ in range(devices_of(rank))]  # of all devices


def accumulates():
    pair = Pair(grad_req="add", width=Pair.LONG)
    for _ in range(2):
        pair.backward()
        pair.step()
        for net in (pair.net, pair.alone):
            net.collect_params().zero_grad()
    pair.assert_same()


def scales_the_loss():
    """One rank has an infinite gradient: all skip the step, and the next one is right."""
    pair = Pair()
    pair.trainer._amp_loss_scaler, pair.twin._amp_loss_scaler = LossScaler(), LossScaler()
    pair.step()
    before = pair.net.last.weight.data(OWN[0]).asnumpy()
    samples = pair.backward()
    pair.net.dense.weight.grad(OWN[0])[:1] = np.inf if kv.rank == 1 else 1
    pair.trainer.step(samples)
    assert (pair.net.last.weight.data(OWN[0]).asnumpy() == before).all()
    pair.twin._amp_loss_scaler._loss_scale = pair.trainer._amp_loss_scaler._loss_scale
    pair.step()
    pair.assert_same()


def leaves_out_what_is_stale():
    """A parameter that no process has used in the step stays as it is, and so does one that all have frozen."""
    pair = Pair()
    extra = nn.Dense(2, in_units=3)
    extra.initialize(mx.init.One(), ctx=OWN)
    for frozen in pair.parameters()[0]:
        frozen.grad_req = "null"
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
        with raises(ValueError, f"optimizer: '{name.upper()}' was given, expected {text}"):
            gluon.Trainer(net.collect_params(), name, kvstore=kv)


UNFIT = {"groupadagrad", "adamax"}  # takes matrices only; makes a NaN of a gradient that is always 0
REFUSED = {"sgld": "an optimizer without noise", "lbsgd": "one device for each process"}


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
    for p in [p for p, _ in pair.parameters() if p.grad_req == "write"]:  # MXNet copies no marks of autograd
        p.grad_req = "null"
        p.grad_req = "write"
    pair.trainer, pair.twin = pair._trainer(pair.net, kv), pair._trainer(pair.alone, None)
    pair.step()
    pair.assert_same()
    assert copy.deepcopy(kv) is kv
    with raises(TypeError, r"cannot be pickled.*net.save_parameters"):
        pickle.dumps(pair.net)


# ---- processes that have different numbers of batches ------------------------------------------------------------

STEPS = (2, 5, 3)  # of each rank


class Clips(gluon.Trainer):
    """Clips the sums of all processes, in each of them."""

    def step(self, batch_size, ignore_stale_grad=False):
        self.allreduce_grads()
        for gradient in [one for p in self._params if p.grad_req != "null" for one in p.list_grad()]:
            nd.clip(gradient, -0.5, 0.5, out=gradient)
        self.update(batch_size, ignore_stale_grad)


def joins(**settings):
    """By name, also groups, of which a process without a batch is an empty member."""
    for way in ("eager", "hybrid", "static_shape"):
        pair = Pair(way=way, **settings)
        if way == "hybrid":
            pair.trainer, pair.twin = pair._trainer(pair.net, kv, Clips), pair._trainer(pair.alone, None, Clips)
        with gluon_syncbn.join(pair.net, pair.trainer):
            for step in range(STEPS[kv.rank]):
                pair.trainer.step(pair.backward_here(step))
        for step in range(max(STEPS[: kv.num_workers])):
            pair.twin.step(pair.backward_alone(step, [rank for rank, steps in enumerate(STEPS) if step < steps]))
        pair.assert_same()


def joins_without_an_output():
    """The layer before it gets no gradient in any process, and stays as it is. Others wrap ``trainer.step``, too."""
    pair = Pair()
    net, trainer, counted = pair.net, pair.trainer, []
    before, own, all_ = net.last.weight.data(OWN[0]).asnumpy(), 2 * len(OWN), 2 * DEVICES

    def counting():
        step = trainer.step
        trainer.step = lambda *args, **kwargs: (counted.append(args[0]), step(*args, **kwargs))
        return trainer.step

    def one_step(samples=own):
        with autograd.record():
            ys = [net(nd.ones((2, 3), ctx=c, dtype="float64"))[1] for c in OWN]
        autograd.backward(ys)
        trainer.step(samples, ignore_stale_grad=True)

    outer = counting()
    with gluon_syncbn.join(net, trainer):
        for _ in range(STEPS[kv.rank]):
            one_step()
    assert trainer.step is outer and len(counted) == max(STEPS[: kv.num_workers])
    with gluon_syncbn.join(net, trainer):
        inner = counting()
        one_step()
    one_step(all_)
    assert trainer.step is inner and counted[-4:] == [own, all_, all_, all_]
    assert (net.last.weight.data(OWN[0]).asnumpy() == before).all()


def raises_while_joined():
    pair = Pair(way="hybrid")
    text = "the disk is full" if kv.rank == 1 else "rank 1 left gluon_syncbn.join with OSError: the disk is full"
    with learns(text, (OSError, mx.MXNetError)), gluon_syncbn.join(pair.net, pair.trainer):
        for step in range(STEPS[kv.rank]):
            pair.trainer.step(pair.backward_here(step))
            if kv.rank == 1 and step == 3:
                raise OSError("the disk is full")


def is_refused_while_joined(call, text):
    """In the first step of the block. Outside of it, the samples of all are what a step takes."""
    pair = Pair()
    with learns(text, (ValueError, mx.MXNetError)), gluon_syncbn.join(pair.net, pair.trainer):
        call(pair.trainer, pair.backward_here(0))


MISUSES = {
    "samples_of_all": (
        lambda trainer, samples: trainer.step(samples * kv.num_workers),
        "was given, expected the samples of this process within gluon_syncbn.join, not of all",
    ),
    "clips_alone": (
        lambda trainer, _: trainer.allreduce_grads(),
        "trainer.allreduce_grads was called within gluon_syncbn.join, where a process without a batch",
    ),
    "updates_alone": (lambda trainer, _: trainer.update(2), "trainer.update was called within gluon_syncbn.join"),
    "gathers_while_joined": (
        lambda *_: contrastive.gather([nd.ones((2, 3), ctx=c) for c in OWN], kvstore=kv),
        "gather does not work within gluon_syncbn.join, because a process without a batch has no rows",
    ),
}


def resumes():
    """Weights and momentum are saved half way and loaded into another net: as without a break."""
    pair = Pair(6)
    for k in range(4):
        if k == 2:
            with tempfile.TemporaryDirectory() as folder:
                pair.net.save_parameters(f"{folder}/net")
                pair.trainer.save_states(f"{folder}/trainer")
                pair.net = pair._net({"kvstore": kv}, OWN)
                pair.net.load_parameters(f"{folder}/net", ctx=OWN)
                pair.trainer = pair._trainer(pair.net, kv)
                pair.trainer.load_states(f"{folder}/trainer")
        pair.step()
    pair.assert_same()


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def fails(fault):
    """A step that fails changes no parameter, and all processes learn why."""
    spoil, text = SPOILS[fault]
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
    if kv.rank == 1:
        spoil(net)
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
    with learns(text if kv.rank == 0 else ""):
        net[1].weight.grad(OWN[0]).asnumpy()
        step()


def load_other_states(net):
    """As those of other parameters: MXNet's file has places instead of names."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps({2: nd.ones((300_000, 4))}))
        file.flush()
        net[1].weight._trainer.load_states(file.name)


def begins(net):
    net[1].bias.set_data(net[1].bias.data(OWN[0]) + 1)


def other_samples(net):
    net.samples = 2


WEIGHTS_DIFFER = "the processes begin with different weights: 'dense1_bias' of rank 1 is not that of rank 0"
STATES_DIFFER = r" the update in .*: loaded states \w+ on rank 1 and none on rank 0\. "
# What rank 1 does before the step, and what rank 0 learns.
SPOILS = {
    "freezes": (
        lambda net: setattr(net[1].bias, "grad_req", "null"),
        r"disagree about their arrays .*1_weight' \(1200000 values of float32\) on rank 1 and the gradient of "
        r"'dense1_bias' \(300000 values of float32\) on rank 0\. Build .* freeze the same parameters",
    ),
    "divides_otherwise": (
        other_samples,
        r"and 3 more, step 2 of trainer 1: rescale_grad 0\.5 on rank 1 and rescale_grad 1\.0 on rank 0\. Give all ",
    ),
    "leaves_out_the_second": (
        lambda net: setattr(net, "forward", net[0].forward),
        r" the update in .*: new gradient False of parameters \[2, 3\] \(the first is 'dense1_bias'\) on rank 1 and "
        "lr_mult 1, wd_mult 1, grad_req 'write', new gradient True of all other parameters on rank 0",
    ),
    "divides_apart": (
        other_samples,
        r"trainer\.update: the ranks from 0 on say \[1\.0, 2\.0\] samples\. It takes the ",
    ),
    "begins_elsewhere": (begins, WEIGHTS_DIFFER),
    "begins_frozen": (begins, WEIGHTS_DIFFER),
    "begins_with_other_states": (load_other_states, STATES_DIFFER),
    "loads_other_states": (load_other_states, STATES_DIFFER),
}

SCENARIOS = {
    **{name: functools.partial(is_refused_while_joined, *one) for name, one in MISUSES.items()},
    **{name: functools.partial(fails, name) for name in SPOILS},
    "joins_masked": functools.partial(joins, masked=True),
    "joins_masked_in_groups": functools.partial(joins, masked=True, groups=[range(DEVICES)]),
}

if __name__ == "__main__":
    main({**vars(mpi_worker), **globals(), **SCENARIOS})

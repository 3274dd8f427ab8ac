"""What one process of a job does; the tests of each transport start several of them.

``mpi_worker.py SCENARIO+SCENARIO ...``. Other workers have scenarios of their own, and share what stands here.
"""

import atexit
import itertools
import os
import sys
import time
import unittest
import warnings

import light  # noqa: F401
import numpy as np

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(4)

import mxnet as mx  # noqa: E402
from allreduce import sent  # noqa: E402
from gate import Gate  # noqa: E402
from internals import WHY_CUSTOM, core_count  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from poolings import POOLINGS, fits, specification  # noqa: E402
from ranks import learns, leave, main, meet, path_of, raises, wait_for  # noqa: E402
from replicas import (  # noqa: E402
    TOLERANCE,
    WAYS,
    assert_same,
    assert_same_bits,
    forward_and_backward,
    interrupt_when_waiting,
    make_batch,
    on_devices,
    prepare,
    step,
)

from gluon_syncbn import _native, contrastive  # noqa: E402
from gluon_syncbn.exchange import mpi  # noqa: E402

if os.environ.get("GLUON_SYNCBN_TEST_DEVICE") == "gpu":
    CONTEXTS = [mx.gpu(i) for i in range(mx.context.num_gpus())]
kv = meet()


def devices_of(rank):
    """1, 2, 1, 2 ..., or what the test asks for."""
    return int(os.environ.get("MPI_WORKER_CONTEXTS", 1 + rank % 2))


DEVICES = sum(map(devices_of, range(kv.num_workers)))
HERE = slice(*(sum(map(devices_of, range(rank))) for rank in (kv.rank, kv.rank + 1)))  # this process's, of all replicas
OWN = CONTEXTS[: devices_of(kv.rank)]


def own(batch):
    """This process's part of the batch of all."""
    return batch._replace(shards=batch.shards[HERE], heads=batch.heads[HERE])


def make_layer(batch, dtype="float64", way="eager", **settings):
    for _ in range(3 * kv.rank):
        nn.BatchNorm()  # so that Gluon's counters differ among the processes
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5, kvstore=kv, **settings)
    return prepare(layer, batch, OWN, dtype, WAYS[way])


def specified(layer, batch, **settings):
    """What it computes, by the number that all processes have for it."""
    local = layer._replicas.id
    layer._replicas.id = layer._replicas.key
    want = specification(layer, batch, **settings)
    layer._replicas.id = local
    return want


def part_of(result):
    """Of the replicas of all, this process's."""
    names = "outputs", "dxs", "running_mean", "running_var"
    return result._replace(**{name: getattr(result, name)[HERE] for name in names})


def summed(got):
    """With the gradients of gamma and beta that all processes have."""
    totals = {name: nd.array(getattr(got, name), dtype="float64") for name in ("dgamma", "dbeta")}
    for name, total in totals.items():
        kv.pushpull(name, total)
    return got._replace(**{name: total.asnumpy() for name, total in totals.items()})


def equals_the_specification(poolings=POOLINGS):
    """Two calls. Replicas that share statistics have the same bits, and others do not; so have all ways of running, in
    any order of arrival.
    """
    rng, pause = np.random.RandomState(0), np.random.RandomState(os.getpid())
    fitting = [(name, pooling) for name, pooling in poolings.items() if fits(pooling, DEVICES)]
    for dtype, (name, pooling) in itertools.product(("float64", "float16"), fitting):
        batch = make_batch(rng, DEVICES, dtype=dtype)
        part, firsts = own(batch), []
        for way, call in itertools.product(WAYS if dtype == "float64" else ["eager"], range(2)):
            if call == 0:
                layer = make_layer(part, dtype, way, **pooling)
            time.sleep(0.01 * pause.rand())
            got = step(layer, part, OWN, dtype)
            firsts += [got] * (way == "eager")
            if pooling.get("mode") != "shuffle":  # each layer draws an order of its own
                assert_same_bits(got, firsts[call])
            got = summed(got)
            want = part_of(specified(layer, batch, call=call, node=-1 if way == "eager" else 0))
            if call == 1:  # the specification begins with the running statistics of a new layer
                got, want = (one._replace(running_mean=[], running_var=[]) for one in (got, want))
            else:
                running = got.running_mean, got.running_var
            assert_same(got, want, TOLERANCE[dtype], f"{name}, {dtype}, {way}: ")
        for statistic in running if pooling.get("mode", "sync") == "sync" else ():
            of_all = np.concatenate(kv.allgather("running", np.array(statistic), equal=False))
            size = pooling.get("group_size", DEVICES)
            for group in pooling.get("groups", np.arange(DEVICES).reshape(-1, size)):
                others = np.delete(of_all, group, axis=0)
                assert (of_all[group] == of_all[group[0]]).all(), (name, of_all)
                assert (others != of_all[group[0]]).any(axis=1).all(), (name, of_all)


def updates_bn_stats():
    """One rank has another number of batches, and nothing changes."""
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5)
    layer.initialize(ctx=OWN)
    xs = on_devices(make_batch(np.random.RandomState(0), len(OWN)).shards, OWN, "float32")
    with raises(ValueError, f"batches: rank 0 of {kv.num_workers} gave 2, expected as many as the other ranks"):
        gluon_syncbn.update_bn_stats(layer, [xs] * (2 + (kv.rank > 0)), kvstore=kv)
    assert not layer.running_mean.data(OWN[0]).asnumpy().any()


def broadcasts_parameters():
    """Of every type, those of each rank in turn, also if no layer names the store. Another net is an error."""
    types = ("float16", "float32", "float64", np.dtype([("bfloat16", np.uint16)]))
    for root, dtype in itertools.product(range(kv.num_workers), types):
        for _ in range(kv.rank):
            nn.Dense(1)  # so that Gluon's counters differ among the processes
        net = nn.HybridSequential()
        net.add(nn.Dense(4, in_units=3), gluon_syncbn.SyncBatchNorm(in_channels=4, kvstore=kv if root else None))
        net.cast(dtype)
        net.initialize(mx.init.Constant(1 + kv.rank), ctx=OWN)
        gluon_syncbn.broadcast_parameters(net if root else net.collect_params(), root_rank=root)
        for array in net[0].weight.list_data():
            assert (array.astype("float32").asnumpy() == 1 + root).all(), (root, dtype)
    net = nn.Dense(4 + kv.rank, in_units=3, prefix="net_")
    net.initialize(ctx=OWN)
    told = [rf"'net_weight' of shape \({4 + k}, 3\) and type float32 on rank {k}" for k in (kv.rank, 1 - kv.rank)]
    with learns(f"the processes disagree about the parameters: number 1 is {told[0]} and {told[1]}"):
        gluon_syncbn.broadcast_parameters(net, kvstore=kv)


class Branches(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.second = (gluon_syncbn.SyncBatchNorm(in_channels=2, momentum=0, kvstore=kv) for _ in "12")

    def hybrid_forward(self, F, x, y):
        return self.first(x), self.second(y)


def prepares_otherwise():
    """The processes initialise branches in different orders, as by a file and by a forward, and record more graphs. One
    of them runs another net before the first step, as for a preview.
    """
    data = mx.sym.var("data", dtype="float32")
    recorded = gluon.SymbolBlock(mx.sym.BatchNorm(data, momentum=0, fix_gamma=False, name="recorded"), data)
    recorded.initialize(ctx=CONTEXTS[:1])
    gluon_syncbn.convert(recorded, kvstore=kv)
    for _ in range(kv.rank):
        preview = nn.Dense(1, in_units=1)
        preview.initialize()
        preview.hybridize()
        preview(nd.ones((1, 1)))
    with autograd.record():
        recorded(nd.ones((3, 2)) * kv.rank)
    mean = recorded.collect_params()["recorded_moving_mean"].data().asnumpy()
    np.testing.assert_allclose(mean, (kv.num_workers - 1) / 2, rtol=1e-6)
    net = Branches()
    for layer in [net.first, net.second][:: 1 - 2 * (kv.rank % 2)]:
        layer.initialize(ctx=CONTEXTS[:1])
    for _ in range(kv.rank):
        net(mx.sym.var("x"), mx.sym.var("y"))
    for k in range(3):
        if k in (1, 1 + kv.rank):
            net.hybridize()
        with autograd.record():
            net(nd.ones((3, 2)) * (kv.rank + k), nd.ones((3, 2)) * (10 + kv.rank + k))
        for layer, first in ((net.first, 0), (net.second, 10)):
            want = first + k + (kv.num_workers - 1) / 2
            np.testing.assert_allclose(layer.running_mean.data().asnumpy(), want, rtol=1e-6)


def shares_the_store():
    """A layer names it and the Trainer nothing, or the reverse, and a name is enough; or `configure` comes behind both.
    Where the script has chosen another one, a warning says what follows. A Trainer of Horovod's needs none.
    """
    horovod = type("DistributedTrainer", (gluon.Trainer,), {"__module__": "horovod.mxnet"})
    own, plain = type("Own", (horovod,), {}), gluon.Trainer
    named = [(plain, "name", None), (plain, "object", None), (plain, None, "name"), (plain, None, "object")]
    for cls, *stores in (*named, (plain, None, None), (plain, None, "device"), (own, None, "device")):
        meet()
        name = {"name": kv.type[len("gluon_syncbn_") :], "object": kv}
        of_layer, of_trainer = (name.get(one, one) for one in stores)
        settings = {} if of_trainer is None else {"kvstore": of_trainer}
        net = nn.HybridSequential()
        net.add(gluon_syncbn.SyncBatchNorm(in_channels=3, kvstore=of_layer), nn.Dense(2, in_units=3))
        net.initialize(mx.init.One(), ctx=OWN)
        trainer = cls(net.collect_params(), "sgd", **settings)
        if stores in ([None, None], [None, "device"]):
            gluon_syncbn.configure(kvstore=kv)
        gluon_syncbn.broadcast_parameters(net)
        with autograd.record():
            losses = [net(nd.random.normal(shape=(2, 3), ctx=c) * (1 + kv.rank)).square().sum() for c in OWN]
        autograd.backward(losses)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            trainer.step(8)
        for parameter in net.collect_params().values():
            mine = parameter.data(OWN[0]).asnumpy()
            same = all((theirs == mine).all() for theirs in kv.allgather("a test", mine))
            assert same is (of_trainer != "device" or parameter.grad_req == "null"), (parameter.name, stores)
        warned = any("stay in this one, with kvstore='device'" in str(one.message) for one in given)
        assert warned is (of_trainer == "device" and cls is not own)
    gluon_syncbn.summary(net)
    twin = nn.Dense(1, in_units=1)
    twin.initialize()
    with unittest.TestCase().assertLogs("gluon_syncbn", "WARNING") as said:
        trainers = [gluon.Trainer(twin.collect_params(), "sgd", **settings) for settings in ({}, {"kvstore": None})]
    assert [trainer._kvstore_params["kvstore"] for trainer in trainers] == [kv, None]
    assert ["whose net has no layer of gluon_syncbn" in line for line in said.output] == [True], said.output


def a_batch_that_is_not_finite():
    """Of rank 1: left out by all, then the end of all."""
    layer = gluon_syncbn.SyncBatchNorm(in_channels=2, kvstore=kv, prefix="front_")
    layer.initialize(ctx=OWN)
    gluon_syncbn.configure(nonfinite="skip", timeout=20)

    def forward(spoil):
        xs = [np.random.RandomState(kv.rank).randn(3, 2) for _ in OWN]
        if spoil and kv.rank == 1:
            xs[1][2, 1] = np.nan
        with autograd.record():
            ys = [layer(nd.array(x, ctx=c)) for x, c in zip(xs, OWN)]
        mx.nd.waitall()
        return ys

    forward(spoil=True)
    for context in layer.running_var.list_ctx():
        assert (layer.running_var.data(context).asnumpy() == 1).all()
        assert (layer.running_mean.data(context).asnumpy() == 0).all()
    forward(spoil=False)
    for context in layer.running_var.list_ctx():
        assert (layer.running_var.data(context).asnumpy() != 1).all()
    gluon_syncbn.configure(nonfinite="error")
    with learns(r"'front' on \wpu\(1\): the batch is not finite|rank 1 of 2 has failed"):
        forward(spoil=True)
        forward(spoil=False)  # in which the ranks of others' GPUs hear of it


def recomputed():
    """The statistics of all processes once, in the first forward; sums of all in the backward."""
    cases = [({}, False), ({}, True), ({"mode": "local"}, True), ({"group_size": 1}, True)]
    cases.append(({"mode": "shuffle"}, False))  # each graph draws an order of its own
    part = own(make_batch(np.random.RandomState(6), DEVICES))
    for settings, hybrid in cases:
        net = nn.HybridSequential()
        for _ in range(2):
            norms = [gluon_syncbn.SyncBatchNorm(in_channels=5, kvstore=kv, **settings) for _ in range(2)]
            net.add(nn.HybridSequential())
            net[-1].add(*norms)
            if CONTEXTS[0].device_type == "cpu":  # MXNet's own operators do not run on the emulator
                net[-1].add(nn.Activation("tanh"))
        net.initialize(ctx=OWN)
        found = []
        for active in (False, True):
            gluon_syncbn.configure(seed=0)
            for unit in net:
                gluon_syncbn.recompute(unit, active=active)
                if active and hybrid:
                    unit.hybridize()
            for parameter in net.collect_params(".*running.*").values():
                parameter.set_data(nd.ones(5))
            xs, heads = (on_devices(arrays, OWN, "float32") for arrays in (part.shards, part.heads))
            ys = forward_and_backward(net, xs, heads)
            arrays = [*ys, *[x.grad for x in xs], *norms[1].gamma.list_grad(), *norms[0].running_var.list_data()]
            found.append([array.asnumpy() for array in arrays])
        for a, b in zip(*found):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            assert np.abs(a).max() > 0


def calls_stay_in_the_engine():
    """Where the other process comes within a moment, and at least where it has come before."""
    if WHY_CUSTOM:
        return
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, 7, in_channels=32), gluon_syncbn.SyncBatchNorm(in_channels=32, kvstore=kv))
    net.initialize(ctx=CONTEXTS[0])
    net.hybridize()
    for k in range(11):
        if k == 1:  # the first one asks what the processes have agreed on
            before = core_count("lone_calls")
        gate = Gate()
        x = gate.behind(nd.ones((4, 32, 40, 40), ctx=CONTEXTS[0]))
        with autograd.record():
            y = net(x)
        y.backward()
        gate.open()
        nd.waitall()
    assert sum(kv.allgather("lone", np.array([core_count("lone_calls") - before]))) > 0


def gathers():
    """Uneven parts, one or all of them empty, and such that each rank adds a part: the rows of all, and float64 sums of
    what all replicas give back. One message in each direction. What a net makes of them, in each way of running, is
    that of one process: test_gather.py.
    """
    rng, short, tolerances = np.random.RandomState(3), [3, 0, 5, 2, 4], {"float64": 1e-14, "float32": 1e-6}
    long, none = [400 * (1 + device) for device in range(DEVICES)], [0] * DEVICES
    cases = [(short, 4, "float64"), (short, 4, "float32"), (long, 128, "float64"), (none, 3, "float64")]
    for sizes, width, dtype in cases * 2:
        sizes = sizes[:DEVICES]
        everyone = rng.randn(sum(sizes), width).astype(dtype)
        heads = rng.randn(DEVICES, *everyone.shape).astype(dtype)  # of each replica
        before = sent(kv.handle)
        with mx.util.np_shape(True):
            xs = on_devices(np.split(everyone, np.cumsum(sizes)[:-1])[HERE], OWN, dtype)
            for x in xs:
                x.attach_grad()
            with autograd.record():
                gathered = contrastive.gather(xs, name="rows", kvstore=kv)
            autograd.backward(gathered, on_devices(heads[HERE], OWN, dtype))
            wants = np.split(heads.astype("float64").sum(axis=0), np.cumsum(sizes)[:-1])[HERE]
            for rows, x, want in zip(gathered, xs, wants):
                np.testing.assert_array_equal(rows.asnumpy(), everyone)
                np.testing.assert_allclose(x.grad.asnumpy(), want, tolerances[dtype], tolerances[dtype])
        nd.waitall()  # a read of an array without values waits for nothing
        assert sent(kv.handle) - before == 2 * (kv.num_workers - 1) or sizes[0] == long[0]


def gradients_in_any_order():
    """The backwards of the gathers of a step, in an order of its own in each process."""
    rng = np.random.RandomState(100 + kv.rank)
    names = ["a", "b", "c"]
    for _ in range(15):
        xs = {name: nd.array(rng.randn(1 + kv.rank, 3), dtype="float64") for name in names}
        ys = {}
        for x in xs.values():
            x.attach_grad()
        with autograd.record():
            for name in names:
                (ys[name],) = contrastive.gather([xs[name]], name=name, kvstore=kv)
                time.sleep(0.005 * rng.rand())
        heads = {name: nd.ones_like(ys[name]) * (k + 1) for k, name in enumerate(names)}
        order = rng.permutation(names)
        autograd.backward([ys[name] for name in order], [heads[name] for name in order])
        for k, name in enumerate(names):
            np.testing.assert_array_equal(xs[name].grad.asnumpy(), np.full(xs[name].shape, kv.num_workers * (k + 1)))


def shuffled_keys():
    """Keys and their gradients come to the process of their queries, with several contexts."""
    dim = 8
    images = np.random.RandomState(0).rand(20 * kv.num_workers - 3, 3, 64, 64).astype("float32")
    table = images.reshape(len(images), -1)[:, :dim].astype("float64")  # the features
    sampler = contrastive.ShuffleSampler(len(images), 8, kv.num_workers, kv.rank, seed=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, pairs in enumerate(sampler):
            queries, keys = (np.array(column) for column in zip(*pairs))
            parts = np.array_split(table[keys], len(OWN))
            xs = [nd.array(part, ctx=c, dtype="float64") for part, c in zip(parts, CONTEXTS)]
            for x in xs:
                x.attach_grad()
            with autograd.record():
                ys = sampler.restore([x * 3 for x in xs], batch, kvstore=kv)
            heads = np.array_split(table[queries] ** 2, len(OWN))
            autograd.backward(ys, [nd.array(head, ctx=c, dtype="float64") for head, c in zip(heads, CONTEXTS)])
            np.testing.assert_array_equal(np.concatenate([y.asnumpy() for y in ys]), 3 * table[queries])
            got = np.concatenate([x.grad.asnumpy() for x in xs])
            np.testing.assert_allclose(got, 3 * table[keys] ** 2, rtol=1e-15)


def gathers_other_rows():
    text = rf"gather 'features': rank {kv.rank} came with rows of shape \({3 + kv.rank},\) and type float32"
    with learns(text), autograd.record():
        contrastive.gather(nd.ones((2, 3 + kv.rank)), name="features", kvstore=kv).asnumpy()


# ---- faults: rank 1 does something else, the others must hear of it ----------------------------------------------


def saves_its_work():
    """Rank 1 leaves its loop in the given way, and rank 0 saves the net: mpiexec ends it with the first that leaves."""
    gluon_syncbn.configure(kvstore=kv)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5, prefix="layer0_")
    layer.initialize(ctx=CONTEXTS[:1])
    way = sys.argv[2]

    def save():
        time.sleep(2)  # in which mpiexec would have ended this rank
        path = path_of(".saved")
        layer.save_parameters(str(path))
        assert (nd.load(str(path))["running_mean"] == layer.running_mean.data()).asnumpy().all()
        path.unlink()
        leave("saved", "SAVED\n")

    def train():
        for k in range(4):
            faulty = kv.rank == 1 and k == 2
            if faulty and way == "exits":
                sys.exit()
            with autograd.record():
                if faulty:
                    raise OSError("the disk is full")
                y = layer(nd.array(np.random.randn(2, 5, 3), ctx=CONTEXTS[0]))
            y.asnumpy()

    if kv.rank == 1:
        train()
    if way == "exits":
        atexit.register(save)
    left = r"rank 1 of 2 has failed: OSError left the recorded step \(the disk is full\)"
    ended = (
        r"rank 1 of 2 has ended .*in the forward of call 3 of SyncBatchNorm 'layer0'\)\. The output of rank 1, or the "
        r"log of its machine, says why\. Give every process the same number of steps, or train within gluon_syncbn\."
    )
    with learns(left if way == "left_the_scope" else ended):
        train()
    if way != "exits":
        save()
    raise SystemExit(3)


def fails_beside_two():
    """Rank 2 fails while rank 0 waits for rank 1 of its group, which may wait for rank 2."""
    gluon_syncbn.configure(timeout=60)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5, kvstore=kv, groups=[[0, 1], [2]])
    layer.initialize(ctx=CONTEXTS[:1])
    x = nd.ones((2, 5), ctx=CONTEXTS[0])
    with autograd.record():
        layer(x).asnumpy()  # in which all agree
    kv._job._comm.Barrier()  # nobody waits in it any more
    if kv.rank == 2:
        kv.fail("the disk is full")
    elif kv.rank == 0:
        with learns(r"rank 2 of 3 has failed: the disk is full \(rank 0 was in the forward of call 2 of SyncBatchNorm"):
            with autograd.record():
                layer(x).asnumpy()


def fails_after_another_has_ended():
    """Neither of the two goes into MPI_Finalize, which the other one would not come to."""
    leave_by_exit = mpi.leave

    def leaving():
        leave(f"left {kv.rank}", f"LEFT {kv.rank}\n")
        wait_for([f"left {rank}" for rank in range(kv.num_workers)])  # mpiexec ends all others with the first
        leave_by_exit()

    mpi.leave = leaving
    if kv.rank == 0:
        while _native.fate_of(kv.handle, 1) != "has ended":
            time.sleep(0.01)
        kv.fail("the disk is full")
    raise SystemExit(kv.rank == 0)


def trained_alone_before():
    """Rank 0, some steps before the processes meet."""
    batch = make_batch(np.random.RandomState(9), DEVICES)
    for pooling in ({}, {"mode": "shuffle", "virtual_devices": 2}):
        layer = prepare(gluon_syncbn.SyncBatchNorm(in_channels=5, **pooling), batch, OWN, "float64")
        for _ in range(3 * (kv.rank == 0)):
            step(layer, own(batch), OWN, "float64")
        gluon_syncbn.configure(kvstore=kv)
        for call in range(2):
            got, want = summed(step(layer, own(batch), OWN, "float64")), part_of(specified(layer, batch, call=call))
            got, want = (one._replace(running_mean=[], running_var=[]) for one in (got, want))
            assert_same(got, want, 1e-11, f"{pooling}, {call}: ")
        gluon_syncbn.configure(kvstore=None)


def modules_of_other_channels():
    symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), fix_gamma=False, name="bn")
    gluon_syncbn.configure(kvstore=kv)
    module = mx.mod.Module(symbol, label_names=None, context=CONTEXTS[:1])
    module.bind([("data", (2, 5 + kv.rank))])
    module.init_params()
    others = rf"'bn' \({5 + kv.rank} channels.*'bn' \({6 - kv.rank} channels"
    with learns(f"the processes disagree about the net: layer 1 is SyncBatchNorm {others}"):
        module.forward(mx.io.DataBatch([nd.ones((2, 5 + kv.rank))]), is_train=True)


def interrupted():
    """Ctrl-C while rank 0 waits for rank 1, which does not come."""
    if kv.rank > 0:
        time.sleep(600)
    gluon_syncbn.configure(timeout=60, kvstore=kv)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5)
    layer.initialize(ctx=CONTEXTS[:1])
    interrupt_when_waiting()
    with learns("asked to end|^$", (mx.MXNetError, KeyboardInterrupt)), autograd.record():
        layer(nd.ones((2, 5))).asnumpy()
    leave("interrupted", "INTERRUPTED\n")
    raise SystemExit(3)


if __name__ == "__main__":
    main(globals())

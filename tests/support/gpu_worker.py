"""What one process of a job on GPUs does, beside what mpi_worker.py has. Rank r has 1 + r % 2 GPUs."""

import ctypes
import itertools
import os
import sys

import light  # noqa: F401
import numpy as np

import gluon_syncbn
from gluon_syncbn import contrastive

os.environ["GLUON_SYNCBN_TEST_DEVICE"] = "gpu"

import mpi_worker
import mxnet as mx
from gpus import assert_sound, counted_step
from mpi_worker import CONTEXTS, DEVICES, HERE, OWN, devices_of, kv, main, make_layer, own, specified, summed
from mxnet import autograd, gluon, nd
from places import TESTS
from poolings import POOLINGS, fits
from replicas import assert_same, make_batch, on_devices, step

sys.path.append(str(TESTS))


def leaving_another_gpu(method):
    """As Python does if it frees an array on another GPU while it is called here: that one is current then."""

    def call(*arguments, **settings):
        result = method(*arguments, **settings)
        ctypes.CDLL("libcudart.so.11.0").cudaSetDevice(3)
        return result

    return call


kv.exchange = leaving_another_gpu(kv.exchange)


def wanted(layer, batch, *, devices=None, **settings):
    """Of this process; gradients of the parameters are those of its own replicas, which nobody adds here."""
    want = specified(layer, batch, **settings)
    mine = HERE if devices is None else devices
    return want._replace(outputs=want.outputs[mine], dxs=want.dxs[mine], running_mean=[], running_var=[])


def assert_right(got, want, tolerance):
    assert_same(summed(got)._replace(running_mean=[], running_var=[]), want, tolerance)


# ---- numbers and counts ------------------------------------------------------------------------------------


def every_mode():
    """What is computed, twice, and what each direction of a step asks for."""
    rng = np.random.RandomState(0)
    ways = [("eager", "float64", 1e-10, (4, 6)), ("static_shape", "float16", 2e-3, (4, 6))]
    cut_into_parts = ({}, ("eager", "float32", 1e-5, (180, 190)))
    cases = [*itertools.product(POOLINGS.values(), ways), cut_into_parts]
    for settings, (way, dtype, tolerance, spatial) in cases:
        if not fits(settings, DEVICES):
            continue
        batch = make_batch(rng, DEVICES, dtype=dtype, spatial=spatial)
        part = own(batch)
        layer = make_layer(part, dtype, way, **settings)
        for call in range(2):
            got = step(layer, part, OWN, dtype)
            assert_right(got, wanted(layer, batch, call=call, node=-1 if way == "eager" else 0), tolerance)
        cost(layer, part, dtype, 2 if spatial == (4, 6) else 3)
    assert_sound()


def rows_and_gradients():
    """The rows of all GPUs on each of them, and the sum of what flows back into the copies. With a GPU in each process,
    because MXNet's own operators do not run on the emulator."""
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-6), ("float16", 4e-3)):
        batch = make_batch(np.random.RandomState(5), kv.num_workers, dtype=dtype)
        everyone = np.concatenate(batch.shards)
        heads = [np.random.RandomState(rank).randn(*everyone.shape).astype(dtype) for rank in range(kv.num_workers)]
        want = np.split(sum(head.astype("float64") for head in heads), np.cumsum([len(s) for s in batch.shards])[:-1])
        (x,) = on_devices(batch.shards[kv.rank : kv.rank + 1], CONTEXTS[:1], dtype)
        autograd.mark_variables([x], on_devices(batch.shards[kv.rank : kv.rank + 1], CONTEXTS[:1], dtype))
        for _ in range(2):
            with autograd.record():
                (y,) = contrastive.gather([x], name=dtype, kvstore=kv)
            y.backward(*on_devices(heads[kv.rank : kv.rank + 1], CONTEXTS[:1], dtype))
            assert y.context == x.context
            np.testing.assert_array_equal(y.asnumpy(), everyone)
            np.testing.assert_allclose(x.grad.asnumpy(), want[kv.rank], rtol=tolerance, atol=tolerance)
    assert_sound()


def cost(layer, part, dtype, launches):
    xs, heads = (on_devices(arrays, OWN, dtype) for arrays in (part.shards, part.heads))
    for x in xs:
        x.attach_grad()
    shared = layer.mode != "local"
    copies = {"to device": int(shared), "to host": int(shared), "waits": 3 if shared else 1}
    want = {"launches": launches, "within": 0, "collectives": 0, **copies}
    for of_each in counted_step(lambda: [layer(x) for x in xs], heads, 1):
        for context in OWN:
            found = of_each[context.device_id]
            assert {name: found[name] for name in want} == want, found


def short_batches():
    """In some steps some processes have fewer devices."""
    rng = np.random.RandomState(3)
    layer = None
    for few in (False, True, False, True):
        here = [1 if few else devices_of(rank) for rank in range(kv.num_workers)]
        batch = make_batch(rng, sum(here))
        mine = slice(sum(here[: kv.rank]), sum(here[: kv.rank + 1]))
        part = batch._replace(shards=batch.shards[mine], heads=batch.heads[mine])
        layer = layer or make_layer(part)
        layer.gamma.set_data(nd.array(batch.gamma, dtype="float64"))
        layer.beta.set_data(nd.array(batch.beta, dtype="float64"))
        with gluon_syncbn.only_on(OWN[: here[kv.rank]]):
            got = step(layer, part, OWN, "float64")
        want = wanted(layer, batch, devices=mine)
        assert_same(got._replace(dgamma=want.dgamma, dbeta=want.dbeta, running_mean=[], running_var=[]), want, 1e-10)
    assert_sound()


def beside_a_cpu():
    """Rank 0 is on CPUs."""
    batch = make_batch(np.random.RandomState(5), DEVICES)
    part = own(batch)
    contexts = [mx.cpu(i) for i in range(len(OWN))] if kv.rank == 0 else OWN
    layer = gluon_syncbn.SyncBatchNorm(in_channels=5, kvstore=kv)
    layer.cast("float64")
    layer.initialize(ctx=contexts)
    layer.gamma.set_data(nd.array(batch.gamma, dtype="float64"))
    layer.beta.set_data(nd.array(batch.beta, dtype="float64"))
    assert_right(step(layer, part, contexts, "float64"), wanted(layer, batch), 1e-10)


# ---- gradients ---------------------------------------------------------------------------------------------


class Gradients:
    """Parameters whose gradients are random, another array on each GPU."""

    def __init__(self, dtype, sizes=(3, 1500, 1, 700, 5)):
        self.dtype = dtype
        self.parameters = gluon.ParameterDict()
        for i, size in enumerate(sizes):
            self.parameters.get(f"array{i}", shape=(size,), dtype=dtype, init=mx.init.Zero())
        self.parameters.initialize(ctx=OWN)
        self.trainer = gluon.Trainer(self.parameters, "sgd", kvstore=kv)
        self.sizes = sizes

    def given(self, replica, seed):
        rng = np.random.RandomState(100 * seed + replica)
        return [rng.randn(size).astype(self.dtype) * 3 for size in self.sizes]

    def add(self, seed):
        for k, context in enumerate(OWN):
            for parameter, value in zip(self.parameters.values(), self.given(HERE.start + k, seed)):
                nd.array(value, dtype=self.dtype).copyto(parameter.grad(context))
        self.trainer.allreduce_grads()

    def assert_sums(self, seed, tolerance):
        wide = "float64" if self.dtype == "float64" else "float32"
        want = [sum(one.astype(wide) for one in each) for each in zip(*(self.given(r, seed) for r in range(DEVICES)))]
        for context in OWN:
            for parameter, sums in zip(self.parameters.values(), want):
                got = parameter.grad(context).asnumpy()
                np.testing.assert_allclose(got, sums.astype(self.dtype), tolerance, tolerance)


def gradients():
    """Of all types, through the host."""
    for dtype in ("float16", "float32", "float64"):
        arrays = Gradients(dtype)
        for seed in range(3):
            arrays.add(seed)
            arrays.assert_sums(seed, 1e-3 if dtype == "float16" else 1e-6)
    assert_sound()


if __name__ == "__main__":
    main({**vars(mpi_worker), **globals()})

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
from mpi_worker import (
    CONTEXTS,
    DEVICES,
    HERE,
    OWN,
    equals_the_specification,
    kv,
    make_layer,
    own,
    specified,
    summed,
)
from mxnet import autograd, gluon, nd
from places import TESTS
from poolings import POOLINGS, fits
from ranks import main
from replicas import assert_same, make_batch, on_devices, prepare, step

sys.path.append(str(TESTS))


def leaving_another_gpu(method):
    """As Python does if it frees an array on another GPU while it is called here: that one is current then."""

    def call(*arguments, **settings):
        result = method(*arguments, **settings)
        ctypes.CDLL("libcudart.so.11.0").cudaSetDevice(3)
        return result

    return call


type(kv).exchange = leaving_another_gpu(type(kv).exchange)


# ---- numbers and counts ------------------------------------------------------------------------------------


def every_mode():
    """What is computed, and what each direction of a step asks for."""
    groups = {str(groups): {"groups": groups} for groups in ([[0, 2], [1]], [[0], [1, 2]])}
    equals_the_specification({**POOLINGS, **groups})
    cases = itertools.product(POOLINGS.values(), [("eager", "float64", (4, 6), 2)])
    for settings, (way, dtype, spatial, launches) in [*cases, ({}, ("static_shape", "float32", (180, 190), 3))]:
        if fits(settings, DEVICES):
            part = own(make_batch(np.random.RandomState(0), DEVICES, dtype=dtype, spatial=spatial))
            cost(make_layer(part, dtype, way, **settings), part, dtype, launches)
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
    for of_each in counted_step(lambda: [layer(x) for x in xs], heads, 1)[1:]:
        for context in OWN:
            found = of_each[context.device_id]
            assert {name: found[name] for name in want} == want, found


def beside_a_cpu():
    """Rank 0 is on CPUs."""
    batch = make_batch(np.random.RandomState(5), DEVICES)
    part = own(batch)
    contexts = [mx.cpu(i) for i in range(len(OWN))] if kv.rank == 0 else OWN
    layer = prepare(gluon_syncbn.SyncBatchNorm(in_channels=5, kvstore=kv), part, contexts, "float64")
    got, want = summed(step(layer, part, contexts, "float64")), specified(layer, batch)
    want = want._replace(outputs=want.outputs[HERE], dxs=want.dxs[HERE], running_mean=[], running_var=[])
    assert_same(got._replace(running_mean=[], running_var=[]), want, 1e-10)


def gradients():
    """Of several sizes and all types, through the host: a Trainer's, another array on each GPU."""
    sizes = (3, 1500, 1, 700, 5)
    for dtype, tolerance in (("float16", 1e-3), ("float32", 1e-6), ("float64", 1e-6)):
        wide = "float64" if dtype == "float64" else "float32"
        parameters = gluon.ParameterDict()
        for i, size in enumerate(sizes):
            parameters.get(f"array{i}", shape=(size,), dtype=dtype, init=mx.init.Zero())
        parameters.initialize(ctx=OWN)
        trainer = gluon.Trainer(parameters, "sgd", kvstore=kv)
        for seed in range(3):
            rng = np.random.RandomState(seed)
            given = [[3 * rng.randn(size).astype(dtype) for size in sizes] for _ in range(DEVICES)]
            for context, values in zip(OWN, given[HERE]):
                for parameter, value in zip(parameters.values(), values):
                    nd.array(value, dtype=dtype).copyto(parameter.grad(context))
            trainer.allreduce_grads()
            for parameter, parts in zip(parameters.values(), zip(*given)):
                want = sum(part.astype(wide) for part in parts).astype(dtype)
                for context in OWN:
                    np.testing.assert_allclose(parameter.grad(context).asnumpy(), want, tolerance, tolerance)
    assert_sound()


if __name__ == "__main__":
    main({**vars(mpi_worker), **globals()})

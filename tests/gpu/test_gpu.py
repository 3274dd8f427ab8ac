"""The layer on GPU contexts: on GPUs that MXNet has code for, or on the emulator (`make test-gpu-emulated`),
which also runs what is marked `on_gpus` in tests/layer.

MXNet's own operators do not run on the emulator, so that tests make arrays by copying and compare on the host.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, product

import mxnet as mx
import numpy as np
import pytest
from environments import ended, shell
from gate import Gate
from gpus import EMULATED, GPUS, counted_step, counts, gpus
from internals import core
from masks import make_masks, masked_step
from mpi_job import Job
from mxnet import autograd, nd
from mxnet.gluon import nn
from places import BENCHMARKS, SUPPORT
from poolings import POOLINGS, fits, specification
from replicas import (
    TOLERANCE,
    WAYS,
    assert_same,
    collect,
    make_batch,
    on_devices,
    prepare,
    release,
    short_waits,
    step,
    step_in_any_order,
)
from soak.case import draw
from soak.trial import run as random_case

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd
from gluon_syncbn.system import kinds

if not GPUS:
    pytest.skip("MXNet finds no GPU; `make test-gpu-emulated` needs none", allow_module_level=True)
pytestmark = pytest.mark.on_gpus
on_the_emulator = pytest.mark.skipif(not EMULATED, reason="counts, lost GPUs and errors that end are the emulator's")


#: Of programs in a process of their own.
HEAD = """
import ctypes, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import light, gluon_syncbn
import mxnet as mx, numpy as np
from gluon_syncbn import SyncBatchNorm
from internals import core
from mxnet import autograd
contexts = [mx.gpu(0), mx.gpu(1)]
layer = SyncBatchNorm(in_channels=4)
layer.initialize(ctx=contexts)
xs = [mx.nd.array(np.random.randn(2, 4, 9), ctx=context) for context in contexts]
def read(arrays):  # values, or the texts of errors
    found = []
    for array in arrays:
        try:
            found.append(array.asnumpy())
        except mx.MXNetError as error:
            found.append(str(error))
    return found
"""


def text_of(program):
    return HEAD + textwrap.dedent(program)


def run(program, **variables):
    command = [sys.executable, "-W", "ignore", *program]
    return ended(command, SUPPORT, **variables)


def side_by_side(programs, **variables):
    """Runs of these, two at a time: most of each is starting Python."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda program: run(program, **variables), programs))


# ---- numbers -----------------------------------------------------------------------------------------------


def assert_right(layer, got, batch, tolerance=1e-10, **given):
    """But for the running statistics, which other steps have moved."""
    assert_same(got._replace(running_mean=[], running_var=[]), specification(layer, batch, **given), tolerance)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_cases(first):
    """Those of `make soak`, without the events and the operators of MXNet's own that may stand in a case: every
    layout, type, setting and request for gradients, with and without an activation, an addition, a mask of any type and
    empty shards."""
    gpus(4)
    for seed in range(first, first + 20):
        random_case(draw(seed, contexts=4, emulated=True), GPUS)


def test_bfloat16_is_refused():
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize(ctx=gpus(2))
    data = nd.ones((2, 3, 4)).astype(kinds.BFLOAT16).as_in_context(gpus(2)[1])
    with pytest.raises(mx.MXNetError, match=r"bfloat16 data is on gpu\(1\), but MXNet 1.9 computes with it on CPUs"):
        with autograd.record():
            layer(data)


# ---- the way of calls ------------------------------------------------------------------------------------------


def test_calls_come_straight_from_the_engine():
    assert core.WHY_CUSTOM["gpu"] in ("", "GLUON_SYNCBN_OPERATOR=custom")


def test_the_other_way_computes_the_same():
    """A random case and layers in any order through MXNet's `Custom`, or, where this process takes that, the engine."""
    way = "" if core.WHY_CUSTOM["gpu"] else "custom"
    chosen = "test_random_cases[0] or test_parallel_branches_in_another_order_on_each_gpu[device]"
    done = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, __file__],
               GLUON_SYNCBN_OPERATOR=way)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(bool(core.WHY_CUSTOM["gpu"]), reason="calls come through MXNet's `Custom`")
def test_the_engine_goes_on_while_a_replica_waits(rng):
    """More calls wait on a GPU than MXNet has threads for it. The gate is on a CPU, because operators of MXNet's do not
    run on the emulator."""
    contexts, batch = gpus(2), make_batch(rng, 2, dtype="float32")
    layers = [prepare(SyncBatchNorm(in_channels=5, timeout=40), batch, contexts, "float32") for _ in range(6)]
    alone = prepare(SyncBatchNorm(in_channels=5, mode="local"), batch, contexts, "float32")
    gate = Gate()
    xs = [gate.behind(nd.array(x, dtype="float32")).as_in_context(c) for x, c in zip(batch.shards, contexts)]
    with autograd.record():
        first = [layer(xs[0]) for layer in layers]
        gate.open()
        alone(xs[0]).wait_to_read()
        second = [layer(xs[1]) for layer in layers]
    want = specification(layers[0], batch)
    for ys in zip(first, second):
        for y, expected in zip(ys, want.outputs):
            np.testing.assert_allclose(y.asnumpy(), expected, rtol=0, atol=1e-4)


# ---- how layers are called ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kvstore", [None, "host", "local", "device"])
def test_parallel_branches_in_another_order_on_each_gpu(rng, kvstore):
    """Collectives of NCCL that are posted in another order on two GPUs hang. Every way gives the same numbers."""
    poolings = ("sync", "sync, 3 slots", "groups of 2", "named groups", "shuffle, 2 slots", "local")
    contexts, batches = gpus(4), [make_batch(rng, 4) for _ in poolings]
    layers = [SyncBatchNorm(in_channels=5, kvstore=kvstore, **POOLINGS[pooling]) for pooling in poolings]
    for layer, batch in zip(layers, batches):
        prepare(layer, batch, contexts, "float64")
    xs = [on_devices(batch.shards, contexts, "float64") for batch in batches]
    heads = [on_devices(batch.heads, contexts, "float64") for batch in batches]
    for x in chain(*xs):
        x.attach_grad()
    for call in range(5):
        ys = step_in_any_order(rng, layers, xs, heads)
        for i, (layer, batch) in enumerate(zip(layers, batches)):
            assert_right(layer, collect(layer, ys[i], [x.grad for x in xs[i]], contexts), batch, call=call)
    for layer, batch in zip(layers, batches):
        masks = make_masks(rng, batch)
        masks[2] *= 0
        assert_right(layer, masked_step(layer, batch, masks, contexts, "float64"), batch, masks=masks, call=5)


# ---- exchange ----------------------------------------------------------------------------------------------


def test_another_way_in_the_middle_of_a_step(rng):
    """What meets goes the same way, whenever `configure` is called."""
    batch, contexts, ended = make_batch(rng, 4), gpus(4), threading.Event()
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=20), batch, contexts, "float64")

    def change():
        while not ended.is_set():
            for kvstore in ("host", "nccl", "local", "device", None):
                gluon_syncbn.configure(kvstore=kvstore)
                ended.wait(0.0005)  # a step takes some milliseconds

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        for _ in range(50):
            assert_right(layer, step(layer, batch, contexts, "float64"), batch)
    finally:
        ended.set()
        thread.join(20)


@pytest.mark.parametrize("way", WAYS)
def test_two_forwards_with_a_loss_that_joins_the_gpus(rng, way, monkeypatch):
    """The gradients of the data, as on one CPU context. With MXNet's one copy of temporary space for each GPU,
    convolutions would wait for each other.
    """
    monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")  # the emulator has no clock
    views = [[rng.randn(2, 4, 12, 12) for _ in range(2)] for _ in range(2)]
    weights = [rng.randn(4, 4, 3, 3) / 6 for _ in range(3)]

    def gradients(norm, contexts, views, way=None):
        net = nn.HybridSequential()
        for _ in weights:
            net.add(nn.Conv2D(4, 3, padding=1, in_channels=4, use_bias=False), norm(in_channels=4))
        net.initialize(ctx=mx.cpu())
        for block, weight in zip(net[::2], weights):
            block.weight.set_data(nd.array(weight))
        net.collect_params(".*(weight|gamma|beta)").setattr("grad_req", "null")  # the emulator cannot add gradients
        net.collect_params().reset_ctx(contexts)
        if way is not None:
            net.hybridize(**way)
        for _ in range(3):
            xs = [on_devices(view, contexts, "float32") for view in views]
            for x in chain(*xs):
                x.attach_grad()
            with autograd.record():
                first, second = ([net(x).as_in_context(mx.cpu()) for x in view] for view in xs)
                means = [sum(y.sum(axis=0, keepdims=True) for y in ys) / 4 for ys in (first, second)]
                losses = [nd.square(a - means[1]).sum() + (nd.abs(b + means[0])).sum() for a, b in zip(first, second)]
            autograd.backward(losses)
        return np.concatenate([x.grad.asnumpy() for x in chain(*xs)])

    want = gradients(nn.BatchNorm, [mx.cpu()], [[np.concatenate(view)] for view in views])
    got = gradients(SyncBatchNorm, gpus(2), views, WAYS[way])
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)


@on_the_emulator
def test_a_build_without_nccl(tmp_path):
    """The default goes over the host and says so once; whoever asks for NCCL gets an error. First the kernels are not
    there: all replicas have an error of the layer's own, with its name."""
    library = tmp_path / "libmxnet.so"
    folder = os.path.join(os.environ["CUDA_EMULATOR"], "lib")
    link = ["g++", "-shared", "-Wl,--no-as-needed", "-o", str(library), f"-L{folder}"]
    subprocess.run([*link, "-l:libcuda.so.1", "-l:libnvrtc.so.11.2"], check=True, timeout=60, env=shell())
    program = f"""
        def step(layer):
            with autograd.record():
                ys = [layer(mx.nd.array(np.full((2, 4, 9), i), ctx=c)) for i, c in enumerate(contexts)]
            for found in read(ys):
                print(found.splitlines()[0] if isinstance(found, str) else float(found.mean().round(3)))
        handle = ctypes.CDLL({str(library)!r})._handle
        core.find_in(handle, "/no", "")
        step(layer)
        gluon_syncbn.reset()
        core.find_in(handle, str(core.PATH.parent / "csrc"), {str(tmp_path)!r})
        step(layer)
        other = SyncBatchNorm(in_channels=4)
        other.initialize(ctx=contexts)
        step(other)
        try:
            gluon_syncbn.configure(kvstore="nccl")
        except ValueError as error:
            print(error)
        """
    done = run(["-c", text_of(program)])
    *failed, refused = [line for line in done.stdout.splitlines() if line not in ("-1.0", "1.0")]
    assert done.stdout.count("-1.0\n1.0\n") == len(failed) == 2, done.stdout + done.stderr
    expected = r"SyncBatchNorm 'batchnorm0' on gpu\([01]\): cannot read /no/activation.h; install gluon_syncbn again"
    assert all(re.search(expected, line) for line in failed)
    assert refused == (
        "kvstore: 'nccl' was given, but this build of MXNet is not linked against NCCL 2.4 or later; "
        "None (the default), 'host', 'device' and 'local' need none"
    )
    assert done.stderr.count("the statistics of GPUs go through host memory") == 1


def test_nccl_is_for_gpus(rng):
    batch, contexts = make_batch(rng, 2), [mx.cpu(0), mx.cpu(1)]
    layer = prepare(SyncBatchNorm(in_channels=5, kvstore="nccl"), batch, contexts, "float64")
    with pytest.raises(mx.MXNetError, match=r"'nccl' needs GPUs, but the layer is on cpu\(0\), cpu\(1\)"):
        step(layer, batch, contexts, "float64")
    gluon_syncbn.reset()
    with pytest.raises(ValueError, match="a Trainer cannot share it"):
        SyncBatchNorm(kvstore=mx.kv.create("nccl"))


# ---- failures ----------------------------------------------------------------------------------------------


@on_the_emulator
def test_a_gpu_that_fails(rng):
    """Nothing runs on it any more, not even this layer: its own error is at its output, and the others do not hang."""
    contexts, batch = gpus(2), make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=20), batch, contexts, "float64")
    xs = on_devices(batch.shards, contexts, "float64")
    module = mx.rtc.CudaModule('extern "C" __global__ void beyond(double* x) { x[1 << 20] = 0; }')
    victim = on_devices(batch.shards, contexts, "float64")[1]
    module.get_kernel("beyond", "double* x").launch([victim], contexts[1], (1, 1, 1), (1, 1, 1))
    with pytest.raises(mx.MXNetError):
        victim.wait_to_read()
    with autograd.record():
        ys = [layer(x) for x in xs]
    with pytest.raises(mx.MXNetError, match="an illegal memory access was encountered"):
        ys[1].asnumpy()
    # MXNet's Custom does not call this layer on a GPU that has failed.
    custom = r"missing gpu\(1\) after 20 s\. .* or has failed"
    native = r"on gpu\(1\): MXNet gave no memory for an array: .*an illegal memory access was encountered"
    with pytest.raises(mx.MXNetError, match=custom if core.WHY_CUSTOM["gpu"] else native):
        ys[0].asnumpy()
    with suppress(mx.MXNetError):
        mx.nd.waitall()
    ctypes.CDLL("libcuda.so.1").cuda_emulator_reset()
    gluon_syncbn.reset()
    assert_right(layer, step(layer, batch, contexts, "float64"), batch)


@pytest.fixture
def nccl():
    """The emulator's, which loses no GPU and holds nobody when the test has ended."""
    library = ctypes.CDLL("libnccl.so.2")
    yield library
    library.cuda_emulator_lose(-1)
    library.cuda_emulator_hold(0)


@on_the_emulator
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_collective_that_hangs(rng, nccl, phase):
    """It ends in an error on every GPU and changes no running statistics; the next step makes new communicators."""
    batch, contexts = make_batch(rng, 4), gpus(4)
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=3), batch, contexts, "float64")
    xs, heads = (on_devices(arrays, contexts, "float64") for arrays in (batch.shards, batch.heads))
    for x in xs:
        x.attach_grad()
    if phase == "forward":
        nccl.cuda_emulator_lose(1)
    with autograd.record():
        ys = [layer(x) for x in xs]
    if phase == "backward":
        mx.nd.waitall()
        nccl.cuda_emulator_lose(1)
        autograd.backward(ys, heads)
        ys = [x.grad for x in xs]
    text = r"SyncBatchNorm 'batchnorm\d+' on gpu\(\d\): the GPU has not finished after 3 s. .*kvstore='host'"
    for y in ys:
        with pytest.raises(mx.MXNetError, match=text):
            y.asnumpy()
    nccl.cuda_emulator_lose(-1)
    gluon_syncbn.reset()
    if phase == "forward":
        for context in contexts:
            np.testing.assert_array_equal(layer.running_mean.data(context).asnumpy(), np.zeros(5))
            np.testing.assert_array_equal(layer.running_var.data(context).asnumpy(), np.ones(5))
    assert_right(layer, step(layer, batch, contexts, "float64"), batch)


@on_the_emulator
def test_memory_is_freed_while_a_collective_hangs():
    """MXNet then waits for the GPU, and holds a lock that its allocations need: the layer needs no more of them."""
    program = """
        from gpus import counts
        cuda, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
        layers = [SyncBatchNorm(in_channels=4, timeout=1, prefix=prefix) for prefix in ("first_", "second_")]
        for layer in layers:
            layer.initialize(ctx=contexts)
        def forward():
            with autograd.record():
                return [layers[1](layers[0](x)) for x in xs]
        def free():
            while counts(0)["collectives"] == 0:
                time.sleep(0.001)
            threading.Timer(0.5, nccl.cuda_emulator_hold, [0]).start()
            others.clear()
        for phase in ("forward", "backward"):
            heads, others = ([x.copy() for x in xs] for _ in range(2))
            ys = forward()
            mx.nd.waitall()
            cuda.cuda_emulator_reset_counts()
            nccl.cuda_emulator_lose(1)
            nccl.cuda_emulator_hold(1)
            threading.Thread(target=free).start()
            if phase == "forward":
                ys = forward()
            else:
                autograd.backward(ys, heads)
            print(*read(ys if phase == "forward" else [layers[0].gamma.grad(context) for context in contexts]))
            nccl.cuda_emulator_lose(-1)
            gluon_syncbn.reset()
        """
    done = run(["-c", text_of(program)], timeout=100)
    errors = re.findall(r"SyncBatchNorm '(\w+)' on gpu\([01]\): the GPU has not finished after 1 s", done.stdout)
    assert errors == ["first", "first", "second", "second"], done.stdout + done.stderr


@on_the_emulator
def test_a_collective_that_cannot_be_ended(rng, nccl, caplog):
    """While NCCL posts one, which takes it long: the log says so."""
    contexts, batch = gpus(2), make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=1), batch, contexts, "float64")
    step(layer, batch, contexts, "float64")
    xs = on_devices(batch.shards, contexts, "float64")
    nccl.cuda_emulator_lose(1)
    nccl.cuda_emulator_hold(1)
    with autograd.record():
        ys = [layer(x) for x in xs]
    until = time.monotonic() + 60
    while "a collective that hangs cannot be ended, because NCCL is busy" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.1)
    nccl.cuda_emulator_hold(0)
    for y in ys:
        with pytest.raises(mx.MXNetError, match="NCCL has not answered after"):
            y.wait_to_read()


@on_the_emulator
def test_a_layer_while_nccl_connects_another_one(rng, nccl):
    """Each has a limit of its own, and no thread of MXNet's engine waits."""
    contexts = gpus(4)[:0:-1]  # which no other test connects
    batch = make_batch(rng, 3)
    slow, quick = (prepare(SyncBatchNorm(in_channels=5, timeout=t), batch, contexts, "float64") for t in (60, 1))
    xs = on_devices(batch.shards, contexts, "float64")
    nccl.cuda_emulator_hold(1)
    with autograd.record():
        ys, zs = [slow(x) for x in xs], [quick(x) for x in xs]
    for z in zs:
        with pytest.raises(mx.MXNetError, match=f"'{quick.name}'.*NCCL has not connected the GPUs after 1 s"):
            z.wait_to_read()
    for y in ys:
        with pytest.raises(mx.MXNetError, match="NCCL has not connected the GPUs after 1 s"):
            y.wait_to_read()
    nccl.cuda_emulator_hold(0)
    assert_same(step(slow, batch, contexts, "float64"), specification(slow, batch), 1e-11)


@on_the_emulator
def test_nothing_is_posted_where_replicas_differ(rng):
    """They meet after their moments: no collective is made from half of them."""
    contexts, batch = gpus(2), make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=5), batch, contexts, "float64")
    step(layer, batch, contexts, "float64")
    before = [layer.running_mean.data(context).asnumpy() for context in contexts]
    xs = on_devices(batch.shards, contexts, "float64")
    xs[1] = nd.array(batch.shards[1], ctx=contexts[1], dtype="float32")
    ctypes.CDLL("libcuda.so.1").cuda_emulator_reset_counts()
    with autograd.record():
        y = layer(xs[0])
        with pytest.raises(mx.MXNetError):
            layer(xs[1]).asnumpy()
        with pytest.raises(mx.MXNetError):
            with short_waits():
                y.asnumpy()
    assert [counts(i)["collectives"] for i in range(2)] == [0, 0]
    gluon_syncbn.reset()
    for context, values in zip(contexts, before):
        np.testing.assert_array_equal(layer.running_mean.data(context).asnumpy(), values)


# ---- what a step asks of a GPU -----------------------------------------------------------------------------


#: A layer with something behind it: its class and arguments. All activations are one kernel's.
BEHIND = {
    "nothing": (SyncBatchNorm, {}),
    "relu": (SyncBatchNorm, {"activation": "relu"}),
    "add": (SyncBatchNormAdd, {"activation": None}),
    "add, leaky": (SyncBatchNormAdd, {"activation": "leaky", "slope": 0.1}),
}
# (replicas, pooling, way, extents, what is behind): neither the way changes anything, nor the mode of moments in
# chunks, nor what is behind.
COSTS = [(replicas, pooling, "eager", (4, 6), "nothing") for replicas in (1, 4) for pooling in POOLINGS]
COSTS += [(4, one, "static_shape", (4, 6), "nothing") for one in ("sync", "named groups", "local, 2 slots", "shuffle")]
COSTS += [(replicas, "sync", "eager", (180, 190), "nothing") for replicas in (1, 4)]
COSTS += [(2, "sync", "eager", extents, behind) for extents in ((4, 6), (180, 190)) for behind in BEHIND]
COSTS = [case for case in COSTS if fits(POOLINGS[case[1]], case[0])]


@on_the_emulator
@pytest.mark.parametrize("replicas, pooling, way, spatial, behind", COSTS)
def test_what_a_step_costs(rng, replicas, pooling, way, spatial, behind):
    settings, (kind, arguments) = POOLINGS[pooling], BEHIND[behind]
    contexts, batch = gpus(replicas), make_batch(rng, replicas, spatial=spatial, dtype="float32")
    layer = prepare(kind(in_channels=5, **settings, **arguments), batch, contexts, "float32", WAYS[way])
    given = [batch.shards, batch.heads] if kind is SyncBatchNormAdd else [batch.shards]
    *inputs, heads = (on_devices(arrays, contexts, "float32") for arrays in (*given, batch.heads))
    for x in chain(*inputs):
        x.attach_grad()

    ys, *directions = counted_step(lambda: [layer(*arrays) for arrays in zip(*inputs)], heads, 3)
    if behind == "nothing":
        got = collect(layer, ys, [x.grad for x in inputs[0]], contexts)
        assert_right(layer, got, batch, TOLERANCE["float32"], call=2, node=-1 if way == "eager" else 0)
    shared = replicas > 1 and settings.get("mode") != "local"
    want = {"launches": 2 if spatial == (4, 6) else 3, "to device": 0, "to host": 0, "within": 0, "waits": 1}
    for group in settings.get("groups", ()):
        for rank in group:  # the numbers of replicas that are no neighbours do not travel with a launch
            directions[0][rank]["to device"] -= group != [*range(group[0], group[-1] + 1)]
    for each in directions:
        for numbers in each[:replicas]:
            del numbers["allocations"]
            assert numbers == {**want, "collectives": int(shared)}
        assert not any(any(numbers.values()) for numbers in each[replicas:])


@on_the_emulator
def test_memory_is_used_again():
    """From the second step on a graph allocates nothing; where MXNet lets go of a step's calls some time later, what
    that takes at most. Batches of many shapes share what is there for each power of two."""
    program = """
        from gpus import counts
        graph = sys.argv[1] == "graph"
        gluon_syncbn.configure(kvstore="device" if graph else None)
        layers = [SyncBatchNorm(in_channels=4, mode=mode) for mode in ("sync", "local", "shuffle")]
        if not graph:  # the backward of this layer takes memory of the size of its batch
            layers.append(gluon_syncbn.SyncBatchNormAdd(in_channels=4, activation="relu"))
        for layer in layers:
            layer.initialize(ctx=contexts)
            layer.hybridize(graph, static_alloc=True, static_shape=True)
        for step in range(32):
            if step == 1:
                ctypes.CDLL("libcuda.so.1").cuda_emulator_reset_counts()
            values = np.random.RandomState(step).randn(2, 4, 4, 9 if graph else 9 + step)
            xs = [mx.nd.array(values, ctx=context) for context in contexts]
            for x in xs:
                x.attach_grad()
            inputs = [(x, x.copy()) for x in xs]
            for layer in layers:
                with autograd.record():
                    ys = [layer(*arrays[: 1 + (layer in layers[3:])]) for arrays in inputs]
                autograd.backward(ys, xs)
                mx.nd.waitall()
        for device in range(2):
            print(counts(device)["allocations"])
        """
    limits = {"graph": 0, "shapes": 18}
    for (way, limit), done in zip(limits.items(), side_by_side([["-c", text_of(program), way] for way in limits])):
        assert done.returncode == 0, done.stderr
        numbers = [int(word) for word in done.stdout.split()]
        assert len(numbers) == 2 and max(numbers) <= limit, (way, numbers)


def test_compiled_kernels_are_kept(tmp_path):
    """For the next process; what is damaged is made anew.

    A thread that gets its memory from MXNet's pool makes no call of CUDA that would give it a context.
    """
    gpus(2)
    program = """
        for x in xs:
            x.attach_grad()
        spare = [mx.nd.array(np.zeros(n), ctx=c) for c in contexts for n in (4, 8, 16, 32, 64) for _ in range(8)]
        mx.nd.waitall()
        del spare
        mx.nd.waitall()
        with autograd.record():
            ys = [layer(x) for x in xs]
        autograd.backward(ys, xs)
        mx.nd.waitall()
        """

    def kept():
        done = run(["-c", text_of(program)], XDG_CACHE_HOME=tmp_path, MXNET_GPU_MEM_POOL_TYPE="Naive")
        assert done.returncode == 0, done.stderr
        files = sorted((tmp_path / "gluon_syncbn").iterdir())
        assert all(re.fullmatch(r"kernels-[0-9a-f]+\.ptx", file.name) for file in files)
        return [(file, file.read_bytes(), file.stat().st_mtime_ns) for file in files]

    first = kept()
    assert len(first) == 4  # for the moments, the output, the sums and the gradient: no other kernel is asked for
    first[0][0].write_bytes(b"damaged")
    again = kept()
    assert again[1:] == first[1:] and again[0][:2] == first[0][:2]


def test_a_net_that_was_traced_on_gpus_and_moved(rng):
    batch, contexts = make_batch(rng, 2), gpus(2)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64", {})
    step(layer, batch, contexts, "float64")
    layer.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    with pytest.raises(mx.MXNetError, match=r"traced on GPUs and is now called on cpu\(0\); call net.hybridize"):
        step(layer, batch, [mx.cpu(0), mx.cpu(1)], "float64")
    gluon_syncbn.reset()
    layer.hybridize()
    assert_right(layer, step(layer, batch, [mx.cpu(0), mx.cpu(1)], "float64"), batch)


LOST = """
victim = mx.nd.array(np.zeros(4), dtype="float64", ctx=contexts[1])
module = mx.rtc.CudaModule('extern "C" __global__ void beyond(double* x) { x[1 << 20] = 0; }')
module.get_kernel("beyond", "double* x").launch([victim], contexts[1], (1, 1, 1), (1, 1, 1))
for _ in range(3):
    with autograd.record():
        ys = [layer(x) for x in xs]
    gluon_syncbn.reset()
with autograd.record():
    ys = [layer(x) for x in xs]
if os.fork() == 0:
    os._exit(0)
os.wait()
print("came to its end", flush=True)
"""
#: Programs, their exit codes, and what they say. 86: the emulator tells of errors that nobody has asked it for.
EXITS = [
    ("with autograd.record(): [layer(x) for x in xs]; raise SystemExit(5)", (5,), ""),
    ("with autograd.record(): y = layer(xs[0]); raise KeyError('mine')", (1,), "KeyError: 'mine'"),
    *[(LOST, (0, 86), "came to its end")] * EMULATED,
]


def test_the_process_ends():
    """With a step in flight, beside a replica that is missing, and where a GPU has failed, whose error comes at every
    call of CUDA."""
    gpus(2)
    for (_, codes, said), done in zip(EXITS, side_by_side([["-c", text_of(program)] for program, *_ in EXITS])):
        assert done.returncode in codes and said in done.stdout + done.stderr, done.stderr


def test_memory_of_a_device_stays(rng):
    """With GluonCV's threads at each step, too: the layer asks for nothing that MXNet keeps for a thread."""
    contexts = gpus(2)
    release()  # what earlier tests have left
    parallel = pytest.importorskip("gluoncv.utils.parallel")
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=6), SyncBatchNorm(in_channels=6))
    net.initialize(ctx=contexts)
    model = parallel.DataParallelModel(net, contexts, sync=True)
    images, free = nd.array(rng.randn(5, 6, 9)), []
    heads = on_devices([rng.randn(3, 6, 9), rng.randn(2, 6, 9)], contexts, "float32")
    for _ in range(120):
        with autograd.record():
            ys = [y for (y,) in model(images)]
        autograd.backward(ys, heads)
        del ys
        mx.nd.waitall()
        free.append([mx.context.gpu_memory_info(context.device_id)[0] for context in contexts])
    for late, early in zip(free[-1], free[10]):  # what is in flight goes to and fro
        assert abs(late - early) < 10_000


# ---- the machine -------------------------------------------------------------------------------------------


@on_the_emulator
def test_self_check_of_gpus_that_mxnet_has_no_code_for():
    done = run(["-m", "gluon_syncbn"], CUDA_EMULATOR_CAPABILITY="9.0", GLUON_SYNCBN_ANY_ARCHITECTURE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu(1): " in done.stdout and "4 replicas on gpu, beside plain BatchNorm on one CPU\n" in done.stdout
    assert re.search(r"\n +with NCCL, a step differs by .*\n +with host memory, a step differs by ", done.stdout)


@on_the_emulator
def test_a_gpu_that_mxnet_has_no_code_for():
    done = run(["-c", HEAD], CUDA_EMULATOR_CAPABILITY="9.0")
    assert "ValueError: ctx: gpu(0) was given, CUDA emulator 0 of compute capability 9.0, expected" in done.stderr


@on_the_emulator
@pytest.mark.slow
def test_the_benchmark_runs_and_says_what_was_left_out(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    done = run([str(BENCHMARKS / "gpu.py"), "--quick", "--out", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    text, cells = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert "**Measured on tests/cuda_emulator: the times mean nothing, on no line of this page.**" in text
    assert "MXNet's nn.BatchNorm: its kernels do not run on the emulator" in text
    ways = product((1, 4), ("eager", "static"))
    assert {(cell["gpus"], cell["way"]) for cell in cells["layers"]} == set(ways)
    for cell in cells["layers"]:
        assert all(cell["seconds"][f"ours {way}"]["median"] > 0 for way in ("forward", "backward"))
    assert ("the kernels by themselves: CuPy is missing" in text) == (find_spec("cupy") is None)
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "- GPUs: CUDA emulator 0, compute capability 8.0; " in text


@on_the_emulator
def test_two_processes():
    """What GPUs of several processes compute, and what it costs."""
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    scenarios = "every_mode+gradients+rows_and_gradients+recomputed+beside_a_cpu+a_batch_that_is_not_finite"
    job = Job(2, scenarios, worker=SUPPORT / "gpu_worker.py", limit=200)
    assert job.succeeded(2), job.output

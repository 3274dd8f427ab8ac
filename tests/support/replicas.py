"""Shared by the tests of the layer: batches that differ from replica to replica, one training step, and the truth."""

import contextlib
import ctypes
import functools
import gc
import os
import signal
import threading
import time
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from internals import core
from mxnet import autograd, nd
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn.system import kinds

#: Arguments of `hybridize`, of every way in which Gluon runs a net.
WAYS = {
    "eager": {"active": False},
    "hybrid": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}

#: What float arithmetic allows, relative to the largest value.
TOLERANCE = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-11}
#: And for data that MXNet has on CPUs alone. A value of bfloat16 keeps 8 bits.
ON_CPUS = TOLERANCE if os.environ.get("GLUON_SYNCBN_TEST_DEVICE") == "gpu" else {"bfloat16": 1.6e-2, **TOLERANCE}


@functools.lru_cache(maxsize=None)
def convolves_bfloat16() -> bool:
    """oneDNN does on processors with AVX-512, unless DNNL_MAX_CPU_ISA keeps it from that."""
    one = nd.ones((1, 1, 1, 1)).astype(kinds.BFLOAT16)
    try:
        nd.Convolution(one, one, num_filter=1, kernel=(1, 1), no_bias=True).wait_to_read()
    except mx.MXNetError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        return False
    return True


class Batch(NamedTuple):
    """One shard and one head gradient per replica, of different size, mean and spread."""

    shards: List[np.ndarray]
    heads: List[np.ndarray]
    gamma: np.ndarray
    beta: np.ndarray


class Result(NamedTuple):
    outputs: List[np.ndarray]
    dxs: List[np.ndarray]
    dgamma: np.ndarray  # summed over the replicas
    dbeta: np.ndarray
    running_mean: List[np.ndarray]
    running_var: List[np.ndarray]


SIZES = (2, 5, 1, 3, 4, 2, 6, 1)


def make_batch(rng, replicas, *, channels=5, spatial=(4, 6), axis=1, dtype="float64", offset=0.0) -> Batch:
    shards, heads = [], []
    for i in range(replicas):
        shape = [SIZES[i], *spatial]
        shape.insert(axis % (len(shape) + 1), channels)
        scale = 1 + np.arange(channels).reshape([-1 if a == axis % len(shape) else 1 for a in range(len(shape))])
        shards.append(rounded(((i + 1) * rng.randn(*shape) + i - 1) * scale + offset, dtype))
        heads.append(rounded(rng.randn(*shape) + 0.3 * i, dtype))
    # of values that float32 parameters can hold
    affine = [v.astype("float32").astype("float64") for v in (rng.rand(channels) + 0.5, rng.randn(channels))]
    return Batch(shards, heads, *affine)


def rounded(array, dtype):
    """To what the type can hold: bfloat16 is float32 to the nearest of 8 bits, ties to even."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    bits = array.astype("float32").view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view("float32")


def prepare(layer, batch: Batch, contexts: Sequence[mx.Context], dtype: str, way: dict = WAYS["eager"]):
    layer.cast(dtype)
    layer.initialize(ctx=list(contexts))
    array = mx.np.array if mx.util.is_np_array() else nd.array
    layer.gamma.set_data(array(batch.gamma, dtype=layer.gamma.dtype))
    layer.beta.set_data(array(batch.beta, dtype=layer.beta.dtype))
    layer.hybridize(**way)
    return layer


def ready(net, *behind, contexts=None, way="eager"):
    """A block, or a net of several in a row: initialised, and called in this way."""
    if behind:
        row = nn.HybridSequential()
        row.add(net, *behind)
        net = row
    net.initialize(ctx=contexts)
    net.hybridize(**WAYS[way])
    return net


def on_devices(arrays, contexts, dtype):
    if dtype != "bfloat16":
        return [nd.array(a, ctx=c, dtype=dtype) for a, c in zip(arrays, contexts)]
    return [nd.array(a, ctx=c, dtype="float32").astype(kinds.BFLOAT16) for a, c in zip(arrays, contexts)]


def in_blocks(array, context, dtype="float32"):
    """The same values as a convolution leaves them, which depends on the processor: some have 3 dimensions plain."""
    channels, dims = array.shape[1], array.ndim - 2
    kernel = np.zeros((channels, channels, *[3] * dims))
    kernel[(..., *[1] * dims)] = np.eye(channels)
    settings = {"kernel": (3,) * dims, "pad": (1,) * dims, "num_filter": channels, "no_bias": True}
    inputs = [on_devices([values], [context], dtype)[0] for values in (array, kernel)]
    with autograd.record():  # else it leaves them plain
        return nd.Convolution(*inputs, **settings).detach()


def is_in_blocks(array) -> bool:
    """Whether MXNet has it in a layout of oneDNN's, which it gives nobody else."""
    array.wait_to_read()
    try:
        array.to_dlpack_for_read()
    except mx.MXNetError as error:
        if "IsMKLDNNData" not in str(error):
            raise
        return True
    return False


def forward_and_backward(net, xs, heads=None, *others):
    """Of all replicas in one record scope: the outputs, of which `heads` may be a function. `xs` then have gradients;
    `others` are further inputs."""
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = [net(*given) for given in zip(xs, *others)]
    autograd.backward(ys, heads(ys) if callable(heads) else heads)
    return ys


def step_of_net(net, xs, heads) -> Dict[str, np.ndarray]:
    """Outputs and gradients of the data, of all replicas together; by name, gradients and running statistics."""
    ys = forward_and_backward(net, xs, heads)
    found = {"y": np.concatenate([y.asnumpy() for y in ys]), "dx": np.concatenate([x.grad.asnumpy() for x in xs])}
    for name, parameter in net.collect_params().items():
        arrays = [parameter.data(xs[0].ctx)] if parameter.grad_req == "null" else parameter.list_grad()
        found[name] = sum(array.asnumpy() for array in arrays)
    return found


def assert_near(got: Dict[str, np.ndarray], want: Dict[str, np.ndarray], tolerance: float) -> None:
    """Relative to the largest value of each array, of which a bias before a normalisation has none but for rounding."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        atol = tolerance * (np.abs(value).max() + 1e-3)
        np.testing.assert_allclose(got[name], value, rtol=0, atol=atol, err_msg=name)


def step(layer, batch: Batch, contexts: Sequence[mx.Context], dtype: str, *others) -> Result:
    """`others` are further inputs."""
    xs, heads = (on_devices(arrays, contexts, dtype) for arrays in (batch.shards, batch.heads))
    ys = forward_and_backward(layer, xs, heads, *others)
    return collect(layer, ys, [x.grad for x in xs], [x.ctx for x in xs])


def step_in_any_order(rng, layers, xs, heads, pause=0.0):
    """Layers that nothing puts in order, called in another one on each device. Returns the outputs, by layer."""
    ys = [[None] * len(xs[0]) for _ in layers]
    with autograd.record():
        for device in range(len(xs[0])):
            for i in rng.permutation(len(layers)):
                time.sleep(pause * rng.rand())
                ys[i][device] = layers[i](xs[i][device])
    order = rng.permutation(len(layers))
    autograd.backward([y for i in order for y in ys[i]], [head for i in order for head in heads[i]])
    return ys


def collect(layer, ys, dxs, contexts) -> Result:
    def total(parameter):
        if parameter.grad_req == "null":
            return np.zeros(parameter.shape)
        return sum(parameter.grad(c).asnumpy().astype("float64") for c in dict.fromkeys(contexts))

    return Result(
        [kinds.values(y) for y in ys],
        [kinds.values(dx) for dx in dxs],
        total(layer.gamma),
        total(layer.beta),
        [layer.running_mean.data(c).asnumpy() for c in contexts],
        [layer.running_var.data(c).asnumpy() for c in contexts],
    )


def truth(batch: Batch, steps: int = 1, **settings) -> Result:
    """One device, plain ``nn.BatchNorm`` in float64, the concatenated batch."""
    plain = prepare(nn.BatchNorm(in_channels=len(batch.gamma), **settings), batch, [mx.cpu()], "float64")
    whole = Batch([np.concatenate(batch.shards)], [np.concatenate(batch.heads)], batch.gamma, batch.beta)
    for _ in range(steps):
        result = step(plain, whole, [mx.cpu()], "float64")
    cuts = np.cumsum([len(x) for x in batch.shards])[:-1]
    count = len(batch.shards)
    return Result(
        np.split(result.outputs[0], cuts),
        np.split(result.dxs[0], cuts),
        result.dgamma,
        result.dbeta,
        result.running_mean * count,
        result.running_var * count,
    )


def assert_same(got: Result, want: Result, tolerance: float, case: str = "") -> None:
    for name in Result._fields:
        pairs = zip(getattr(got, name), getattr(want, name))
        if name in ("dgamma", "dbeta"):
            pairs = [(getattr(got, name), getattr(want, name))]
        for i, (g, w) in enumerate(pairs):
            error = np.abs(g.astype("float64") - w).max(initial=0) / (np.abs(w).max(initial=0) or 1)
            assert error <= tolerance, f"{case}{name} of replica {i}: off by {error:.2e}, allowed {tolerance:.0e}"


def assert_next_step_is_right(layer, batch: Batch, contexts: Sequence[mx.Context], dtype: str = "float32") -> None:
    """It equals one device with plain BatchNorm that starts from the running statistics of now."""
    with autograd.record():
        pass  # starts afresh; until then, reading what a failed step may have written raises its error
    old = [[p.data(c).asnumpy().astype("float64") for c in contexts] for p in (layer.running_mean, layer.running_var)]
    assert np.isfinite(old).all()
    layer.gamma.set_data(nd.array(batch.gamma))
    layer.beta.set_data(nd.array(batch.beta))
    got, want, keep = step(layer, batch, contexts, dtype), truth(batch), float(np.float32(0.9))
    # truth starts from mean 0 and variance 1
    means = [value + keep * mean for value, mean in zip(want.running_mean, old[0])]
    variances = [value + keep * (variance - 1) for value, variance in zip(want.running_var, old[1])]
    assert_same(got, want._replace(running_mean=means, running_var=variances), TOLERANCE[dtype])


def assert_same_bits(got: Result, want: Result) -> None:
    for name in Result._fields:
        for g, w in zip(getattr(got, name), getattr(want, name)):
            np.testing.assert_array_equal(g, w, err_msg=name)


def in_threads(work, count) -> None:
    """``work(i)`` for each number below the count, each in a thread of its own, until all have ended."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def release() -> None:
    """What was freed goes back to the system: glibc would keep it, in pieces, and come to many GB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def short_waits(seconds: float = 0.2) -> Iterator[None]:
    """Around what nobody can finish, up to its error. What can be finished may take its time on a busy machine."""
    before = core.timeout_of()
    gluon_syncbn.configure(timeout=seconds)
    try:
        yield
    finally:
        gluon_syncbn.configure(timeout=before)


def interrupt_handler() -> Optional[int]:
    """The address of what Ctrl-C calls: another one as soon as a wait of this process looks out for it."""
    action = (ctypes.c_void_p * 64)()  # more than a struct sigaction, which begins with the handler
    assert ctypes.CDLL(None).sigaction(signal.SIGINT, None, action) == 0
    return action[0]


def interrupt_when_waiting() -> None:
    """Ctrl-C comes as soon as a wait of this process looks out for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    before = interrupt_handler()

    def press() -> None:
        while interrupt_handler() == before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()

"""Layers on GPUs, from the call of a chain to its results: ours, MXNet's `nn.BatchNorm`, `torch.nn.SyncBatchNorm`.

PyTorch runs in processes of its own, one for each GPU: as it is used, and because its CUDA libraries are others than
MXNet's. All take turns, round by round.
"""

import functools
import itertools
import json
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import _measuring
import numpy as np

# Images of a GPU, channels, height and width.
SHAPES = [(4, 64, 8, 8), (4, 256, 60, 60), (16, 512, 15, 15), (16, 256, 60, 60)]
SMALL = [(2, 3, 2, 2)]  # for the emulator
WAYS = {"eager": None, "static": {"static_alloc": True, "static_shape": True}}
CHAIN = 10  # layers, each the input of the next, so that what the host does for one overlaps with the work of another
WAIT = 300  # seconds that a process of PyTorch's gets for an answer
DIRECTIONS = ("forward", "backward")

EXPLANATION = f"""A chain of {CHAIN} layers as it is called: microseconds for each of them, from the call until the
result is there, on all GPUs; medians over interleaved rounds, by the host's clock. The ratios are those of the same
round, and above 1 is slower: ours over MXNet's `nn.BatchNorm`, which synchronises nothing; over
`torch.nn.SyncBatchNorm`, one process per GPU with NCCL; and ours with ReLU in it over MXNet's two layers. On one GPU
PyTorch runs its synchronised way with a group of one, ours has nobody to hear from."""

Contestant = Callable[[], Tuple[float, float]]  # seconds of one forward, and of its backward


def measure(
    shapes: Sequence[Tuple], rounds: int, emulated: bool, python: str
) -> Tuple[List[_measuring.Cell], List[str]]:
    """The samples, and what was left out and why. `python` may have PyTorch."""
    import mxnet as mx
    from mxnet.gluon import nn

    import gluon_syncbn

    found = [mx.gpu(i) for i in range(mx.context.num_gpus())]
    norms: Dict[str, Callable[[int], List[Any]]] = {
        "ours": lambda channels: [gluon_syncbn.SyncBatchNorm(in_channels=channels)],
        "fused": lambda channels: [gluon_syncbn.SyncBatchNorm(in_channels=channels, activation="relu")],
        "plain": lambda channels: [nn.BatchNorm(in_channels=channels)],
        "two": lambda channels: [nn.BatchNorm(in_channels=channels), nn.Activation("relu")],
    }
    absent: Dict[str, str] = {}
    if emulated:
        absent["MXNet's nn.BatchNorm"] = "its kernels do not run on the emulator"
        del norms["plain"], norms["two"]
    samples = []
    length = 2 if emulated else CHAIN
    for count, shape, dtype in itertools.product(sorted({1, len(found)}), shapes, ("float32", "float16")):
        with ExitStack() as stack:
            others = {}
            try:
                if "torch.nn.SyncBatchNorm" not in absent:
                    others["torch"] = _of_torch(stack, python, count, shape, dtype, length)
            except Missing as reason:
                absent["torch.nn.SyncBatchNorm"] = str(reason)
            for way, hybrid in WAYS.items():
                mine = {name: _chain(norm, found[:count], shape, dtype, hybrid, length) for name, norm in norms.items()}
                seconds = _interleaved({**mine, **others}, rounds)
                samples.append({"gpus": count, "shape": shape, "dtype": dtype, "way": way, "seconds": seconds})
    return samples, [f"{name}: {why}" for name, why in absent.items()]


def _chain(
    norm: Callable[[int], List[Any]],
    contexts: Sequence[Any],
    shape: Tuple[int, ...],
    dtype: str,
    flags: Optional[Dict[str, bool]],
    length: int,
) -> Contestant:
    """Returns a function that runs a chain of layers once: seconds of one layer's forward, and of its backward.

    ``flags`` are those of `hybridize`; with none the net is eager.
    """
    import mxnet as mx
    from mxnet import autograd
    from mxnet.gluon import nn

    net = nn.HybridSequential()
    for _ in range(length):
        net.add(*norm(shape[1]))
    net.initialize(ctx=list(contexts))
    net.cast(dtype)
    if flags:
        net.hybridize(**flags)
    random = np.random.RandomState(0)
    xs, heads, grads = (
        [mx.nd.array(random.standard_normal(shape), ctx=context, dtype=dtype) for context in contexts] for _ in range(3)
    )
    autograd.mark_variables(xs, grads)  # not attach_grad, which runs an operator

    def step() -> Tuple[float, float]:
        mx.nd.waitall()
        begun = time.perf_counter()
        with autograd.record():
            ys = [net(x) for x in xs]
        mx.nd.waitall()
        forward = time.perf_counter()
        autograd.backward(ys, heads)
        mx.nd.waitall()
        return (forward - begun) / length, (time.perf_counter() - forward) / length

    step()
    return step


class Missing(Exception):
    """Why a contestant takes no part."""


def _interleaved(contestants: Dict[str, Contestant], rounds: int) -> _measuring.Rounds:
    taken: _measuring.Rounds = {f"{name} {way}": [] for name in contestants for way in DIRECTIONS}
    for done in range(rounds + 2):  # two warm up
        for name, contestant in contestants.items():
            for way, seconds in zip(DIRECTIONS, contestant()):
                if done >= 2:
                    taken[f"{name} {way}"].append(seconds)
    return taken


def _of_torch(stack: ExitStack, python: str, count: int, shape: Tuple, dtype: str, length: int) -> Contestant:
    children = []
    port = 29500 + np.random.RandomState().randint(2000)
    for rank in range(count):
        work = json.dumps({"rank": rank, "size": count, "port": port, "shape": shape, "dtype": dtype, "length": length})
        pipes: Dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        child = subprocess.Popen([python, __file__, work], text=True, **pipes)
        stack.callback(_end, child)
        children.append(child)

    def step() -> Tuple[float, float]:
        try:
            for child in children:
                print("step", file=child.stdin, flush=True)
        except BrokenPipeError:
            pass  # the answer says why
        answers = [_answer(child) for child in children]
        return max(one["forward"] for one in answers), max(one["backward"] for one in answers)

    for child in children:
        _answer(child)  # it is there
    return step


def _answer(child: subprocess.Popen) -> Dict[str, Any]:
    there, _, _ = select.select([child.stdout], [], [], WAIT)  # one line for each that we write
    line = there[0].readline() if there else ""
    if not line.startswith("{"):
        child.kill()
        said = child.communicate()[1].strip().splitlines()
        raise Missing(said[-1] if said else "its process ended without a word")
    answer = json.loads(line)
    if "missing" in answer:
        raise Missing(answer["missing"])
    return answer


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.communicate()


# ---- in a process of PyTorch's -----------------------------------------------------------------------------


def child(rank: int, size: int, port: int, shape: Sequence[int], dtype: str, length: int) -> None:
    try:
        import torch
    except ImportError:
        _say(missing="PyTorch is not installed")
        return
    if not torch.cuda.is_available():
        _say(missing=f"PyTorch {torch.__version__} finds no GPU")
        return
    torch.cuda.set_device(rank)
    where = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("nccl", init_method=where, rank=rank, world_size=size)
    layers = [torch.nn.SyncBatchNorm(shape[1], device="cuda") for _ in range(length)]
    random = np.random.RandomState(0)
    x, dy = (torch.tensor(random.standard_normal(shape), dtype=getattr(torch, dtype), device="cuda") for _ in range(2))
    x.requires_grad_()
    synchronised = torch.nn.modules._functions.SyncBatchNorm  # which the layer leaves out for a group of one

    def through(layer: Any, x: Any) -> Any:
        if size > 1:
            return layer(x)
        settings = layer.running_mean, layer.running_var, layer.eps, layer.momentum, torch.distributed.group.WORLD
        return synchronised.apply(x, layer.weight, layer.bias, *settings, 1)

    def run() -> Any:
        return functools.reduce(lambda y, layer: through(layer, y), layers, x)

    run().backward(dy)
    _say(torch=torch.__version__)
    for _ in sys.stdin:
        for leaf in (x, *(parameter for layer in layers for parameter in layer.parameters())):
            leaf.grad = None  # to be written, as MXNet's are, and not added to
        torch.cuda.synchronize()
        begun = time.perf_counter()
        y = run()
        torch.cuda.synchronize()
        forward = time.perf_counter()
        y.backward(dy)
        torch.cuda.synchronize()
        _say(forward=(forward - begun) / length, backward=(time.perf_counter() - forward) / length)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# ---- tables ------------------------------------------------------------------------------------------------

HEADER = ["GPUs", "tensor of each", "way", "forward, us", "backward, us"]
HEADER += [f"{way} / {other}" for other in ("plain", "torch") for way in DIRECTIONS]
HEADER += [f"{way} with ReLU / both" for way in DIRECTIONS]
RATIOS = {"plain": ("ours", "plain"), "torch": ("ours", "torch"), "two": ("fused", "two")}


def row(result: _measuring.Cell) -> List[str]:
    """Of a sample whose times and ratios are quantiles."""
    seconds, ratios = result["seconds"], result["ratios"]
    return [
        str(result["gpus"]),
        f"{' x '.join(map(str, result['shape']))} {result['dtype']}",
        result["way"],
        *(f"{seconds[f'ours {way}']['median'] * 1e6:.0f}" if f"ours {way}" in seconds else "-" for way in DIRECTIONS),
        *(
            f"{ratios[f'{other} {way}']['median']:.2f}" if f"{other} {way}" in ratios else "-"
            for other in RATIOS
            for way in DIRECTIONS
        ),
    ]


def ratios(seconds: _measuring.Rounds) -> _measuring.Rounds:
    """Ours over each of the others, round by round."""
    return {
        f"{name} {way}": [a / b for a, b in zip(seconds[f"{ours} {way}"], seconds[f"{other} {way}"])]
        for name, (ours, other) in RATIOS.items()
        for way in DIRECTIONS
        if f"{other} {way}" in seconds
    }


if __name__ == "__main__":
    child(**json.loads(sys.argv[1]))

"""Checks a model: how many layers are synchronised, a training step, and the files and graphs that leave the package.

The training step runs on two contexts, with one sample and with two. It is compared with plain BatchNorm on one context
with all three samples: outputs, gradients of parameters and inputs, running statistics. In float32, the order of the
samples alone changes the gradients of a deep net with ReLU by up to some percent. This change is the baseline, for
each of the three kinds.

``python -m families.checks MODEL CHECK [--plain]`` prints the cell of one check, which may crash or hang; with
``--plain``, that of a net that was never converted.
"""

import json
import os
import re
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from gluoncv.nn.dropblock import DropBlock
from mxnet import autograd, gluon
from mxnet.gluon import Block, nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import blocks
from gluon_syncbn.system.kinds import arrays_of

from .models import BY_NAME, Model

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
SPLIT = [[0], [1, 2]]  # the samples of each context
ORDERS = [[2, 0, 1], [1, 2, 0]]  # of the baseline
STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var")  # moving_*: in recorded graphs
SMALL = 1e-3  # of the median norm; a smaller tensor counts as zero, such as the gradient of a bias before BatchNorm
FLOOR = 1e-7  # of the baseline, because two orders may agree in every bit
SAME = 1e-5  # of the largest value; below, predictions are the same
ROUNDING = 1e-3  # of the largest value; other operators or another runtime round by less
LIMIT = 10.0  # times the baseline
WEAK = 0.1  # a larger baseline proves little
Tensors = Dict[Any, np.ndarray]


class Counts(NamedTuple):
    """The batch normalisation layers; `synchronised` does not count the frozen ones."""

    layers: int
    synchronised: int
    frozen: int


def count(net: Block) -> Counts:
    rows = [row.statistics for row in gluon_syncbn.summary(net, show=False)]
    rows = [row for row in rows if "normalises each sample" not in row]
    frozen = sum("frozen" in row for row in rows)
    return Counts(len(rows), sum(row.startswith("synchronised") for row in rows), frozen)


def make(model: Model, contexts: Sequence[mx.Context] = CONTEXTS[:1], dtype: str = "float32", **norm: Any) -> Block:
    """A network whose parameters depend on their structural names alone. Two such networks are equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about symbols without types, and parameters that GluonCV initialises itself
        with mx.name.NameManager():  # the names in recorded graphs count from 0
            net = model.build(**norm)
        net.initialize(mx.init.Zero(), ctx=list(contexts), force_reinit=True)
        net.cast(dtype)
        with autograd.pause():  # an eager forward, which fixes the number of input channels
            net(*_arrays(model.inputs, [0], contexts[0], dtype))
    for number, (name, parameter) in enumerate(sorted(net._collect_params_with_prefix().items())):
        rng, shape = np.random.default_rng(number), parameter.shape
        if name.endswith(("gamma", "var")):
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("weight"):
            value = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        elif name.endswith(("bias", "beta", "mean")):
            value = rng.normal(0, 0.2, shape)
        else:
            continue  # constants, such as anchors
        parameter.set_data(mx.nd.array(value, dtype=dtype))
    for block in blocks.iterate(net):
        if isinstance(block, nn.Dropout):
            block._rate = 0  # each context would draw its own masks
        elif isinstance(block, DropBlock):
            block.drop_prob = 0
        elif blocks.is_batch_norm(block) and block._kwargs["fix_gamma"]:
            block.gamma.set_data(mx.nd.ones(block.gamma.shape, dtype=dtype))  # MXNet's ONNX takes gamma as it is
    return net


def converted(net: Block) -> Tuple[Block, str]:
    """The converted net, and the warnings of `convert`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gluon_syncbn.convert(net)
    return net, "; ".join(str(one.message) for one in caught)


def compare(
    model: Model, plain: Block, net: Block, dtype: str = "float32", orders: Sequence[List[int]] = ORDERS
) -> List[Dict[str, float]]:
    """How far a training step of `net` on both contexts is from one of `plain` on one context: the largest difference
    of each kind, relative in the L2 norm. Behind it that of `plain` in each other order of the samples."""
    want = _step(model, plain, [[0, 1, 2]], dtype)
    steps = [_step(model, net, SPLIT, dtype, want["outputs"])]
    steps += [_step(model, plain, [order], dtype, want["outputs"]) for order in orders]
    return [{kind: _worst(one[kind], tensors) for kind, tensors in want.items() if tensors} for one in steps]


def _step(
    model: Model, net: Block, split: List[List[int]], dtype: str, batched: Optional[Iterable[int]] = None
) -> Dict[str, Tensors]:
    """The tensors of one training step, by kind and name. It restores the running statistics afterwards.

    `batched` are the outputs that hold samples; the others are anchors.
    """
    net.hybridize()  # records afresh, because some models train another graph than they predict with
    parameters = net._collect_params_with_prefix()
    statistics = {name: p for name, p in parameters.items() if name.endswith(STATISTICS)}
    before = {name: parameter.data(CONTEXTS[0]).copy() for name, parameter in statistics.items()}
    shards = [_arrays(model.inputs + model.targets, part, ctx, dtype) for part, ctx in zip(split, CONTEXTS)]
    inputs = [shard[: len(model.inputs)] for shard in shards]
    for x in (x for shard in inputs for x in shard):
        x.attach_grad()
    with autograd.record():
        outputs = [arrays_of(model.forward(net, *shard)) for shard in shards]
    if batched is None:
        size = len(split[0])
        batched = [i for i, y in enumerate(outputs[0]) if y.shape[0] % size == 0 and np.dtype(y.dtype).kind == "f"]
    ys = [[shard[i] for i in batched] for shard in outputs]
    autograd.backward(
        [y for shard in ys for y in shard],
        [
            _draw(y.shape, part, ctx, dtype, 100 + i)
            for shard, part, ctx in zip(ys, split, CONTEXTS)
            for i, y in enumerate(shard)
        ],
    )

    def gathered(rows: Sequence[List[mx.nd.NDArray]]) -> List[np.ndarray]:
        """Arrays of the whole batch, in the order of the samples."""
        wholes = [
            np.concatenate([one.asnumpy().reshape(len(of), -1, *one.shape[1:]) for one, of in zip(parts, split)])
            for parts in zip(*rows)
        ]
        return [whole[np.argsort(np.concatenate(split))] for whole in wholes]

    found: Dict[str, Tensors] = {
        "outputs": dict(zip(batched, gathered(ys))),
        "gradients": dict(enumerate(gathered([[x.grad for x in shard] for shard in inputs]))),
        "statistics": {name: np.stack([one.asnumpy() for one in p.list_data()]) for name, p in statistics.items()},
    }
    for name, p in parameters.items():
        if p.grad_req != "null":
            found["gradients"][name] = sum(grad.asnumpy() for grad in p.list_grad())
    for name, parameter in statistics.items():
        parameter.set_data(before[name])
    return found


def _worst(got: Tensors, want: Tensors) -> float:
    norms = {name: float(np.linalg.norm(value.astype("float64"))) for name, value in want.items()}
    least = SMALL * float(np.median([norm for norm in norms.values() if norm] or [1]))
    worst = 0.0
    for name, value in want.items():
        away = float(np.linalg.norm(np.subtract(got[name], value, dtype="float64"))) / max(norms[name], least)
        worst = max(worst, away if np.isfinite(away) else np.inf)
    return worst


def files(model: Model, plain: Block, net: Block) -> str:
    """The problem of the saved parameters of `net` in `plain`, or of `net` reverted; or an empty string.

    Both must predict the same, and as before, up to the rounding of another operator. The reverted net must have the
    layers of `plain`.
    """
    want = predict(model, net)
    with tempfile.TemporaryDirectory() as folder:
        net.save_parameters(f"{folder}/net.params")
        plain.load_parameters(f"{folder}/net.params", ctx=CONTEXTS[0])
    loaded = predict(model, plain)
    problem = _different(loaded, want, ROUNDING)
    if problem:
        return f"loaded: {problem}"
    gluon_syncbn.revert(net)
    if count(net) != count(plain):
        return f"reverted: {count(net)}, was {count(plain)}"
    problem = _different(predict(model, net), loaded, SAME)
    return f"reverted: {problem}" if problem else ""


def exported(model: Model, net: Block, folder: Path) -> str:
    """The problem of the exported graph of a plain net, or an empty string. The graph stays in the folder."""
    want = predict(model, net)
    net.export(str(folder / "net"))
    operators = [node["op"] for node in json.loads((folder / "net-symbol.json").read_text())["nodes"]]
    if "Custom" in operators:
        return "it holds custom operators"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SymbolBlock guesses types
        graph = gluon.SymbolBlock.imports(
            str(folder / "net-symbol.json"), sorted(_names(folder)), str(folder / "net-0000.params"), ctx=CONTEXTS[0]
        )
    return _different(arrays_of(graph(*_arrays(model.inputs, [0], CONTEXTS[0]))), want, SAME)


def onnx(model: Model, net: Block, folder: Path) -> str:
    """The problem of a plain net as ONNX in onnxruntime, or an empty string."""
    import mxnet.onnx
    import onnx
    import onnxruntime
    import pooling  # of examples/segmentation, where the Makefile finds it

    pooling.register()

    problem = exported(model, net, folder)
    if problem:
        return f"export: {problem}"
    shapes = dict(zip(sorted(_names(folder)), model.inputs))
    with _opset(onnx, 13):
        mxnet.onnx.export_model(
            str(folder / "net-symbol.json"), str(folder / "net-0000.params"),
            [(1, *shapes[name]) for name in _names(folder)], np.float32, str(folder / "net.onnx"),
        )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(folder / "net.onnx"), options, providers=["CPUExecutionProvider"])
    given = {name: x.asnumpy() for name, x in zip(shapes, _arrays(model.inputs, [0], CONTEXTS[0]))}
    # MXNet's exporter lists outputs in the order of their nodes.
    outputs = [
        re.sub(r"_output(\d*)$", r"\1", name) for name in mx.sym.load(str(folder / "net-symbol.json")).list_outputs()
    ]
    known = {output.name for output in session.get_outputs()}
    return _different(session.run(outputs if set(outputs) == known else None, given), predict(model, net), ROUNDING)


@contextmanager
def _opset(onnx: Any, version: int) -> Iterator[None]:
    """Makes onnx take `version` for its newest opset.

    MXNet 1.9.1 translates to opset 13 at the most. It stamps and checks the graph with onnx's newest opset, where some
    operators have other inputs (export_model in mxnet/onnx/mx2onnx/_export_model.py).
    """
    context, newest = onnx.checker.DEFAULT_CONTEXT, onnx.defs.onnx_opset_version
    before = dict(context.opset_imports)
    onnx.defs.onnx_opset_version, context.opset_imports = lambda: version, {"": version}
    try:
        yield
    finally:
        onnx.defs.onnx_opset_version, context.opset_imports = newest, before


def predict(model: Model, net: Block, dtype: str = "float32") -> List[np.ndarray]:
    net.hybridize()
    return [y.asnumpy() for y in arrays_of(net(*_arrays(model.inputs, [0], CONTEXTS[0], dtype)))]


def _names(folder: Path) -> List[str]:
    """The names of an exported graph's inputs, in its order. Sorted, they have the order of the arguments."""
    given = {key.split(":", 1)[1] for key in mx.nd.load(str(folder / "net-0000.params"))}
    return [name for name in mx.sym.load(str(folder / "net-symbol.json")).list_inputs() if name not in given]


def _different(got: Sequence[Any], want: Sequence[np.ndarray], limit: float) -> str:
    got = [y.asnumpy() if isinstance(y, mx.nd.NDArray) else y for y in got]
    if [y.shape for y in got] != [y.shape for y in want]:
        return f"shapes {[y.shape for y in got]}, expected {[y.shape for y in want]}"
    away = max(np.abs(one - other).max() / (np.abs(other).max() or 1) for one, other in zip(got, want))
    return "" if away <= limit else f"outputs differ by {away:.0e} of the largest"


def _arrays(
    shapes: Sequence[Tuple[int, ...]], samples: List[int], ctx: mx.Context, dtype: str = "float32"
) -> List[mx.nd.NDArray]:
    """The inputs. Each sample has another distribution."""
    return [_draw((len(samples), *shape), samples, ctx, dtype, i, shifted=True) for i, shape in enumerate(shapes)]


def _draw(
    shape: Sequence[int], samples: List[int], ctx: mx.Context, dtype: str, number: int, shifted: bool = False
) -> mx.nd.NDArray:
    """Random values that depend on the sample, not on its place in the batch."""
    shape = (shape[0] // len(samples), *shape[1:])
    parts = [np.random.default_rng([number, k]).normal(0, 1, shape) for k in samples]
    if shifted:
        parts = [k / 2 + (1 + k) * part for k, part in zip(samples, parts)]
    return mx.nd.array(np.concatenate(parts), ctx=ctx, dtype=dtype)


# ---- the cells of the table ----------------------------------------------------------------------------------------


def _norm_layer(model: Model) -> str:
    given = count(make(model, CONTEXTS, norm_layer=SyncBatchNorm))
    return f"{given.synchronised} of {given.layers}"


def _convert(net: Block, warning: str) -> str:
    found = count(net)
    frozen = f", {found.frozen} frozen (`use_global_stats`)" if found.frozen else ""
    warned = f": {warning}" if found.synchronised + found.frozen < found.layers else ""
    return f"{found.synchronised} of {found.layers}{frozen}{warned}"


def _trained(model: Model, plain: Block, net: Block) -> str:
    found, *moved = compare(model, plain, net)
    baseline = {kind: max([FLOOR, *(one[kind] for one in moved)]) for kind in found}
    multiple, kind = max((value / baseline[kind], kind) for kind, value in found.items())
    text = f"{multiple:.2g} x {baseline[kind]:.0e} ({kind})"
    weak = {name: value for name, value in baseline.items() if value > WEAK}
    if weak:
        text += f"; baseline of {', '.join(weak)}: {max(weak.values()):.0e}"
    return f"{'yes' if multiple <= LIMIT else 'no'}: {text}"


def _left(problem: Callable[[Model, Block, Path], str], model: Model, net: Block) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return _verdict(problem(model, gluon_syncbn.revert(net), Path(folder)))


def _verdict(problem: str) -> str:
    return f"no: {problem}" if problem else "yes"


#: By column, of the model, a plain net, the converted net and the warnings of `convert`.
CHECKS: Dict[str, Callable[[Model, Block, Block, str], str]] = {
    "layers": lambda model, plain, net, warning: str(count(plain).layers),
    "norm_layer": lambda model, plain, net, warning: _norm_layer(model),
    "convert": lambda model, plain, net, warning: _convert(net, warning),
    "step": lambda model, plain, net, warning: _trained(model, plain, net),
    "files": lambda model, plain, net, warning: _verdict(files(model, make(model), net)),
    "export": lambda model, plain, net, warning: _left(exported, model, net),
    "onnx": lambda model, plain, net, warning: _left(onnx, model, net),
}


def _reason(error: BaseException) -> str:
    """The error in one line, without line numbers of MXNet's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = next((line for line in reversed(lines) if "Error: " in line or "Check failed" in line), lines[0])
    found = re.sub(r"^\w*Error: ", "", re.sub(r"\s+", " ", found).replace("|", "/"))
    return f"{type(error).__name__}: {found[:160]}"


def main(name: str, check: str, *options: str) -> None:
    gluon_syncbn.cpu_devices(2)
    gluon_syncbn.configure(timeout=60)
    model = BY_NAME[name]
    os.environ.update(model.environment)  # MXNet reads these at the first operator
    try:
        plain = make(model)
        nets = (plain, "") if "--plain" in options else converted(make(model, CONTEXTS))
        print(CHECKS[check](model, plain, *nets), flush=True)
    except Exception as error:
        print(f"no: {_reason(error)}", flush=True)
    os._exit(0)  # skips a long clean-up


if __name__ == "__main__":
    main(*sys.argv[1:])

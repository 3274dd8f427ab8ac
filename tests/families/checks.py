"""Checks a model: how many layers are synchronised, a training step, and the files and graphs that leave the package.

The training step runs on two contexts, with one sample and with two. It is compared with plain BatchNorm on one context
with all three samples: outputs, gradients of parameters and inputs, running statistics. In float32, the order of the
samples alone changes the gradients of a deep net with ReLU by up to some percent. This change is the baseline, for
each of the three kinds.
"""

import json
import re
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np
from gluoncv.nn.dropblock import DropBlock
from mxnet import autograd, gluon
from mxnet.gluon import Block, SymbolBlock, nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import blocks
from gluon_syncbn.nets import graphs
from gluon_syncbn.system.kinds import arrays_of

from .models import Model

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
SPLIT = [[0], [1, 2]]  # the samples of each context
ORDERS = [[2, 0, 1], [1, 2, 0]]  # of the baseline
STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var")  # moving_*: in recorded graphs
SMALL = 1e-3  # of the median norm; a smaller tensor counts as zero, such as the gradient of a bias before BatchNorm
FLOOR = {"float32": 1e-7, "float64": 1e-15}  # of the baseline, because two orders may agree in every bit
SAME = 1e-5  # of the largest value; below, predictions are the same
ROUNDING = 1e-3  # of the largest value; other operators or another runtime round by less


class Counts(NamedTuple):
    """The batch normalisation layers; `synchronised` does not count the frozen ones."""

    layers: int
    synchronised: int
    frozen: int


class Differences(NamedTuple):
    """The largest difference of each kind, relative in the L2 norm, and that of the baseline."""

    found: Dict[str, float]
    baseline: Dict[str, float]
    unequal: List[str]  # running statistics that differ between the contexts


class Step(NamedTuple):
    tensors: Dict[str, Dict[str, np.ndarray]]  # by kind and name
    unequal: List[str]
    batched: List[int]  # the outputs that hold samples; the others are anchors


def count(net: Block) -> Counts:
    layers = synchronised = frozen = 0
    for block in blocks.iterate(net):
        if blocks.is_batch_norm(block):
            layers += 1
            frozen += block._kwargs["use_global_stats"]
            synchronised += isinstance(block, SyncBatchNorm) and not block._kwargs["use_global_stats"]
        elif isinstance(block, SymbolBlock) and not isinstance(block, graphs.Opened):  # the loop visits its layers
            operators = [node.operator for node in blocks.recorded(block)]
            synchronised += operators.count("gluon_syncbn")
            layers += len(operators)
    return Counts(layers, synchronised, frozen)


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
) -> Differences:
    """Compares a training step of `net` on both contexts with a step of `plain` on one context."""
    want = _step(model, plain, [[0, 1, 2]], dtype)
    others = [_step(model, plain, [order], dtype, want.batched) for order in orders]
    got = _step(model, net, SPLIT, dtype, want.batched)
    found, *moved = [
        {kind: _worst(one.tensors[kind], tensors) for kind, tensors in want.tensors.items() if tensors}
        for one in (got, *others)
    ]
    baseline = {kind: max([FLOOR[dtype], *(one[kind] for one in moved)]) for kind in found}
    return Differences(found, baseline, got.unequal)


def trains(model: Model, plain: Block) -> str:
    """The problem of the training step of plain BatchNorm on one context, or an empty string."""
    tensors = _step(model, plain, [[0, 1, 2]], "float32").tensors
    wrong = [name for kind in tensors.values() for name, value in kind.items() if not np.isfinite(value).all()]
    return f"not finite: {', '.join(wrong[:3])}" if wrong else ""


def _step(model: Model, net: Block, split: List[List[int]], dtype: str, batched: Sequence[int] = ()) -> Step:
    """One training step. It restores the running statistics afterwards."""
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
    if len(split) == 1:
        size = len(split[0])
        batched = [i for i, y in enumerate(outputs[0]) if y.shape[0] % size == 0 and np.dtype(y.dtype).kind == "f"]
    ys = [[shard[i] for i in batched] for shard in outputs]
    heads = [
        _draw(y.shape, part, ctx, dtype, 100 + i)
        for shard, part, ctx in zip(ys, split, CONTEXTS)
        for i, y in enumerate(shard)
    ]
    autograd.backward([y for shard in ys for y in shard], heads)

    def gathered(name: str, rows: Sequence[List[mx.nd.NDArray]]) -> Dict[str, np.ndarray]:
        """Arrays of the whole batch, in the order of the samples."""
        order = np.argsort(np.concatenate(split))
        found = {}
        for i, parts in enumerate(zip(*rows)):
            samples = [one for part, of in zip(parts, split) for one in np.split(part.asnumpy(), len(of))]
            found[f"{name} {i}"] = np.stack([samples[place] for place in order])
        return found

    gradients = gathered("of input", [[x.grad for x in shard] for shard in inputs])
    for name, p in parameters.items():
        if p.grad_req != "null":
            gradients[name] = sum(grad.asnumpy() for grad in p.list_grad())
    after = {name: [one.asnumpy() for one in p.list_data()] for name, p in statistics.items()}
    unequal = [name for name, values in after.items() if any((values[0] != one).any() for one in values)]
    tensors = {
        "outputs": gathered("output", ys),
        "gradients": gradients,
        "statistics": {name: values[0] for name, values in after.items()},
    }
    for name, parameter in statistics.items():
        parameter.set_data(before[name])
    return Step(tensors, unequal, list(batched))


def _worst(got: Dict[str, np.ndarray], want: Dict[str, np.ndarray]) -> float:
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

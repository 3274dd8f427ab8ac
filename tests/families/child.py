"""Runs checks of one model and prints a line of JSON for each. The process may crash or hang."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

from mxnet.gluon import Block

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

from . import checks
from .models import BY_NAME, Model

LIMIT = 10.0  # times the baseline
WEAK = 0.1  # a larger baseline proves little
Cells = Dict[str, str]


def layers(model: Model, plain: Block, net: Block, warning: str) -> Cells:
    found = checks.count(net)
    frozen = f", {found.frozen} frozen (`use_global_stats`)" if found.frozen else ""
    warned = f": {warning}" if found.synchronised + found.frozen < found.layers else ""
    try:
        given = checks.count(checks.make(model, norm_layer=SyncBatchNorm))
        named = "frozen" if given.frozen == given.layers > 0 else f"{given.synchronised} of {given.layers}"
    except Exception as error:
        named = f"no: {reason(error)}"
    converted = f"{found.synchronised} of {found.layers}{frozen}{warned}"
    return {"layers": str(checks.count(plain).layers), "norm_layer": named, "convert": converted}


def step(model: Model, plain: Block, net: Block, _: str) -> Cells:
    if net is plain:
        return {"step": verdict(checks.trains(model, plain))}
    differences = checks.compare(model, plain, net)
    multiple, kind = max((value / differences.baseline[kind], kind) for kind, value in differences.found.items())
    text = f"{multiple:.2g} x {differences.baseline[kind]:.0e} ({kind})"
    if differences.unequal:
        return {"step": f"no: {len(differences.unequal)} running statistics differ between the contexts; {text}"}
    weak = {name: value for name, value in differences.baseline.items() if value > WEAK}
    if weak:
        text += f"; baseline of {', '.join(weak)}: {max(weak.values()):.0e}"
    return {"step": f"{'yes' if multiple <= LIMIT else 'no'}: {text}"}


def files(model: Model, plain: Block, net: Block, _: str) -> Cells:
    return {"files": verdict(checks.files(model, checks.make(model) if net is plain else plain, net))}


def export(model: Model, _: Block, net: Block, __: str) -> Cells:
    with tempfile.TemporaryDirectory() as folder:
        return {"export": verdict(checks.exported(model, gluon_syncbn.revert(net), Path(folder)))}


def onnx(model: Model, _: Block, net: Block, __: str) -> Cells:
    with tempfile.TemporaryDirectory() as folder:
        return {"onnx": verdict(checks.onnx(model, gluon_syncbn.revert(net), Path(folder)))}


CHECKS: Dict[str, Callable[..., Cells]] = {f.__name__: f for f in (layers, step, files, export, onnx)}


def verdict(problem: str) -> str:
    return f"no: {problem}" if problem else "yes"


def reason(error: BaseException) -> str:
    """The error in one line, without line numbers of MXNet's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = next((line for line in reversed(lines) if "Error: " in line or "Check failed" in line), lines[0])
    found = re.sub(r"^\w*Error: ", "", re.sub(r"\s+", " ", found).replace("|", "/"))
    return f"{type(error).__name__}: {found[:160]}"


def main(name: str, *wanted: str) -> None:
    """``--plain``: of a net that was never converted."""
    gluon_syncbn.cpu_devices(2)
    gluon_syncbn.configure(timeout=60)
    model = BY_NAME[name]
    os.environ.update(model.environment)  # MXNet reads these at the first operator
    nets: Sequence[Any] = (checks.make(model),)
    nets = (
        (*nets, *nets, "") if "--plain" in wanted else (*nets, *checks.converted(checks.make(model, checks.CONTEXTS)))
    )
    for check in [one for one in wanted if one in CHECKS]:
        try:
            cells = CHECKS[check](model, *nets)
        except Exception as error:
            cells = {check: f"no: {reason(error)}"}
        print(json.dumps(cells), flush=True)
    os._exit(0)  # skips a long clean-up


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs all checks of one model and prints a line of JSON for each. The process may crash or hang."""

import json
import os
import re
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Dict, Sequence, Tuple

from mxnet.gluon import Block

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

from . import checks
from .models import BY_NAME, Model

NEITHER = "no, and plain BatchNorm fails too"
LIMIT = 10.0  # times the baseline
WEAK = 0.1  # a larger baseline proves little
Cells = Dict[str, str]


class Subject:
    """The model's nets: plain and converted, with the warning of `convert`."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @cached_property
    def plain(self) -> Block:
        return checks.make(self.model)

    @cached_property
    def _converted(self) -> Tuple[Block, str]:
        return checks.converted(checks.make(self.model, checks.CONTEXTS))

    @property
    def net(self) -> Block:
        return self._converted[0]

    @property
    def warning(self) -> str:
        return self._converted[1]


def layers(subject: Subject) -> Cells:
    plain, net = checks.count(subject.plain), checks.count(subject.net)
    frozen = f", {net.frozen} frozen (`use_global_stats`)" if net.frozen else ""
    warned = f": {subject.warning}" if net.synchronised + net.frozen < net.layers else ""
    try:
        given = checks.count(checks.make(subject.model, norm_layer=SyncBatchNorm))
        named = "frozen" if given.frozen == given.layers > 0 else f"{given.synchronised} of {given.layers}"
    except Exception as error:
        named = f"no: {reason(error)}"
    return {
        "layers": str(plain.layers),
        "norm_layer": named,
        "convert": f"{net.synchronised} of {net.layers}{frozen}{warned}",
    }


def step(subject: Subject) -> Cells:
    differences = checks.compare(subject.model, subject.plain, subject.net)
    multiple, kind = differences.multiple()
    text = f"{multiple:.2g} x {differences.baseline[kind]:.0e} ({kind})"
    if differences.unequal:
        count = len(differences.unequal)
        return {"step": f"no: {count} running statistics differ between the contexts; {text}"}
    weak = [name for name, value in differences.baseline.items() if value > WEAK]
    if weak:
        text += f"; baseline of {', '.join(weak)}: {max(differences.baseline[name] for name in weak):.0e}"
    return {"step": f"{'yes' if multiple <= LIMIT else 'no'}: {text}"}


def files(subject: Subject) -> Cells:
    return {"files": verdict(checks.files(subject.model, subject.plain, subject.net))}


def export(subject: Subject) -> Cells:
    return {"export": verdict(_in_a_folder(checks.exported, subject.model, _reverted(subject)))}


def onnx(subject: Subject) -> Cells:
    return {"onnx": verdict(_in_a_folder(checks.onnx, subject.model, _reverted(subject)))}


CHECKS: Dict[str, Callable[[Subject], Cells]] = {f.__name__: f for f in (layers, step, files, export, onnx)}
# The same checks of a net that was never converted. They show whether a failure is the package's.
PLAIN: Dict[str, Callable[[Subject], str]] = {
    "step": lambda s: checks.trains(s.model, checks.make(s.model)),
    "files": lambda s: checks.files(s.model, s.plain, checks.make(s.model)),
    "export": lambda s: _in_a_folder(checks.exported, s.model, checks.make(s.model)),
    "onnx": lambda s: _in_a_folder(checks.onnx, s.model, checks.make(s.model)),
}


def _reverted(subject: Subject) -> Any:
    return gluon_syncbn.revert(subject.net)


def _in_a_folder(check: Callable[..., str], model: Model, net: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return check(model, net, Path(folder))


def verdict(problem: str) -> str:
    return f"no: {problem}" if problem else "yes"


def reason(error: BaseException) -> str:
    """The error in one line, without line numbers of MXNet's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = next((line for line in reversed(lines) if "Error: " in line or "Check failed" in line), lines[0])
    found = re.sub(r"^\w*Error: ", "", re.sub(r"\s+", " ", found).replace("|", "/"))
    return f"{type(error).__name__}: {found[:160]}"


def run(name: str, check: str, subject: Subject) -> None:
    try:
        cells = CHECKS[check](subject)
    except Exception as error:
        cells = {check: f"no: {reason(error)}"}
    print(json.dumps({"model": name, "check": check, "cells": cells}), flush=True)


def main(arguments: Sequence[str]) -> None:
    name, *wanted = arguments
    plain = wanted[:1] == ["--plain"]
    gluon_syncbn.cpu_devices(2)
    gluon_syncbn.configure(timeout=60)
    os.environ.update(BY_NAME[name].environment)  # MXNet reads these at the first operator
    subject = Subject(BY_NAME[name])
    for check in wanted[1:] if plain else wanted:
        print(json.dumps({"begins": check}), flush=True)
        if plain:
            print(json.dumps({"plain": PLAIN[check](subject)}), flush=True)
        else:
            run(name, check, subject)
    sys.stdout.flush()
    os._exit(0)  # skips a long clean-up


if __name__ == "__main__":
    main(sys.argv[1:])

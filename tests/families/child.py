"""All checks of one model, each a line of JSON. A process of its own, which may crash or hang."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

from . import checks
from .models import BY_NAME, Model

NEITHER = "no, nor with plain BatchNorm"
LIMIT = 10.0  # times the yardstick
BLIND = 0.1  # a yardstick beyond which a difference says nothing
Cells = Dict[str, str]


class Subject:
    """The model's nets, made when they are first asked for."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.plain = checks.make(model)
        self.net, self.warning = checks.converted(checks.make(model, checks.CONTEXTS))


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
    text = f"{multiple:.2g} x {differences.yardstick[kind]:.0e} ({kind})"
    if differences.unequal:
        count = len(differences.unequal)
        return {"step": f"no: {count} running statistics differ between the contexts; {text}"}
    blind = [name for name, value in differences.yardstick.items() if value > BLIND]
    if blind:
        text += f"; the yardstick of {', '.join(blind)} is {max(differences.yardstick[b] for b in blind):.0e}"
    return {"step": f"{'yes' if multiple <= LIMIT else 'no'}: {text}"}


def files(subject: Subject) -> Cells:
    return {"files": verdict(checks.files(subject.model, subject.plain, subject.net))}


def export(subject: Subject) -> Cells:
    return {"export": verdict(_in_a_folder(checks.exported, subject.model, _reverted(subject)))}


def onnx(subject: Subject) -> Cells:
    return {"onnx": verdict(_in_a_folder(checks.onnx, subject.model, _reverted(subject)))}


CHECKS: Dict[str, Callable[[Subject], Cells]] = {f.__name__: f for f in (layers, step, files, export, onnx)}
# What is wrong with a net that was never converted: whose fault is it?
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
    """In one line, without the places in MXNet's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = next((line for line in reversed(lines) if "Error: " in line or "Check failed" in line), lines[0])
    found = re.sub(r"^\w*Error: ", "", re.sub(r"\s+", " ", found).replace("|", "/"))
    return f"{type(error).__name__}: {found[:160]}"


def run(name: str, check: str, subject: Subject) -> None:
    try:
        cells = CHECKS[check](subject)
    except Exception as error:
        cells = {check: f"no: {reason(error)}"}
    text = cells.get(check, "")
    if text.startswith("no") and check in PLAIN:
        cells[check] = f"{blame(check, subject)}{text[2:]}"
    print(json.dumps({"model": name, "check": check, "cells": cells}), flush=True)


def blame(check: str, subject: Subject) -> str:
    try:
        problem = PLAIN[check](subject)
    except Exception as error:
        problem = reason(error)
    return NEITHER if problem else "no"


def main(arguments: Sequence[str]) -> None:
    name, *wanted = arguments
    plain = wanted[:1] == ["--plain"]
    gluon_syncbn.cpu_devices(2)
    gluon_syncbn.configure(timeout=60)
    os.environ.update(BY_NAME[name].environment)  # like those of cpu_devices, MXNet reads them at the first operator
    subject = Subject(BY_NAME[name])
    for check in wanted[1:] if plain else wanted:
        print(json.dumps({"begins": check}), flush=True)
        if plain:
            print(json.dumps({"plain": PLAIN[check](subject)}), flush=True)
        else:
            run(name, check, subject)
    sys.stdout.flush()
    os._exit(0)  # there is nothing left to do, and much to tear down


if __name__ == "__main__":
    main(sys.argv[1:])

"""Checks a small member of each of GluonCV's model families, and writes the table of benchmarks/results/gluoncv.md.

    make gluoncv
    make gluoncv ARGS="--only resnet18_v1b fastscnn"      # prints their rows

Each model runs in a process of its own with a time limit. The program appends each result to a file. A run that was
interrupted continues from this file, if the sources are the same.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from tqdm import tqdm

from . import table
from .child import CHECKS, NEITHER, PLAIN
from .models import BY_NAME

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="MODEL", help="these models")
    parser.add_argument("--again", action="store_true", help="repeat recorded checks, after a change of a model")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a model may take (600)")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "gluoncv.jsonl", help="runs/gluoncv.jsonl")
    page = ROOT / "benchmarks" / "results" / "gluoncv.md"
    parser.add_argument("--page", type=Path, default=page, help="benchmarks/results/gluoncv.md")
    options = parser.parse_args(arguments)

    sources, wanted = fingerprint(), options.only or list(BY_NAME)
    found = {} if options.again else read(options.results, sources)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as file, tqdm(wanted, unit="model", disable=None) as progress:
        for name in progress:
            progress.set_postfix_str(name)
            cells = found.setdefault(name, {})
            for record in examine(name, [check for check in CHECKS if check not in cells], options.limit):
                cells[record["check"]] = record["cells"]
                file.write(json.dumps({**record, "sources": sources}) + "\n")
                file.flush()

    said = {name: model.notes() for name, model in BY_NAME.items()}
    rows = {
        name: {column: text for cells in found[name].values() for column, text in cells.items()}
        for name in BY_NAME
        if name in (options.only or found)
    }
    text = "\n\n".join([table.table(rows, said), *table.totals(rows), table.environment()])
    print(text)
    if not options.only:
        table.write(options.page, text)
    return 0


def fingerprint() -> str:
    """A digest of the sources that a result depends on, without the list of models."""
    digest = hashlib.sha256()
    own = [Path(__file__).with_name(name) for name in ("checks.py", "child.py")]
    package = (ROOT / "gluon_syncbn").rglob("*")
    for path in own + sorted(path for path in package if path.suffix in (".py", ".cc", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read(path: Path, sources: str) -> Dict[str, Dict[str, Any]]:
    found: Dict[str, Dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        if record["sources"] == sources:
            found.setdefault(record["model"], {})[record["check"]] = record["cells"]
    return found


def examine(name: str, checks: List[str], limit: float) -> Iterator[Dict[str, Any]]:
    """A record for each check. After a check that ends the process, a new process continues with the next check."""
    while checks:
        lines, end = child([name, *checks], limit)
        records = [line for line in lines if "cells" in line]
        if len(records) < len(checks):
            check = checks[len(records)]
            records.append({"model": name, "check": check, "cells": {check: f"no: {end}"}})
        for record in records:
            yield blamed(record, limit)
        checks = checks[len(records) :]


def blamed(record: Dict[str, Any], limit: float) -> Dict[str, Any]:
    """What a net that was never converted fails, too, is not the package's failure."""
    check, cells = record["check"], record["cells"]
    if check in PLAIN and cells.get(check, "").startswith("no: "):
        lines, _ = child([record["model"], "--plain", check], limit)
        if not any(line.get("plain") == "" for line in lines):
            cells[check] = NEITHER + cells[check][len("no") :]
    return record


def child(arguments: List[str], limit: float) -> Tuple[List[Dict[str, Any]], str]:
    """The records that the process printed, and how the process ended."""
    command = [sys.executable, "-W", "ignore", "-m", "families.child", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=limit)
        code = process.returncode
        said = err.strip().splitlines() or [f"exit code {code}"]
        end = f"ended by {signal.Signals(-code).name}" if code < 0 else said[-1]
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        end = f"not finished after {limit:.0f} s"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

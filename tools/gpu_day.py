"""Tests, trains and measures on the GPU of this machine, in at most eight minutes, and names what it did not reach.

    make gpu-day                                          # in a checkout, with the extras cu112 and dev, and CuPy

On a machine without a network, which has Python 3.12, NumPy, CuPy, pytest, g++ and compute-sanitizer, two calls that
carry a part each of what `tools/gpu_day_files.py` has made (docs/platforms.md, "A day with a GPU"):

    python3 tools/gpu_day.py --unpack build/gpu_day/1
    python3 tools/gpu_day.py --unpack build/gpu_day/2 && python3 tools/gpu_day.py --out $OUT

Each step is a program with a limit of its own, and a log of its own in the folder `--out`, where its tables are too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

ROOT = Path(__file__).resolve().parent.parent
SITE = Path("/tmp/gluon_syncbn_gpu_day")  # outside of the checkout, which each call there brings anew
SECONDS = 480  # of all steps together
PATIENCE = 10  # seconds for a step to end after Ctrl-C
KERNELS = "tests/gpu/test_kernels_cuda.py"
# A forward and a backward of each kernel: with two slots and chunks, so that partial results are merged.
ONCE = [
    f"{KERNELS}::test_against_the_reference[{ways}-(3, 1, 5, 77)-float32-2-3-1-(1, 1, 1)]"
    for ways in ("pooled", "masked", "behind")
]


class Step(NamedTuple):
    name: str
    what: str
    command: List[str]
    limit: int  # seconds


def steps(out: Path) -> List[Step]:
    """In their order: what says most comes first."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "66", "--tool"]
    training = [sys.executable, "-m", "gluon_syncbn", "check"]
    speed = [sys.executable, "benchmarks/gpu.py", "--out", str(out)]
    return [
        Step("kernels", "each kernel against NumPy", [*pytest, KERNELS], 100),
        Step("layer", "the layer, as far as the GPUs go", [*pytest, "tests/gpu/test_gpu.py"], 100),
        Step("training", "the self-check, which trains a net beside the CPU", training, 90),
        Step("memcheck", "each kernel once under compute-sanitizer", [*sanitizer, "memcheck", *pytest, *ONCE], 50),
        Step("racecheck", "the same, for races on shared memory", [*sanitizer, "racecheck", *pytest, *ONCE], 50),
        Step("speed", "the layer and its kernels beside others", speed, 80),
    ]


def environment(out: Path) -> Dict[str, str]:
    """In which MXNet finds the files that were carried, and starts on GPUs that it has no code for."""
    variables = dict(os.environ, GLUON_SYNCBN_TEST_DEVICE="gpu", GLUON_SYNCBN_ANY_ARCHITECTURE="1")
    for name, folder in (("PYTHONPATH", SITE), ("PATH", SITE / "bin"), ("LD_LIBRARY_PATH", SITE / "lib")):
        if SITE.exists():
            variables[name] = os.pathsep.join([str(folder), *filter(None, [variables.get(name)])])
    library = out / "skip_launches.so"
    if "skip_launches" not in variables.get("LD_PRELOAD", ""):
        source = "tests/support/skip_launches.c"
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", str(library), "-ldl"], check=True, cwd=ROOT)
        variables["LD_PRELOAD"] = str(library)
    return variables


def run(step: Step, out: Path, limit: float, variables: Dict[str, str]) -> str:
    """What became of it."""
    if shutil.which(step.command[0], path=variables["PATH"]) is None:
        return f"not there: {step.command[0]}"
    with open(out / f"{step.name}.log", "wb") as log:
        child = subprocess.Popen(
            step.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, start_new_session=True
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT)  # so that it says what it has so far, and ends its own children
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
            return f"not ended after {limit:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    lines = (out / f"{step.name}.log").read_text(errors="replace").strip().splitlines()
    return f"exit code {code}" + (f": {lines[-1]}" if code and lines else "")


def unpack(folders: Sequence[Path]) -> None:
    archives = [archive for folder in folders for archive in sorted(folder.glob("*.tar.xz"))]
    if not archives:
        raise SystemExit(f"no archive in {', '.join(map(str, folders))}: tools/gpu_day_files.py makes them")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda archive: shutil.unpack_archive(str(archive), str(SITE)), archives))
    print(f"{len(archives)} archives unpacked into {SITE}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_day_results", help="folder for all results")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of all steps together ({SECONDS})")
    parser.add_argument("--commit", help="what is tested (what git says)")
    parser.add_argument("--list", action="store_true", help="prints the steps, and runs none")
    parser.add_argument(
        "--unpack", type=Path, nargs="+", metavar="FOLDER", help="unpacks these parts, and runs nothing"
    )
    options = parser.parse_args(arguments)
    if options.unpack:
        unpack(options.unpack)
        return 0
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    out = options.out.resolve()
    commit = options.commit
    if commit is None:
        said = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        commit = said.stdout.strip() or "unknown: no git here"
    wanted = [step for step in steps(out) if step.name in (options.only or [step.name])]
    if options.list:
        print(*(f"{step.name:10} {step.limit:4} s  {step.what}" for step in wanted), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    variables, begun, rows = environment(out), time.monotonic(), []
    for step in wanted:
        left = options.seconds - (time.monotonic() - begun)
        started = time.monotonic()
        limit = min(step.limit, left - PATIENCE)
        became = run(step, out, limit, variables) if limit > 0 else "not reached"
        rows.append(f"{step.name:10} {time.monotonic() - started:4.0f} s  {became}")
        print(rows[-1], flush=True)
        (out / "summary.txt").write_text("\n".join([f"commit {commit}", *rows]) + "\n")
    failed = [row for row in rows if not row.endswith("exit code 0")]
    print(f"{len(rows) - len(failed)} of {len(rows)} steps passed; logs and tables are in {out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Puts each fault of `table.txt` into a copy of the checkout, and runs the tests that are named for it: one has to
fail.

    make mutants                             # without what an earlier run, that was interrupted, has seen caught
    make mutants ARGS="--again"              # all of them
    make mutants ARGS="layer.py csrc/cuda"   # those of files with one of these texts

The copy keeps what it has compiled, so that a fault in C++ costs the files that include it. Two runs at once need a
``--folder`` each."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from environments import shell
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.txt")
EMULATOR = ROOT / "build" / "cuda_emulator"  # `make mutants` builds it
FAST = "-O1 -DSYNCBN_CLONES= -DSYNCBN_WIDTH=2"  # to compile: one set of instructions
LIMIT = 600  # seconds for the tests of one fault
CAUGHT = "is caught"
RED = 1  # pytest's exit code where a test has failed
CRASHED = 255  # that of MXNet's handler of SIGSEGV


class Mutant(NamedTuple):
    file: str
    before: str
    after: str
    breaks: str
    tests: str

    def source(self, tree):
        return tree / "gluon_syncbn" / self.file


def mutants():
    """Those of the table: ``file | before | after | what it breaks | tests``. ``\\n`` in a text is a new line."""
    for number, line in enumerate(TABLE.read_text().splitlines(), 1):
        if line and not line.startswith("#"):
            columns = [column.strip() for column in re.split(r"\s\|(?=\s)", line)]
            if len(columns) != 5:
                raise SystemExit(f"{TABLE.name}:{number}: {len(columns)} columns, expected 5")
            file, before, after, breaks, tests = columns
            yield Mutant(file, before.replace("\\n", "\n"), after.replace("\\n", "\n"), breaks, tests)


def line_of(mutant):
    return " | ".join(mutant).replace("\n", "\\n")


def misplaced(mutant):
    """Why it cannot be applied, or an empty text."""
    found = mutant.source(ROOT).read_text().count(mutant.before) if mutant.source(ROOT).exists() else 0
    return "" if found == 1 else f"{mutant.file} has {mutant.before!r} {found} times, expected once"


def run(command, tree, log):
    """Its exit code. All that it has started ends with it, and at the limit."""
    home = {"PYTHONPATH": f"{tree}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "passive", "CXXFLAGS": FAST}
    if any(word.startswith("tests/gpu/") for word in command):
        home.update(CUDA_EMULATOR=str(EMULATOR), PYTHONPATH=f"{tree}:{EMULATOR}", LD_LIBRARY_PATH=f"{EMULATOR}/lib")
        home.update(MXNET_GPU_MEM_POOL_TYPE="Unpooled", GLUON_SYNCBN_TEST_DEVICE="gpu")
    with open(log, "w") as output:
        streams = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, cwd=tree, env=shell(**home), **streams)
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return RED
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Copies:
    """Of the checkout: one that is built, `clean`, and `tree`, where that was built, which gets the faults."""

    def __init__(self, folder):
        self.folder, self.clean, self.tree = folder, folder / "clean", folder / "tree"

    def build(self, log="build.log"):
        return run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], self.tree, self.folder / log)

    def test(self, tests, log):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
        code = run([*command, *shlex.split(tests)], self.tree, self.folder / log)
        return {0: "SURVIVES", RED: CAUGHT, CRASHED: CAUGHT}.get(
            code, CAUGHT if code < 0 else f"PYTEST ENDS WITH {code}"
        )

    def set_up(self):
        """Files keep their times, so that what has changed since the last run is all that is compiled."""
        shutil.rmtree(self.tree, ignore_errors=True)
        left_out = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", "data", "*.so", "__pycache__")
        shutil.copytree(ROOT, self.tree, symlinks=True, ignore=left_out)
        if self.clean.exists():
            shutil.copytree(self.clean / "build", self.tree / "build")
        if self.build():
            raise SystemExit(f"the copy does not compile: {self.folder / 'build.log'}")
        shutil.rmtree(self.clean, ignore_errors=True)
        shutil.copytree(self.tree, self.clean, symlinks=True)

    def fresh(self):
        shutil.rmtree(self.tree)
        shutil.copytree(self.clean, self.tree, symlinks=True)


def fate(mutant, copies):
    source = mutant.source(copies.tree)
    source.write_text(source.read_text().replace(mutant.before, mutant.after))
    if "csrc" in mutant.file and copies.build("mutant.log"):
        return "DOES NOT COMPILE"
    return copies.test(mutant.tests, "mutant.log")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has started ends, too
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="*", help="part of a path: faults of such files run")
    parser.add_argument("--again", action="store_true", help="also those that were caught by an earlier run")
    parser.add_argument("--check", action="store_true", help="look only whether the table fits the sources")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="of the copies")
    given = parser.parse_args()
    chosen = [one for one in mutants() if not given.texts or any(text in one.file for text in given.texts)]
    problems = list(filter(None, map(misplaced, chosen)))
    if problems or given.check:
        raise SystemExit("\n".join(problems) or f"{len(chosen)} faults fit the sources")
    copies = Copies(given.folder.resolve())
    copies.set_up()
    results = copies.folder / "caught.txt"
    if given.again:
        results.unlink(missing_ok=True)
    results.touch()
    before, survivors = set(results.read_text().splitlines()), []
    left = [one for one in chosen if line_of(one) not in before]
    with open(results, "a") as file, tqdm(left, unit="fault") as bar:
        for mutant in bar:
            bar.set_postfix_str(f"{len(survivors)} survive; {mutant.file}")
            copies.fresh()
            became = fate(mutant, copies)
            if became == CAUGHT:
                print(line_of(mutant), file=file, flush=True)
            else:
                survivors.append(mutant)
                bar.write(f"{became} {line_of(mutant)}")
    copies.fresh()
    red = [tests for tests in sorted({one.tests for one in left}) if copies.test(tests, "clean.log") != "SURVIVES"]
    for tests in red:
        print(f"RED WITHOUT A FAULT {tests}")
    print(f"{len(chosen)} faults: {len(chosen) - len(survivors)} caught, {len(survivors)} survive")
    if survivors or red:
        raise SystemExit(1)
    results.unlink()  # the next run begins anew


if __name__ == "__main__":
    main()

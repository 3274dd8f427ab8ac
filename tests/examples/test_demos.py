"""What `make` offers as a demo, in a folder of its own: to its exit code, with the environment of a user's shell."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from commands import TARGETS
from environments import shell
from places import ROOT

DEMOS = sorted(target for target in TARGETS if target == "quickstart" or target.startswith("demo"))


def run(folder, command, limit, **environment):
    """What it prints; it has to end with exit code 0."""
    with open(folder / "output", "w+") as output:
        done = subprocess.run(
            command,
            cwd=str(folder),
            env=shell(**environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
        output.seek(0)
        said = output.read()
    assert done.returncode == 0, said[-3000:]
    return said


def recipe(target):
    """The command of a target that starts its program."""
    made = subprocess.run(
        ["make", "-n", target], cwd=str(ROOT), env=shell(), stdout=subprocess.PIPE, text=True, timeout=100, check=True
    )
    (line,) = (line for line in made.stdout.splitlines() if " examples/" in line)
    _, *words = shlex.split(line)
    return [sys.executable, *(str(ROOT / word) if word.startswith("examples/") else word for word in words)]


@pytest.mark.slow
@pytest.mark.parametrize("target", DEMOS)
def test_a_demo_ends_well(target, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    run(tmp_path, recipe(target), 3000)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path):
    """`make demo-distributed` in small. Every sum over two devices has two terms, so that all bits are the same."""
    pytest.importorskip("mpi4py", reason="two processes meet through MPI")
    program = [sys.executable, str(ROOT / "examples" / "segmentation" / "distributed.py")]
    options = "--crop-size 32 --base-size 40 --batch-size 20 --no-progress"
    said = run(tmp_path, [*program, "--epochs", "1", "--options", options], 800, OMP_NUM_THREADS=1)
    assert "largest relative difference: 0.0e+00 in the first 10 steps, 0.0e+00 in all 10\n" in said
    scores = dict(re.findall(r"^(\d process.*?each|\d process.*?devices) +([\d.]+ +[\d.]+)", said, re.MULTILINE))
    assert len(scores) == 2 and len(set(scores.values())) == 1, said

"""What `make` offers as a demo, in a folder of its own: to its exit code, with the environment of a user's shell."""

import shlex
import shutil
import sys

import pytest
from environments import ended
from pages import TARGETS
from places import ROOT

DEMOS = sorted(target for target in TARGETS if target == "quickstart" or target.startswith("demo"))


def recipe(target):
    """The command of a target that starts its program."""
    made = ended(["make", "-n", target], cwd=ROOT)
    (line,) = (line for line in made.stdout.splitlines() if " examples/" in line)
    _, *words = shlex.split(line)
    return [sys.executable, *(str(ROOT / word) if word.startswith("examples/") else word for word in words)]


@pytest.mark.slow
@pytest.mark.parametrize("target", DEMOS)
def test_a_demo_ends_well(target, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    ended(recipe(target), code=0, cwd=tmp_path, timeout=3000)

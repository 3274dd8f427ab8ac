"""Random layers against an implementation of the tests' own; `make soak ARGS="--kind layers"` runs more of them."""

import pytest
from soak.layers.runner import Runner

pytestmark = pytest.mark.timeout(900)

HANG = 120.0  # seconds

#: A process of which case 2 ends by a signal, case 4 does not end, and case 6 is followed by a crash at the exit.
PROGRAM = """
import json, os, sys, time
for seed in map(int, sys.argv[1:]):
    print(json.dumps({"seed": seed, "began": f"case {seed}"}), flush=True)
    if seed == 2:
        os.abort()
    if seed == 4:
        time.sleep(1000)
    print(json.dumps({"seed": seed, "strain": 0.5}), flush=True)
if seed == 6:
    os._exit(7)
"""


def outcomes(seeds):
    found = []
    Runner(found.append, HANG).run(seeds)
    return found


def test_120_cases():
    """The same at every run, half of them through each door."""
    found = outcomes(range(120))
    assert not [outcome.text for outcome in found if outcome.kind not in ("right", "refused")]
    assert sum(outcome.kind == "refused" for outcome in found) < 5
    assert sorted(outcome.seed for outcome in found) == list(range(120))


def test_crashes_and_hangs_have_a_seed():
    class Failing(Runner):
        def _program(self):
            return ["-c", PROGRAM]

    found = []
    Failing(found.append, hang=15).run([0, 2, 4, 6])
    kinds = [(outcome.seed, outcome.kind) for outcome in found]
    assert kinds == [(0, "right"), (2, "crashed"), (4, "hung"), (6, "right"), (6, "crashed")]
    texts = [outcome.text for outcome in found if outcome.kind != "right"]
    assert [text.split("\n")[1] for text in texts] == [
        "  in it: ended by SIGABRT",
        "  in it: no answer for 15 s",
        "  after it: exit code 7",
    ]

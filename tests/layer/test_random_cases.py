"""Random layers against an implementation of the tests' own; `make soak ARGS="--kind layers"` runs more of them."""

import pytest
from soak.layers.faults import FAULTS
from soak.layers.runner import Runner

HANG = 120.0  # seconds


def outcomes(seeds, fault=None):
    found = []
    Runner(found.append, HANG, fault).run(seeds)
    return found


def test_200_cases():
    """The same at every run, half of them through each door."""
    found = outcomes(range(200))
    assert not [outcome.text for outcome in found if outcome.kind != "right"]
    assert sorted(outcome.seed for outcome in found) == list(range(200))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    """One that is planted into what is expected: cases that it concerns are wrong."""
    found = outcomes(range(0, 60, 2), fault)
    assert {outcome.kind for outcome in found} == {"right", "wrong"}

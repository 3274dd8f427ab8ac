"""Random layers against an implementation of the tests' own; `make soak` runs more of them."""

import pytest
from soak.runner import Runner

pytestmark = pytest.mark.timeout(900)


def test_120_cases():
    """The same at every run, half of them through each door."""
    found = []
    Runner(found.append, hang=120).run(range(120))
    assert not [outcome.text for outcome in found if outcome.kind != "right"]
    assert sorted(outcome.seed for outcome in found) == list(range(120))

"""The estimators of `gluoncv.auto` train with their own setting for synchronised BatchNorm, through `run`."""

import json
import sys

import pytest
from environments import ended
from places import PACKAGE, SUPPORT


# How many layers GluonCV synchronises with the setting, and what it leaves plain: the model zoo does not pass
# norm_layer on to them.
@pytest.mark.parametrize(
    "name, synchronised, left",
    [
        ("ssd", 27, "_expand_"),
        pytest.param("faster_rcnn", 30, None, marks=pytest.mark.slow),
    ],
)
def test_an_estimator_trains(tmp_path, name, synchronised, left):
    command = [sys.executable, "-W", "ignore", "-m", "gluon_syncbn", "run", "--cpus", "2"]
    ran = ended([*command, SUPPORT / "estimator_job.py", name], PACKAGE.parent, code=0, cwd=tmp_path, timeout=250)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["steps"] >= 8
    statistics = {key: value for key, value in result["statistics"].items() if left is None or left not in key}
    assert len(statistics) == synchronised
    # Each device's own statistics would differ from the first step on.
    assert all(value["same"] and value["moved"] for value in statistics.values())
    plain = [value for key, value in result["statistics"].items() if key not in statistics]
    assert bool(plain) == (left is not None)
    assert not any(value["same"] for value in plain)

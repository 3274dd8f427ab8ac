"""An estimator of `gluoncv.auto` trains with its own setting for synchronised BatchNorm, through `run`."""

import json
import sys

from environments import ended
from places import PACKAGE, SUPPORT


def test_an_estimator_trains(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "gluon_syncbn", "run", "--cpus", "2"]
    ran = ended([*command, SUPPORT / "estimator_job.py"], PACKAGE.parent, code=0, cwd=tmp_path, timeout=250)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["steps"] >= 2
    # The model zoo does not pass norm_layer on to what stands behind the base.
    plain = [value for key, value in result["statistics"].items() if "_expand_" in key]
    synchronised = [value for key, value in result["statistics"].items() if "_expand_" not in key]
    assert len(synchronised) == 27
    # Each device's own statistics differ from the first step on.
    assert all(value["same"] and value["moved"] for value in synchronised)
    assert plain and not any(value["same"] for value in plain)

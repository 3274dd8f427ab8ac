"""The benchmarks run and write all of their results; what they measure and how it looks is not for a test to judge."""

import gzip
import json
import sys

import pytest
from environments import ended
from places import BENCHMARKS, PACKAGE

pytest.importorskip("matplotlib", reason="the plots need matplotlib")

OTHERS = ["layers --eager --quick", "models --quick", "kernels --quick", "modes --quick", "recompute --quick"]
IN_PROCESSES = ["gradients --quick", "models --processes 2 --quick", "exchange --quick", "scaling --bandwidth-gbit 100"]


@pytest.mark.parametrize(
    "command", ["layers --quick", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS + IN_PROCESSES)]
)
def test_a_short_run(command, tmp_path):
    if command in IN_PROCESSES:
        pytest.importorskip("mpi4py", reason="processes need mpi4py")
    name, *options = command.split()
    program = [sys.executable, BENCHMARKS / f"{name}.py", *options, "--out", tmp_path]
    ended(program, PACKAGE.parent, code=0, timeout=240)
    if "--eager" in options:  # which prints its result
        return
    (path,) = tmp_path.glob("*.json")
    assert all(path.with_suffix(end).exists() for end in (".md", ".png"))
    results = json.loads(path.read_text())
    assert results["cells"]
    if name == "scaling":  # which measures nothing; more processes never cost less
        assert all(costs == sorted(costs) for costs in results["cells"].values())
    else:
        with gzip.open(path.with_suffix(".raw.json.gz"), "rt") as file:
            assert json.load(file)["environment"] == results["environment"]


def test_what_is_kept_of_the_samples(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _results

    assert _results.quantiles(range(99, 0, -1)) == {"count": 99, "10%": 10, "median": 50, "90%": 90}
    assert _results.quantiles([3.0, 1.0]) == {"count": 2, "10%": 1, "median": 2, "90%": 3}
    cell = _results.compared({"shape": [1], "seconds": {"plain": [1.0, 4.0, 2.0], "ours": [3.0, 4.0, 8.0]}})
    assert cell["shape"] == [1] and cell["seconds"].keys() == {"plain", "ours"}
    # of the rounds 3, 1 and 4; the quotient of the medians is 2
    assert list(cell["ratios"]) == ["ours"] and cell["ratios"]["ours"]["median"] == 3

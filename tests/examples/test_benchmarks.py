"""The benchmarks run and write all of their results; what they measure and how it looks is not for a test to judge."""

import gzip
import json
import sys

import pytest
from environments import ended
from places import BENCHMARKS, PACKAGE

pytest.importorskip("matplotlib", reason="the plots need matplotlib")


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark: the cells of its results, if it writes any."""

    def cells(name, *options):
        command = [sys.executable, BENCHMARKS / f"{name}.py", *options, "--out", tmp_path]
        ran = ended(command, PACKAGE.parent, timeout=240)
        assert ran.returncode == 0, ran.stderr
        paths = sorted(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[-1:]:
            assert all(path.with_suffix(end).exists() for end in (".md", ".png"))
            results = json.loads(path.read_text())
            if name != "scaling":  # which measures nothing
                with gzip.open(path.with_suffix(".raw.json.gz"), "rt") as file:
                    assert json.load(file)["environment"] == results["environment"]
            return results["cells"]
        return None

    return cells


OTHERS = ["layers --eager", "models", "kernels", "modes", "recompute"]


@pytest.mark.parametrize("command", ["layers", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_a_short_run(run, command):
    assert run(*command.split(), "--quick") or "--eager" in command


@pytest.mark.slow
@pytest.mark.parametrize("command", ["gradients", "models --processes 2"])
def test_a_short_run_in_processes(run, command):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    assert run(*command.split(), "--quick")


@pytest.mark.slow
def test_more_processes_never_cost_less(run):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    assert run("exchange", "--quick")
    cells = run("scaling", "--bandwidth-gbit", 100)
    for net, costs in cells["processes"].items():
        assert costs == sorted(costs) and all(way == sorted(way) for way in cells["gpus"][net].values())


@pytest.mark.slow
def test_what_the_sample_shuffle_moves(run):
    (cell,) = run("shuffle", "--quick")
    image, feature = 4 * 3 * 8 * 8 * 4, 4 * 128 * 4  # of one device
    assert cell["bytes"]["plain"] == 0
    assert 0 < cell["bytes"]["loading"] <= 2 * feature
    assert cell["bytes"]["loading"] < cell["bytes"]["moving"] <= 2 * (image + feature)
    assert cell["bytes"]["gathering"] == 2 * (image + feature)


# A benchmark's child as `measure` sees it: one line of JSON for each cell, or what the cell says instead.
CHILD = """
import json, sys, time
print("chatter of a library")
for cell in json.loads(sys.argv[2]):
    if cell["contrib"] and cell["does"] == "hang":
        time.sleep(600)
    if cell["does"] == "fail" or cell["contrib"] and cell["does"] == "contrib fails":
        sys.exit("RuntimeError: broken")
    names = ("plain", "ours") + ("contrib",) * cell["contrib"]
    print(json.dumps({name: [1.0, 2.0 * len(name)] for name in names}), flush=True)
"""


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_hanging_or_failing_cell_does_not_stop_the_others(tmp_path, benchmarks):
    import _measuring
    import _results

    script = tmp_path / "child.py"
    script.write_text(CHILD)
    cells = [{"does": does, "contrib": True} for does in ("measure", "hang", "fail", "contrib fails", "measure")]
    measured = list(_measuring.measure(str(script), cells, limit_s=5))
    assert [cell for cell, _, _ in measured] == cells
    results = [_results.compared({"seconds": taken, "problems": problems}) for _, taken, problems in measured]
    ours_and_contribs = [tuple(_results.entry(result, name) for name in ("ours", "contrib")) for result in results]
    ours, contribs = "0.90 (0.80 to 1.00; n = 2)", "1.20 (1.00 to 1.40; n = 2)"
    fine = (ours, contribs)
    assert ours_and_contribs == [fine, (ours, "hang"), ("error", "error"), (ours, "error"), fine]
    assert results[2]["problems"] == {"contrib": "RuntimeError: broken", "ours": "RuntimeError: broken"}
    assert _results.report(results[:2] + results[3:]) == 0
    assert _results.report(results) == 1


def test_what_is_kept_of_the_samples(benchmarks):
    import _results

    assert _results.quantiles(range(99, 0, -1)) == {"count": 99, "10%": 10, "median": 50, "90%": 90}
    assert _results.quantiles([3.0, 1.0]) == {"count": 2, "10%": 1, "median": 2, "90%": 3}
    cell = _results.compared({"shape": [1], "seconds": {"plain": [1.0, 4.0, 2.0], "ours": [3.0, 4.0, 8.0]}})
    assert cell["shape"] == [1] and cell["seconds"].keys() == {"plain", "ours"}
    # of the rounds 3, 1 and 4; the quotient of the medians is 2
    assert list(cell["ratios"]) == ["ours"] and cell["ratios"]["ours"]["median"] == 3
    assert [_results.ratio(cell, name) for name in ("plain", "ours")] == [1, 3]

"""The benchmarks run and their results are complete; what they measure is not for a test to judge."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
NUMBER = r"\d+\.\d\d"


def run(name, out):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--out", str(out)]
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


def rows(text):
    """The cells of the table's rows, without header and rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


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


def test_a_hanging_or_failing_cell_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import _common

    script = tmp_path / "child.py"
    script.write_text(CHILD)
    cells = [{"does": does, "contrib": True} for does in ("measure", "hang", "fail", "contrib fails", "measure")]
    measured = list(_common.measure(str(script), cells, limit_s=2))
    assert [cell for cell, _, _ in measured] == cells
    results = [{"seconds": taken, "problems": problems} for _, taken, problems in measured]
    names = ("ours", "contrib")
    ours_and_contribs = [tuple(_common.entry(result, name) for name in names) for result in results]
    fine = ("0.90", "1.20")
    assert ours_and_contribs == [fine, ("0.90", "hang"), ("error", "error"), ("0.90", "error"), fine]
    assert results[2]["problems"] == {"contrib": "RuntimeError: broken", "ours": "RuntimeError: broken"}
    assert _common.report(results[:2] + results[3:]) == 0
    assert _common.report(results) == 1


@pytest.mark.parametrize("name, count, ratios", [("layers", 4, 3), ("models", 1, 2)])
def test_the_results_are_complete(name, count, ratios, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    pytest.importorskip("gluoncv", reason="GluonCV is not installed")
    ran = run(name, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.{end}" for end in ("json", "md", "png")]
    text = (tmp_path / f"{name}.md").read_text()
    assert f"benchmarks/{name}.py --quick" in text
    for fact in ("processor", "cores", "mxnet: 1.9", "native core", "date"):
        assert f"- {fact}" in text
    table = rows(text)
    assert len(table) == count
    for row in table:
        ours, *others = row[-ratios:]
        assert float(ours) > 0
        assert all(cell == "hang" or float(cell) > 0 for cell in others)
    data = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(data["cells"]) == count
    assert all({"plain", "ours"} <= cell["seconds"].keys() for cell in data["cells"])
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_of_the_sample_shuffle_are_complete(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    ran = run("shuffle", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"shuffle.{end}" for end in ("json", "md", "png")]
    text = (tmp_path / "shuffle.md").read_text()
    assert "benchmarks/shuffle.py --quick" in text and "- processor" in text
    formula, measured = (rows(part) for part in text.split("## Measured"))
    # 32 images of 3 x 224 x 224 and 32 rows of 128 features on each device, float32
    image, feature = 32 * 3 * 224 * 224 * 4 / 1e6, 32 * 128 * 4 / 1e3
    assert [int(row[0]) for row in formula] == list(range(2, 9))
    for row in formula:
        n = int(row[0])
        want = [0, (n - 1) * image, n * (n - 1) * image, (n - 1) * feature, n * (n - 1) * feature]
        assert [float(cell) for cell in row[1:]] == pytest.approx(want, abs=0.006)
    ((devices, *times, loading, moving, gathering),) = measured
    assert devices == "2" and len(times) == 4 and all(float(cell) > 0 for cell in times)
    assert float(loading) <= float(moving) <= float(gathering)
    (cell,) = json.loads((tmp_path / "shuffle.json").read_text())["cells"]
    image, feature = 4 * 3 * 8 * 8 * 4, 4 * 128 * 4  # of one device
    assert cell["bytes"]["plain"] == 0
    assert 0 < cell["bytes"]["loading"] <= 2 * feature
    assert cell["bytes"]["loading"] < cell["bytes"]["moving"] <= 2 * (image + feature)
    assert cell["bytes"]["gathering"] == 2 * (image + feature)
    assert (tmp_path / "shuffle.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_of_the_modes_are_complete(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    ran = run("modes", tmp_path)
    assert ran.returncode == 0, ran.stderr
    data = json.loads((tmp_path / "modes.json").read_text())
    names = {"plain", "sync", "local", "local, V=8", "shuffle, V=2", "shuffle, V=8"}
    assert [cell["seconds"].keys() == names for cell in data["cells"]] == [True, True]
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")


def test_the_exchange_and_what_it_lets_expect(tmp_path):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    ran = run("exchange", tmp_path)
    assert ran.returncode == 0, ran.stderr
    data = json.loads((tmp_path / "exchange.json").read_text())["cells"]
    assert [cell["bytes"] for cell in data["sizes"]] == [1024, 2048, 4096, 8192, 16384]
    assert 0 < data["step"]["share"] < 1
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "scaling.py"), "--out", str(tmp_path), "--bandwidth-gbit", "100"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    costs = json.loads((tmp_path / "scaling.json").read_text())["cells"]
    assert all(sorted(seconds) == seconds for seconds in costs.values())  # more processes never cost less
    assert costs["PSPNet-ResNet101"][0] > costs["PSPNet-ResNet50"][0] > 0


def test_the_ways_of_shuffled_statistics(tmp_path):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    ran = run("shuffle_statistics", tmp_path)
    assert ran.returncode == 0, ran.stderr
    cells = json.loads((tmp_path / "shuffle_statistics.json").read_text())["cells"]
    assert {len(times) for times in cells["2"].values()} == {40} and len(cells["2"]) == 6
    assert (tmp_path / "shuffle_statistics.png").read_bytes().startswith(b"\x89PNG")

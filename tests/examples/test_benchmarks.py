"""The benchmarks run and write all of their results; what they measure and how it looks is not for a test to judge."""

import gzip
import importlib.util
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments import ended
from places import BENCHMARKS, PACKAGE


def run(name, *arguments):
    ran = ended([sys.executable, BENCHMARKS / f"{name}.py", *arguments], PACKAGE.parent, timeout=240)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory):
    """Of each of these, the folder that a short run writes to; as many at a time as there are cores, for nobody looks
    at how long anything took. `make slow` runs the others."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    commands = {name: (name, "--quick") for name in ("layers", "models", "kernels")}
    if importlib.util.find_spec("mpi4py"):
        commands["exchange"] = ("exchange", "--quick")
        commands["models_processes"] = ("models", "--quick", "--processes", 2)
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        folders = {name: tmp_path_factory.mktemp(name) for name in commands}
        for ran in [pool.submit(run, *command, "--out", folders[name]) for name, command in commands.items()]:
            ran.result()
    return folders


def results(name, out):
    """The cells that a short run of a benchmark writes."""
    ends = ("json", "md", "png", "raw.json.gz")
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.{end}" for end in ends]
    results = json.loads((out / f"{name}.json").read_text())
    with gzip.open(out / f"{name}.raw.json.gz", "rt") as file:
        samples = json.load(file)
    assert samples["environment"] == results["environment"]
    assert_summarised(results["cells"], samples["cells"])
    return results["cells"]


def assert_summarised(cells, samples):
    """The cells are the samples, but for quantiles in place of the values of a series."""
    if isinstance(cells, dict) and "median" in cells:
        assert (cells["count"], cells["median"]) == (len(samples), approximately(statistics.median(samples)))
        assert list(cells) == ["count", "10%", "median", "90%"]
    elif isinstance(samples, dict):
        assert cells.keys() - samples.keys() <= {"ratios"}
        for name, values in samples.items():
            assert_summarised(cells[name], values)
    elif isinstance(samples, list):
        assert len(cells) == len(samples)
        for cell, sample in zip(cells, samples):
            assert_summarised(cell, sample)
    else:
        assert cells == (approximately(samples) if isinstance(samples, float) else samples)


def approximately(value):
    """To five digits."""
    return pytest.approx(value, rel=5e-5)


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
    names = ("ours", "contrib")
    ours_and_contribs = [tuple(_results.entry(result, name) for name in names) for result in results]
    ours, contribs = "0.90 (0.80 to 1.00; n = 2)", "1.20 (1.00 to 1.40; n = 2)"
    fine = (ours, contribs)
    assert ours_and_contribs == [fine, (ours, "hang"), ("error", "error"), (ours, "error"), fine]
    assert results[2]["problems"] == {"contrib": "RuntimeError: broken", "ours": "RuntimeError: broken"}
    assert _results.report(results[:2] + results[3:]) == 0
    assert _results.report(results) == 1


@pytest.mark.parametrize("settings", [{}, {"devices": (1, 2)}, {"devices": (2,), "processes": True}], ids=str)
def test_the_help_of_a_benchmark(benchmarks, capsys, settings):
    import _measuring

    with pytest.raises(SystemExit) as end:
        _measuring.options("What it measures.", ["--help"], quick="a short run", **settings)
    assert end.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_what_is_kept_of_the_samples(benchmarks):
    import _results

    series = _results.quantiles(range(99, 0, -1))
    assert series == {"count": 99, "10%": 10, "median": 50, "90%": 90}
    few = _results.quantiles([3.0, 1.0])
    assert few == {"count": 2, "10%": 1, "median": 2, "90%": 3}
    sample = {"shape": [1], "seconds": {"plain": [1.0, 4.0, 2.0], "ours": [3.0, 4.0, 8.0]}}
    cell = _results.compared(sample)
    assert cell["shape"] == [1] and cell["seconds"].keys() == {"plain", "ours"}
    # of the rounds 3, 1 and 4; the quotient of the medians is 2
    assert list(cell["ratios"]) == ["ours"] and cell["ratios"]["ours"]["median"] == 3
    assert [_results.ratio(cell, name) for name in ("plain", "ours")] == [1, 3]


def test_the_results_of_the_repository_are_short(benchmarks):
    """They are written as a benchmark writes them, and a reader finds his way."""
    import _results

    texts = [path.read_text() for path in sorted((BENCHMARKS / "results").glob("*.json"))]
    assert all(json.loads(text)["environment"]["gluon_syncbn"] for text in texts), "of which version?"
    assert all(text == _results._lines(json.loads(text)) + "\n" for text in texts)
    assert texts and sum(text.count("\n") for text in texts) <= 2200


def test_what_eager_calls_cost():
    run("layers", "--eager", "--quick")


@pytest.mark.parametrize("name", ["layers", "models", "kernels"])
def test_a_short_run(short_runs, name):
    assert results(name, short_runs[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modes", "memory", "recompute", "inplace", "gradients"])
def test_a_short_run_of_another(tmp_path, name):
    if name == "gradients":
        pytest.importorskip("mpi4py")
    run(name, "--quick", "--out", tmp_path)
    assert results(name, tmp_path)


def test_the_models_in_processes(short_runs):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    (cell,) = results("models_processes", short_runs["models_processes"])
    # The mean of two processes is above half of the slowest, and never above it.
    for mode in ("alone", "local", "sync"):
        slowest, mean = (cell["seconds"][name]["median"] for name in (mode, f"{mode}, mean"))
        assert slowest / 2 < mean <= slowest


@pytest.mark.parametrize(
    "arguments, problem",
    [(["1"], "--processes 1: a meeting takes 2 or more"), (["2", "--devices", "2"], "not allowed with")],
)
def test_the_processes_of_the_models(benchmarks, capsys, arguments, problem):
    import models

    with pytest.raises(SystemExit) as raised:
        models.main(["--processes", *arguments])
    assert raised.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_sample_shuffle_moves(tmp_path):
    run("shuffle", "--quick", "--out", tmp_path)
    (cell,) = results("shuffle", tmp_path)
    image, feature = 4 * 3 * 8 * 8 * 4, 4 * 128 * 4  # of one device
    assert cell["bytes"]["plain"] == 0
    assert 0 < cell["bytes"]["loading"] <= 2 * feature
    assert cell["bytes"]["loading"] < cell["bytes"]["moving"] <= 2 * (image + feature)
    assert cell["bytes"]["gathering"] == 2 * (image + feature)


def test_the_exchange_and_what_it_lets_expect(short_runs):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    folder = short_runs["exchange"]
    assert results("exchange", folder)
    # In place of the time that was measured, one that the model's outcome can be told for.
    path = folder / "exchange.json"
    exchange = json.loads(path.read_text())
    exchange["cells"]["sizes"][0]["microseconds"]["transport"]["median"] = 90.0
    path.write_text(json.dumps(exchange))
    run("scaling", "--out", folder, "--bandwidth-gbit", 100)
    nets = {"PSPNet-ResNet50": 61, "PSPNet-ResNet101": 112}
    cells = json.loads((folder / "scaling.json").read_text())["cells"]
    costs = cells["processes"]
    assert list(costs) == list(cells["gpus"]) == list(nets)
    for net, layers in nets.items():
        # 8 processes: two exchanges for each layer, of 3 messages each; the bytes add little
        bare = 2 * layers * 3 * (20e-6 + 45e-6)
        assert bare < costs[net][0] < 1.05 * bare
        assert costs[net] == sorted(costs[net])  # more processes never cost less
        of_net = cells["gpus"][net]
        assert len(of_net) == 3 and all(len(way) == 11 and way == sorted(way) for way in of_net.values())
        nccl = of_net["NCCL"]
        # 1 GPU: two launches of 3 us and a wait of 3 in each direction; 8 GPUs: 6 us and 7 hops of 2 us, and the bytes
        assert nccl[0] == pytest.approx(2 * layers * 9e-6)
        assert 2 * layers * 19e-6 < nccl[3] - nccl[0] < 2 * layers * 24e-6
        # 128 machines: an agreement of 7 messages, less what hides it, and a tree of 2 x 7 hops each way
        least, most = 7 * 65 - 35 + 6 + 14 * 2 + 14 * 5, 7 * 65 + 125 + 6
        assert 2 * layers * least * 1e-6 < nccl[10] - nccl[0] < 2 * layers * most * 1e-6

"""The benchmarks run and their results are complete; what they measure is not for a test to judge."""

import gzip
import importlib.util
import json
import os
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

import kernels_library
import pytest
from environments import ended
from places import BENCHMARKS, PACKAGE

from gluon_syncbn import __version__

# What a cell of a table may be.
NUMBER = r"-?\d+\.\d+"
MEDIAN_AND_RANGE = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"


def run(name, *arguments):
    ran = ended([sys.executable, BENCHMARKS / f"{name}.py", *arguments], PACKAGE.parent, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory):
    """Of each of these, what a short run says and the folder that it writes to; as many at a time as there are cores,
    for nobody looks at how long anything took. `make slow` runs the others."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    commands = {name: (name, "--quick") for name in ("layers", "models", "kernels")}
    if importlib.util.find_spec("mpi4py"):
        commands["exchange"] = ("exchange", "--quick")
        commands["models_processes"] = ("models", "--quick", "--processes", 2)
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        folders = {name: tmp_path_factory.mktemp(name) for name in commands}
        said = {name: pool.submit(run, *command, "--out", folders[name]) for name, command in commands.items()}
        return {name: (said[name].result(), out) for name, out in folders.items()}


def results(name, said, out, command=None):
    """The text and the cells that a short run of a benchmark writes, and of which command it says so."""
    ends = ("json", "md", "png", "raw.json.gz")
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.{end}" for end in ends]
    assert f"{name}.raw.json.gz" in said
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (out / f"{name}.md").read_text()
    assert (command or f"benchmarks/{name}.py --quick") in text
    for fact in ("processor", "cores", "mxnet: 1.9", "native core", "date", f"gluon_syncbn: {__version__}"):
        assert f"- {fact}" in text
    results = json.loads((out / f"{name}.json").read_text())
    with gzip.open(out / f"{name}.raw.json.gz", "rt") as file:
        samples = json.load(file)
    assert samples["environment"] == results["environment"]
    assert_summarised(results["cells"], samples["cells"])
    return text, results["cells"]


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


def tables(text):
    """The header and the rows of each table."""
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines())
        yield header, rows


def assert_cells(rows, first, *patterns):
    """The first columns are these, and each other column holds what its pattern says."""
    assert [row[: len(first[0])] for row in rows] == first
    for row in rows:
        cells = row[len(first[0]) :]
        assert len(cells) == len(patterns), row
        assert all(re.fullmatch(pattern, cell) for pattern, cell in zip(patterns, cells)), row


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
    fine = ("0.90", "1.20")
    assert ours_and_contribs == [fine, ("0.90", "hang"), ("error", "error"), ("0.90", "error"), fine]
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
    ((header, rows),) = tables(run("layers", "--eager", "--quick"))
    assert header == ["eager, forward and backward", "us for a layer and replica", "/ plain"]
    assert_cells(rows, [["ours"], ["ours, with waits"]], r"\d+", NUMBER)


PAIR = rf"{NUMBER}, {NUMBER}"
WAYS = [(layout, behind) for layout in ("NCHW", "blocks of 16", "NHWC") for behind in ("nothing", "ReLU")]
#: Of each benchmark's table: the first columns, and what stands in the others.
TABLES = {
    "layers": (
        [[shape, replicas] for shape in ("2 x 64 x 8 x 8", "2 x 8 x 16 x 16") for replicas in ("1", "2")],
        [NUMBER, NUMBER, "-", NUMBER, NUMBER, NUMBER],
    ),
    "models": (
        [["depthwise chain", "16", "1", "2"]],
        [NUMBER, NUMBER, MEDIAN_AND_RANGE, MEDIAN_AND_RANGE, NUMBER, "-", NUMBER, *[r"\d+"] * 3],
    ),
    "kernels": ([[name, "2 x 32 x 64", *way] for name in kernels_library.here() for way in WAYS], [NUMBER] * 5),
}
SLOW = {
    "modes": ([["4 x 8 x 8 x 8", replicas] for replicas in ("1", "2")], [NUMBER] * 6),
    "memory": ([["FastSCNN", "32", "1"]], [*[r"-?\d+"] * 4, *[NUMBER] * 3, r"-?\d+"]),
    "checkpoint": ([["ResNet-50", "32", "1"]], [r"\d+", r"\d+", *[NUMBER] * 3]),
    "inplace": (
        [["depthwise chain", "16", "1", way] for way in ("dynamic", "static")],
        [*[r"\d+, \d+"] * 3, PAIR, "4 of 4", rf"{PAIR}, {NUMBER}"],
    ),
    "gradients": (
        [["MobileNetV2", "64", "3.5", "2"]],
        [NUMBER, NUMBER, MEDIAN_AND_RANGE, NUMBER, NUMBER, MEDIAN_AND_RANGE, NUMBER],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_results_are_complete(short_runs, name):
    ((_, rows),) = tables(results(name, *short_runs[name])[0])
    assert_cells(rows, TABLES[name][0], *TABLES[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_results_of_others_are_complete(tmp_path, name):
    if name == "gradients":
        pytest.importorskip("mpi4py")
    ((_, rows),) = tables(results(name, run(name, "--quick", "--out", tmp_path), tmp_path)[0])
    assert_cells(rows, SLOW[name][0], *SLOW[name][1])


def test_the_results_of_the_models_in_processes_are_complete(short_runs):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    command = "benchmarks/models.py --quick --processes 2"
    text, (cell,) = results("models_processes", *short_runs["models_processes"], command)
    ((_, rows),) = tables(text)
    patterns = [*[NUMBER] * 3, MEDIAN_AND_RANGE, rf"{NUMBER} %", *[MEDIAN_AND_RANGE] * 2]
    assert_cells(rows, [["FastSCNN", "64", "2", "2", "3"]], *patterns)
    assert {one["count"] for one in cell["seconds"].values()} == {3}
    # The mean of two processes is above half of the slowest, and never above it.
    for mode in ("alone", "local", "sync"):
        slowest, mean = (cell["seconds"][name]["median"] for name in (mode, f"{mode}, mean"))
        assert slowest / 2 < mean <= slowest
    ratio = cell["ratios"]["sync"]["median"]
    assert float(rows[0][9].split()[0]) == pytest.approx(100 * (1 - 1 / ratio), abs=0.1)


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
def test_the_results_of_the_sample_shuffle_are_complete(tmp_path):
    text, (cell,) = results("shuffle", run("shuffle", "--quick", "--out", tmp_path), tmp_path)
    (_, formula), (_, rows) = tables(text)
    # 32 images of 3 x 224 x 224 and 32 rows of 128 features on each device, float32
    image, feature = 32 * 3 * 224 * 224 * 4 / 1e6, 32 * 128 * 4 / 1e3
    assert [int(row[0]) for row in formula] == list(range(2, 9))
    for row in formula:
        n = int(row[0])
        want = [0, (n - 1) * image, n * (n - 1) * image, (n - 1) * feature, n * (n - 1) * feature]
        assert [float(cell) for cell in row[1:]] == pytest.approx(want, abs=0.006)
    ways = ["plain", "loading", "moving", "gathering"]
    assert_cells(rows, [["2"]], *[NUMBER] * 4, *(f"{cell['bytes'][way] / 1e6:.2f}" for way in ways[1:]))
    assert list(cell["seconds"]) == ways
    image, feature = 4 * 3 * 8 * 8 * 4, 4 * 128 * 4  # of one device
    assert cell["bytes"]["plain"] == 0
    assert 0 < cell["bytes"]["loading"] <= 2 * feature
    assert cell["bytes"]["loading"] < cell["bytes"]["moving"] <= 2 * (image + feature)
    assert cell["bytes"]["gathering"] == 2 * (image + feature)


def test_the_exchange_and_what_it_lets_expect(short_runs):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    said, folder = short_runs["exchange"]
    text, cells = results("exchange", said, folder)
    ((header, rows),) = tables(text)
    assert header == ["bytes", "processes", "bare, us", "ours, us", "ours / bare", "transport, us"]
    sizes = [1024, 2048, 4096, 8192, 16384]
    known = [[str(size), "2"] for size in sizes]
    assert_cells(rows, known, MEDIAN_AND_RANGE, MEDIAN_AND_RANGE, NUMBER, MEDIAN_AND_RANGE)
    assert [(cell["bytes"], cell["processes"]) for cell in cells["sizes"]] == [(size, 2) for size in sizes]

    # In place of the time that was measured, one that the model's outcome can be told for.
    path = folder / "exchange.json"
    exchange = json.loads(path.read_text())
    exchange["cells"]["sizes"][0]["microseconds"]["transport"]["median"] = 90.0
    path.write_text(json.dumps(exchange))
    run("scaling", "--out", folder, "--bandwidth-gbit", 100)
    text = (folder / "scaling.md").read_text()
    assert "45 us per message, 20 us latency, 100 Gbit/s, a step of 800 ms" in text
    (header, rows), (of_gpus, gpu_rows), (_, figures) = tables(text)
    nets = {"PSPNet-ResNet50": 61, "PSPNet-ResNet101": 112}
    assert header == ["processes", *(f"{net}, ms ({layers} layers)" for net, layers in nets.items()), "of a step"]
    processes = [[str(2**k)] for k in range(3, 11)]
    assert_cells(rows, processes, NUMBER, NUMBER, rf"{NUMBER} % / {NUMBER} %")
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
    assert of_gpus[:2] == ["GPUs", "machines"] and len(of_gpus) == 5
    time_and_share = rf"{NUMBER} \({NUMBER}%\)"
    gpus = [[str(2**k), str(max(1, 2**k // 8))] for k in range(11)]
    assert_cells(gpu_rows, gpus, *[time_and_share] * 3)
    kinds = {"counted on the emulator", "measured, or given", "published", "assumed"}
    assert {row[2] for row in figures} == kinds
    assert "**Every time in this table is reckoned**" in text
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")

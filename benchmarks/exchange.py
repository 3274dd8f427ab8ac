"""What it costs to put statistics together over processes: microseconds per exchange.

Processes of this machine, over the MPI beside this Python. *Bare* is mpi4py's ``Allreduce`` of the same bytes in the
same processes and run, which never gives up waiting, and matches by the order of the calls. All messages of a second
job go over TCP, as between machines.

    python benchmarks/exchange.py             # writes benchmarks/results/exchange.{md,json,png}
    python benchmarks/exchange.py --quick     # a smoke test, its figures mean nothing
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import _measuring
import _results
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

SIZES = [1024, 2048, 4096, 8192, 16384]  # bytes
PROCESSES = [2, 4, 8]
ROUNDS = 1000
PAIRS = [("bare", "ours"), ("bare over TCP", "ours over TCP")]  # in a machine, and between machines

EXPLANATION = """Microseconds for the sum of a float64 vector over the processes of one machine, the median over
{rounds} calls on rank 0 (10 % and 90 % in brackets). *Bare* is mpi4py's `Allreduce` in the same job,
called from Python, of which mpi4py takes 0.7 us. *Ours* is what a layer calls. *Over TCP* is a job whose messages all
go over TCP, as between machines. With more processes than cores, a wait is mostly for the scheduler."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, child)
    env = {**_results.environment(["benchmarks/exchange.py", *arguments]), "processes over": _measuring.library()}
    processes, rounds = ([2], 50) if options.quick else (PROCESSES, ROUNDS)
    samples: List[_measuring.Cell] = []
    for count in tqdm(processes, desc="exchange", unit="job", disable=None):
        near, far = (
            _measuring.job(count, [__file__], {"rounds": rounds, "network": network}, network)
            for network in (False, True)
        )
        for size in SIZES:
            of_size = {**near[str(size)], **far[str(size)]}
            samples.append({"bytes": size, "processes": count, "microseconds": of_size})

    cells = [{**sample, "microseconds": _results.summary(sample["microseconds"])} for sample in samples]
    header = ["bytes", "processes", "bare, us", "ours, us", "ours / bare"]
    header += [f"over TCP: {name}" for name in header[2:]]
    parts, title = [EXPLANATION.format(rounds=rounds), [header, *map(row, cells)]], "Exchange between processes"
    _results.write(options.out, "exchange", title, parts, env, {"sizes": cells}, {"sizes": samples})
    return 0


def row(cell: _measuring.Cell) -> List[str]:
    texts = [str(cell["bytes"]), str(cell["processes"])]
    for bare, ours in PAIRS:
        pair = [cell["microseconds"][name] for name in (bare, ours)]
        texts += [*map(_results.median_and_range, pair), f"{pair[1]['median'] / pair[0]['median']:.2f}"]
    return texts


def child(work: Dict[str, Any]) -> None:
    import numpy as np
    from allreduce import combine

    import gluon_syncbn

    gluon_syncbn.configure(timeout=120)
    store = gluon_syncbn.kvstore("mpi")
    bare, ours = PAIRS[work["network"]]
    result = {}
    for size in SIZES:
        values, total = np.ones(size // 8), np.empty(size // 8)
        numbers, data = itertools.count(), (values.ctypes.data, total.ctypes.data)
        bare_sum = _measuring.bare_sum(values)

        def timed_bare(bare_sum: Callable[[], Any] = bare_sum) -> float:
            start = time.perf_counter()
            bare_sum()
            return time.perf_counter() - start

        # A step calls it from C++, so it is timed there.
        def timed_ours(numbers: Any = numbers, size: int = size, data: Any = data) -> float:
            id = 0, size, next(numbers), 0, b"a benchmark", 120.0
            return combine(store.handle, False, *id, size // 8, *data)

        result[size] = in_turn({bare: timed_bare, ours: timed_ours}, work["rounds"])
    if store.rank == 0:
        print(json.dumps(result), flush=True)


def in_turn(calls: Dict[str, Callable[[], float]], rounds: int) -> _measuring.Rounds:
    """Microseconds of each call; in turn, so that a slow moment hits all."""
    taken: _measuring.Rounds = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(10):
        for name, call in calls.items():
            taken[name] += [call() * 1e6 for _ in range(rounds // 10)]
    return taken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

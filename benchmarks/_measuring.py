"""Measures implementations in turn, in a child process or a job of processes."""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

RESULTS = Path(__file__).resolve().parent / "results"

Cell = Dict[str, Any]
Rounds = Dict[str, List[float]]  # seconds of one step, by implementation and round

# For processes whose memory is measured: glibc returns freed memory to the kernel at once, so that the peak is the
# memory in use. Otherwise glibc keeps freed pieces, and the peak varies by a quarter.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def options(
    doc: Optional[str],
    arguments: Sequence[str],
    child: Optional[Callable[[Any], None]] = None,
    more: Optional[Dict[str, Dict[str, Any]]] = None,
) -> argparse.Namespace:
    """Parses the command line of a benchmark, which may have `more` options.

    A process that ``--child`` started measures its cells with `child`, and ends.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test, whose figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    for name, settings in (more or {}).items():
        parser.add_argument(name, **settings)
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the cells to measure, as JSON
    parsed = parser.parse_args(arguments)
    if parsed.child and child:
        child(json.loads(parsed.child))
        sys.exit()
    return parsed


def interleaved(steps: Dict[str, Callable[[], Any]], rounds: int, budget_s: float, least: int = 2) -> Rounds:
    """Returns seconds per call of each step.

    A round takes one sample of each step in turn, so that a slow minute affects all of them. Each round begins with
    another step, so that no step always follows the same one. A sample has as many calls as take about 50 ms, or 0.5 %
    of a small `budget_s`. After a warm-up and the `least` rounds, the measurement ends when `budget_s` is spent.
    """
    calls, sample_s = {}, min(0.05, budget_s / 200)
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        calls[name] = max(1, round(sample_s / (time.perf_counter() - start)))
    taken: Rounds = {name: [] for name in steps}
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= least and time.perf_counter() - begun > budget_s:
            break
        names = list(steps)
        first = done % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            for _ in range(calls[name]):
                steps[name]()
            taken[name].append((time.perf_counter() - start) / calls[name])
    return taken


def in_processes(calls: Dict[str, Callable[[], float]], rounds: int, budget_s: float) -> Dict[str, List[List[float]]]:
    """Returns seconds of each call, in each round and process of the job.

    The processes begin each call together, and each round begins with another one, after two that build the graphs.
    The clock of rank 0 says for all processes when `budget_s` is spent.
    """
    from mpi4py import MPI

    of_all = MPI.COMM_WORLD.allgather
    taken: Dict[str, List[List[float]]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for done in range(-2, rounds):
        if done >= 2 and of_all(time.perf_counter() - begun)[0] > budget_s:
            break
        for turn in range(len(calls)):
            name = list(calls)[(done + turn) % len(calls)]
            all_are_here()
            seconds = of_all(calls[name]())
            if done >= 0:
                taken[name].append(seconds)
    return taken


def all_are_here() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def resident_mib() -> float:
    """Returns the memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def figures(script: str, cell: Cell, limit_s: float, environment: Optional[Dict[str, str]] = None) -> Any:
    """Returns the figures of a cell, which a child process measures."""
    ((_, figures, problem),) = _children(script, [cell], limit_s, environment)
    if problem:
        raise SystemExit(f"{cell}: {problem}")
    return figures


def measure(script: str, cells: Sequence[Cell], limit_s: float) -> Iterator[Tuple[Cell, Rounds, Dict[str, str]]]:
    """Yields each cell with its times, and with the problems by implementation.

    If a cell with ``"contrib": True`` fails, the problem counts as contrib's. The cell is then measured again without
    contrib.
    """
    for cell, taken, problem in _children(script, cells, limit_s):
        problems = {}
        if problem and cell["contrib"]:
            problems["contrib"] = problem
            ((_, taken, problem),) = _children(script, [{**cell, "contrib": False}], limit_s)
        if problem:
            problems["ours"] = problem
        yield cell, taken, problems


def _children(
    script: str, cells: Sequence[Cell], limit_s: float, environment: Optional[Dict[str, str]] = None
) -> Iterator[Tuple[Cell, Any, str]]:
    """Runs ``script --child`` on the cells; one process measures all of them in turn.

    If a cell does not end within `limit_s`, the process is killed, and a new one measures the next cells.
    """
    pending = list(cells)
    while pending:
        with tempfile.TemporaryFile("w+") as errors:
            # a new session, so that all processes of the child end with it
            child = subprocess.Popen(
                [sys.executable, script, "--child", json.dumps(pending)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
            lines: queue.Queue[str] = queue.Queue()
            reader = threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True)
            reader.start()
            try:
                while pending:
                    line = lines.get(timeout=limit_s)
                    if line.startswith("{"):  # GluonCV prints, too
                        yield pending.pop(0), json.loads(line), ""
                    elif not line:
                        code = child.wait()
                        errors.seek(0)
                        said = [text.strip() for text in errors if text.strip()]
                        yield pending.pop(0), {}, said[-1] if said else f"exit code {code}"
                        break
            except queue.Empty:
                yield pending.pop(0), {}, "hang"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                reader.join()


def _pass_on(stream: IO[str], lines: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")  # the end


def bare_sum(values: Any) -> Callable[[], Any]:
    """Sums the values over the processes of a job, by mpi4py's ``Allreduce``."""
    import numpy as np
    from mpi4py import MPI

    out = np.empty_like(values)
    return lambda: MPI.COMM_WORLD.Allreduce(values, out)


def library() -> str:
    """What carries messages between the processes of `job`, with its version."""
    import mpi4py

    mpi4py.rc.initialize = False  # this process is none of the job
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].partition(",")[0].split())


# All messages of a job go over TCP, as between machines: those of MPICH and of Open MPI.
NETWORK = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}


def job(processes: int, script: Sequence[str], work: Dict[str, Any], network: bool = False) -> Any:
    """Runs ``script --child`` on the work, in a job of `processes`, over the `network`. Returns what rank 0 prints."""
    launcher = Path(sys.executable).with_name("mpiexec")
    command = [str(launcher), "-n", str(processes), sys.executable, *script]
    # Open MPI's would give each process one core, and start no more processes than there are cores.
    policies = {"hwloc_default_binding": "none", "rmaps_default_mapping": ":oversubscribe"}
    environment = {**{f"PRTE_MCA_{name}_policy": value for name, value in policies.items()}, **os.environ}
    environment.update(NETWORK if network else {}, OMP_NUM_THREADS="1", PATH=f"{launcher.parent}:{os.environ['PATH']}")
    done = subprocess.run(
        [*command, "--child", json.dumps(work)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{' '.join(command[:4])} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(lines[-1])

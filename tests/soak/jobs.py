"""Jobs of two or three processes that make random exchanges while something happens to one of them.

``PYTHONPATH=tests/support:tests python -m soak.jobs [--minutes M] [--seed N]``. The cases of a job are like those of
tests/support/exchanges.py, but longer, and the last one has a signal. All ranks have what is right, or soon an error
that names an exchange; and no process is left.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from exchanges import assert_sound, drawn
from mpi_job import BIN, Programs
from places import SUPPORT


def left(folder):
    """The processes of the job that have not ended."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MPI_WORKER_REPORTS={folder}".encode() in path.read_bytes():
                yield int(path.parent.name)
        except OSError:
            pass  # it has ended since, or is another user's


def problems_of_job(first, count):
    ranks = 2 + first // count % 2
    cases = [drawn(seed, ranks, seed == first + count - 1) for seed in range(first, first + count)]
    with Programs() as programs:
        path = programs.folder / ".cases"
        path.write_text(json.dumps(cases))
        command = [BIN / "mpiexec", "-n", ranks, sys.executable, "-W", "ignore", SUPPORT / "exchanges_worker.py", path]
        job, limit = [programs.start("job", command, {})], 90 + 20 * count
        if cases[-1]["fault"] == "SIGSTOP" and programs.wait(job, limit) == [None]:
            for pid in left(programs.folder):  # it stopped behind its last call, and as in MPI_Finalize all wait for it
                if " (python) T " in Path(f"/proc/{pid}/stat").read_text():
                    os.kill(pid, signal.SIGKILL)
        if programs.wait(job, limit) == [None]:
            yield "mpiexec has not ended"
        time.sleep(1)
        for pid in left(programs.folder):
            yield f"process {pid} is left"
            os.kill(pid, signal.SIGKILL)
        try:
            assert_sound(programs.output(), ranks, cases)
        except AssertionError as error:
            yield f"{error}\n{programs.output()[-6000:]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=8 * random.randrange(10**6), help="of the first case")
    parser.add_argument("--cases", type=int, default=8, help="of a job")
    given = parser.parse_args()
    end, seed, bad = time.monotonic() + 60 * given.minutes, given.seed, []
    while time.monotonic() < end:
        problems = list(problems_of_job(seed, given.cases))
        print(f"{seed}: {'right' if not problems else 'wrong'}", *problems, sep="\n", flush=True)
        bad += [seed] * bool(problems)
        seed += given.cases
    print(f"{seed - given.seed} cases from --seed {given.seed}; jobs with a fault: {bad}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

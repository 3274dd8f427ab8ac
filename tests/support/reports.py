"""Files that the ranks of a job leave for the test and for each other.

What a process prints at its end may get lost: mpiexec ends all with the first that ends with an error.
"""

import os
import re
import time
from pathlib import Path

case = ""  # of several in a job, the one that is under way: its files have names of their own


def path_of(name):
    return Path(os.environ["MPI_WORKER_REPORTS"], f"{case}{name}")


def leave(name, text=""):
    """The file is there when all of it is there."""
    path = path_of(name)
    path.with_name(f".{path.name}").write_text(text)
    path.with_name(f".{path.name}").rename(path)


def leave_memory():
    """The names of MPICH's files in /dev/shm. If the job does not come to MPI_Finalize, the test removes them."""
    files = set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text()))
    if files:
        leave(f"memory of {os.getpid()}", "\n".join(files))


def report(rank, since, error):
    leave(rank, f"FAILED {case}rank {rank} after {time.monotonic() - since:.1f} s: {error}\n")


def wait_for(names):
    """Before an end with an error, on which mpiexec ends the others."""
    until = time.monotonic() + 30
    while time.monotonic() < until and not all(path_of(name).exists() for name in names):
        time.sleep(0.05)

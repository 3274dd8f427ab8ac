"""What the workers of all jobs share: how ranks meet, what they learn, and the files that they leave for others.

What a process prints at its end may get lost: mpiexec ends all with the first that ends with an error.
"""

import contextlib
import gc
import os
import re
import sys
import time
import unittest
from pathlib import Path

import gluon_syncbn
from gluon_syncbn.training.replicas import Replicas
from gluon_syncbn.training.session import session

kv = None  # of the scenario that is under way
raises = unittest.TestCase().assertRaisesRegex  # pytest takes half a second to import


def path_of(name):
    return Path(os.environ["MPI_WORKER_REPORTS"], str(name))


def leave(name, text=""):
    """The file is there when all of it is there."""
    path = path_of(name)
    path.with_name(f".{path.name}").write_text(text)
    path.with_name(f".{path.name}").rename(path)


def wait_for(names):
    """Before an end with an error, on which mpiexec ends the others."""
    until = time.monotonic() + 30
    while time.monotonic() < until and not all(path_of(name).exists() for name in names):
        time.sleep(0.05)


def meet():
    """All ranks take a store that no failure has reached: the ``kv`` of all modules that had the one before."""
    global kv
    before = kv
    gluon_syncbn.reset()  # tells the others, as the end of a process does
    session.stores.clear()
    gluon_syncbn.configure(kvstore=None, timeout=300, seed=0, nonfinite="propagate")
    session.chosen = False  # as where a script has chosen nothing
    gc.collect()
    for replicas in Replicas.placed():  # of the scenarios before, which a rank may have alone
        replicas.order = 0
    kv = gluon_syncbn.kvstore("mpi")
    for module in list(sys.modules.values()):
        if before is not None and getattr(module, "__dict__", {}).get("kv") is before:
            module.kv = kv
    # MPICH's files. The test removes them if the job does not come to MPI_Finalize.
    files = set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text()))
    leave(f".memory of {os.getpid()}", "\n".join(files))
    return kv


@contextlib.contextmanager
def learns(text, kind=gluon_syncbn.StepError):
    """This rank learns of the end of the job, soon, by such an error in which this is found."""
    since = time.monotonic()
    with raises(kind, text):
        yield
    assert time.monotonic() - since < 30


def main(scenarios):
    """Runs those that the command line names, ``ONE+ANOTHER``, each with a store of its own."""
    for scenario in sys.argv[1].split("+"):
        print(f"BEGINS {kv.rank} {scenario}", flush=True)
        scenarios[scenario]()
        meet()
    print(f"OK {kv.rank}", flush=True)

"""Introduces the processes of ``mpiexec`` to the native core, which carries everything over MPI itself (mpi4py)."""

from __future__ import annotations

import math
import threading
import time

import mxnet as mx

from .. import _native
from ..system.distribution import WHERE, command
from ..system.logs import errors_reported, log
from .base import leave

_POLL = 0.01  # seconds between two looks at the other ranks
_GRACE = 10.0  # seconds that a rank stays after a failure, until the others have come to their end
_QUIET = 10.0  # seconds after which it says what it waits for


class Job:
    """The processes that ``mpiexec`` has started together, with a copy of ``MPI.COMM_WORLD``.

    Every process has to create one. Under ``mpiexec``, a process that ends after a failure ends the others too.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(f"kvstore 'mpi' needs mpi4py ({error}): {command('mpi')}{WHERE}") from None
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise mx.MXNetError(
                "kvstore 'mpi' calls MPI from several threads, but this job has it without MPI_THREAD_MULTIPLE. Leave "
                "mpi4py.rc.thread_level as it is, or take an MPI that is built with threads."
            )
        if threading.current_thread() is threading.main_thread() and not MPI.Is_thread_main():
            raise mx.MXNetError(
                "kvstore 'mpi' needs MPI until the end, but another thread has initialised it and may end it before, "
                "as Horovod's does: create the store before hvd.init()"
            )
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self._comm, request = MPI.COMM_WORLD.Idup()
        deadline = time.monotonic() + _native.timeout_of()
        while not request.Test():
            if time.monotonic() > deadline:
                raise mx.MXNetError("kvstore 'mpi': not every process has created one. Create it in all, at the start.")
            time.sleep(1e-4)
        functions = (
            *("MPI_Isend", "MPI_Improbe", "MPI_Imrecv", "MPI_Get_count", "MPI_Test"),
            *("MPI_Iallreduce", "MPI_Comm_idup"),
        )
        handles = map(MPI._handleof, (MPI.FLOAT, MPI.DOUBLE, MPI.SUM, self._comm))
        constants = int(MPI.IN_PLACE), MPI.ANY_SOURCE, MPI.ANY_TAG
        #: The members of `Mpi` in csrc/exchange/mpi.h.
        self.mpi = [*_native.addresses(MPI.__file__, functions), *constants, *handles]

    def close(self, handle: int) -> None:
        """Waits until all ranks have come to their end, as MPI_Finalize does. Some may run much longer. After a failure
        they have `_GRACE` seconds: mpiexec ends all with the first that leaves, also a handler that saves its work.
        """
        here, quiet, until = self._comm.Ibarrier(), time.monotonic() + _QUIET, math.inf
        while True:
            have_come, now = here.Test(), time.monotonic()
            fates = [_native.fate_of(handle, rank) for rank in range(self.size)]
            failed = [rank for rank, fate in enumerate(fates) if fate not in ("", "has ended")] if self.size > 1 else []
            if failed and until == math.inf:
                until = now + _GRACE
                first = f"rank {failed[0]} of {self.size} {fates[failed[0]]}"
                self._say(f"ends, and its job with it when all have, or in {_GRACE:.0f} s: {first}")
            if (have_come and all(fates)) or now > until:
                break
            if now > quiet and not failed:
                quiet = math.inf
                missing = ", ".join(str(rank) for rank, fate in enumerate(fates) if not fate)
                self._say(f"has come to its end, and waits for that of rank {missing}, as MPI_Finalize does")
            time.sleep(_POLL)
        if failed:
            # MPI_Finalize waits for processes that may be stuck or gone, and a job may hang where a rank leaves while
            # another one is in there. MPI_Abort runs destructors in MXNet that end in a signal. If all ranks leave
            # without either, mpiexec returns 1.
            leave()
        _native.processes_closed(handle)

    def _say(self, text: str) -> None:
        with errors_reported(text):
            log.warning("rank %d of %d %s", self.rank, self.size, text)

"""Ranks in one process, for tests: a job of threads, over an MPI of its own."""

from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p

import libraries
from places import SUPPORT

from gluon_syncbn import _native
from gluon_syncbn.exchange.store import ProcessStore

_library = libraries.build("threads_mpi", [SUPPORT / "threads_mpi.cc"], ["-O1", "-fvisibility=hidden"])
_library.threads_mpi_job.restype, _library.threads_mpi_job.argtypes = c_void_p, [c_size_t]
_library.threads_mpi_of.argtypes = [c_void_p, c_size_t, c_void_p]
_library.threads_mpi_fail.argtypes = [c_void_p, c_size_t, c_char_p, c_int]


class ThreadTransport:
    def __init__(self, job, rank, size):
        self.rank, self.size = rank, size
        words = (c_int64 * 64)()
        self.mpi = words[: _library.threads_mpi_of(job, rank, words)]

    def close(self, handle):
        pass


class Job:
    """``stores`` has that of each rank."""

    def __init__(self, size):
        self._job = _library.threads_mpi_job(size)
        self.stores = [ProcessStore("threads", ThreadTransport(self._job, rank, size)) for rank in range(size)]

    def fail(self, rank, function, status):
        """From now on, a function of MPI's returns this status to a rank."""
        _library.threads_mpi_fail(self._job, rank, function.encode(), status)

    def end(self):
        for store in self.stores:
            _native.processes_ended(store.handle)


def everywhere(stores, work):
    """``work(store)`` in a thread for the store of each rank; what it returns or raises, in their order."""
    with ThreadPoolExecutor(len(stores)) as pool:
        jobs = [pool.submit(work, store) for store in stores]
        return [job.exception() or job.result() for job in jobs]

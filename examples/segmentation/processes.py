"""The processes of a job: the rank of this process, and collective calls.

    mpiexec -n 4 python train.py --kvstore mpi ...

All processes make the same calls of this module in the same order. A single process makes the same calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib

import numpy as np
from errors import ElsewhereError, UserError

# For each KVStore that spans processes: its launcher, and the environment variables that hold the number of processes.
LAUNCHERS = {"mpi": ("mpiexec", ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))}
STORES = tuple(LAUNCHERS)


def check_launch(args) -> None:
    """Raise a UserError if a launcher has started several processes, but --kvstore does not connect them."""
    for store, (launcher, names) in LAUNCHERS.items():
        count = max(int(os.environ.get(name) or 1) for name in names)
        if count > 1 and args.kvstore != store:
            given = f"--kvstore {args.kvstore}" if args.kvstore else "--kvstore is missing"
            raise UserError(f"{given}: {launcher} has started {count} processes; expected --kvstore {store}")


def place(args) -> tuple:
    """Return the rank and the number of the job's processes on this machine. The function does not import MXNet."""
    return _place_in_mpi() if getattr(args, "kvstore", None) == "mpi" else (0, 1)


@functools.lru_cache(maxsize=None)  # all processes have to make this call equally often
def _place_in_mpi() -> tuple:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI
        raise UserError(f"--kvstore mpi: {error}; pip install mpi4py mpich") from None
    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    return here.rank, here.size


class Processes:
    """The processes of a job, connected by the KVStore that adds their gradients. Without a KVStore: one process.

    Process 0 writes the files and the messages.
    """

    def __init__(self, kvstore=None):
        self.kvstore = kvstore
        self.rank = kvstore.rank if kvstore else 0
        self.size = kvstore.num_workers if kvstore else 1

    def sum(self, values) -> np.ndarray:
        """The sum of numbers over all processes, in double precision, with the same bits in all of them."""
        import mxnet as mx

        values = np.asarray(values, np.float64)
        if self.size == 1:
            return values
        array = mx.nd.array(values.ravel(), dtype="float64")
        self.kvstore.pushpull("numbers", array)
        return array.asnumpy().reshape(values.shape)

    def gather(self, values) -> np.ndarray:
        """The numbers of all processes, one row for each, in the order of the ranks."""
        values = np.asarray(values, np.float64)
        rows = np.zeros((self.size, *values.shape))
        rows[self.rank] = values
        return self.sum(rows)

    @contextlib.contextmanager
    def together(self):
        """End the block in all processes if one raises a UserError. The first failed process raises its own error."""
        error = None
        try:
            yield
        except UserError as found:
            error = found
        codes = self.gather(error.exit_code if error else 0)
        if codes.any():
            first = int(np.flatnonzero(codes)[0])
            raise error if error and first == self.rank else ElsewhereError(int(codes[first]))

    def each(self, items):
        """Iterate over the items. Every process has the same number. An error in reading an item ends all processes."""
        items = iter(items)
        while True:
            with self.together():
                item = next(items, None)
            if item is None:
                return
            yield item

    def check_same(self, what: str, value) -> None:
        """Raise a UserError unless the value is the same in all processes. The comparison uses its repr."""
        digests = self.gather(zlib.crc32(repr(value).encode()))
        others = np.flatnonzero(digests != digests[0])
        with self.together():
            if self.rank == 0 and others.size:
                raise UserError(f"{what}: not the same in processes 0 and {others[0]}")

    def broadcast(self, net) -> None:
        """Send process 0's values of a network to all devices of all processes.

        gluon.Trainer does the same, but only in its first step, after the first forward.
        """
        if self.kvstore:
            from model import package

            package().broadcast_parameters(net, self.kvstore)

    @contextlib.contextmanager
    def one_on_each_machine_first(self, args):
        """Let one process of each machine run the block first. The others then find a file that the block downloads."""
        if place(args)[0]:
            self.sum(0)
        yield
        if not place(args)[0]:
            self.sum(0)


ALONE = Processes()


def processes(args) -> Processes:
    """The processes that the options name. From now on, SyncBatchNorm synchronises over these processes."""
    if args.kvstore not in STORES:
        return ALONE
    from model import package

    try:
        kvstore = package().kvstore(args.kvstore)
    except ImportError as error:
        raise UserError(f"--kvstore {args.kvstore}: {error}") from None
    package().configure(kvstore=kvstore)
    return Processes(kvstore)

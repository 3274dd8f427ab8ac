"""Provides a KVStore that spans processes: one object for gradients and statistics.

The native core exchanges (csrc/exchange/processes.h). The store introduces the processes to each other.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import operator
import os
import socket
from typing import Any, Dict, Iterator, List, NoReturn, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments, kinds
from ..system.identity import OfEach
from .agreement import ProcessExchange


def _in_place(values: Sequence[mx.nd.NDArray]) -> bool:
    """Whether the core adds these arrays where they are."""
    plain = not _native.WHY_CUSTOM["cpu"] and all(value.ctx.device_type != "gpu" for value in values)
    return plain and kinds.is_float(values[0])


def _classic(value: mx.nd.NDArray) -> mx.nd.NDArray:
    if value.stype != "default":
        arguments.refuse("value", value, "dense arrays")
    return kinds.classic(value)


def _copied(value: mx.nd.NDArray) -> mx.nd.NDArray:
    """Returns a copy on a CPU in the order of the dimensions, in a type that the core adds."""
    value = _classic(value)
    value = value if kinds.is_float(value) else value.astype("float64")
    # Where the core does not know oneDNN's layouts: see mxnet_side/op.py.
    return mx.nd.SwapAxis(value.as_in_context(mx.cpu()), dim1=0, dim2=0)


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _given(name: str, value: Any) -> List[mx.nd.NDArray]:
    """Returns an argument that is an array or a list of arrays, one for each device."""
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    if not arrays or not all(isinstance(array, mx.nd.NDArray) for array in arrays):
        arguments.refuse(name, value, "an array of MXNet's, or a list of one for each device")
    return arrays


class _TrainerState:
    """What a store knows of a Trainer."""

    def __init__(self, number: int) -> None:
        self.number = number
        # Its gradients, as the core takes them, until other arrays take their place.
        self.given: List[mx.nd.NDArray] = []
        self.summands: Tuple[Any, ...] = ()


class ProcessStore(mx.kvstore.KVStoreBase, ProcessExchange):
    """Adds over the devices of all processes, for ``gluon.Trainer(kvstore=...)`` and ``SyncBatchNorm(kvstore=...)``.

    The Trainer's ``step(batch_size)`` takes the number of samples of all processes.
    """

    def __init__(self, name: str, job: Any) -> None:
        ProcessExchange.__init__(self, _native.processes(job.mpi, job.rank, job.size), name)
        self.of_trainer = {"kvstore": self}
        self._job = job
        self.joins = 0  # blocks of `join` that the program is in
        self._rounds: Dict[str, Iterator[int]] = {}  # of exchanges, by their names
        self._trainers = OfEach(lambda: _TrainerState(_native.add_trainer(self.handle)))
        #: This process's place among those of its machine, and their number: which GPU is its own.
        self.local_rank, self.local_size = 0, 1

    # ---- KVStoreBase ---------------------------------------------------------------------------------------

    type = property(lambda self: f"gluon_syncbn_{self.name}")
    rank = property(lambda self: self._job.rank)
    num_workers = property(lambda self: self._job.size)

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # the optimizer runs in the Trainer, where every process has the same gradients

    def init(self, *_: Any) -> NoReturn:
        """For a ``Module``, which would have the store run its optimizer, or a script that goes on to ``push``."""
        arguments.refuse("kvstore", self, "another store for a Module and for push: this one has pushpull")

    def __repr__(self) -> str:
        return f"<kvstore {self.name!r}: rank {self.rank} of {self.num_workers}>"

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copies rank 0's ``value`` into ``out``, in every process."""
        like, targets = _given("value", value)[0].asnumpy(), _given("out", out)
        what = self.next_round(f"broadcast {key!r}")
        array = self.exchange(what, [like if self.rank == 0 else np.empty(0)], equal=False)[0]
        self._check_alike(what, 0, array, like)
        for target in targets:
            mx.nd.array(array, dtype=array.dtype).copyto(kinds.classic(target))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Adds ``value`` over the devices of all processes into ``out``, or into ``value`` itself."""
        values = _given("value", value)
        kind = np.dtype(values[0].dtype)
        wide = "int64" if kind.kind in "iu" else "float64" if kind == np.float64 else "float32"
        own = sum(_classic(array).astype(wide).asnumpy() for array in values)
        total = functools.reduce(np.add, self.allgather(f"the sum of {key!r}", own))
        for target in values if out is None else _given("out", out):
            mx.nd.array(total, dtype=wide).astype(target.dtype).copyto(kinds.classic(target))

    def add_gradients(self, trainer: Any, gradients: Dict[str, List[mx.nd.NDArray]], update: str = "") -> None:
        """Adds the gradients of a Trainer over the devices of all processes, in place, as one round.

        Does not wait. All of them become sums, or all raise the failure, so that a failed step changes no parameter.
        Trainers of several threads may come in any order. The store numbers them as `expect` got them. ``gradients``
        has, by the name of the parameter and in the same order in all processes, one for each context. ``update`` tells
        in lines what is done with the sums, and has to be the same in all processes.
        """
        known, given = self.expect(trainer), [array for arrays in gradients.values() for array in arrays]
        copies = {}
        if len(known.given) != len(given) or any(map(operator.is_not, known.given, given)):
            arrays = list(gradients.values())
            copies = {i: list(map(_copied, of_one)) for i, of_one in enumerate(arrays) if not _in_place(of_one)}
            names = [f"the gradient of '{name}'" for name in gradients]
            known.summands = _native.summands(names, [copies.get(i, of_one) for i, of_one in enumerate(arrays)])
            known.given = [] if copies else given
        _native.sum(self.handle, known.number, update, *known.summands)
        for i, (total, *_) in copies.items():
            for target in arrays[i]:
                kinds.classic(total.astype(target.dtype)).copyto(kinds.classic(target))

    def expect(self, trainer: Any) -> _TrainerState:
        """Gives a Trainer the next number, unless it has one. All processes make theirs in the same order."""
        with self._lock:
            return self._trainers(trainer)

    # ---- arrays of all processes -----------------------------------------------------------------------------

    def allgather(self, key: str, array: np.ndarray, *, equal: bool = True) -> List[np.ndarray]:
        """Returns the arrays of all processes, in the order of the ranks. All make the same calls with the same key.

        ``equal``: an array of another shape or type than ours is an error. ValueError: ``array`` is of another kind.
        """
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            arguments.refuse("array", array, "a NumPy array of numbers (an NDArray has asnumpy())")
        return self.exchange(self.next_round(f"exchange {key!r}"), [array], equal)

    def exchange(self, what: str, parts: Sequence[np.ndarray], equal: bool) -> List[np.ndarray]:
        """Returns the arrays of all processes under a name that all use once, in the order of the ranks.

        ``parts`` has one for each rank, or one for all. `StepError`: a process is late, has failed, or has an array of
        another shape or type where it has to be ``equal``. After that, nothing is exchanged any more.
        """
        messages = list(map(_saved, parts))
        key = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=7).digest(), "little")
        try:
            found = _native.bytes_of(self.handle, self.num_workers, key, what, messages)
        except _native.StepError as error:
            self.fail(str(error))
            raise
        arrays = [np.load(io.BytesIO(part.tobytes())) for part in found]
        for rank, array in enumerate(arrays if equal else []):
            self._check_alike(what, rank, array, parts[self.rank % len(parts)])
        return arrays

    def _check_alike(self, what: str, rank: int, theirs: np.ndarray, ours: np.ndarray) -> None:
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            self.give_up(
                f"in {what}, rank {rank} sent values of {theirs.dtype} in shape {theirs.shape} where rank {self.rank} "
                f"has {ours.dtype} in {ours.shape}. All processes must build the same net and cast it alike."
            )

    def tell_all(self, what: str, ours: Any) -> List[Any]:
        """Returns what each process tells, in the order of the ranks: all that JSON takes."""
        everyone = self.exchange(self.next_round(what), [np.array(json.dumps(ours))], equal=False)
        return [json.loads(str(theirs)) for theirs in everyone]

    def next_round(self, what: str) -> str:
        """Returns a name for the next exchange of its kind, another one for each of several threads."""
        return f"{what}, round {next(self._rounds.setdefault(what, itertools.count(1)))}"

    def meet(self) -> None:
        """Finds the processes of this machine, by its name. Every process calls this before the first step."""
        mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
        everyone = self.tell_all("the machines of the processes", mine)
        here = [rank for rank, (machine, _) in enumerate(everyone) if machine == mine[0]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        cores = {core for rank in here for core in everyone[rank][1]}
        _native.crowded(self.handle, len(cores) < len(here))

    # ---- Exchange ------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        _native.processes_failed(self.handle, reason)

    def close(self) -> None:
        _native.processes_ended(self.handle)
        self._job.close(self.handle)

"""Provides a KVStore that spans processes: one object for gradients and statistics.

The native core exchanges (csrc/exchange/processes.h). The store introduces the processes to each other. It compares
their nets, and numbers the layers alike.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import io
import itertools
import json
import operator
import os
import re
import socket
import threading
from typing import Any, Dict, Iterator, List, Mapping, NoReturn, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments, kinds, locks
from ..system.identity import OfEach
from ..system.logs import log
from .base import Exchange


def _machine() -> str:
    """Returns an id that is equal in all processes of one kernel and PID namespace: those of a container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _in_place(values: Sequence[mx.nd.NDArray]) -> bool:
    """Whether the core adds these arrays where they are."""
    plain = not _native.why_custom() and all(value.ctx.device_type != "gpu" for value in values)
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


@functools.lru_cache(maxsize=10000)
def numbered(name: str) -> List[str]:
    """Returns what to sort names by, so that numbers count as numbers."""
    return [text.zfill(9) for text in re.split(r"(\d+)", name)]


def kind_of(name: str) -> str:
    """Returns a name without its numbers, which may differ between processes."""
    return re.sub(r"\d+", "", name)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


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


class ProcessStore(mx.kvstore.KVStoreBase, Exchange):
    """Adds over the devices of all processes, for ``gluon.Trainer(kvstore=...)`` and ``SyncBatchNorm(kvstore=...)``.

    The Trainer's ``step(batch_size)`` takes the number of samples of all processes.
    """

    spans_processes = True

    def __init__(self, name: str, job: Any) -> None:
        self.name = name
        self.of_trainer = {"kvstore": self}
        self._job = job
        self.layers = 0  # on which the processes have agreed
        self.replicas = 0  # of such a layer, in all processes
        self.joins = 0  # blocks of `join` that the program is in
        self._collected = self._warned = False  # of layers that some processes do not have
        self._rounds: Dict[str, Iterator[int]] = {}  # of exchanges, by their names
        self._trainers = OfEach(lambda: _TrainerState(_native.add_trainer(self.handle)))
        self._lock: Any
        locks.give(self, _lock=threading.Lock)
        self.handle = _native.processes(job.mpi, job.rank, job.size)
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
        """For a ``Module``, which would have the store run its optimizer."""
        arguments.refuse("kvstore", self, "a store of one process for a Module: gluon.Trainer takes this one")

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

    def compare(self, everyone: List[List[Any]], what: str, advice: str = "") -> None:
        """Compares what the processes have built. MXNetError, in all of them: the first difference.

        ``everyone`` has a list of each rank. An entry begins with a name, whose digits may differ, as Gluon's counters
        do, and what has to be equal. ``what`` is compared, and the word before an entry's number: "the net: layer".
        """
        difference = self._difference(everyone)
        if difference:
            self._give_up(
                f"the processes disagree about {what} {difference}. Build and initialise the same net in every "
                f"process{advice}."
            )

    def _difference(self, everyone: List[List[Any]]) -> str:
        """Returns the first difference to what this process has; empty if there is none."""
        for rank, theirs in enumerate(everyone):
            for number, entries in enumerate(itertools.zip_longest(everyone[self.rank], theirs), 1):
                one, another = (entry and (kind_of(entry[0]), *entry[1:2]) for entry in entries)
                if one != another:
                    here, there = (f"{entry[0]} {entry[1]}" if entry else "none" for entry in entries)
                    return f"{number} is {here} on rank {self.rank} and {there} on rank {rank}"
        return ""

    def compare_divisor(self, trainer: Any, samples: float) -> None:
        """Compares what the sums of a Trainer are divided by, where its update does not follow them at once."""
        everyone = self.tell_all(f"the samples of an update of trainer {self.expect(trainer).number}", samples)
        if any(theirs != samples for theirs in everyone):
            self._give_up(
                f"the processes disagree about trainer.update: the ranks from 0 on say {everyone} samples. It takes "
                "the samples of all processes."
            )

    def compare_weights(
        self, trainer: Any, parameters: Dict[str, Tuple[List[mx.nd.NDArray], bool]], states: Mapping[str, bytes]
    ) -> None:
        """Compares the parameters of a Trainer with those of the other processes, before its first update.

        ``parameters`` has, by name and in the same order in all processes, the array of each context, and whether it
        is trained, or could be. One that could not, such as the running statistics of plain BatchNorm, becomes that of
        rank 0. ``states`` has what the optimizer keeps of each. MXNetError: the first other one that differs.
        """
        number = self.expect(trainer).number
        digests = [(_hash(arrays[0].asnumpy().tobytes()), _hash(states[p])) for p, (arrays, _) in parameters.items()]
        everyone = self.allgather(f"the comparison of the weights of trainer {number}", np.array(digests, np.int64))
        for i, (name, (arrays, trained)) in enumerate(parameters.items()):
            differing, in_states = (
                [rank for rank, theirs in enumerate(everyone) if theirs[i, of] != everyone[0][i, of]] for of in (0, 1)
            )
            if differing and trained:
                self._give_up(
                    f"the processes begin with different weights: '{name}' of rank {differing[0]} is not that of rank "
                    "0. Call gluon_syncbn.broadcast_parameters(net) in every process, before the first step."
                )
            if in_states:
                self._give_up(
                    f"the processes begin with different states of the optimizer: that of '{name}' on rank "
                    f"{in_states[0]} is not that on rank 0. trainer.load_states goes by the places of the parameters "
                    "among their sorted names: load one file, into a net whose names sort as those of the saved one."
                )
            if differing:
                self.broadcast(f"parameter {i} of trainer {number}", arrays[0], arrays)
            for array in arrays[1:]:
                kinds.classic(arrays[0]).copyto(kinds.classic(array))

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
        try:
            found = _native.bytes_of(self.handle, self.num_workers, _hash(what.encode()), what, messages)
        except _native.StepError as error:
            self.fail(str(error))
            raise
        arrays = [np.load(io.BytesIO(part.tobytes())) for part in found]
        for rank, array in enumerate(arrays if equal else []):
            self._check_alike(what, rank, array, parts[self.rank % len(parts)])
        return arrays

    def _check_alike(self, what: str, rank: int, theirs: np.ndarray, ours: np.ndarray) -> None:
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            self._give_up(
                f"in {what}, rank {rank} sent values of {theirs.dtype} in shape {theirs.shape} where rank {self.rank} "
                f"has {ours.dtype} in {ours.shape}. All processes must build the same net and cast it alike."
            )

    def _give_up(self, reason: str) -> NoReturn:
        self.fail(reason)
        raise _native.StepError(reason)

    def tell_all(self, what: str, ours: Any) -> List[Any]:
        """Returns what each process tells, in the order of the ranks: all that JSON takes."""
        everyone = self.exchange(self.next_round(what), [np.array(json.dumps(ours))], equal=False)
        return [json.loads(str(theirs)) for theirs in everyone]

    def next_round(self, what: str) -> str:
        """Returns a name for the next exchange of its kind."""
        return f"{what}, round {self._count(what)}"

    def _count(self, what: str) -> int:
        return next(self._rounds.setdefault(what, itertools.count(1)))  # one number for each of several threads

    def meet(self) -> None:
        """Finds the processes of this machine. Every process calls this before the first step."""
        mine = _machine(), sorted(os.sched_getaffinity(0))
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

    def agree(self, layer: Any, layers: Sequence[Any], more: bool) -> None:
        """Numbers a layer that is about to train, and others without a number, after a comparison with the other
        processes. It may take more than one such exchange until this layer has a number.

        ``layers`` has those of this store that have parameters, this one included, in the order of their
        initialisation. Where ``more`` are to come, the processes agree on the first ones, as many as all have: the
        first forward of an eager net initialises layers while another process has all. Otherwise they agree on all,
        sorted by name. Some processes may have layers that never train, such as those of an average of the net. Then
        they agree on the layer that each of them is about to call, by its place among the names of its kind: a copy has
        the name of its original.
        """
        with self._lock:
            if layer.store is self:  # another thread has been faster
                return
            new = [one for one in layers if one.store is not self]
            names = sorted({one.name for one in layers if kind_of(one.name) == kind_of(layer.name)}, key=numbered)
            name, text, count = described(layer)
            called = name, f"{text}, number {1 + names.index(layer.name)} of its kind", count
            answers = self.tell_all("the agreement on the layers of the net", [list(map(described, new)), more, called])
            everyone = [theirs for theirs, _, _ in answers]
            several = [len(theirs) for theirs, to_come, _ in answers if to_come]
            if several:
                everyone = [theirs[: min(several)] for theirs in everyone]
            else:  # a file and a forward may initialise branches of a net in different orders
                everyone = [sorted(theirs, key=lambda one: numbered(one[0])) for theirs in everyone]
                new.sort(key=lambda one: numbered(described(one)[0]))
            difference = self._difference(everyone)
            if difference and not self._collected:  # layers without a user may be left, and not in all processes
                self._collected = True
                gc.collect()
                return
            if difference:
                new, everyone = [layer], [[called] for _, _, called in answers]
                if not (self._warned or self._difference(everyone)):
                    log.warning(
                        "the processes have different layers: layer %s. Those meet that are called in training, in the "
                        "order of their calls; layers that train in one process alone need a KVStore of their own",
                        difference,
                    )
                self._warned = True
            advice = "; layers that train in one process only need a KVStore of their own"
            self.compare(everyone, "the net: layer", advice)
            self.replicas = sum(one[0][2] for one in everyone)
            log.info("the statistics of %d layers meet over %r: %d replicas", len(everyone[0]), self, self.replicas)
            for one, *of_ranks in zip(new, *everyone):
                replicas = [count for _, _, count in of_ranks]
                problem = one.settings.problem(sum(replicas))
                if problem:
                    raise ValueError(problem)
                one.agrees(self, self.layers, replicas)
                self.layers += 1


def described(layer: Any) -> Tuple[str, str, int]:
    """Returns the name of a layer, what has to be equal in all processes, and the number of replicas in this one."""
    text = "".join(f", {name} {value!r}" for name, value in layer.settings.compared().items())
    return f"SyncBatchNorm '{layer.name}'", f"({layer.channels} channels{text})", len(layer.contexts)

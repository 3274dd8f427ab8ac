"""Provides a KVStore that spans processes: one object for gradients and statistics.

The native core exchanges (csrc/exchange/processes.h). The store introduces the processes to each other. It compares
their nets, numbers the layers alike, and finds the members of groups.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import socket
import threading
import weakref
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from .._native import Agreed
from ..system import arguments, environment, kinds
from ..system.logs import log
from .base import Exchange, LayerInfo
from .groups import group_of_each, problem, shared
from .transport import Label, Transport

#: Bytes of gradients that NCCL adds at once. Not measured: NCCL is said to need some MB for its full rate.
_BUCKET = 8 << 20
_ON_GPUS = {"float16", "float32", "float64"}


def _machine() -> str:
    """Returns an id that is equal in all processes of one kernel and PID namespace: they share files in /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # without the file, opening others fails too, and the first to try reports it
        return socket.gethostname()


def _in_place(values: Sequence[mx.nd.NDArray]) -> bool:
    """Whether the core adds these arrays where they are."""
    plain = not _native.why_custom() and all(value.ctx.device_type != "gpu" for value in values)
    return plain and kinds.is_float(values[0])


def _copied(value: mx.nd.NDArray) -> mx.nd.NDArray:
    """Returns a copy on a CPU in the order of the dimensions, in a type that the core adds."""
    if value.stype != "default":
        arguments.refuse("value", value, "dense arrays")
    value = kinds.classic(value)
    value = value if kinds.is_float(value) else value.astype("float64")
    # Where the core does not know oneDNN's layouts: see mxnet_side/op.py.
    return mx.nd.SwapAxis(value.as_in_context(mx.cpu()), dim1=0, dim2=0)


def _in_order(parameters: Dict[str, Any]) -> List[Tuple[str, Any]]:
    """Sorts by name with numbers as numbers. Gluon's counters may begin elsewhere in another process, where the Trainer
    puts ``dense10_weight`` before ``dense9_weight``.
    """
    return sorted(parameters.items(), key=lambda one: [t.zfill(9) for t in re.split(r"(\d+)", one[0])])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class ProcessStore(mx.kvstore.KVStoreBase, Exchange):
    """Adds over the devices of all processes, for ``gluon.Trainer(kvstore=...)`` and ``SyncBatchNorm(kvstore=...)``.

    The Trainer's ``step(batch_size)`` takes the number of samples of all processes.

    Parameters
    ----------
    name : str
        Name of the transport.
    transport : Transport
        Carries what the processes tell each other.
    """

    spans_processes = True

    def __init__(self, name: str, transport: Transport) -> None:
        self._name = name
        self._transport = transport
        self._agreed: Dict[int, Agreed] = {}  # by layer
        self._rounds: Counter = Counter()  # of gradients
        self._trainers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()  # of trainers; one that is gone keeps its own
        #: Whether gradients of GPUs may go over NCCL.
        self.nccl = True
        # The contexts of a Trainer's gradients, and their way over NCCL, if they have one.
        self._ways: weakref.WeakKeyDictionary[Any, Tuple[List[mx.Context], Optional[_native.Handle]]]
        self._ways = weakref.WeakKeyDictionary()
        # Their gradients, as the core takes them, until other arrays take their place.
        self._prepared: weakref.WeakKeyDictionary[Any, Tuple[List[Any], _native.Summands]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._agreements = 0
        #: Why statistics go by the transport alone; None where processes meet in memory.
        self.why_not_in_memory: Optional[str] = "not every process was asked"
        #: The ranks of each machine that meet in memory; the first of each speaks for its machine.
        self.machines: List[List[int]] = []
        number = _native.python_exchange(self)
        self.handle = _native.processes(number, self.rank, self.num_workers, transport.mpi)
        transport.open(self.handle)
        self._sums: Optional[_native.Handle] = None  # the same, with memory of this machine or of this process alone

    # ---- KVStoreBase ---------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        return f"gluon_syncbn_{self._name}"

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def num_workers(self) -> int:
        return self._transport.size

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # the optimizer runs in the Trainer, where every process has the same gradients

    def __repr__(self) -> str:
        machines = f"on {len(self.machines)} machines" if len(self.machines) > 1 else "on one machine"
        if self.why_not_in_memory is not None:
            statistics = f"{self._name}, because {self.why_not_in_memory}"
            machines = "each by itself"
        else:
            statistics = "shared memory" + (f", and {self._name} between machines" if len(self.machines) > 1 else "")
        gradients = statistics if self.why_not_in_memory is None else self._name
        if any(way is not None for _, way in self._ways.values()):
            gradients = "NCCL"
        return (
            f"<kvstore {self._name!r}: rank {self.rank} of {self.num_workers}, {machines}; statistics: {statistics}; "
            f"gradients: {gradients}>"
        )

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copies rank 0's ``value`` into ``out``, in every process."""
        value = value[0] if isinstance(value, (list, tuple)) else value
        label = self._label("broadcast", key)
        like = value.asnumpy()
        array = self._transport.allgather(label, like.ravel()[: None if self.rank == 0 else 0], equal=False)[0]
        self._transport.check_alike(label, 0, array.size, array.dtype, like)
        array = array.reshape(like.shape)
        for target in out if isinstance(out, (list, tuple)) else [out]:
            mx.nd.array(array, dtype=array.dtype).copyto(kinds.classic(target))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Adds ``value`` over the devices of all processes into ``out``, or into ``value`` itself."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        targets = values if out is None else list(out) if isinstance(out, (list, tuple)) else [out]
        self._sum(self._label("gradient", key), {f"gradient {key!r}": (values, targets)})

    def add_gradients(self, trainer: Any, gradients: Dict[str, List[mx.nd.NDArray]]) -> None:
        """Adds the gradients of a Trainer over the devices of all processes, in place, as one round.

        Does not wait. All of them become sums, or all raise the failure, so that a failed step changes no parameter.
        Trainers of several threads may come in any order. The store numbers them as `expect` got them.

        Parameters
        ----------
        trainer : gluon.Trainer
            The Trainer.
        gradients : dict
            By the name of the parameter, one for each context.
        """
        label = self._label("gradient", f"of trainer {self._number(trainer)}")
        given = [array for arrays in gradients.values() for array in arrays]
        before = self._prepared.get(trainer)
        if before is not None and len(before[0]) == len(given) and all(a is b for a, b in zip(before[0], given)):
            self._begin_sum(label, before[1])
            return
        sums = {f"the gradient of '{name}'": (arrays, arrays) for name, arrays in _in_order(gradients)}
        gpus = self._way_of(trainer, list(gradients.values()))
        if gpus is None and not all(_in_place(arrays) for arrays in gradients.values()):
            self._sum(label, sums)
            return
        summands = _native.Summands(list(sums), [arrays for arrays, _ in sums.values()], gpus)
        self._prepared[trainer] = given, summands
        self._begin_sum(label, summands)

    def _way_of(self, trainer: Any, gradients: List[List[mx.nd.NDArray]]) -> Optional[_native.Handle]:
        """Returns the way of gradients between the GPUs of all processes; None if they go over the host.

        Every process calls this in its first step, and if its contexts change.
        """
        contexts = [array.context for array in gradients[0]] if gradients else []
        if trainer in self._ways and self._ways[trainer][0] == contexts:
            return self._ways[trainer][1]
        devices = [context.device_id for context in contexts if context.device_type == "gpu"]

        def find() -> Any:
            problem = self._without_nccl(contexts, gradients)
            if problem:
                raise mx.MXNetError(problem)
            return list(map(_native.gpu_identity, devices)), _native.new_id()

        label = self._label("exchange", f"the GPUs of trainer {self._number(trainer)}")
        everyone, problem = self._all_make(label, find)
        gpus = [] if problem else [gpu for theirs, _ in everyone for gpu in theirs]
        if len(set(gpus)) < len(gpus):
            problem = "several processes use the same GPU"
        way = None
        if not problem:
            first = sum(len(theirs) for theirs, _ in everyone[: self.rank])
            way = _native.gpus(devices, everyone[0][1], first, len(gpus), _BUCKET)
        elif devices and self.nccl:
            log.warning("the gradients of GPUs go through host memory: %s", problem)
        self._ways[trainer] = contexts, way
        return way

    def _without_nccl(self, contexts: List[mx.Context], gradients: List[List[mx.nd.NDArray]]) -> str:
        """Returns what keeps this process's gradients from NCCL; empty if nothing does."""
        if not self.nccl:
            return "gpus='host'"
        if not contexts or any(context.device_type != "gpu" for context in contexts):
            return "gradients on CPUs"
        if len(set(contexts)) < len(contexts) or any([a.context for a in arrays] != contexts for arrays in gradients):
            return "parameters on different GPUs, or several copies on one"
        kinds_here = {np.dtype(a.dtype).name for arrays in gradients for a in arrays if a.stype == "default"}
        if any(a.stype != "default" for arrays in gradients for a in arrays) or kinds_here - _ON_GPUS:
            return f"gradients that are sparse or of other types than {', '.join(sorted(_ON_GPUS))}"
        missing = _native.nccl_problem()
        return f"no NCCL: {missing}" if missing else ""

    def compare(self, everyone: List[List[Any]], what: str, advice: str = "") -> None:
        """Compares what the processes have built, of which each rank has a list.

        Parameters
        ----------
        everyone : list
            By rank. An entry begins with a name, whose digits may differ, as Gluon's counters do, and what has to be
            equal.
        what : str
            What is compared, and the word before the number of an entry: "the net: layer".
        advice : str, optional
            The rest of the last sentence of the error.

        Raises
        ------
        MXNetError
            If a list differs. The text names the first difference, and the other processes get it, too.
        """
        for rank, theirs in enumerate(everyone):
            for number, entries in enumerate(itertools.zip_longest(everyone[self.rank], theirs), 1):
                one, another = (entry and (re.sub(r"\d+", "", entry[0]), entry[1]) for entry in entries)
                if one != another:
                    here, there = (f"{entry[0]} {entry[1]}" if entry else "none" for entry in entries)
                    reason = (
                        f"the processes disagree about {what} {number} is {here} on rank {self.rank} and {there} on "
                        f"rank {rank}. Build and initialise the same net in every process{advice}."
                    )
                    self.fail(reason)
                    raise mx.MXNetError(reason)

    def compare_weights(self, trainer: Any, parameters: Dict[str, Tuple[List[mx.nd.NDArray], bool]]) -> None:
        """Compares the parameters of a Trainer with those of the other processes, before its first update.

        Parameters
        ----------
        trainer : gluon.Trainer
            The Trainer.
        parameters : dict
            By the name of the parameter: its array for each context, and whether it is trained. One that is not, such
            as the running statistics of plain BatchNorm, becomes that of rank 0.

        Raises
        ------
        MXNetError
            If a trained parameter differs. The text names the first one.
        """
        number, ordered = self._number(trainer), _in_order(parameters)
        digests = [hashlib.blake2b(a[0].asnumpy().tobytes(), digest_size=8).digest() for _, (a, _) in ordered]
        own = np.frombuffer(b"".join(digests), np.uint8)
        everyone = self.allgather(f"digests of the weights of trainer {number}", own)
        for i, (name, (arrays, trained)) in enumerate(ordered):
            differing = [r for r, theirs in enumerate(everyone) if (theirs != everyone[0])[8 * i : 8 * i + 8].any()]
            if differing and trained:
                reason = (
                    f"the processes begin with different weights: '{name}' of rank {differing[0]} is not that of rank "
                    "0. Call gluon_syncbn.broadcast_parameters(net) in every process, before the first step."
                )
                self.fail(reason)
                raise mx.MXNetError(reason)
            if differing:
                self.broadcast(f"parameter {i} of trainer {number}", arrays[0], arrays)
            for array in arrays[1:]:
                kinds.classic(arrays[0]).copyto(kinds.classic(array))

    def expect(self, trainer: Any) -> None:
        """Gives a Trainer the next number, unless it has one. All processes make theirs in the same order."""
        with self._lock:
            if trainer not in self._trainers:
                self._trainers[trainer] = next(self._numbers)

    def _number(self, trainer: Any) -> int:
        self.expect(trainer)
        return self._trainers[trainer]

    def _sum(self, label: Label, sums: Dict[str, Tuple[List[mx.nd.NDArray], List[mx.nd.NDArray]]]) -> None:
        """Adds values over the devices of all processes into targets; does not wait."""
        arrays, copies = [], []
        for values, targets in sums.values():
            arrays.append(values if values is targets and _in_place(values) else list(map(_copied, values)))
            if arrays[-1] is not values:
                copies.append((arrays[-1][0], targets))
        self._begin_sum(label, _native.Summands(list(sums), arrays))
        for total, targets in copies:
            for target in targets:
                kinds.classic(total.astype(target.dtype)).copyto(kinds.classic(target))

    def _begin_sum(self, label: Label, summands: _native.Summands) -> None:
        if self._sums is None:
            self._begin_sums()
        assert self._sums is not None
        _native.sum_arrays(self._sums, _hash(f"{label.kind} {label.key}"), label.call, summands)

    def allgather(self, key: str, array: np.ndarray, *, equal: bool = True) -> List[np.ndarray]:
        """Returns the arrays of all processes, in the order of the ranks. All make the same calls with the same key.

        ``equal``: an array of another size or type than ours is an error.
        """
        return self._transport.allgather(self._label("exchange", key), array, equal=equal)

    def gather_rows(self, name: str, rows: np.ndarray) -> Tuple[Label, List[np.ndarray]]:
        """Returns the arrays of all processes for a `gather`, and the label with which `add_rows` adds gradients."""
        label = self._label("exchange", f"gather {name!r}")
        label = label._replace(what=f"gather {name!r}, round {label.call + 1}")
        return label, self._transport.allgather(label, rows, equal=False)

    def add_rows(self, label: Label, backward: int, gradients: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """Returns the sum of the gradients of this process's rows, in the backward of this number from 1.

        ``gradients`` has those of the rows of all processes, and ``rows`` how many each of them has.
        """
        label = label._replace(phase=backward, what=f"the gradients of {label}")
        parts = np.split(gradients, np.cumsum(rows)[:-1])
        everyone = self._transport.allgather(label, [part.ravel() for part in parts], equal=True)
        return functools.reduce(np.add, everyone).reshape(parts[self.rank].shape)

    def _label(self, kind: str, key: Any) -> Label:
        with self._lock:
            call = self._rounds[kind, key]
            self._rounds[kind, key] += 1
        return Label(kind, _hash(repr(key)), call=call, what=f"{kind} {key!r}, round {call + 1}")

    # ---- memory of the machine -------------------------------------------------------------------------------

    def meet_in_memory(self) -> None:
        """Lets statistics meet in memory that the processes of a machine share, if these can see the same memory.

        With several machines, one process of each exchanges with the others. Every process calls this before the first
        step.
        """
        self._meet()
        self._begin_sums()

    def _begin_sums(self) -> None:
        """Makes the way of gradients, through memory of the machine or of this process, and between machines."""
        self._sums = self.handle
        if not self.machines or (len(self.machines) > 1 and self._transport.adds_from):
            self._sums = self._machine(_native.segment_create(1), [self.rank], list(range(self.num_workers)))

    def _machine(self, segment: int, ranks: List[int], leaders: List[int]) -> _native.Handle:
        if len(leaders) > 1:
            self._transport.split(leaders)
        way = self._transport.mpi, self._transport.adds_from or 1 << 62
        return _native.exchange_machine(self._transport.handle, segment, ranks, leaders, *way)

    def _meet(self) -> None:
        def machine() -> str:
            if environment.read("GLUON_SYNCBN_SHARED_MEMORY") == "off":
                raise mx.MXNetError("GLUON_SYNCBN_SHARED_MEMORY=off")
            return _machine()

        names, problem = self._all_make(self._agreement("the machines of the processes"), machine)
        machines: Dict[str, List[int]] = {}
        for rank, name in enumerate(names):
            machines.setdefault(name, []).append(rank)
        ranks = machines[names[self.rank]]
        if len(machines) == self.num_workers > 1:
            problem = problem or "every process is on another machine"
        segment, problem = (None, problem) if problem else self._segment(ranks)
        if segment is None:
            self.why_not_in_memory = problem
            log.info("the processes exchange statistics over %s: %s", self._name, problem)
            return
        self.why_not_in_memory, self.machines = None, list(machines.values())
        self.handle = self._machine(segment, ranks, [first for first, *_ in self.machines])

    def _segment(self, ranks: List[int]) -> Tuple[Optional[int], str]:
        """Returns the segment that these ranks share, or the reason why a machine has none. Every process calls it."""
        segment: Optional[int] = None

        def create() -> Any:
            nonlocal segment
            if self.rank != ranks[0]:
                return None
            segment = _native.segment_create(len(ranks))
            return os.getpid(), _native.segment_number(segment), _native.segment_token(segment)

        def see() -> None:
            nonlocal segment
            if segment is None:
                segment = _native.segment_open(len(ranks), ranks.index(self.rank), *places[ranks[0]])

        places, problem = self._all_make(self._agreement("the memory that the processes of a machine share"), create)
        if not problem:
            problem = self._all_make(self._agreement("whether all processes see that memory"), see)[1]
        if problem and segment is not None:
            _native.segment_free(segment)
        return (None if problem else segment), problem

    def _all_make(self, label: Label, make: Callable[[], Any]) -> Tuple[List[Any], str]:
        """Returns what every process makes, and the first problem of one, empty if there is none."""
        made, problem = None, ""
        try:
            made = make()
        except mx.MXNetError as error:
            problem = f"rank {self.rank}: {error}"
        everyone = self._tell_all(label, [made, problem])
        return [one for one, _ in everyone], next((problem for _, problem in everyone if problem), "")

    def _agreement(self, what: str) -> Label:
        self._agreements += 1
        return Label("agreement", call=self._agreements, what=what)

    def _tell_all(self, label: Label, ours: Any) -> List[Any]:
        part = np.frombuffer(json.dumps(ours).encode(), np.uint8)
        return [json.loads(bytes(p)) for p in self._transport.allgather(label, part, equal=False)]

    # ---- Exchange ------------------------------------------------------------------------------------------------

    def agreed(self, layer: LayerInfo, here: int = 0) -> Agreed:
        """For the core: returns the agreement about a layer, for a step with ``here`` replicas in this process.

        With 0, all of them take part. ValueError: some members of a group are missing.
        """
        agreed = self._agreed[layer.id]
        replicas, size = agreed.replicas, layer.group_size
        if not layer.in_groups() or here in (0, replicas):
            return agreed
        if size is None:
            arguments.refuse(
                "groups", layer.groups, f"all {replicas} devices of this process in every step, not {here}"
            )
        if len(agreed.ranks) > 1:
            reach = f"all {replicas} devices in every step, not {here}: groups reach from rank {self.rank} to others"
            arguments.refuse("group_size", size, reach)
        if here % size:
            arguments.refuse("group_size", size, f"a divisor of the {here} devices of this step")
        groups = group_of_each(here, size, None)
        return agreed._replace(replicas=here, members=np.arange(here), groups=groups, first=0)

    def fail(self, reason: str) -> None:
        for handle in {self.handle, self._sums or self.handle}:
            _native.processes_failed(handle, reason)

    def close(self) -> None:
        for handle in {self.handle, self._sums or self.handle}:
            _native.processes_ended(handle)
        self._transport.close()

    def forked(self) -> None:
        self._lock = threading.Lock()  # a thread that the child does not have may have held it
        self._transport.forked()

    def knows(self, layer: LayerInfo) -> bool:
        return layer.id in self._agreed

    def learn(self, layers: Sequence[LayerInfo], more: bool = False) -> None:
        """Numbers the layers without a number, in their order, after a comparison with the other processes.

        Where ``more`` are to come, the processes agree on those that all have. The first forward of an eager net
        initialises layers while another process is ahead. Names are compared without Gluon's counters, which depend on
        what else a process has built.
        """
        with self._lock:
            new = [layer for layer in layers if layer.id not in self._agreed]
            if new:
                self._agree(new, more)

    def _agree(self, new: Sequence[LayerInfo], more: bool) -> None:
        ours = [_describe(layer) for layer in new]
        answers = self._tell_all(self._agreement("the agreement on the layers of the net"), [ours, more])
        common = min((len(layers) for layers, to_come in answers if to_come), default=None)
        everyone, ours = [layers[:common] for layers, _ in answers], ours[:common]
        advice = "; layers that train in one process only need a KVStore of their own"
        self.compare(everyone, "the net: layer", advice)
        log.info(
            "the statistics of %d layers meet over %r: %d replicas", len(ours), self, sum(one[0][2] for one in everyone)
        )
        for i, layer in enumerate(new[:common]):
            replicas = [layers[i][2] for layers in everyone]
            text = problem(sum(replicas), layer.group_size, layer.groups)
            if text:
                raise ValueError(text)
            agreed = Agreed(len(self._agreed))
            if layer.in_groups():
                group_of = group_of_each(sum(replicas), layer.group_size or 0, layer.groups)
                agreed = shared(agreed.key, layer.channels, group_of, replicas, self.rank)
            self._agreed[layer.id] = agreed  # last, because another thread goes on when it finds it


def _describe(layer: LayerInfo) -> Tuple[str, str, int]:
    """Returns the name of a layer, what has to be equal in all processes, and the number of replicas in this one."""
    detail = f"{layer.channels} channels, mode {layer.mode!r}, virtual_devices {layer.virtual_devices}, "
    detail += f"group_size {layer.group_size}" + (f", groups {[*map(list, layer.groups)]}" if layer.groups else "")
    return f"SyncBatchNorm '{layer.name}'", f"({detail})", layer.replicas

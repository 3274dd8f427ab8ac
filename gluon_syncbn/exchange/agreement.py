"""Has the processes agree on what they exchange."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import threading
from typing import Any, List, NoReturn, Sequence, Tuple

from .. import _native
from ..system import locks
from ..system.logs import log
from .base import Exchange


@functools.lru_cache(maxsize=10000)
def numbered(name: str) -> List[str]:
    """Returns what to sort names by, so that numbers count as numbers."""
    return [text.zfill(9) for text in re.split(r"(\d+)", name)]


def _kind(name: str) -> str:
    """Returns a name without its numbers, which may differ between processes."""
    return re.sub(r"\d+", "", name)


def described(layer: Any) -> Tuple[str, str, int]:
    """Returns the name of a layer, what has to be equal in all processes, and the number of replicas in this one."""
    text = "".join(f", {name} {value!r}" for name, value in layer.settings.compared().items())
    return f"SyncBatchNorm '{layer.name}'", f"({layer.channels} channels{text})", len(layer.contexts)


class ProcessExchange(Exchange):
    """Spans processes. They compare their nets, and number the layers alike."""

    spans_processes = True
    rank: Any
    num_workers: Any

    def __init__(self, handle: int, name: str) -> None:
        super().__init__(handle, name)
        self.layers = 0  # on which the processes have agreed
        self.replicas = 0  # of such a layer, in all processes
        self._collected = self._warned = False  # of layers that some processes do not have
        self._lock: Any
        locks.give(self, _lock=threading.Lock)

    def tell_all(self, what: str, ours: Any) -> List[Any]:
        """Returns what each process tells, in the order of the ranks: all that JSON takes."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """A step has failed here: nothing more is exchanged."""
        raise NotImplementedError

    def begin_layer(self, number: int, channels: int) -> None:
        """Prepares the exchanges of a layer on which the processes have agreed."""

    def give_up(self, reason: str) -> NoReturn:
        self.fail(reason)
        raise _native.StepError(reason)

    def compare(self, everyone: List[List[Any]], what: str, advice: str = "") -> None:
        """Compares what the processes have built. MXNetError, in all of them: the first difference.

        ``everyone`` has a list of each rank. An entry begins with a name, whose digits may differ, as Gluon's counters
        do, and what has to be equal. ``what`` is compared, and the word before an entry's number: "the net: layer".
        """
        difference = self._difference(everyone)
        if difference:
            self.give_up(
                f"the processes disagree about {what} {difference}. Build and initialise the same net in every "
                f"process{advice}."
            )

    def _difference(self, everyone: List[List[Any]]) -> str:
        """Returns the first difference to what this process has; empty if there is none."""
        for rank, theirs in enumerate(everyone):
            for number, entries in enumerate(itertools.zip_longest(everyone[self.rank], theirs), 1):
                one, another = (entry and (_kind(entry[0]), *entry[1:2]) for entry in entries)
                if one != another:
                    here, there = (f"{entry[0]} {entry[1]}" if entry else "none" for entry in entries)
                    return f"{number} is {here} on rank {self.rank} and {there} on rank {rank}"
        return ""

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
            names = sorted({one.name for one in layers if _kind(one.name) == _kind(layer.name)}, key=numbered)
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
                self.check(one.settings)
                self.begin_layer(self.layers, one.channels)
                one.agrees(self, self.layers, replicas)
                self.layers += 1

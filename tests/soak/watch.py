"""What may go wrong beside the numbers: a step that hangs; arrays, memory, threads and handles that stay."""

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np

from gluon_syncbn import _native

HUNG = 3  # the exit code
WARM_UP = 0.3  # of the time: until MXNet's pools and caches have what they need
LEAK = 5.0  # MB in 1000 steps
FEW = 300  # steps, which show no slope


class Interrupts:
    """SIGINT: one that the soak sends to itself only comes; the user's is noted, and a second one ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._due = 0
        signal.signal(signal.SIGINT, self._note)

    def send(self) -> None:
        self._due += 1
        os.kill(os.getpid(), signal.SIGINT)
        while self._due:
            time.sleep(0.001)

    def _note(self, *_: Any) -> None:
        if self._due:
            self._due -= 1
        elif self.asked:
            raise KeyboardInterrupt
        else:
            self.asked = True


class Watchdog:
    """Ends the process where a step takes more than ``limit`` seconds, after all stacks and the last words. Of a pause
    of the whole process, Ctrl-Z, one counts."""

    def __init__(self, limit: float, last_words: Callable[[str], None]) -> None:
        self._limit, self._last_words = limit, last_words
        self._what, self._seconds = "the start", 0
        threading.Thread(target=self._watch, name="soak-watchdog", daemon=True).start()

    def begins(self, what: str) -> None:
        self._what, self._seconds = what, 0

    def _watch(self) -> None:
        while self._seconds < self._limit:
            time.sleep(1)
            self._seconds += 1
        faulthandler.dump_traceback(all_threads=True)
        self._last_words(self._what)
        sys.stdout.flush()
        os._exit(HUNG)


class Sample(NamedTuple):
    memory: float  # MB that are resident
    threads: int  # Python's
    all_threads: int  # of the process, MXNet's and OpenMP's included
    handles: int  # open files

    def __str__(self) -> str:
        return f"{self.memory:.0f} MB, {self.threads} ({self.all_threads}) threads, {self.handles} handles"


class Resources:
    """Samples taken between cases, when everybody has let go of what was theirs."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what is there already need not be looked at again
        self._lives = self._living()
        self.start = self.now = take()
        self.warm: Optional[Sample] = None
        self._memory = [(0, 0.0)]  # (steps, MB) since the warm-up, of cases that count

    def sample(self, steps: int, counts: bool, over: float) -> List[str]:
        """After a case of so many steps, when this share of the time is over; what is wrong. ``counts``: MXNet keeps
        no memory for its operators, as it does for convolutions (temporary space, what oneDNN has prepared)."""
        lives, before = self._living(), self._lives
        self._lives = lives
        last, self.now = self.now, take()
        if self.warm is not None and counts:
            so_far, memory = self._memory[-1]
            self._memory.append((so_far + steps, memory + self.now.memory - last.memory))
        if self.warm is None and over >= WARM_UP:
            self.warm = self.now
        return [
            f"{what}: {n} live on, there were {m}" for what, n, m in zip(("arrays", "layers"), lives, before) if n > m
        ]

    @staticmethod
    def _living() -> Tuple[int, int]:
        mx.nd.waitall()
        gc.collect()
        return sum(isinstance(it, mx.nd.NDArray) for it in gc.get_objects()), _native.layers()

    def slope(self) -> float:
        """MB in 1000 steps, by least squares; NaN where there are too few to tell."""
        steps, memory = np.array(self._memory).T
        return float(np.polyfit(steps, memory, 1)[0]) * 1000 if steps[-1] >= FEW else np.nan

    def problems(self) -> List[str]:
        """At the end."""
        problems = []
        if self.slope() > LEAK:
            problems.append(f"memory grows by {self.slope():.1f} MB in 1000 steps, expected at most {LEAK:.0f}")
        for what in ("threads", "handles"):
            warm, now = getattr(self.warm or self.now, what), getattr(self.now, what)
            if now > warm:
                problems.append(f"{what}: {now}, after the warm-up there were {warm}")
        return problems

    def rows(self) -> List[Tuple[str, str]]:
        slope = self.slope()
        return [
            ("of layers, memory", "too few steps" if np.isnan(slope) else f"{slope:+.2f} MB in 1000 steps"),
            *((f"at the {when}", str(sample)) for when, sample in (("start", self.start), ("end", self.now))),
        ]


def take() -> Sample:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )

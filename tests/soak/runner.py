"""Runs cases in processes of their own, so that one that crashes or hangs is a case with a seed like the others.

The exit code is 1 where a case was wrong or crashed, 3 where one hung.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Callable, Iterator, List, NamedTuple, Sequence

from environments import shell
from places import SUPPORT, TESTS
from tqdm import tqdm

KINDS = ("wrong", "crashed", "hung")
TOGETHER = 60  # cases of a process, which cost it some memory each


class Outcome(NamedTuple):
    seed: int
    kind: str  # "right", "wrong", "crashed" or "hung"
    text: str = ""
    strain: float = 0.0  # the largest error, in what is allowed


class Runner:
    """``hang``: seconds that a case may take."""

    def __init__(self, report: Callable[[Outcome], None], hang: int) -> None:
        self._report, self._hang = report, hang
        self._ended = threading.Event()
        self._running: List[subprocess.Popen] = []

    def run(self, seeds: Sequence[int], seconds: float = math.inf) -> None:
        """Two processes at a time, none begun after so many seconds; `report` is called from their threads."""
        self._deadline = time.monotonic() + seconds
        doors = [[seed for seed in seeds if seed % 2 == door] for door in (0, 1)]
        batches = [some[i : i + TOGETHER] for some in doors for i in range(0, len(some), TOGETHER)]
        batches.sort()
        with ThreadPoolExecutor(2) as pool:
            try:
                for done in [pool.submit(self._batch, batch) for batch in batches]:
                    done.result()
            except BaseException:
                self._ended.set()
                for process in list(self._running):
                    process.kill()
                raise

    def _batch(self, seeds: Sequence[int]) -> None:
        left = list(seeds)
        while left and not self._ended.is_set() and time.monotonic() < self._deadline:
            for outcome in self._process(left):
                left = [seed for seed in left if seed > outcome.seed]
                self._report(outcome)

    def _process(self, seeds: Sequence[int]) -> Iterator[Outcome]:
        """As far as a process comes with them, which is one case at least."""
        command = [sys.executable, "-W", "ignore", "-m", "soak.child", self._hang, *seeds]
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
            list(map(str, command)), env=_environment(seeds[0]), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            self._running.append(process)
            began, text, ended = seeds[0], "before its first case", False
            for line in process.stdout or ():
                said = json.loads(line) if line.startswith("{") else {}
                if "began" in said:
                    began, text, ended = said["seed"], said["began"], False
                elif "seed" in said:
                    ended = True
                    kind = "wrong" if "wrong" in said else "right"
                    problem = "" if kind == "right" else f"{text}\n  {said[kind]}"
                    yield Outcome(said["seed"], kind, problem, said.get("strain", 0.0))
            code = process.wait()
            self._running.remove(process)
            if self._ended.is_set() or (ended and code == 0):
                return
            errors.seek(0)
            kind = "hung" if code == -signal.SIGALRM else "crashed"
            when = "after it" if ended else "in it"
            why = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
            yield Outcome(began, kind, f"{text}\n  {when}: {why}\n{errors.read()[-6000:]}")


def _environment(seed: int) -> dict:
    """A user's, with the door of the case."""
    settings = shell(SUPPORT, TESTS)
    settings.pop("GLUON_SYNCBN_OPERATOR", None)
    return {**settings, **({"GLUON_SYNCBN_OPERATOR": "custom"} if seed % 2 else {})}


class Soak:
    """What `make soak` runs and prints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._counted: Counter = Counter()
        self._strain = (0.0, 0)
        self._lock = threading.Lock()
        self._bar = tqdm(total=options.cases, disable=None, unit="case")
        self._runner = Runner(self._take, math.ceil(options.hang))

    def run(self) -> int:
        first = self._options.seed
        print(f"seeds from {first} on", flush=True)
        with suppress(KeyboardInterrupt):
            self._runner.run(range(first, first + self._options.cases), 60 * (self._options.minutes or math.inf))
        self._bar.close()
        rows = [("cases", str(sum(self._counted.values()))), *((kind, str(self._counted[kind])) for kind in KINDS)]
        rows.append(("largest error", f"{self._strain[0]:.2f} of what is allowed, case {self._strain[1]}"))
        print("\n".join(f"{name:20}{value:>40}" for name, value in rows))
        return 3 if self._counted["hung"] else int(self._counted["wrong"] + self._counted["crashed"] > 0)

    def _take(self, outcome: Outcome) -> None:
        with self._lock:
            self._counted[outcome.kind] += 1
            self._strain = max(self._strain, (outcome.strain, outcome.seed))
            self._bar.update()
            self._bar.set_postfix_str(", ".join(f"{self._counted[kind]} {kind}" for kind in KINDS))
            if outcome.kind != "right":
                again = f'again: make soak ARGS="--seed {outcome.seed} --cases 1"'
                with tqdm.external_write_mode(sys.stdout):
                    print(f"{outcome.kind.upper()} {outcome.text}\n  {again}", flush=True)

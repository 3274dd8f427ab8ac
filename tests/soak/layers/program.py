"""Random layers, each step checked against an implementation in NumPy that is not the package's: `--kind layers`.

    make soak ARGS="--kind layers"
    make soak ARGS="--kind layers --seed 123 --cases 1"       # that case again, with what the package logs

What a case is stands in case.py, what it has to compute in truth.py. The exit code is 1 where a case was
wrong or crashed, 3 where one hung.
"""

import argparse
import math
import sys
import threading
from collections import Counter
from contextlib import suppress

from tqdm import tqdm

from .runner import Outcome, Runner

KINDS = ("refused", "wrong", "crashed", "hung")


class Layers:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._counted: Counter = Counter()
        self._strain = (0.0, 0)
        self._lock = threading.Lock()
        self._bar = tqdm(total=options.cases, disable=None, unit="case")
        self._runner = Runner(self._take, options.hang)

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
            if outcome.kind not in ("right", "refused"):
                again = f'again: make soak ARGS="--kind layers --seed {outcome.seed} --cases 1"'
                with tqdm.external_write_mode(sys.stdout):
                    print(f"{outcome.kind.upper()} {outcome.text}\n  {again}", flush=True)

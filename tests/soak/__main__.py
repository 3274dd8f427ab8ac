"""Trains random small nets in random ways for some minutes, and checks every step against `gluon_syncbn.reference`.

    make soak ARGS="--minutes 10"
    make soak ARGS="--seed 123 --cases 1"       # that case again, with what the package logs
    make soak ARGS="--kind layers"              # 3000 single layers instead, against layers/truth.py

What a case is stands in case.py, what happens to it in trial.py and failures.py. Ends with a table; the exit code is 1
where something was wrong, 3 where a step hung. Ctrl-C ends it after the step.
"""

import argparse
import functools
import itertools
import logging
import os
import sys
import time
import traceback
from collections import Counter
from typing import Sequence

import mxnet as mx
import numpy as np
from tqdm import tqdm

import gluon_syncbn
from gluon_syncbn.training import steps

from . import failures
from .case import Case, draw
from .layers.runner import Layers
from .trial import Crew, Trial
from .watch import Interrupts, Resources, Watchdog

CONTEXTS = 8


class Soak:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begun = self._said = time.monotonic()
        self._now = "the start"
        self._counted: Counter = Counter()
        self._interrupts = Interrupts()
        self._watchdog = Watchdog(options.hang, self._hangs)
        self._contexts = gluon_syncbn.cpu_devices(CONTEXTS)
        self._crew = Crew(CONTEXTS)
        self._resources = Resources()
        self._bar = tqdm(total=1.0, disable=None, bar_format="{percentage:3.0f}%|{bar}| {elapsed}{postfix}")

        if options.cases != 1:  # a case that is repeated may speak, and the others' failures are meant
            log = logging.getLogger("gluon_syncbn")
            log.propagate = False
            log.addHandler(logging.NullHandler())

    def run(self) -> int:
        os.register_at_fork(after_in_child=functools.partial(setattr, self._bar, "disable", True))
        print(f"seeds from {self._options.seed} on", flush=True)
        for seed in itertools.count(self._options.seed):
            case, before = draw(seed, self._contexts), self._counted["steps"]
            self._case(case)
            self._look_around(self._counted["steps"] - before, case.net == "layer")
            if self._interrupts.asked or self._over() >= 1 or self._counted["cases"] == self._options.cases:
                break
        self._begins("all of them")
        for problem in self._resources.problems():
            self._wrong(problem)
        self._bar.close()
        print(self._table())
        return int(self._counted["wrong"] > 0)

    def _over(self) -> float:
        """The share of the time that is over."""
        return (time.monotonic() - self._begun) / (60 * self._options.minutes)

    def _case(self, case: Case) -> None:
        self._counted["cases"] += 1
        again = f'again: make soak ARGS="--seed {case.seed} --cases 1"'
        self._begins(f"{case}\n  the start; {again}")
        try:
            with mx.util.np_shape(case.empty):
                trial = Trial(case, self._crew, self._interrupts.send)
                for count in range(case.steps):
                    if self._interrupts.asked:
                        break
                    kinds = {**trial.choices(), **failures.choices(trial)}
                    weights = np.array(list(kinds.values()))
                    kind = list(kinds)[case.rng.choice(len(kinds), p=weights / weights.sum())]
                    self._begins(f"{case}\n  step {count}, {kind.__name__}; {again}")
                    kind()
                    self._counted["steps"] += 1
                mx.nd.waitall()
            self._counted.update(trial.counted)
        except Exception as error:
            self._wrong("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            gluon_syncbn.reset()
            steps.drain()

    def _begins(self, what: str) -> None:
        self._now = what
        self._watchdog.begins(what)

    def _wrong(self, text: str) -> None:
        self._counted["wrong"] += 1
        with tqdm.external_write_mode(sys.stdout):
            print(f"WRONG in {self._now}\n{text}", flush=True)

    def _hangs(self, what: str) -> None:
        self._counted["hung"] += 1
        print(f"HUNG in {what}\n{self._table()}", flush=True)

    def _look_around(self, steps: int, layer_alone: bool) -> None:
        """After a case of so many steps, of which nothing should be left."""
        for problem in self._resources.sample(steps, layer_alone, self._over()):
            self._wrong(problem)
        self._bar.n = min(self._over(), 1.0)
        self._bar.set_postfix_str(self._status())
        if self._bar.disable and time.monotonic() - self._said > 60:
            self._said = time.monotonic()
            print(f"{self._over():4.0%}  {self._status()}", flush=True)

    def _status(self) -> str:
        counted = ", ".join(f"{self._counted[name]} {name}" for name in ("cases", "steps", "wrong"))
        return f"{counted}, {self._resources.now.memory:.0f} MB"

    def _table(self) -> str:
        names = ("cases", "steps", "wrong", "hung", "failed as expected", "forks", "interrupts")
        rows = [(name, f"{self._counted[name]}") for name in names] + self._resources.rows()
        return "\n".join(f"{name:20}{value:>40}" for name, value in rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=("nets", "layers"), default="nets", help="what a case trains (nets)")
    parser.add_argument("--minutes", type=float, help="how long (nets: 10; layers: until all cases have run)")
    parser.add_argument("--cases", type=int, help="end after so many, if that is earlier (layers: 3000)")
    parser.add_argument("--seed", type=int, help="of the first case; the next has the next (a random one)")
    parser.add_argument("--hang", type=float, default=120, help="seconds that a step may take (120)")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "little")
    if options.kind == "layers":
        options.cases = 3000 if options.cases is None else options.cases
        return Layers(options).run()
    options.minutes = 10 if options.minutes is None else options.minutes
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

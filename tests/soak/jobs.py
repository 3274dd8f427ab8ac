"""Jobs of two or three processes that train random nets while something happens to one of them.

``PYTHONPATH=tests/support:tests python -m soak.jobs [--minutes M] [--seed N]``. A job has several trials, each with
nets, Trainers and a store of its own. Where nothing happens, the weights are those of one process with the samples of
all. What happens is an error on all other ranks, soon, which names the rank; no weight is left between two steps, or
other than on another rank; and no process is left.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

from mpi_job import BIN, Programs

LIMIT, MARGIN = 2, 15  # seconds that a rank waits for the others, and of a busy machine
HANGS = 90  # seconds of a trial, after which its processes say where they are
RAISES = ["raises in record", "raises after the backward"]
QUIET = ["nothing"] * 6 + [*RAISES, "raises before", "half a backward"]
MISCOUNTS = ["skips a step", "skips a forward", "calls twice"]
SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP"]
LAST = [*SIGNALS, "SIGSTOP", "ends early", *RAISES, "nothing"]  # after which the job ends
#: With all but the last two, one device with all samples computes the same. The draws of a shuffle are those of a
#: layer's number, which no other process has.
POOLINGS = [{}, {}, {"virtual_devices": 2}, {"group_size": 1}, {"groups": 2}, {"mode": "local"}, {"mode": "shuffle"}]
BETWEEN = ["", "", "gather", "broadcast", "average", "pushpull", "save", "predict", "join"]
#: An error names one of them.
NAMES = (
    r"SyncBatchNorm '|(gradient|sum) of '|of trainer|(exchange|gather|broadcast) '|agreement on the layers|"
    "the parameters|running statistics|whether there is a batch|gluon_syncbn.join"
)


class Trial:
    """What is drawn, the same for the program and all ranks."""

    def __init__(self, seed, ranks, last):
        rng = random.Random(seed)
        self.seed, self.ranks, self.last = seed, ranks, last
        self.devices = [rng.choice((1, 1, 2)) for _ in range(ranks)]
        self.sizes = [rng.choice((2, 3, 5)) for _ in range(sum(self.devices))]  # of the shards
        self.nets = [self._net(rng) for _ in range(rng.choice((1, 1, 2)))]
        self.steps = rng.randint(2, 5)
        self.event = rng.choice(LAST if last else QUIET + MISCOUNTS)
        self.rank, self.at = rng.randrange(ranks), rng.randrange(self.steps)
        self.delay = rng.choice((0, 0.001, 0.005, 0.02, None))  # of a signal; None: it comes behind the step
        self.between = [rng.choice(BETWEEN) for _ in range(self.steps)]
        self.reads = [rng.random() < 0.5 for _ in range(self.steps)]
        self.hybrid, self.together = rng.random() < 0.5, rng.random() < 0.5

    def _net(self, rng):
        """Of each layer its kind, its settings, and whether it gets a mask. In one, all ranks meet."""
        kinds = [rng.choice(("dense", "norm", "norm", "branches", "add", "tanh")) for _ in range(rng.randint(1, 5))]
        return [*(self._layer(rng, kind) for kind in kinds), ("norm", {}, False), ("dense", {}, False)]

    def _layer(self, rng, kind):
        if kind in ("dense", "tanh"):
            return kind, {}, False
        settings = {**rng.choice(POOLINGS), "activation": rng.choice((None, None, "relu"))}
        if "groups" in settings:
            numbers = rng.sample(range(len(self.sizes)), len(self.sizes))
            cut = rng.randrange(1, len(numbers))
            settings["groups"] = [sorted(numbers[:cut]), sorted(numbers[cut:])]
        return kind, settings, rng.random() < 0.25

    def has(self, *names):
        return any(settings.get(name) for net in self.nets for _, settings, _ in net for name in names)

    @property
    def shuffles(self):
        return any(settings.get("mode") == "shuffle" for net in self.nets for _, settings, _ in net)

    def __str__(self):
        return f"trial {self.seed}: " + ", ".join(f"{name} {value}" for name, value in vars(self).items())

    def problems(self, told):
        """What is wrong, by what the ranks have told. mpiexec may end a rank with another one before it learns why."""
        ended = self.last and self.event not in ("SIGSTOP", "nothing")
        for rank in range(self.ranks):
            one = told.get(rank)
            if one is None:
                if not ended and (rank != self.rank or not self.last or self.event == "nothing"):
                    yield f"rank {rank} has told nothing"
                continue
            if one["wrong"]:
                yield f"rank {rank}: {one['wrong']}"
            if one["seconds"] > LIMIT + MARGIN:
                yield f"rank {rank} took {one['seconds']:.0f} s: {one['problem']}"
            named = f"rank {self.rank}" in one["problem"] and re.search(NAMES, one["problem"])
            if bool(one["problem"]) if self.event == "nothing" else rank != self.rank and not named:
                yield f"rank {rank} has learnt: {one['problem']}"
        for key in {key for one in told.values() for key in one["weights"]}:
            if len({one["weights"][key] for one in told.values() if key in one["weights"]}) > 1:
                yield f"the weights of net and step {key} differ among ranks"


def left(folder):
    """The processes of the job that have not ended."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MPI_WORKER_REPORTS={folder}".encode() in path.read_bytes():
                yield int(path.parent.name)
        except OSError:
            pass  # it has ended since, or is another user's


def problems_of_job(first, count):
    ranks = 2 + first // count % 2
    trials = [Trial(seed, ranks, seed == first + count - 1) for seed in range(first, first + count)]
    found = []
    with Programs() as programs:
        command = [BIN / "mpiexec", "-n", ranks, sys.executable, "-W", "ignore", "-m", "soak.rank", first, count]
        if programs.wait([programs.start("job", command, {})], HANGS + 20 * count) == [None]:
            found.append("mpiexec has not ended")
        time.sleep(1)
        for pid in left(programs.folder):
            found.append(f"process {pid} is left")
            os.kill(pid, signal.SIGKILL)
        for trial in trials:
            told = {}
            for path in programs.folder.glob(f"{trial.seed} *"):
                told[int(path.name.split()[1])] = json.loads(path.read_text())
            problems = list(trial.problems(told))
            found += [f"{trial}\n  {problem}" for problem in problems]
            print(f"{trial.seed}: {trial.event}, {ranks} ranks: {'; '.join(problems) or 'right'}", flush=True)
            if problems and len(told) < ranks:
                break  # the others have not begun
        if found:
            found.append((programs.folder / "job").read_text()[-6000:])
        for path in programs.folder.glob("memory of *"):
            for name in path.read_text().split():
                Path(name).unlink(missing_ok=True)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=8 * random.randrange(10**6), help="of the first trial")
    parser.add_argument("--trials", type=int, default=8, help="of a job")
    given = parser.parse_args()
    end, seed, bad = time.monotonic() + 60 * given.minutes, given.seed, []
    while time.monotonic() < end:
        problems = problems_of_job(seed, given.trials)
        if problems:
            bad.append(seed)
            print(f"== of --seed {seed} --minutes 0.1", *problems, sep="\n", flush=True)
        seed += given.trials
    print(f"{seed - given.seed} trials from --seed {given.seed}; jobs with a fault: {bad}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

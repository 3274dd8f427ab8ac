"""Trains a small net on real GPUs, in several ways, each beside the same training on CPU contexts.

    python tests/gpu/train_on_any_gpu.py                # on all GPUs; writes benchmarks/results/real_gpu.md
    python tests/gpu/train_on_any_gpu.py --dry-run      # on CPU contexts, with any MXNet

The net (`gluon_syncbn.command.training`) takes no kernel of MXNet's own: cuDNN convolves and pools, this layer
normalises, and the rest are copies and NumPy. So it also trains on GPUs that MXNet has no code for, Hopper and later:
there `tests/support/skip_launches.c` skips MXNet's kernels, and a step that needed one is an error.

A training on the CPU has plain ``nn.BatchNorm`` on the whole batch, or on each slot of it; that of `shuffle` has this
layer, whose permutations are the same there. Losses, weights and running statistics are compared after steps 1, 10 and
50, and the accuracy at the end. Ctrl-C ends the training of the moment; what has ended is in the table.
"""

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _results  # noqa: E402

from gluon_syncbn.command.training import BATCH, Training, drawn, network  # noqa: E402

HEADER = [
    "training",
    "beside it, on CPU contexts",
    *(f"step {step}" for step in (1, 10, 50)),
    "loss of a batch",
    "accuracy, and beside",
    "ms a step",
    "skipped",
]
EXPLANATION = """A net like VGG, on drawn images of four classes, 24 in a batch. The columns of the steps say by how
much the training and the one beside it differ: the loss, all weights, all running statistics, relative to their size
(`tests/gpu/train_on_any_gpu.py` has what may differ, and why). A `!` is too much. *Skipped* are launches of MXNet's own
kernels within steps, for which the GPU has no code. The times are those of a net too small for a GPU."""

SLOTS = 4
LIMIT = 150  # seconds of a training; on an H100 it should take a few
# What may differ: the loss, all weights as one vector, and all running statistics as one, relative to their sizes.
# Where an element lies at the edge of a ReLU, or of two in a window of max pooling, rounding decides its gradient, so
# trainings in float32 drift apart. Plain BatchNorm on the CPU, with ten seeds: the same batches in another order differ
# after 1, 10 and 50 steps by up to 1e-7, 5e-5 and 4e-3 (loss). Inputs that are wrong by 1e-5, as those of Winograd's
# convolutions may be, make after 10 and 50 steps up to 2e-3 and 6e-3 (loss), 3e-3 and 9e-3 (weights), 8e-3 and 3e-2
# (statistics). The first step tells right from wrong: with the statistics of half a batch, its loss differs by at least
# 7e-4, and with an unbiased running variance the statistics by 3e-4. The later ones tell that nothing goes astray.
TOLERANCES = {1: (1e-5, 1e-4, 1e-4), 10: (1e-2, 1e-2, 2e-2), 50: (5e-2, 2e-2, 6e-2)}
ACCURACY = 0.02  # by which the accuracies may differ; that of guesses is 0.25
TESTED = 2  # images for each step


class Way(NamedTuple):
    """Of training: settings of the layer, how many processes with which share of the GPUs, and what is beside it."""

    title: str
    settings: Dict[str, Any]
    processes: int = 1
    gpus: int = 1  # of a process
    shared: bool = False  # all processes have the first GPU
    beside: int = 1  # CPU contexts with plain BatchNorm; 0: one with this layer, in the same mode


def ways(gpus: int) -> Dict[str, Way]:
    """Those that this number of GPUs allows."""
    shuffled = {"mode": "shuffle", "virtual_devices": SLOTS}
    found = {
        "local": Way(f"`local`, {SLOTS} slots", {"mode": "local", "virtual_devices": SLOTS}, beside=SLOTS),
        "processes": Way("two processes on a GPU, over the host", {}, processes=2, shared=True),
        "shuffle": Way(f"`shuffle`, {SLOTS} slots", shuffled, beside=0),
        "leaky": Way("with a leaky ReLU", {"activation": "leaky", "slope": 0.1}),
    }
    if gpus > 1:
        found["all"] = Way(f"one process, {gpus} GPUs, over NCCL", {}, gpus=gpus)
        found["each"] = Way(f"{gpus} processes with a GPU each", {}, processes=gpus)
    return found


# ---- a training, in a process of its own ---------------------------------------------------------------------


def train(work: Dict[str, Any]) -> None:
    """Trains, and writes losses, arrays, accuracy and times into a file."""
    import mxnet as mx
    from mxnet.gluon import nn
    from tqdm import tqdm

    import gluon_syncbn

    way, dry, beside = ways(work["gpus"])[work["way"]], work["dry"], work["beside"]
    settings = {"activation": "relu", **way.settings}
    store = None
    if way.processes > 1 and not beside:
        store = gluon_syncbn.kvstore("mpi")
        gluon_syncbn.configure(kvstore=store)
    rank = store.rank if store else 0
    if beside:
        contexts = gluon_syncbn.cpu_devices(max(way.beside, 1))
    elif dry:
        contexts = gluon_syncbn.cpu_devices(way.gpus)
    else:
        first = 0 if way.shared else rank
        contexts = [mx.gpu(i) for i in range(first, first + way.gpus)]

    def plain(channels: int) -> List[nn.HybridBlock]:
        leaky = settings["activation"] == "leaky"
        return [nn.BatchNorm(in_channels=channels), nn.LeakyReLU(0.1) if leaky else nn.Activation("relu")]

    def ours(channels: int) -> List[nn.HybridBlock]:
        return [gluon_syncbn.SyncBatchNorm(in_channels=channels, **settings)]

    random = np.random.RandomState(1)
    one = Training(network(plain if beside and way.beside else ours), contexts, store)
    found: Dict[str, Any] = {"losses": [], "seconds": [], "skipped": 0}
    title = f"{way.title}, {'on the CPU' if beside else contexts[0].device_type}"
    for step in tqdm(range(1, work["steps"] + 1), desc=title, disable=True if rank else None):
        images, labels = drawn(random)
        before, begun = skipped(contexts), time.perf_counter()
        found["losses"].append(one.step(images, labels))
        mx.nd.waitall()
        found["seconds"].append(time.perf_counter() - begun)
        found["skipped"] += skipped(contexts) - before
        if found["skipped"]:
            sys.exit(f"{title}: step {step} launched {found['skipped']} kernels that this GPU has no code for")
        if step in TOLERANCES:
            found.update((f"{step}/{name}", array) for name, array in one.arrays().items())
    images, labels = drawn(np.random.RandomState(2), TESTED * work["steps"])
    y = one.net(mx.nd.array(images, ctx=contexts[0])).asnumpy()
    found["accuracy"] = (y.reshape(len(images), -1).argmax(1) == labels).mean()
    np.savez(f"{work['out']}.{rank}.npz", **found)


def skipped(contexts: Sequence[Any]) -> int:
    """How many launches of this process `skip_launches.c` has skipped."""
    if contexts[0].device_type != "gpu":
        return 0
    return ctypes.c_long.in_dll(ctypes.CDLL(None), "skipped_launches").value


# ---- all of them, and the table ------------------------------------------------------------------------------


def trained(way: str, beside: bool, options: argparse.Namespace, folder: Path, preload: str) -> List[Dict[str, Any]]:
    """Runs a training; what each of its processes has found."""
    out = folder / f"{way}-{'beside' if beside else 'real'}"
    processes = 1 if beside else ways(options.gpus)[way].processes
    work = {"way": way, "beside": beside, "gpus": options.gpus, "steps": options.steps, "dry": options.dry_run}
    command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps({**work, "out": str(out)})]
    # NVIDIA_TF32_OVERRIDE: convolutions in float32, whose 24 bits TensorFloat-32 would cut to 11.
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"}
    if processes > 1:
        launcher = Path(sys.executable).with_name("mpiexec")
        command = [str(launcher if launcher.exists() else "mpiexec"), "-n", str(processes), *command]
        environment["OMP_NUM_THREADS"] = "1"
    if preload and not beside:
        environment.update(LD_PRELOAD=preload, GLUON_SYNCBN_ANY_ARCHITECTURE="1")
    child = subprocess.Popen(command, env=environment, start_new_session=True)  # so that all end together
    try:
        code = child.wait(LIMIT)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code:
        raise RuntimeError(f"exit code {code}: {shlex.join(command)}")
    return [dict(np.load(f"{out}.{rank}.npz")) for rank in range(processes)]


def differences(got: List[Dict[str, Any]], want: Dict[str, Any], step: int) -> List[float]:
    """Of the loss, and of weights and running statistics in the worst process."""
    mine, whole = sum(one["losses"][step - 1] for one in got), want["losses"][step - 1]
    found = [abs(mine - whole) / whole]
    for running in (False, True):
        names = [name for name in want if name.startswith(f"{step}/") and ("running" in name) == running]
        right = np.concatenate([want[name].ravel() for name in names])
        each = [np.concatenate([one[name].ravel() for name in names]) for one in got]
        found.append(max(np.linalg.norm(one - right) for one in each) / np.linalg.norm(right))
    return [float(one) for one in found]


def compared(way: Way, got: List[Dict[str, Any]], want: Dict[str, Any], steps: int) -> List[str]:
    """A row of the table; what is out of bounds has a ! behind it."""
    row = [way.title, f"`nn.BatchNorm` on {way.beside}" if way.beside else "this layer on 1"]
    for step, most in TOLERANCES.items():
        pairs = zip(differences(got, want, step), most) if step <= steps else ()
        row.append(", ".join(f"{one:.0e}{'' if one <= top else ' !'}" for one, top in pairs) or "-")
    losses = sum(one["losses"] for one in got) / BATCH
    accuracies = [float(one["accuracy"]) for one in (*got, want)]
    apart = max(accuracies) - min(accuracies) > ACCURACY
    row += [f"{losses[0]:.3g} to {losses[-1]:.3g}", f"{accuracies[0]:.3f}, {accuracies[-1]:.3f}{' !' if apart else ''}"]
    return [*row, f"{1e3 * np.median(got[0]['seconds']):.1f}", str(sum(int(one["skipped"]) for one in got))]


def said(*command: str) -> str:
    """What a program prints, or why it does not."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT, cwd=ROOT
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return done.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on CPU contexts, in place of --gpus GPUs")
    parser.add_argument("--gpus", type=int, help="how many (all; of a dry run 1)")
    parser.add_argument("--steps", type=int, default=200, help="how many (200)")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="which (local, processes, shuffle, leaky, all, each)")
    parser.add_argument("--out", type=Path, help="folder for real_gpu.md (benchmarks/results; of a dry run none)")
    parser.add_argument("--commit", help="what is tested (what git says)")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # a training, as JSON
    options = parser.parse_args(arguments)
    if options.child:
        train(json.loads(options.child))
        return 0
    import mxnet as mx

    if not options.dry_run and not mx.context.num_gpus():
        parser.error("MXNet finds no GPU here; --dry-run trains on CPU contexts")
    options.gpus = options.gpus or (1 if options.dry_run else mx.context.num_gpus())
    chosen = options.ways or list(ways(options.gpus))
    if set(chosen) - set(ways(options.gpus)):
        parser.error(f"--ways: {options.gpus} GPUs allow {', '.join(ways(options.gpus))}")
    rows: List[List[str]] = []
    problems: List[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        preload = os.environ.get("LD_PRELOAD", "")
        if not options.dry_run and "skip_launches" not in preload:
            preload = f"{scratch}/skip_launches.so"
            source = str(ROOT / "tests" / "support" / "skip_launches.c")
            subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", preload, "-ldl"], check=True, timeout=LIMIT)
        try:
            for name in chosen:
                way = ways(options.gpus)[name]
                try:
                    got, (want,) = (trained(name, beside, options, Path(scratch), preload) for beside in (False, True))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    problems.append(f"{way.title}: {error}")
                    continue
                rows.append(compared(way, got, want, options.steps))
        except KeyboardInterrupt:
            problems.append(f"interrupted: {len(rows)} of {len(chosen)} trainings have ended")
    problems += [f"{row[0]}: differs by more than it may" for row in rows if any(cell.endswith("!") for cell in row)]
    text = "\n\n".join([EXPLANATION, _results.table(HEADER, rows), *(f"**{problem}**" for problem in problems)])
    print(text)
    out = options.out or (None if options.dry_run else ROOT / "benchmarks" / "results")
    if out:
        write(out, text, options, arguments)
    return 1 if problems else 0


def write(out: Path, text: str, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """The table, and what a reader needs to judge it, into ``real_gpu.md``."""
    facts = _results.environment(["tests/gpu/train_on_any_gpu.py", *arguments])
    facts["commit"] = options.commit or said("git", "describe", "--always", "--dirty", "--abbrev=40")
    query = "--query-gpu=name,compute_cap,driver_version"
    facts["GPUs"] = "none: a dry run" if options.dry_run else said("nvidia-smi", query, "--format=csv,noheader")
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    check = said(sys.executable, "-m", "gluon_syncbn")
    out.mkdir(parents=True, exist_ok=True)
    parts = ["# A training on a GPU", text, "## Environment", listed, "The self-check:", f"```text\n{check}\n```"]
    (out / "real_gpu.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

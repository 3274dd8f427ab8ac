"""A job in one process and in two: is the training the same?

    python examples/segmentation/distributed.py

Trains FastSCNN with SyncBatchNorm on the drawn scenes twice. The first run has one process with two CPU devices. The
second run has two processes with one device each (`mpiexec -n 2 train.py --kvstore mpi`). Prints both losses and both
scores. Ctrl-C saves the run, and the next call continues it. A finished run is not repeated. --restart trains anew.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import demo
from errors import EXIT_INTERRUPTED, UserError, run
from minidata import make_minidata
from options import Parser, check_train, train_parser

JOB = (  # on two devices
    "--model fastscnn --syncbn --aux --aux-weight 0.4 --crop-size 128 --base-size 160 "
    "--batch-size 8 --lr 0.2 --momentum 0.9 --weight-decay 1e-4 --epochs 2"  # of 25 steps each
)
SAVE = os.path.join("runs", "demo-distributed")
RUNS = {  # name, processes, options
    "one": ("1 process, 2 devices", 1, "--cpus 2"),
    "two": ("2 processes, 1 device each", 2, "--cpus 1 --kvstore mpi"),
}
SHOWN = 10  # steps
LIMIT, GRACE = 1800, 30  # seconds of a run, and for saving
SAME = (1e-5, 1e-2)  # relative difference of the loss: in the first step, by rounding alone; in the next steps


def main(argv=None) -> int:
    parser = Parser(prog=os.path.basename(sys.argv[0]), description=__doc__.splitlines()[0])
    parser.add_argument("--restart", action="store_true", help="delete earlier runs and train anew")
    given = parser.parse_args(argv)
    if given.restart:
        shutil.rmtree(SAVE, ignore_errors=True)
    if make_minidata(demo.DATA):
        print(f"wrote 200 + 50 scenes to {demo.DATA}")
    begin = time.time()
    for name in RUNS:
        code = train(name)
        if code == EXIT_INTERRUPTED:
            print("call again to continue", file=sys.stderr)
        if code:
            return code
    same = show()
    print(f"{time.time() - begin:.0f} s in all")
    return 0 if same else 1


def train(name: str) -> int:
    """Train one of the runs to its end. Return the exit code."""
    text, processes, devices = RUNS[name]
    options = f"{JOB} {devices} --workers 1 --data-root {demo.DATA} --save-dir {os.path.join(SAVE, name)}"
    args = train_parser().parse_args(options.split())
    check_train(args)
    earlier = demo.earlier_state(args)
    if earlier and earlier["epoch"] >= args.epochs:
        print(f"{text}: already finished (--restart trains anew)")
        return 0
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
    command = [sys.executable, script, *options.split()]
    if earlier:
        command += ["--resume", os.path.join(SAVE, name, "last.ckpt")]
    if processes > 1:
        command = [mpiexec(), "-n", str(processes), *command]
    print(f"{text}: {' '.join(os.path.relpath(c) if os.path.isabs(c) else c for c in command)}", flush=True)
    code = call(command)
    if code and code != EXIT_INTERRUPTED:
        print(f"{text}: ended with exit code {code}", file=sys.stderr)
    return code


def mpiexec() -> str:
    """The path of mpiexec: that of this Python's packages, or else that of PATH."""
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
    if not found:
        raise UserError("mpiexec: not found; pip install mpich mpi4py")
    return found


def call(command: list) -> int:
    """Run a program and return its exit code. Pass Ctrl-C and SIGTERM on, and send the first at the limit."""
    # A session of its own: the terminal's Ctrl-C reaches the program only once, through this process.
    process = subprocess.Popen(command, start_new_session=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return process.wait(LIMIT)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGINT)  # the program may save
        return process.wait(GRACE)
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.kill()  # mpiexec's helper then ends the processes
            process.wait()


def show() -> bool:
    """Print losses and scores side by side. Return whether the first steps are the same."""
    from records import read_table

    tables = {name: read_table(os.path.join(SAVE, name, "steps.csv")) for name in RUNS}
    one, two = ([row["loss"] for row in table] for table in tables.values())
    differences = [abs(a - b) / abs(a) for a, b in zip(one, two)]
    print(f"\n{'step':>4}{'1 process':>14}{'2 processes':>14}{'difference':>14}   (training loss)")
    for i in range(min(SHOWN, len(differences))):
        print(f"{i + 1:>4}{one[i]:>14.6g}{two[i]:>14.6g}{two[i] - one[i]:>14.2g}")
    print(f"largest relative difference: {max(differences[:SHOWN]):.1e} in the first {SHOWN} steps, ", end="")
    print(f"{max(differences):.1e} in all {len(differences)}\n")
    print(f"{'':28}pixAcc   mIoU  images/s")
    for name, (text, *_) in RUNS.items():
        last = read_table(os.path.join(SAVE, name, "epochs.csv"))[-1]
        speed = last["images_per_second"]
        print(f"{text:28}{last['pixAcc']:6.3f} {last['mIoU']:6.3f} {'' if speed is None else format(speed, '9.2f')}")
    return differences[0] < SAME[0] and max(differences[:SHOWN]) < SAME[1]


if __name__ == "__main__":
    sys.exit(run(main))

"""tests/gpu/train_on_any_gpu.py on CPU contexts or, in `make test-gpu-emulated`, on the emulator."""

import json
import re
import sys

import pytest
import train_on_any_gpu as program
from environments import ended
from gpus import EMULATED, GPUS
from places import SUPPORT, TESTS

PROGRAM = TESTS / "gpu" / "train_on_any_gpu.py"
if GPUS and not EMULATED:
    pytest.skip("a GPU's owner runs the program itself", allow_module_level=True)


def run(*arguments):
    return ended([sys.executable, "-W", "ignore", *arguments], CUDA_EMULATOR_MACHINE="one", timeout=400)


def test_each_training_is_the_one_beside_it(tmp_path):
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    if GPUS:
        chosen, steps = ["processes", "shuffle"], 1
        where = []
    else:
        chosen, steps = ["local", "processes"], 10
        where = ["--dry-run"]
    options = ["--gpus", 2, "--steps", steps, "--ways", *chosen, "--out", tmp_path, "--commit", "this one"]
    done = run(PROGRAM, *where, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "real_gpu.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| .* \| +0 \|$", line)]
    assert [row.split(" |")[0][2:].strip() for row in rows] == [program.ways(2)[way].title for way in chosen]
    assert "!" not in "".join(rows)
    assert "- commit: this one\n" in text and "gluon_syncbn works here." in text


@pytest.mark.skipif(not GPUS, reason="MXNet's kernels are on GPUs")
def test_a_step_that_needs_a_kernel_of_mxnet_s_ends_the_program(tmp_path):
    skips = tmp_path / "skip_launches.so"
    ended(["gcc", "-shared", "-fPIC", SUPPORT / "skip_launches.c", "-o", skips, "-ldl"]).check_returncode()
    work = {"way": "leaky", "beside": False, "gpus": 1, "steps": 1, "dry": False, "out": str(tmp_path / "none")}
    text = f"""
        import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})
        import mxnet as mx, train_on_any_gpu as program
        step = program.Training.step
        program.Training.step = lambda one, *batch: (mx.nd.ones((2,), ctx=one.contexts[0]), step(one, *batch))[1]
        program.train({json.dumps(work).replace("false", "False")})
        """
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(line.strip() for line in text.splitlines())]
    done = ended(command, LD_PRELOAD=str(skips))
    assert done.returncode != 0
    assert "step 1 launched 1 kernels that this GPU has no code for" in done.stderr

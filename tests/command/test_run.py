"""`python -m gluon_syncbn run`: a script that knows contrib's layer, GluonCV's helpers and GPUs, as it is."""

import json
import os
import signal
import sys
from collections import Counter

import pytest
from environments import ended
from mxnet import gluon, nd
from nets import Operates
from places import PACKAGE, SUPPORT
from replicas import forward_and_backward

import gluon_syncbn
from gluon_syncbn.command import run
from gluon_syncbn.training.session import session

SCRIPT = '''
"""Prints how far a training step's losses, gradients and running statistics are from those of one device."""
import json
import helper  # beside the script
import mxnet as mx
import numpy as np
from gluoncv.utils.parallel import DataParallelCriterion, DataParallelModel, parallel_backward
from mxnet import autograd, gluon
from mxnet.gluon import nn

random = np.random.RandomState(1)
x, t = mx.nd.array(3 * random.randn(5, 2, 6, 6) + 1), mx.nd.array(5 * random.randn(5, 2, 6, 6))


def step(norm, contexts):
    norm.initialize(ctx=contexts)
    norm.gamma.set_data(mx.nd.array([2, 3]))
    model = DataParallelModel(norm, contexts, sync=True)
    criterion = DataParallelCriterion(gluon.loss.L2Loss(), contexts, sync=True)
    with autograd.record():
        losses = criterion(model(x), t)
    parallel_backward(losses)
    found = {"losses": np.concatenate([loss.asnumpy() for loss in losses])}
    found.update({p.name[-4:]: sum(g.asnumpy() for g in p.list_grad()) for p in (norm.gamma, norm.beta)})
    found.update({p.name[-4:]: p.data(contexts[-1]).asnumpy() for p in (norm.running_mean, norm.running_var)})
    return found


gpus = [mx.gpu(i) for i in mx.test_utils.list_gpus()]
got = step(mx.gluon.contrib.nn.SyncBatchNorm(in_channels=2, num_devices=len(gpus)), gpus)
want = step(nn.BatchNorm(in_channels=2), [mx.cpu()])
print(json.dumps({name: float(np.abs(got[name] - value).max() / np.abs(value).max()) for name, value in want.items()}))
'''


@pytest.fixture
def job(tmp_path):
    """Exit code, output and errors of a script in a folder."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("")

    def run(text, *command, launcher=(), code=None):
        (tmp_path / TRAIN).write_text(text)
        command = [*launcher, sys.executable, "-W", "ignore", *command]
        done = ended(command, PACKAGE.parent, SUPPORT, code=code, cwd=tmp_path, timeout=250)
        return done.returncode, done.stdout, done.stderr

    return run


RUN = ("-m", "gluon_syncbn", "run")
TRAIN = "scripts/train.py"
FROZEN = "its layers had one device each, or are frozen"
NOTHING = f"gluon_syncbn: {TRAIN} has trained, and nothing was synchronised: "
MEET = "gluon_syncbn: 1 layer synchronised over "


def test_an_unedited_script_is_one_device_with_the_whole_batch(job):
    _, output, errors = job(SCRIPT, *RUN, "--cpus", "2", TRAIN, code=0)
    line, end = errors.splitlines()
    assert end == f"{MEET}cpu(0) to cpu(1)"
    for fact in (TRAIN, "mx.gluon.contrib.nn.SyncBatchNorm", "mx.sym.contrib.SyncBatchNorm", "gluoncv.utils.parallel"):
        assert fact in line
    assert "mx.gpu(0) to mx.gpu(1) are CPU contexts" in line
    away = json.loads(output)
    assert len(away) == 5 and all(far < 1e-4 for far in away.values()), away


#: Trains a net with plain BatchNorm, of which a part has run; prints whether the statistics are those of all contexts.
PLAIN = """
import sys
import mxnet as mx
from gluoncv.model_zoo import get_model
from mxnet import autograd, gluon
from mxnet.gluon import nn

mx.random.seed(1)
net = nn.HybridSequential()
net.add(nn.BatchNorm(in_channels=3), nn.Dense(2, in_units=3))
frozen = nn.BatchNorm(in_channels=3)
for number in sys.argv[1]:
    contexts = [mx.gpu(i) for i in range(int(number))]
    kv = mx.kv.create(sys.argv[3])
    net.initialize(ctx=contexts, force_reinit=True)
    net.hybridize()
    net(mx.nd.ones((2, 3), ctx=contexts[0]))
    if sys.argv[2] == "predicts":
        continue
    net[0]._kwargs["use_global_stats"] = sys.argv[2] == "freezes"
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)
    for _ in range(2):
        with autograd.record():
            losses = [net(k + mx.nd.random.normal(shape=(4, 3), ctx=c)) for k, c in enumerate(contexts, kv.rank)]
        autograd.backward(losses)
        trainer.step(8)
shared = net[0].running_mean.data(contexts[-1]).asnumpy().mean() > 0.05
sys.stdout.write(f"{type(net[0]).__name__} {type(frozen).__name__} {shared}\\n")  # in one piece
if sys.argv[2] == "raises":
    raise RuntimeError("late")
"""


@pytest.mark.parametrize(
    "given, own, printed, said",
    [
        (["--convert"], ["12", "raises"], "SyncBatchNorm BatchNorm True", [f"{MEET}cpu(0) to cpu(1)"]),
        (["--convert"], ["1", "trains"], "SyncBatchNorm BatchNorm False", [f"{NOTHING}{FROZEN}"]),
        (["--convert"], ["2", "freezes"], "SyncBatchNorm BatchNorm False", [f"{NOTHING}{FROZEN}"]),
        ([], ["2", "trains"], "BatchNorm BatchNorm True", [f"{NOTHING}try run --convert"]),
        ([], ["2", "predicts"], "BatchNorm BatchNorm False", []),
    ],
)
def test_a_script_with_plain_batch_norm(job, given, own, printed, said):
    raises = own[1] == "raises"
    _, output, errors = job(PLAIN, *RUN, "--cpus", "2", *given, TRAIN, *own, "device", code=int(raises))
    first, *rest = errors.splitlines()
    if raises:
        assert rest.pop() == "RuntimeError: late" and "Traceback" in rest[1], errors
        del rest[1:]
    assert output == f"{printed}\n" and ("converts the nets" in first) == bool(given)
    assert [line[: len(one)] for line, one in zip(rest, said)] == said and len(rest) == len(said), errors


@pytest.mark.parametrize("kvstore", ["mpi", "device"])
def test_a_script_in_two_processes(job, kvstore):
    """Its own ``--kvstore mpi`` is enough; otherwise the last line says that the processes do not meet."""
    launcher = [os.path.join(os.path.dirname(sys.executable), "mpiexec"), "-n", "2"]
    own = ["--cpus", "2", "--convert", TRAIN, "1", "trains", kvstore]
    _, output, errors = job(PLAIN, *RUN, *own, launcher=launcher, code=0)
    if kvstore == "mpi":
        assert output == "SyncBatchNorm BatchNorm True\n" * 2
        assert errors.count(f"{MEET}2 replicas of 2 processes") == 2, errors
    else:
        assert output.count("SyncBatchNorm BatchNorm") == 2
        assert errors.count("gluon_syncbn: This is one of 2 processes (PMI_SIZE), but its layers meet no replica") == 2


def test_nets_that_call_the_operator(contexts, monkeypatch):
    """One is eager, and its parameters tell; one is hybridized, and its graph tells."""
    for name, empty in (("ran", Counter()), ("stores", [])):
        monkeypatch.setattr(session, name, empty)
    gluon_syncbn.install(convert=True)
    nets = Operates(prefix="named_"), Operates("gbmv", prefix="other_")
    nets[1].hybridize()
    for net, name in zip(nets, ("named", "other_called")):
        net.initialize(ctx=contexts[:2])
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        forward_and_backward(net, [nd.random.normal(shape=(4, 3), ctx=context) for context in contexts[:2]])
        with pytest.warns(UserWarning, match=rf"^0 of 1 layers of .* are synchronised, and these are not: {name}\."):
            trainer.step(8)
    (text,) = run._what_met("train.py", True)
    assert text.endswith("call layers, not operators")


def test_the_script_finds_what_it_finds_by_itself(job):
    text = """
import json, multiprocessing, os, sys
import helper
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, os.getcwd(), main.__file__]))
# By these, the processes of a pool return objects of the script's classes.
print(sys.modules["__mp_main__"] is main, main.__spec__)
"""
    given = TRAIN, "--cpus", "3", "run", "-h", "--", "--c"
    by_itself, ran = (job(text, *command, *given, code=0) for command in (("-u",), (*RUN, "--")))
    assert by_itself[:2] == ran[:2]


ENDS = {
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("def read():\n    raise RuntimeError('out of data')\n\nread()", 1),
    "a chain of them": ("try:\n    json.loads('[')\nexcept ValueError as error:\n    raise OSError(3) from error", 1),
    "no Python": ("x = = 1", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", -signal.SIGINT),
}


@pytest.mark.parametrize("way", ENDS)
def test_it_ends_as_the_script_does(job, way):
    start = "import json, os, signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    text, code = ENDS[way]
    by_itself, ran = (job(start + text, *command, TRAIN) for command in ((), RUN))
    assert by_itself[0] == ran[0] == code
    assert by_itself[1] == ran[1] == ""
    assert ran[2].splitlines()[0].startswith("gluon_syncbn: scripts/train.py runs with")
    assert ran[2].split("\n", 1)[1] == by_itself[2]  # the traceback has the script's frames and no others


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["walk"], "argument command: invalid choice: 'walk' (choose from "),
        (["check", "all"], "unrecognized arguments: all"),
        (["check", "--rep"], "unrecognized arguments: --rep"),
        (["run"], "the following arguments are required: script"),
        (["run", "missing.py"], "script: 'missing.py' was given, expected a Python file that can be read"),
        (["run", "scripts"], "script: 'scripts' was given, expected a Python file that can be read"),
        (["run", "--cpus", "0", TRAIN], "cpus: 0 was given, expected a whole number from 1 to 1024"),
        (["run", "--cpus=1e3", TRAIN], "argument --cpus: invalid int value: '1e3'"),
        (["run", "--cpus"], "argument --cpus: expected one argument"),
        (["run", "--gpus", "2", TRAIN], "unrecognized arguments: --gpus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_named(tmp_path, monkeypatch, capsys, arguments, expected):
    (tmp_path / "scripts").mkdir()
    (tmp_path / TRAIN).write_text("print('it ran')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run.main(arguments)
    output, errors = capsys.readouterr()
    assert (end.value.code, output) == (2, "")
    assert f": error: {expected}" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, printed",
    [(["--help"], "check"), (["run", "-h"], "--cpus N"), (["--version"], f"gluon_syncbn {gluon_syncbn.__version__}\n")],
)
def test_help_and_version(capsys, arguments, printed):
    with pytest.raises(SystemExit) as end:
        run.main(arguments)
    output, errors = capsys.readouterr()
    assert not end.value.code and printed in output and not errors

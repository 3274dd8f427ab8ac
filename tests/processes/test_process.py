"""Signals, exits, forks and engines: what ends a process in mid-step ends it soon, with its own exit code."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from replicas import WAYS

import gluon_syncbn

PATHS = [str(Path(__file__).parent), str(Path(gluon_syncbn.__file__).parents[1])]
# What this process has set for itself.
UNSET = ("MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY", "MXNET_ENGINE_TYPE")

# Two replicas; nothing but the end of the process, or a failure, ends a wait within the tests' limits.
START = """
import os, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
warnings.simplefilter("ignore")
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import WAYS, assert_same, make_batch, on_devices, prepare, step, truth
import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

contexts = gluon_syncbn.cpu_devices(2, temp_copies=64)
gluon_syncbn.configure(timeout=300)
batch = make_batch(np.random.RandomState(0), 2)
layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64")
xs = on_devices(batch.shards, contexts, "float64")

def ready():
    print("ready", flush=True)
"""


class Script:
    """A Python process that says `ready`, does something and ends; it is killed where it does not end."""

    def __init__(self, text, start=START, arguments=(), **environment):
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        self.process = subprocess.Popen(
            [sys.executable, "-c", start + text, *arguments],
            env={**kept, "PYTHONPATH": os.pathsep.join(PATHS), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.communicate()

    def until_ready(self):
        line = self.process.stdout.readline()  # ends with the process at the latest
        assert line == "ready\n", line + self.process.stderr.read()

    def end(self, within):
        """Exit code, output and errors; fails where the process has not ended `within` these seconds."""
        try:
            output, errors = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            errors = self.process.communicate()[1]
            pytest.fail(f"the process had not ended after {within} s: {errors[-2000:]}")
        return self.process.returncode, output, errors


def run(text, within, **kwargs):
    """Runs it to its end: `within` seconds of being ready."""
    with Script(text, **kwargs) as script:
        script.until_ready()
        return script.end(within)


# ---- the end of the main thread in mid-step ------------------------------------------------------------------

ENDS = {
    "sys.exit in the step": (
        """
with autograd.record():
    layer(xs[0])
    sys.exit(7)
""",
        7,
    ),
    "an exception in the step": (
        """
with autograd.record():
    y = layer(xs[0])
    raise RuntimeError("out of data")
""",
        1,
    ),
    "an exception after the scope": (
        """
with autograd.train_mode():
    y = layer(xs[0])
raise RuntimeError("out of data")
""",
        1,
    ),
    "only one loss's backward": (
        """
with autograd.record():
    ys = [layer(x) for x in xs]
ys[0].backward()
raise RuntimeError("out of data")
""",
        1,
    ),
    "the end of the script": (
        """
with autograd.record():
    y = layer(xs[0])
""",
        0,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_end_in_mid_step(how):
    text, code = ENDS[how]
    got, _, errors = run("ready()" + text, within=8)
    assert got == code, errors
    assert ("out of data" in errors) == (code == 1)
    assert "terminate called" not in errors


@pytest.mark.parametrize("end, code", [("", 0), ("raise RuntimeError('out of data')", 1)])
def test_a_worker_that_waits_while_the_main_thread_ends(end, code):
    text = """
def work():
    try:
        with autograd.record():
            y = layer(xs[0])
        y.asnumpy()
    except mx.MXNetError as error:
        print(error, flush=True)
threading.Thread(target=work).start()
time.sleep(0.3)
ready()
"""
    got, output, errors = run(text + end, within=8)
    assert got == code, errors
    assert "1 of 2 replicas arrived (cpu(0)), missing cpu(1)" in output
    assert "its main thread is gone" in output


def test_a_thread_that_goes_on_after_the_main_thread():
    """It may take its time between two replicas: whoever can still call the other one is no reason to end."""
    text = """
def work():
    threading.main_thread().join()
    for turn in range(2):
        with autograd.record():
            ys = [layer(xs[0])]
            time.sleep(3.5)
            ys.append(layer(xs[1]))
        print(np.isfinite(ys[1].asnumpy()).all(), flush=True)
threading.Thread(target=work).start()
ready()
"""
    code, output, errors = run(text, within=20)
    assert (code, output) == (0, "True\nTrue\n"), errors


@pytest.mark.parametrize("pause", [0, 0.01])
def test_a_daemon_thread_that_trains_while_the_process_ends(pause):
    text = """
def work():
    while True:
        train()
        time.sleep(float(sys.argv[2]))
threading.Thread(target=work, daemon=True).start()
time.sleep(0.5 * np.random.RandomState(os.getpid()).rand())
ready()
"""
    text = HEALTHY.replace("for _ in range(3)", "for _ in range(2)") + text
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        ways = ["eager", "hybrid", "static_alloc", "static_shape"]
        runs = [pool.submit(run, text, 20, arguments=[ways[i % 4], str(pause)], OMP_NUM_THREADS="1") for i in range(8)]
        for code, _, errors in [r.result() for r in runs]:
            assert code == 0, errors
            assert "terminate called" not in errors


HEALTHY = """
net = nn.HybridSequential()
for _ in range(3):
    net.add(nn.Conv2D(8, 3, padding=1), SyncBatchNorm(), nn.Activation("relu"))
net.add(nn.Dense(5))
net.initialize(mx.init.Xavier(), ctx=contexts)
if WAYS[sys.argv[1]] is not None:
    net.hybridize(**WAYS[sys.argv[1]])
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
steps = 0
def train(places=contexts):
    global steps
    steps += 1
    with autograd.record():
        losses = [net(nd.ones((2, 3, 8, 8), ctx=c) * i).sum() for i, c in enumerate(places, steps)]
    autograd.backward(losses)
    trainer.step(4, ignore_stale_grad=True)
    return losses
"""


def ends_of(text, ways, count):
    """What became of `count` runs, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        runs = [pool.submit(run, text, 20, arguments=[ways[i % len(ways)]], OMP_NUM_THREADS="1") for i in range(count)]
        return [r.result() for r in runs]


def test_the_end_right_after_a_healthy_step_was_issued():
    """Twenty times: what is in flight at the end is a matter of chance."""
    text = HEALTHY + "train(); train()\nready()\ntrain()"
    for code, _, errors in ends_of(text, ["eager", "static_shape"], 20):
        assert (code, errors) == (0, "")


def test_the_end_after_failed_steps():
    text = (
        HEALTHY
        + """
train()
gluon_syncbn.configure(timeout=0.2)
ready()
for turn in range(2):
    train([contexts[turn]])
    train()
train(contexts[:1])
"""
    )
    for code, _, errors in ends_of(text, ["static_shape", "static_alloc"], 4):
        assert code == 0, errors
        assert "terminate called" not in errors and "Traceback" not in errors


# ---- signals -------------------------------------------------------------------------------------------------

WAITS = """
with autograd.record():
    y = layer(xs[0])
ready()
y.asnumpy()
"""


def test_ctrl_c_while_a_replica_is_missing():
    with Script(WAITS) as script:
        script.until_ready()
        time.sleep(0.5)  # now it waits
        script.process.send_signal(signal.SIGINT)
        code, _, errors = script.end(within=5)
    assert code in (1, -signal.SIGINT), errors
    assert re.search("^KeyboardInterrupt", errors, re.M) or "asked to end (Ctrl-C" in errors


def test_ctrl_c_while_replicas_of_threads_are_missing():
    """The main thread waits for threads that wait: that it can be interrupted does not end their waiting."""
    text = """
def work():
    with autograd.record():
        y = layer(xs[0])
    y.asnumpy()
threads = [threading.Thread(target=work)]
threads[0].start()
time.sleep(0.3)
ready()
threading.Event().wait()  # an interrupted join() would let Python 3.11 exit without the thread's last words
"""
    with Script(text) as script:
        script.until_ready()
        time.sleep(0.5)
        script.process.send_signal(signal.SIGINT)
        code, _, errors = script.end(within=8)
    assert code in (1, -signal.SIGINT), errors
    assert "KeyboardInterrupt" in errors
    assert "1 of 2 replicas arrived (cpu(0)), missing cpu(1)" in errors


def test_a_handler_that_only_takes_note():
    """Ctrl-C that the program handles itself disturbs no step, however often it comes."""
    text = """
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
start = time.monotonic()
# The second replica comes late, so that the first one waits long enough to look for interrupts.
late = threading.Event()
count = 0
ready()
while time.monotonic() < start + 4:
    count += 1
    ys = []
    with autograd.record():
        for x in xs:
            ys.append(layer(x))
            if count % 4 == 0:
                time.sleep(0.15)
    autograd.backward(ys, on_devices(batch.heads, contexts, "float64"))
    nd.waitall()
assert len(seen) >= 5, seen
want = truth(batch, steps=count)
got = step(layer, batch, contexts, "float64")
assert_same(got, truth(batch, steps=count + 1), 1e-11)
print("right")
"""
    with Script(text) as script:
        script.until_ready()
        for _ in range(8):
            time.sleep(0.3)
            script.process.send_signal(signal.SIGINT)
        code, output, errors = script.end(within=15)
    assert (code, output) == (0, "right\n"), errors


def test_a_handler_that_calls_the_one_before_it():
    """Whoever installs a handler over the library's is called, and may call back, without going round in circles."""
    text = """
import faulthandler
gluon_syncbn.configure(timeout=0.3)
for turn in range(2):
    with autograd.record():
        y = layer(xs[0])
    try:
        y.asnumpy()
    except mx.MXNetError:
        pass
    if turn == 0:
        faulthandler.register(signal.SIGINT, chain=True)
ready()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    sys.exit(5)
"""
    code, _, errors = run(text, within=8)
    assert code == 5, errors[-2000:]


def test_a_pause_of_the_whole_process():
    """Ctrl-Z and `fg` later: time in which nobody could come does not count."""
    text = """
gluon_syncbn.configure(timeout=5)
with autograd.record():
    ys = [layer(xs[0])]
    time.sleep(0.5)
    ready()
    begin = time.process_time()
    while time.process_time() < begin + 1:  # the other replica's part
        pass
    ys.append(layer(xs[1]))
assert_same(step(layer, batch, contexts, "float64"), truth(batch, steps=2), 1e-11)
"""
    with Script(text) as script:
        script.until_ready()
        script.process.send_signal(signal.SIGSTOP)
        time.sleep(7)
        script.process.send_signal(signal.SIGCONT)
        code, _, errors = script.end(within=10)
    assert code == 0, errors


def test_sigterm_ends_at_once():
    with Script(WAITS) as script:
        script.until_ready()
        time.sleep(0.5)
        script.process.send_signal(signal.SIGTERM)
        code, _, errors = script.end(within=1)
    assert code == -signal.SIGTERM, errors


# ---- what ends a process that does not look out --------------------------------------------------------------


FOUR = START.replace("cpu_devices(2,", "cpu_devices(4,").replace("RandomState(0), 2)", "RandomState(0), 4)")


@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_a_kvstore_on_changing_contexts(kvstore):
    """A store keeps what it made for the contexts of a key's first sum."""
    text = """
rng = np.random.RandomState(1)
layer = prepare(SyncBatchNorm(in_channels=5, momentum=0, kvstore=sys.argv[1]), batch, contexts, "float64")
ready()
for count in [2, 4, 1, 3, *rng.randint(1, 5, 12)]:
    places = [contexts[i] for i in sorted(rng.permutation(4)[:count])]
    part = make_batch(rng, count)
    part = part._replace(gamma=batch.gamma, beta=batch.beta)
    with gluon_syncbn.devices(places):
        layer.collect_params().zero_grad()
        got = step(layer, part, places, "float64")
    assert_same(got, truth(part, momentum=0), 1e-11)
print("right")
"""
    code, output, errors = run(text, within=20, start=FOUR, arguments=[kvstore])
    assert (code, output) == (0, "right\n"), errors[-2000:]


def test_configure_in_mid_step():
    """Whatever adds the statistics meanwhile, they are right."""
    text = """
stop = threading.Event()
def change():
    stores = [None, mx.kv.create("device"), "local", mx.kv.create("local")]
    while not stop.is_set():
        for store in stores:
            gluon_syncbn.configure(kvstore=store)
            time.sleep(2e-4)
changer = threading.Thread(target=change)
changer.start()
ready()
end, layer = time.monotonic() + 6, prepare(SyncBatchNorm(in_channels=5, momentum=0), batch, contexts, "float64")
want = truth(batch, momentum=0)
while time.monotonic() < end:
    assert_same(step(layer, batch, contexts, "float64"), want, 1e-11)
stop.set()
changer.join()
print("right")
"""
    code, output, errors = run(text, within=20)
    assert (code, output) == (0, "right\n"), errors[-2000:]


# ---- temporary space, engines and forks ----------------------------------------------------------------------

CONVOLUTIONAL = """
import sys, time, warnings
warnings.simplefilter("ignore")
import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from mxnet.gluon import nn
import gluon_syncbn

contexts = [mx.cpu(0), mx.cpu(1)] if sys.argv[1] == "without" else gluon_syncbn.cpu_devices(2)
layers = int(sys.argv[2])

def build(norm):
    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=8), norm(in_channels=8), nn.Activation("tanh"))
    return net

def train(net, shards):
    xs = [nd.array(x, ctx=c) for x, c in zip(shards, contexts)]
    with autograd.record():
        ys = [net(x) for x in xs]
        losses = [(y * y * y).sum() for y in ys]
    autograd.backward(losses)
    # of the parameters that come first: the gradient went through all layers
    gradient = sum(g.asnumpy() for g in net[0].weight.list_grad()) if len(xs) > 1 else net[0].weight.grad().asnumpy()
    return np.concatenate([y.asnumpy() for y in ys]), gradient

rng = np.random.RandomState(0)
net, plain = build(gluon_syncbn.SyncBatchNorm), build(nn.BatchNorm)
plain.initialize(mx.init.Xavier(), ctx=contexts[:1])
net.initialize(ctx=contexts)
for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
    p.set_data(q.data())
print("ready", flush=True)
shards = [(i + 1) * rng.randn(n, 8, 12, 12) + i for i, n in enumerate((3, 2))]
start = time.monotonic()
try:
    got = train(net, shards)
except mx.MXNetError as error:
    print("%.1f" % (time.monotonic() - start), error)
    sys.exit(3)
want = train(plain, [np.concatenate(shards)])
for g, w in zip(got, want):
    assert np.abs(g - w).max() < 1e-3 * np.abs(w).max(), np.abs(g - w).max() / np.abs(w).max()
"""


# MXNet's default is 4 copies: as many convolutions before the first of the other replica fit in the forward.
@pytest.mark.parametrize("layers, phase", [(12, "forward"), (4, "backward")])
def test_too_little_temporary_space(layers, phase):
    code, output, errors = run("", within=20, start=CONVOLUTIONAL, arguments=["without", str(layers)])
    assert code == 3, errors
    assert float(output.split()[0]) < 12
    assert re.search(f"SyncBatchNorm 'batchnorm[0-9]+', {phase} of call 1: 1 of 2 replicas arrived", output), output
    assert "missing cpu(" in output and "nothing has been computed for 3 s" in output
    assert "gluon_syncbn.cpu_devices(n)" in output


def test_enough_temporary_space():
    code, output, errors = run("", within=20, start=CONVOLUTIONAL, arguments=["with", "12"])
    assert (code, output) == (0, ""), output + errors


RANDOM = """
contexts = gluon_syncbn.cpu_devices(2, random_copies=int(sys.argv[1]))
net = nn.HybridSequential()
for _ in range(8):
    net.add(nn.Dropout(0.5), SyncBatchNorm(in_channels=5))
net.initialize(ctx=contexts)
with autograd.record():
    ys = [net(x.astype("float32")) for x in xs]
ready()
try:
    print([y.shape for y in ys if np.isfinite(y.asnumpy()).all()])
except mx.MXNetError as error:
    print(error)
"""


def test_random_states_for_many_dropouts():
    """Eight random operators in a replica's forward: as many copies are enough for two replicas."""
    start = START.replace("cpu_devices(2, temp_copies=64)", "cpu_devices(2, random_copies=1)")
    code, output, errors = run(RANDOM, within=20, start=start, arguments=["1"])
    assert code == 0, errors
    assert "1 of 2 replicas arrived" in output and "many Dropouts its random_copies" in output
    code, output, errors = run(RANDOM, within=20, start=start, arguments=["8"])
    assert (code, output) == (0, "[(2, 5, 4, 6), (5, 5, 4, 6)]\n"), errors


def test_naive_engine():
    text = """
ready()
try:
    with autograd.record():
        ys = [layer(x) for x in xs]
    ys[0].asnumpy()
except mx.MXNetError as error:
    print(error)
alone = make_batch(np.random.RandomState(0), 1)
one = prepare(SyncBatchNorm(in_channels=5), alone, contexts[:1], "float64")
assert_same(step(one, alone, contexts, "float64"), truth(alone), 1e-11)
"""
    code, output, errors = run(text, within=8, MXNET_ENGINE_TYPE="NaiveEngine")
    assert code == 0, errors
    assert "SyncBatchNorm 'batchnorm0'" in output and "MXNET_ENGINE_TYPE=NaiveEngine" in output


FORKS = {
    "os.fork": """
def fork():
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if sys.version_info >= (3, 9) else 7
""",
    "multiprocessing": """
import multiprocessing
def fork():
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
    child.start()
    child.join()
    return child.exitcode
""",
    "preexec_fn": """
import subprocess
def fork():
    return subprocess.run([sys.executable, "-c", "raise SystemExit(7)"], preexec_fn=os.getpid).returncode
""",
}


@pytest.mark.parametrize("way", FORKS)
def test_a_fork_while_a_step_is_in_flight(way):
    """The loss is read, the backward still runs."""
    text = """
for turn in range(6):
    losses = train()
    losses[0].asnumpy()
    assert fork() == 7
got = [net.collect_params()[p.name].data(c).asnumpy() for p in net.collect_params().values() for c in contexts]
assert all(np.isfinite(value).all() for value in got)
print("right")
"""
    for code, output, errors in ends_of(HEALTHY + FORKS[way] + "\nready()\n" + text, ["eager", "static_alloc"], 4):
        assert (code, output) == (0, "right\n"), errors[-2000:]


@pytest.mark.parametrize("way", WAYS)
def test_a_fork_between_two_replicas(way):
    """Nobody can call the other replica meanwhile: an error that says so, at once, and the next step is right."""
    text = """
for turn in range(2):  # the second time, a static graph executes what it has made
    layer.hybridize(**WAYS[sys.argv[1]]) if WAYS[sys.argv[1]] is not None and turn == 0 else None
    step(layer, batch, contexts, "float64")
    start = time.monotonic()
    with autograd.record():
        ys = [layer(xs[0])]
        assert fork() == 7
        assert time.monotonic() - start < 20, time.monotonic() - start
        try:
            ys.append(layer(xs[1]))
            nd.waitall()
        except mx.MXNetError as error:
            print(error)
    gluon_syncbn.reset()
    for name, value in zip(("running_mean", "running_var"), (0, 1)):
        getattr(layer, name).set_data(nd.ones(5, dtype="float64") * value)
    assert_same(step(layer, batch, contexts, "float64"), truth(batch), 1e-11)
print("right")
"""
    code, output, errors = run(FORKS["os.fork"] + "ready()" + text, within=30, arguments=[way])
    assert code == 0, errors[-2000:]
    assert output.endswith("right\n")
    assert output.count("the process was forked") == 2
    assert "SyncBatchNorm 'batchnorm0', forward of call" in output and "missing cpu(1)" in output


def test_the_child_of_a_fork_trains_and_ends():
    text = """
train()
ready()
for turn in range(3):
    child = os.fork()
    if child == 0:
        assert_same(step(layer, batch, contexts, "float64"), truth(batch), 1e-11)
        train()
        sys.exit(5)  # with a step in flight
    assert os.waitpid(child, 0)[1] == 5 << 8
    train()
print("right")
"""
    for code, output, errors in ends_of(HEALTHY + text, ["eager", "static_shape"], 6):
        assert (code, output) == (0, "right\n"), errors[-2000:]


def test_loader_processes():
    """Workers are forked from a process that trains, and end without a word."""
    text = """
class Samples(gluon.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return np.random.RandomState(i).randn(5, 4, 6), float(i)

def main():
    loader = gluon.data.DataLoader(Samples(), batch_size=4, num_workers=2)
    ready()
    seen = 0
    for epoch in range(2):
        for x, _ in loader:
            shards = np.split(x.asnumpy(), [1])
            got = step(layer, batch._replace(shards=shards, heads=shards), contexts, "float64")
            want = truth(batch._replace(shards=shards, heads=shards))
            for i in range(2):
                np.testing.assert_allclose(got.dxs[i], want.dxs[i], rtol=0, atol=1e-10)
            seen += len(x)
    assert seen == 24

main()
"""
    code, output, errors = run(text, within=25)
    assert (code, output, errors) == (0, "", "")

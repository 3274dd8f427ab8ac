"""Signals, exits, forks and engines: what ends a process in mid-step ends it soon, with its own exit code."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments import shell
from internals import WHY_CUSTOM
from places import PACKAGE, SUPPORT
from replicas import WAYS

# Seconds: far more than anything here takes where all cores are busy, far fewer than the 300 of a replica's time limit.
LIMIT = 60

# Two replicas; nothing but the end of the process, or a failure, ends a wait within the tests' limits.
START = """
import os, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
warnings.simplefilter("ignore")
import light
import gluon_syncbn
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import WAYS, assert_same, interrupt_handler, make_batch, on_devices, prepare, short_waits, step, truth
from gluon_syncbn import SyncBatchNorm

contexts = gluon_syncbn.cpu_devices(2)
gluon_syncbn.configure(timeout=300)
batch = make_batch(np.random.RandomState(0), 2)
layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64")
xs = on_devices(batch.shards, contexts, "float64")

def ready():
    print("ready", flush=True)

idle = interrupt_handler()
def until_it_waits():
    while interrupt_handler() == idle:
        time.sleep(0.01)
"""


class Script:
    """A Python process that says `ready`, does something and ends; it is killed where it does not end."""

    def __init__(self, text, start=START, arguments=(), **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", start + text, *arguments],
            env=shell(SUPPORT, PACKAGE.parent, **environment),
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
        end = threading.Timer(LIMIT, self.process.kill)
        end.start()
        line = b""  # and no more, which `communicate` would not see; it ends with the process at the latest
        while not line.endswith(b"\n") and (more := os.read(self.process.stdout.fileno(), 1)):
            line += more
        end.cancel()
        assert line == b"ready\n", line.decode() + self.process.stderr.read()

    def end(self, limit=LIMIT):
        """Exit code, output and errors; fails where the process does not end."""
        try:
            output, errors = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            errors = self.process.communicate()[1]
            pytest.fail(f"the process had not ended after {limit} s: {errors[-2000:]}")
        return self.process.returncode, output, errors


def run(text, **kwargs):
    """Runs it to its end, which has to come soon after it was ready."""
    with Script(text, **kwargs) as script:
        script.until_ready()
        return script.end()


def ends(runs):
    """What became of each of these runs, (text, settings) by name, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        jobs = {name: pool.submit(run, text, **settings) for name, (text, settings) in runs.items()}
        return {name: job.result() for name, job in jobs.items()}


def ends_of(text, ways):
    """Of a run of each of these ways."""
    runs = [(text, {"arguments": [way], "OMP_NUM_THREADS": "1"}) for way in ways]
    return ends(dict(enumerate(runs))).values()


# ---- the end of the main thread in mid-step ------------------------------------------------------------------

IN_THE_STEP = "with autograd.record():\n    y = layer(xs[0])\n"
OUT_OF_DATA = "raise RuntimeError('out of data')"
ENDS = {
    "sys.exit in the step": (IN_THE_STEP + "    sys.exit(7)", 7),
    "an exception in the step": (IN_THE_STEP + "    " + OUT_OF_DATA, 1),
    "an exception after the scope": (IN_THE_STEP.replace("record", "train_mode") + OUT_OF_DATA, 1),
    "only one loss's backward": (IN_THE_STEP + "    z = layer(xs[1])\ny.backward()\n" + OUT_OF_DATA, 1),
    "the end of the script": (IN_THE_STEP, 0),
}


@pytest.fixture(scope="module")
def ended():
    return ends({how: ("ready()\n" + text, {}) for how, (text, _) in ENDS.items()})


@pytest.mark.parametrize("how", ENDS)
def test_the_end_in_mid_step(how, ended):
    code = ENDS[how][1]
    got, _, errors = ended[how]
    assert got == code, errors
    assert ("out of data" in errors) == (code == 1)
    assert "terminate called" not in errors


def test_a_worker_that_waits_while_the_main_thread_ends():
    text = """
def work():
    try:
        with autograd.record():
            y = layer(xs[0])
        y.asnumpy()
    except mx.MXNetError as error:
        print(error, flush=True)
threading.Thread(target=work).start()
until_it_waits()
ready()
"""
    code, output, errors = run(text + OUT_OF_DATA)
    assert code == 1, errors
    assert "1 of 2 replicas arrived (cpu(0)), missing cpu(1)" in output
    assert "Nobody has called the layer there, and thread 'Thread-1" in output


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


def test_the_end_right_after_a_healthy_step_was_issued():
    """The second replica is late, so that the first one waits for it at the end; and the step is finished. Nobody waits
    for a thread that has trained, and waits for something else.
    """
    text = """
def work():
    train()
    trained.set()
    threading.Event().wait()
trained = threading.Event()
threading.Thread(target=work, daemon=True).start()
trained.wait()
train()
work = nd.ones((1000, 1000), ctx=contexts[1]) * 1e-3
work.wait_to_read()
close = gluon_syncbn._native.close
gluon_syncbn._native.close = lambda: (print("failure:", gluon_syncbn._native.failure()), close())
ready()
for _ in range(5):
    work = nd.dot(work, work)
train()
"""
    for result in ends_of(HEALTHY + text, ["eager", "static_shape"]):
        assert result == (0, "failure: \n", "")


def test_a_daemon_thread_that_trains_while_the_process_ends():
    """What is in flight at the end is a matter of chance, most of all where a graph runs without Python."""
    text = """
def work():
    while True:
        train()
thread = threading.Thread(target=work, daemon=True)
from gluon_syncbn.training import steps as ends
drain = ends.drain
ends.drain = lambda: (print("the thread is alive:", thread.is_alive(), file=sys.stderr), drain())[1]
thread.start()
while thread.is_alive() and not ends.training_threads():
    time.sleep(0.001)
time.sleep(0.5 * np.random.RandomState(os.getpid()).rand())
assert thread.is_alive()
ready()
"""
    text = HEALTHY.replace("for _ in range(3)", "for _ in range(2)") + text
    for code, _, errors in ends_of(text, ["eager", "static_alloc", "static_shape"]):
        assert code == 0, errors
        assert "terminate called" not in errors
        assert "the thread is alive: False\n" in errors, errors


def test_many_failures_at_the_same_time():
    """MXNet's list of errors has no lock: several threads of its engine that fail at once would end the process."""
    text = """
arrays = [nd.zeros(1) for _ in range(4000)]
nd.waitall()
gluon_syncbn._native.fail("somebody has failed")
ready()
for _ in range(10):
    gluon_syncbn._native.gate(arrays)
    try:
        nd.waitall()
    except mx.MXNetError as error:
        assert "somebody has failed" in str(error)
    else:
        raise AssertionError("nothing has failed")
gluon_syncbn.reset()
"""
    code, output, errors = run(text, MXNET_CPU_WORKER_NTHREADS="4")
    assert (code, output) == (0, ""), errors


def test_a_failure_before_the_first_call():
    """Calls outside of all scopes share one, which begins with the first of them and must not keep the failure."""
    text = """
autograd.set_training(True)
gluon_syncbn._native.fail("somebody has failed")
ready()
said = []
for _ in range(2):
    try:
        for y in list(map(layer, xs)):
            y.asnumpy()
    except mx.MXNetError as error:
        said.append(str(error))
    gluon_syncbn.reset()
assert len(said) == 1 and "somebody has failed" in said[0], said
"""
    code, _, errors = run(text)
    assert code == 0, errors


def test_the_end_after_failed_steps():
    text = """
train()
ready()
for turn in range(2):
    with short_waits():
        train([contexts[turn]])
        while not gluon_syncbn._native.failure():  # reading a result would take the error away
            time.sleep(0.01)
    train()
train(contexts[:1])
"""
    for code, _, errors in ends_of(HEALTHY + text, ["static_shape", "static_alloc"]):
        assert code == 0, errors
        assert "terminate called" not in errors and "Traceback" not in errors


# ---- signals -------------------------------------------------------------------------------------------------

WAITS = """
with autograd.record():
    y = layer(xs[0])
until_it_waits()
ready()
y.asnumpy()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_replica_is_missing(number):
    with Script(WAITS) as script:
        script.until_ready()
        time.sleep(0.3)  # so that the main thread waits too
        script.process.send_signal(number)
        code, _, errors = script.end()
    assert code == -number or (code == 1 and number == signal.SIGINT), errors
    told = re.search("^KeyboardInterrupt", errors, re.M) or "asked to end (Ctrl-C" in errors
    assert told or number == signal.SIGTERM, errors


def test_ctrl_c_while_replicas_of_threads_are_missing():
    """The main thread waits for threads that wait: that it can be interrupted does not end their waiting."""
    text = """
def work():
    with autograd.record():
        y = layer(xs[0])
    y.asnumpy()
threads = [threading.Thread(target=work)]
threads[0].start()
until_it_waits()
ready()
while True:  # an interrupted join() would let Python 3.11 exit without the thread's last words
    time.sleep(0.05)  # not for ever: a signal that another thread takes ends no wait of the main thread
"""
    with Script(text) as script:
        script.until_ready()
        time.sleep(0.3)
        script.process.send_signal(signal.SIGINT)
        code, _, errors = script.end()
    assert code in (1, -signal.SIGINT), errors
    assert "KeyboardInterrupt" in errors
    assert "1 of 2 replicas arrived (cpu(0)), missing cpu(1)" in errors


def test_a_handler_that_only_takes_note():
    """Ctrl-C that the program handles itself disturbs no step, however often it comes."""
    text = """
seen = []
def note(*_):
    seen.append(None)
    os.write(1, b"noted\\n")
signal.signal(signal.SIGINT, note)
count = 0
ready()
while len(seen) < 8:
    count += 1
    ys = []
    with autograd.record():
        for x in xs:
            ys.append(layer(x))
            if count % 4 == 0:  # so late that the first replica looks for interrupts
                time.sleep(0.15)
    autograd.backward(ys, on_devices(batch.heads, contexts, "float64"))
    nd.waitall()
assert_same(step(layer, batch, contexts, "float64"), truth(batch, steps=count + 1), 1e-11)
print("right")
"""
    with Script(text) as script:
        script.until_ready()
        for _ in range(8):  # one at a time: of two that come at once, one is lost
            time.sleep(0.2)
            script.process.send_signal(signal.SIGINT)
            assert script.process.stdout.readline() == "noted\n", script.end()
        code, output, errors = script.end()
    assert (code, output) == (0, "right\n"), errors


def test_a_handler_that_calls_the_one_before_it():
    """Whoever installs a handler over the library's is called, and may call back, without going round in circles."""
    text = """
import faulthandler
for turn in range(2):
    with short_waits(0.3):
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
    code, _, errors = run(text)
    assert code == 5, errors[-2000:]


def test_a_pause_of_the_whole_process():
    """Ctrl-Z and `fg` later: time in which nobody could come does not count."""
    text = """
resumed = threading.Event()
signal.signal(signal.SIGCONT, lambda *_: resumed.set())
with short_waits(4), autograd.record():
    ys = [layer(xs[0])]
    until_it_waits()
    ready()
    while not resumed.wait(0.05):  # a signal that another thread takes does not end a wait of the main thread
        pass
    begin = time.process_time()
    while time.process_time() < begin + 0.2:  # the other replica's part
        pass
    ys.append(layer(xs[1]))
assert_same(step(layer, batch, contexts, "float64"), truth(batch, steps=2), 1e-11)
"""
    with Script(text) as script:
        script.until_ready()
        script.process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        script.process.send_signal(signal.SIGCONT)
        code, _, errors = script.end()
    assert code == 0, errors


# ---- what ends a process that does not look out --------------------------------------------------------------


def test_a_kvstore_on_changing_contexts():
    """A store keeps what it made for the contexts of a key's first sum."""
    text = """
rng = np.random.RandomState(1)
layers = [SyncBatchNorm(in_channels=5, momentum=0, kvstore=kvstore) for kvstore in ("device", "local")]
layers = [prepare(layer, batch, contexts, "float64") for layer in layers]
ready()
for layer, count in [(layer, count) for layer in layers for count in (2, 4, 1, 3, *rng.randint(1, 5, 12))]:
    places = [contexts[i] for i in sorted(rng.permutation(4)[:count])]
    part = make_batch(rng, count)
    part = part._replace(gamma=batch.gamma, beta=batch.beta)
    with gluon_syncbn.only_on(places):
        layer.collect_params().zero_grad()
        got = step(layer, part, places, "float64")
    assert_same(got, truth(part, momentum=0), 1e-11)
print("right")
"""
    start = START.replace("cpu_devices(2)", "cpu_devices(4)").replace("RandomState(0), 2)", "RandomState(0), 4)")
    code, output, errors = run(text, start=start)
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
layer = prepare(SyncBatchNorm(in_channels=5, momentum=0), batch, contexts, "float64")
want = truth(batch, momentum=0)
for _ in range(300):
    assert_same(step(layer, batch, contexts, "float64"), want, 1e-11)
stop.set()
changer.join()
print("right")
"""
    assert run(text) == (0, "right\n", "")


# ---- engines and forks ---------------------------------------------------------------------------------------


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
trainer = gluon.Trainer(one.collect_params(), "sgd", kvstore="mpi")
try:
    trainer.step(1)
except mx.MXNetError as error:
    print(error)
"""
    code, output, errors = run(text, MXNET_ENGINE_TYPE="NaiveEngine")
    assert code == 0, errors
    assert "the processes add all arrays of a step together" in output
    assert "SyncBatchNorm 'batchnorm0'" in output and "MXNET_ENGINE_TYPE=NaiveEngine" in output


@pytest.mark.skipif(bool(WHY_CUSTOM), reason="MXNet's Custom ends an operator twice that gets no thread")
def test_little_memory():
    """A call that gets no memory or no thread ends the step in an error that names the layer. The process goes on."""
    text = """
import resource
heads = on_devices(batch.heads, contexts, "float64")
for x in xs:  # MXNet's own threads are there
    x.attach_grad()
    with autograd.record():
        y = x * 2
    y.backward()
mx.nd.waitall()
def train():
    with autograd.record():
        ys = [layer(x) for x in xs]
    autograd.backward(ys, heads)
    mx.nd.waitall()
errors = []
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
ready()
for more in (0, 1, 2, 4, 8, 16, 32, 64):
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (more << 20), hard))
    try:
        train()
    except (mx.MXNetError, MemoryError) as error:
        errors.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    gluon_syncbn.reset()
for error in errors:
    print("error:", str(error).replace(chr(10), " "))
fresh = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64")
assert_same(step(fresh, batch, contexts, "float64"), truth(batch), 1e-11)
print("right")
"""
    code, output, errors = run(text, MALLOC_ARENA_MAX="1")
    assert code == 0, output + errors[-2000:]
    lines = output.splitlines()
    assert lines.pop() == "right"
    for line in lines:  # MXNet's threads are there: those that cannot be started are the layer's
        if "Resource temporarily unavailable" in line:
            assert "SyncBatchNorm 'batchnorm0' on cpu(" in line and "no thread could be started for this call" in line


def test_an_engine_that_does_not_exist():
    """MXNet fails at every wait, of which the process makes one as it ends: MXNet's error is printed, and it ends."""
    code, _, errors = run("", start="import gluon_syncbn\nprint('ready', flush=True)\n", MXNET_ENGINE_TYPE="Naive")
    assert code == 0, errors
    assert "Cannot find Engine Naive" in errors


def test_a_fork_or_a_wait_for_all_between_two_replicas():
    """Nobody can call the other replica meanwhile: an error that says so, at once, and the next step is right."""
    text = """
def interrupted(way, between):
    layer = prepare(SyncBatchNorm(in_channels=5, prefix="norm_"), batch, contexts, "float64", WAYS[way])
    for turn in range(2):  # the second time, a static graph executes what it has made
        step(layer, batch, contexts, "float64")
        try:
            with autograd.record():
                ys = [layer(xs[0])]
                between()
                ys.append(layer(xs[1]))
                nd.waitall()
        except mx.MXNetError as error:
            print(error)
        gluon_syncbn.reset()
        for name, value in zip(("running_mean", "running_var"), (0, 1)):
            getattr(layer, name).set_data(nd.ones(5, dtype="float64") * value)
        assert_same(step(layer, batch, contexts, "float64"), truth(batch), 1e-11)

def load():
    gluon.data.DataLoader(gluon.data.ArrayDataset(np.zeros(8)), batch_size=2, num_workers=2)

def fork():
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8

ready()
for way in WAYS:
    interrupted(way, fork)
    interrupted(way, load)
for wait in (nd.waitall, mx.npx.waitall):
    interrupted("eager", wait)
print("right")
"""
    code, output, errors = run(text)
    assert code == 0, errors[-2000:]
    assert output.endswith("right\n")
    assert output.count("the process was forked") == 2 * len(WAYS)
    said = "Nobody has called the layer there, and thread 'MainThread' waits in waitall (<string>, "
    assert output.count(said) == 2 * (len(WAYS) + 2)
    assert output.count("SyncBatchNorm 'norm', forward of call") == 2 * (2 * len(WAYS) + 2)
    assert output.count("missing cpu(1)") == 2 * (2 * len(WAYS) + 2)


def test_a_wait_for_all_that_ends_well():
    """All replicas have been called, and one is late; or another thread that trains calls the other one, later."""
    text = """
from gate import Gate
if WAYS[sys.argv[1]] is not None:
    layer.hybridize(**WAYS[sys.argv[1]])
ready()
gate = Gate()
with autograd.record():
    ys = [layer(xs[0]), layer(gate.behind(xs[1]))]
    threading.Timer(4, gate.open).start()  # longer than a read may wait for nobody
    ys[0].asnumpy() if sys.argv[1] == "eager" else mx.nd.waitall()
assert all(np.isfinite(y.asnumpy()).all() for y in ys)

def replica(i):
    with autograd.record():
        y = layer(xs[i])
        mx.nd.waitall()
    assert np.isfinite(y.asnumpy()).all()

def work():  # first beside another thread, then beside the main one
    for turn in range(2):
        begin.acquire()
        time.sleep(1)
        replica(1)
        ended.release()

begin, ended = threading.Semaphore(0), threading.Semaphore(0)
helper, other = threading.Thread(target=work), threading.Thread(target=replica, args=(0,))
helper.start()
other.start()
begin.release()
other.join()
ended.acquire()  # else its wait for all takes in what the main thread calls next, and each waits for the other
begin.release()
replica(0)
helper.join()
print("right")
"""
    for result in ends_of(text, ["eager", "static_shape"]):
        assert result == (0, "right\n", "")


def test_the_child_of_a_fork_trains_and_ends():
    """A step is in flight in the parent; in the child, too, when that ends."""
    text = """
import subprocess
train()
ready()
for turn in range(3):
    train()[0].asnumpy()  # the backward still runs
    assert subprocess.run(["false"], preexec_fn=os.getpid).returncode == 1
    train()
    child = os.fork()
    if child == 0:
        assert_same(step(layer, batch, contexts, "float64"), truth(batch), 1e-11)
        train()
        sys.exit(5)  # with a step in flight
    assert os.waitpid(child, 0)[1] == 5 << 8
    assert all(np.isfinite(p.data(c).asnumpy()).all() for p in net.collect_params().values() for c in contexts)
print("right")
"""
    for code, output, errors in ends_of(HEALTHY + text, ["eager", "static_shape"]):
        assert (code, output) == (0, "right\n"), errors[-2000:]


def test_loader_processes():
    """Workers are forked from a process that trains, and end without a word."""
    text = """
loader = gluon.data.DataLoader(np.random.RandomState(0).randn(12, 5, 4, 6), batch_size=4, num_workers=2)
ready()
for x in [x for epoch in range(2) for x in loader]:
    shards = np.split(x.asnumpy(), [1])
    loaded = batch._replace(shards=shards, heads=shards)
    got, want = step(layer, loaded, contexts, "float64"), truth(loaded)
    assert all(np.abs(a - b).max() < 1e-10 for a, b in zip(got.dxs, want.dxs))
"""
    code, output, errors = run(text)
    assert (code, output, errors) == (0, "", "")

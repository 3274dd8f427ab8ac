"""A process that is ended, interrupted, stopped or forked in mid-step: ``process_worker.py SCENARIO+SCENARIO [HOW]``.

Nothing but the end of the process, or a failure, ends a wait within the tests' limits.
"""

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
warnings.simplefilter("ignore")

import light  # noqa: E402, F401

import gluon_syncbn  # noqa: E402

CONTEXTS = gluon_syncbn.cpu_devices(4)
HERE = CONTEXTS[:2]

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from gate import Gate  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from ranks import raises  # noqa: E402
from replicas import (  # noqa: E402
    WAYS,
    assert_same,
    interrupt_handler,
    make_batch,
    on_devices,
    prepare,
    short_waits,
    step,
    truth,
)

from gluon_syncbn import SyncBatchNorm, _native  # noqa: E402
from gluon_syncbn.mxnet_side import lifetime  # noqa: E402
from gluon_syncbn.training import steps as ends  # noqa: E402

gluon_syncbn.configure(timeout=300)
batch = make_batch(np.random.RandomState(0), 2)
layer = None  # of a scenario
xs = on_devices(batch.shards, HERE, "float64")
heads = on_devices(batch.heads, HERE, "float64")
idle = interrupt_handler()
kept = []  # to the end of the process


def until_it_waits():
    while interrupt_handler() == idle:
        time.sleep(0.01)


def presses(script):
    """A shell that sends signals to PID when its input is closed. To start it in mid-step would be a fault."""
    script = f"read _; {script.replace('PID', str(os.getpid()))}"
    kept.append(subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE))
    return kept[-1]


def assert_next_is_right(trained=None, steps=1):
    assert_same(step(trained or layer, batch, HERE, "float64"), truth(batch, steps=steps), 1e-11)


# ---- the end of the main thread in mid-step ------------------------------------------------------------------


def ends_in_mid_step(how):
    with autograd.record():
        kept.append(layer(xs[0]))
        if how == "exits":
            sys.exit(7)
        if how == "has one backward":
            kept.append(layer(xs[1]))
    if how == "has one backward":
        kept[0].backward()
        raise RuntimeError("out of data")


def a_thread_waits_while_the_main_thread_ends():
    def work():
        try:
            with autograd.record():
                y = layer(xs[0])
            y.asnumpy()
        except mx.MXNetError as error:
            print(error, flush=True)

    threading.Thread(target=work).start()
    until_it_waits()
    raise RuntimeError("out of data")


class Training:
    """Healthy steps of a net."""

    def __init__(self, way, layers=3):
        self.net, self.steps = nn.HybridSequential(), 0
        for _ in range(layers):
            self.net.add(nn.Conv2D(8, 3, padding=1), SyncBatchNorm(), nn.Activation("relu"))
        self.net.add(nn.Dense(5))
        self.net.initialize(mx.init.Xavier(), ctx=HERE)
        self.net.hybridize(**WAYS[way])
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"learning_rate": 0.01})
        kept.append(self)

    def train(self, places=HERE):
        self.steps += 1
        with autograd.record():
            losses = [self.net(nd.ones((2, 3, 8, 8), ctx=c) * i).sum() for i, c in enumerate(places, self.steps)]
        autograd.backward(losses)
        self.trainer.step(4, ignore_stale_grad=True)
        return losses


def ends_after_a_healthy_step(way):
    """The second replica is late, so that the first one waits for it at the end; and the step is finished. Nobody waits
    for a thread that has trained, and waits for something else.
    """
    training, trained = Training(way), threading.Event()

    def work():
        training.train()
        trained.set()
        threading.Event().wait()

    threading.Thread(target=work, daemon=True).start()
    trained.wait()
    training.train()
    product = nd.ones((1000, 1000), ctx=HERE[1]) * 1e-3
    product.wait_to_read()
    close = _native.close
    _native.close = lambda: (print("failure:", _native.failure()), close())
    for _ in range(5):
        product = nd.dot(product, product)
    training.train()


def ends_beside_a_thread_that_trains(way):
    """What is in flight at the end is a matter of chance, most of all where a graph runs without Python."""
    training, drain = Training(way, layers=2), ends.drain
    lifetime.DAEMONS_END_WITHIN = 60  # a busy machine may take longer than a second for a step

    def work():
        while True:
            training.train()

    thread = threading.Thread(target=work, daemon=True)
    ends.drain = lambda: (print("the thread is alive:", thread.is_alive()), drain())[1]
    thread.start()
    while thread.is_alive() and not ends.training_threads.objects():
        time.sleep(0.001)
    time.sleep(0.5 * np.random.RandomState(os.getpid()).rand())
    assert thread.is_alive()


def fails_in_many_threads():
    """MXNet's list of errors has no lock: several threads of its engine that fail at once would end the process."""
    arrays = [nd.zeros(1) for _ in range(4000)]
    nd.waitall()
    _native.fail("somebody has failed")
    for _ in range(10):
        _native.gate(arrays)
        with raises(mx.MXNetError, "somebody has failed"):
            nd.waitall()
    gluon_syncbn.reset()


def fails_before_the_first_call():
    """Calls outside of all scopes share one, which begins with the first of them and must not keep the failure."""
    autograd.set_training(True)
    _native.fail("somebody has failed")
    with raises(mx.MXNetError, "somebody has failed"):
        for y in list(map(layer, xs)):
            y.asnumpy()
    gluon_syncbn.reset()
    for y in list(map(layer, xs)):
        y.asnumpy()
    autograd.set_training(False)


def ends_after_failed_steps():
    training = Training("static_shape")
    training.train()
    for turn in range(2):
        with short_waits():
            training.train([HERE[turn]])
            while not _native.failure():  # reading a result would take the error away
                time.sleep(0.01)
        training.train()
    training.train(HERE[:1])


# ---- signals -------------------------------------------------------------------------------------------------


def is_signalled(number):
    shell = presses(f"sleep 0.3; kill -{number} PID")  # so that the main thread waits too
    with autograd.record():
        y = layer(xs[0])
    until_it_waits()
    shell.stdin.close()
    y.asnumpy()


def is_interrupted_while_threads_wait():
    """The main thread waits for threads that wait: that it can be interrupted does not end their waiting."""

    def work():
        with autograd.record():
            y = layer(xs[0])
        y.asnumpy()

    shell = presses("sleep 0.3; kill -INT PID")
    threading.Thread(target=work).start()
    until_it_waits()
    shell.stdin.close()
    while True:  # an interrupted join() would let Python 3.11 exit without the thread's last words
        time.sleep(0.05)  # not for ever: a signal that another thread takes ends no wait of the main thread


def takes_note_of_signals():
    """Ctrl-C that the program handles itself disturbs no step, however often it comes."""
    seen, count = [], 0
    signal.signal(signal.SIGINT, lambda *_: seen.append(None))
    shell = presses("while sleep 0.3; do kill -INT PID; done")
    shell.stdin.close()
    while len(seen) < 8:
        count += 1
        ys = []
        with autograd.record():
            for x in xs:
                ys.append(layer(x))
                if count % 4 == 0:  # so late that the first replica looks for interrupts
                    time.sleep(0.15)
        autograd.backward(ys, heads)
        nd.waitall()
    shell.kill()
    shell.wait()
    assert_next_is_right(steps=count + 1)


def has_a_handler_that_calls_the_one_before_it():
    """Whoever installs a handler over the library's is called, and may call back, without going round in circles."""
    for turn in range(2):
        with short_waits(0.3):
            with autograd.record():
                y = layer(xs[0])
            with raises(mx.MXNetError, ""):
                y.asnumpy()
        if turn == 0:
            faulthandler.register(signal.SIGINT, chain=True)
    with raises(KeyboardInterrupt, ""):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def is_stopped():
    """Ctrl-Z and `fg` later: time in which nobody could come does not count."""
    resumed, shell = threading.Event(), presses("kill -STOP PID; sleep 11; kill -CONT PID")
    signal.signal(signal.SIGCONT, lambda *_: resumed.set())
    with short_waits(10), autograd.record():
        ys = [layer(xs[0])]
        until_it_waits()
        shell.stdin.close()
        while not resumed.wait(0.05):  # a signal that another thread takes does not end a wait of the main thread
            pass
        begin = time.process_time()
        while time.process_time() < begin + 0.2:  # the other replica's part
            pass
        ys.append(layer(xs[1]))
    assert_next_is_right(steps=2)


# ---- what ends a process that does not look out --------------------------------------------------------------


def a_kvstore_on_changing_contexts():
    """A store keeps what it made for the contexts of a key's first sum. The gradients of 5 channels on two contexts are
    as long as the moments of 2 channels on four.
    """
    rng, widths = np.random.RandomState(1), (5, 2)
    fours = {channels: make_batch(np.random.RandomState(0), 4, channels=channels) for channels in widths}
    for kvstore in ("device", "local"):
        layers = {n: SyncBatchNorm(in_channels=n, momentum=0, kvstore=kvstore) for n in widths}
        for channels, layer in layers.items():
            prepare(layer, fours[channels], CONTEXTS, "float64")
        for count in (2, 4, 1, 3, *rng.randint(1, 5, 12)):
            places = [CONTEXTS[i] for i in sorted(rng.permutation(4)[:count])]
            for channels, own in layers.items():
                four = fours[channels]
                part = make_batch(rng, count, channels=channels)._replace(gamma=four.gamma, beta=four.beta)
                with gluon_syncbn.only_on(places):
                    own.collect_params().zero_grad()
                    got = step(own, part, places, "float64")
                assert_same(got, truth(part, momentum=0), 1e-11)


# ---- engines and forks ---------------------------------------------------------------------------------------


def has_the_naive_engine():
    with raises(mx.MXNetError, r"(?s)'batchnorm0'.*MXNET_ENGINE_TYPE=NaiveEngine"), autograd.record():
        for y in [layer(x) for x in xs]:
            y.asnumpy()
    alone = make_batch(np.random.RandomState(0), 1)
    one = prepare(SyncBatchNorm(in_channels=5), alone, HERE[:1], "float64")
    assert_same(step(one, alone, HERE, "float64"), truth(alone), 1e-11)
    with raises(mx.MXNetError, "the processes add all arrays of a step together"):
        gluon.Trainer(one.collect_params(), "sgd", kvstore="mpi").step(1)


def has_little_memory():
    """A call that gets no memory or no thread ends the step in an error that names the layer. The process goes on."""
    for x in xs:  # MXNet's own threads are there
        x.attach_grad()
        with autograd.record():
            y = x * 2
        y.backward()
    mx.nd.waitall()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    for more in (0, 1, 2, 4, 8, 16, 32, 64):
        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        said = ""
        resource.setrlimit(resource.RLIMIT_AS, (used + (more << 20), hard))
        try:
            with autograd.record():
                ys = [layer(x) for x in xs]
            autograd.backward(ys, heads)
            mx.nd.waitall()
        except (mx.MXNetError, MemoryError) as error:
            said = error
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        gluon_syncbn.reset()
        if "Resource temporarily unavailable" in str(said):  # MXNet's threads are there: these are the layer's
            assert "SyncBatchNorm 'batchnorm0' on cpu(" in str(said), said
            assert "no thread could be started for this call" in str(said), said
    assert_next_is_right(prepare(SyncBatchNorm(in_channels=5), batch, HERE, "float64"))


def forks_or_waits_between_two_replicas():
    """Nobody can call the other replica meanwhile: an error that says so, at once, and the next step is right."""

    def load():
        gluon.data.DataLoader(gluon.data.ArrayDataset(np.zeros(8)), batch_size=2, num_workers=2)

    def fork():
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitpid(child, 0)[1] == 7 << 8

    waits = "Nobody has called the layer there, and thread 'MainThread' waits in waitall ("
    cases = [(way, *case) for way in WAYS for case in ((fork, "the process was forked"), (load, waits))]
    for way, between, told in (*cases, ("eager", nd.waitall, waits), ("eager", mx.npx.waitall, waits)):
        own = prepare(SyncBatchNorm(in_channels=5, prefix="norm_"), batch, HERE, "float64", WAYS[way])
        for _ in range(2):  # the second time, a static graph executes what it has made
            step(own, batch, HERE, "float64")
            with raises(mx.MXNetError, "SyncBatchNorm 'norm', forward of call") as said:
                with autograd.record():
                    ys = [own(xs[0])]
                    between()
                    ys.append(own(xs[1]))
                    nd.waitall()
            assert told in str(said.exception) and "missing cpu(1)" in str(said.exception), said.exception
            gluon_syncbn.reset()
            for name, value in zip(("running_mean", "running_var"), (0, 1)):
                getattr(own, name).set_data(nd.ones(5, dtype="float64") * value)
            assert_next_is_right(own)


def waits_for_all_and_ends_well():
    """All replicas have been called, and one is late; or another thread that trains calls the other one, later."""
    for way, wait in (("eager", lambda y: y.asnumpy()), ("static_shape", lambda _: mx.nd.waitall())):
        layer.hybridize(**WAYS[way])
        gate = Gate()
        with autograd.record():
            ys = [layer(xs[0]), layer(gate.behind(xs[1]))]
            threading.Timer(4, gate.open).start()  # longer than a read may wait for nobody
            wait(ys[0])
        assert all(np.isfinite(y.asnumpy()).all() for y in ys)

    def replica(i):
        with autograd.record():
            y = layer(xs[i])
            mx.nd.waitall()
        assert np.isfinite(y.asnumpy()).all()

    def work():  # first beside another thread, then beside the main one
        for _ in range(2):
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


def forks():
    """A step is in flight in the parent; in the child, too, when that ends."""
    trainings = [Training(way) for way in ("eager", "static_shape")]
    for training in trainings:
        training.train()
    for training in 2 * trainings:
        training.train()[0].asnumpy()  # the backward still runs
        assert subprocess.run(["false"], preexec_fn=os.getpid).returncode == 1
        training.train()
        child = os.fork()
        if child == 0:
            assert_next_is_right()
            training.train()
            sys.exit(5)  # with a step in flight
        assert os.waitpid(child, 0)[1] == 5 << 8
        for p in training.net.collect_params().values():
            assert all(np.isfinite(p.data(c).asnumpy()).all() for c in HERE)


def loads():
    """Workers are forked from a process that trains, and end without a word."""
    loader = gluon.data.DataLoader(np.random.RandomState(0).randn(12, 5, 4, 6), batch_size=4, num_workers=2)
    for x in [x for epoch in range(2) for x in loader]:
        shards = np.split(x.asnumpy(), [1])
        loaded = batch._replace(shards=shards, heads=shards)
        got, want = step(layer, loaded, HERE, "float64"), truth(loaded)
        assert all(np.abs(a - b).max() < 1e-10 for a, b in zip(got.dxs, want.dxs))


if __name__ == "__main__":
    for scenario in sys.argv[1].split("+"):
        layer = prepare(SyncBatchNorm(in_channels=5), batch, HERE, "float64")
        globals()[scenario](*sys.argv[2:])
    print("right", flush=True)

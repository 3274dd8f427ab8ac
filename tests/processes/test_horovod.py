"""Several processes on this machine that meet through Horovod: what they compute, and what they learn of each other.

What a process does stands in mpi_worker.py, as far as it is the same for every transport, and at the end of this file.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gluon_syncbn

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; `make test-horovod` builds it"
)


@contextlib.contextmanager
def environments(processes):
    """Of each process, while the store through which they meet is there."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{processes}"), processes)
    server = RendezvousServer()
    job = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(slots)
    try:
        yield [{key: str(value) for key, value in {**job, **create_slot_env_vars(slot)}.items()} for slot in slots]
    finally:
        server.stop()
        server._httpd.server_close()


class Job:
    """Processes that have ended: exit codes by rank, output, and how long rank 0 ran. After a failure of rank 0 the
    others have 2 s to end too, and get None for an exit code where they do not."""

    def __init__(self, processes, script, *arguments, limit=90, **settings):
        self.codes = [None] * processes
        with tempfile.TemporaryDirectory() as reports, contextlib.ExitStack() as stack:
            own = {
                "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
                "OMP_NUM_THREADS": "1",
                "MPI_WORKER_REPORTS": reports,
                "GLUON_SYNCBN_TEST_TRANSPORT": "horovod",
                **settings,
            }
            command = [sys.executable, str(HERE / script), *map(str, arguments)]
            outputs = [stack.enter_context(open(Path(reports, f"output of {i}"), "w+")) for i in range(processes)]
            start = time.monotonic()
            running = [
                subprocess.Popen(command, env={**os.environ, **own, **env}, stdout=output, stderr=subprocess.STDOUT)
                for env, output in zip(stack.enter_context(environments(processes)), outputs)
            ]
            try:
                self.codes[0] = running[0].wait(limit)
                self.seconds = time.monotonic() - start
                limit = 2 if self.codes[0] else limit
                for i in range(1, processes):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.codes[i] = running[i].wait(max(0.1, start + self.seconds + limit - time.monotonic()))
            finally:
                for process in running:
                    process.kill()
                    process.wait()
            self.output = "".join(p.read_text() for p in sorted(Path(reports).iterdir()))

    def succeeded(self):
        return all(code == 0 for code in self.codes) and all(f"OK {i}" in self.output for i in range(len(self.codes)))

    def failure_of(self, rank):
        """(seconds from the beginning of the step, text) of the error that this process got."""
        found = re.search(rf"FAILED rank {rank} after ([0-9.]+) s: (.*)", self.output)
        assert found, self.output
        return float(found[1]), found[2]


@needs_horovod
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_equal_the_specification(processes):
    """All modes, types and ways of running, 1 and 2 devices in turn, names that differ."""
    job = Job(processes, "mpi_worker.py", "equals_the_specification", limit=150)
    assert job.succeeded(), job.output


@needs_horovod
@pytest.mark.parametrize(
    ("processes", "scenario"),
    [
        (2, "same_bits_on_repetition"),
        (2, "one_store_for_gradients_and_statistics"),
        (3, "pushpull_and_broadcast"),
    ],
)
def test_several_processes(processes, scenario):
    job = Job(processes, "mpi_worker.py", scenario)
    assert job.succeeded(), job.output


@needs_horovod
def test_layers_in_any_order():
    job = Job(4, "mpi_worker.py", "random_order", 15)
    assert job.succeeded(), job.output


@needs_horovod
@pytest.mark.slow
def test_layers_in_any_order_for_long():
    job = Job(4, "mpi_worker.py", "random_order", 500, limit=1200)
    assert job.succeeded(), job.output


@needs_horovod
@pytest.mark.parametrize(
    "scenario", ["beside_distributed_trainer", "large_sums", "calls_in_any_order", "initialised_by_the_script"]
)
def test_with_horovod(scenario):
    job = Job(3 if scenario in ("large_sums", "calls_in_any_order") else 2, "test_horovod.py", scenario)
    assert job.succeeded(), job.output


@needs_horovod
def test_horovodrun():
    command = [str(BIN / "horovodrun"), "-np", "2", sys.executable, str(HERE / "mpi_worker.py")]
    own = {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
        "GLUON_SYNCBN_TEST_TRANSPORT": "horovod",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as reports:
        own["MPI_WORKER_REPORTS"] = reports
        done = subprocess.run(
            [*command, "pushpull_and_broadcast"],
            env={**os.environ, **own},
            timeout=60,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK 0" in done.stdout
    assert "OK 1" in done.stdout


@needs_horovod
def test_another_net():
    job = Job(2, "mpi_worker.py", "another_net")
    assert all(job.codes)
    assert "the processes disagree about the net: layer 1 is SyncBatchNorm 'first' (5 channels" in job.output
    assert "'first' (6 channels" in job.output


@needs_horovod
@pytest.mark.parametrize(
    ("fault", "text", "at_once"),
    [
        ("frozen", "waits for rank 1 in the forward of call 2 of SyncBatchNorm 'layer0'", False),
        ("exits", "rank 1 of 2 has ended (rank 0 was in the forward of call 2 of SyncBatchNorm 'layer0')", True),
        ("raises", "rank 1 of 2 has failed: OSError left the recorded step (disk full)", True),
        ("one batch more", "rank 1 of 2 has ended (rank 0 was in the forward of call 3", True),
        ("skips a layer", "in the forward of call 2 of SyncBatchNorm 'layer0'", False),
        ("another layer", "in the forward of call 2 of SyncBatchNorm 'layer0'", False),
        ("repeats a step", "in the forward of call 2 of SyncBatchNorm 'layer1'", False),
        ("another shape", "in gradient 0, round 2, rank 1 sent 7 values of float32 where rank 0 has 5", True),
    ],
)
def test_a_process_that_does_something_else(fault, text, at_once):
    """Rank 0 gets an error that names layer, rank and step, in time, and ends with a code that is not 0."""
    job = Job(2, "mpi_worker.py", "fault", fault)
    seconds, error = job.failure_of(0)
    assert text in error
    assert seconds < (2.5 if at_once else 4.5)  # the time limit is 3 s
    assert "OK 0" not in job.output
    assert job.codes[0] not in (0, None)
    instead = {"skips a layer": (2, "layer1"), "repeats a step": (3, "layer0")}.get(fault)
    if instead:
        assert "was in the forward of call {} of SyncBatchNorm '{}'".format(*instead) in error


@needs_horovod
def test_a_process_that_is_killed():
    job = Job(3, "mpi_worker.py", "fault", "killed")
    for rank in (0, 2):
        seconds, error = job.failure_of(rank)
        assert re.search("1( or 2)? of 3 has ended without a word", error)
        assert "in the forward of call 2 of SyncBatchNorm 'layer0'" in error
        assert seconds < 2.5
    assert job.codes[0] not in (0, None)
    assert job.codes[2] not in (0, None)


@needs_horovod
def test_interrupt_while_another_process_is_late():
    job = Job(2, "mpi_worker.py", "interrupted")
    seconds, error = job.failure_of(0)
    assert seconds < 10
    assert "asked to end" in error or "KeyboardInterrupt" in error
    assert job.codes[0] not in (0, None)


@needs_horovod
@pytest.mark.parametrize(
    ("processes", "sizes", "text"),
    [
        (2, "70_000 80_000", "in gradient 'w', round 1, Horovod says: .*Mismatched"),
        (3, "70_000 100 100", "their arrays differ in size|no answer within 3 s .was in gradient 'w', round 1"),
        (3, "70_000 80_000 70_000", "sent [78]0000 values of float64 where rank [0-2] has [78]0000"),
    ],
)
def test_sums_of_another_size(processes, sizes, text):
    job = Job(processes, "test_horovod.py", "sum_of_sizes", *sizes.split())
    seconds, error = job.failure_of(0)
    assert re.search(text, error), error
    assert seconds < 4.5
    assert job.codes[0] not in (0, None)


@needs_horovod
def test_interrupt_in_the_main_thread():
    job = Job(2, "test_horovod.py", "interrupted_sum")
    assert "KeyboardInterrupt left gradient 0, round 1" in job.failure_of(1)[1]
    assert job.codes[0] not in (0, None)
    assert job.seconds < 30


@needs_horovod
def test_thread_that_initialises():
    job = Job(1, "test_horovod.py", "another_thread")
    assert job.succeeded(), job.output


def test_without_horovod(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ImportError, match="kvstore 'horovod' needs Horovod"):
        gluon_syncbn.kvstore("horovod")


# ---- what one process does ---------------------------------------------------------------------------------------


def beside_distributed_trainer():
    """Horovod's own Trainer adds the gradients: three steps against one process with the whole batch."""
    contexts = gluon_syncbn.cpu_devices(1)
    import horovod.mxnet as hvd
    import mxnet as mx
    from mxnet import autograd, gluon, nd
    from mxnet.gluon import nn

    kv = gluon_syncbn.kvstore("horovod")

    def make(norm, **settings):
        net = nn.HybridSequential()
        for _ in range(3):
            net.add(nn.Conv2D(6, 3, padding=1, in_channels=6), norm(in_channels=6, **settings), nn.Activation("tanh"))
        net.add(nn.Dense(4, in_units=6 * 16))
        net.initialize(ctx=contexts)
        values = np.random.RandomState(7 + (hvd.rank() if settings else 0))
        for p in net.collect_params().values():
            if p.grad_req != "null":
                p.set_data(nd.array(values.randn(*p.shape) * 0.2 + (p.name.endswith("gamma"))))
        net.cast("float64")
        return net

    net, plain = make(gluon_syncbn.SyncBatchNorm, kvstore=kv), make(nn.BatchNorm)
    hvd.broadcast_parameters(net.collect_params())
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", settings)
    alone = gluon.Trainer(plain.collect_params(), "sgd", settings, kvstore=None)
    rng = np.random.RandomState(2)
    for _ in range(3):
        x, head = rng.randn(8, 6, 4, 4), rng.randn(8, 4)
        x[4:] *= 3
        mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        for model, part, samples, update in ((net, mine, 4, trainer), (plain, slice(None), 8, alone)):
            with autograd.record():
                y = model(nd.array(x[part], dtype="float64"))
            y.backward(nd.array(head[part], dtype="float64"))
            update.step(samples)
    mx.nd.waitall()
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        got, want = p.data().asnumpy(), q.data().asnumpy()
        assert np.abs(got - want).max() < 1e-10 * max(1, np.abs(want).max()), p.name


def initialised_by_the_script():
    import horovod.mxnet as hvd

    hvd.init()
    import mxnet as mx

    made = []
    thread = threading.Thread(target=lambda: made.append(gluon_syncbn.kvstore("horovod")))
    thread.start()
    thread.join()
    kv = made[0]
    assert (kv.rank, kv.num_workers) == (hvd.rank(), 2)
    total = mx.nd.full((3,), kv.rank + 1)
    kv.pushpull("x", total)
    assert total.asnumpy().tolist() == [3, 3, 3]


def large_sums():
    """Added up in the order of the ranks, whatever their size."""
    kv = gluon_syncbn.kvstore("horovod")
    from gluon_syncbn.exchange.store import Label

    for size in (1, 1000, 33_000, 500_003):
        parts = [np.random.RandomState(rank).randn(size, 2) * 10**rank for rank in range(kv.num_workers)]
        total = kv._transport.allreduce(Label("gradient", 99, call=size, what="a test"), parts[kv.rank])
        assert (total == parts[0] + parts[1] + parts[2]).all()


def calls_in_any_order():
    """Eight calls of one layer at once, in an order of its own in every process."""
    kv = gluon_syncbn.kvstore("horovod")
    from gluon_syncbn.exchange.store import Label

    rng, totals = np.random.RandomState(kv.rank), {}

    def add(call):
        part = np.full(3, 100.0**kv.rank * (call + 1))
        totals[call] = kv._transport.allreduce(Label("statistics", 5, call=call, what=f"call {call}"), part)

    for first in range(0, 80, 8):
        threads = [threading.Thread(target=add, args=(first + i,)) for i in rng.permutation(8)]
        for thread in threads:
            thread.start()
            time.sleep(0.01 * rng.rand())
        for thread in threads:
            thread.join()
    assert all((totals[call] == 10101.0 * (call + 1)).all() for call in range(80))


def report(kv, since, error):
    text = f"FAILED rank {kv.rank} after {time.monotonic() - since:.1f} s: {error}\n"
    Path(os.environ["MPI_WORKER_REPORTS"], str(kv.rank)).write_text(text)


def sum_of_sizes():
    import mxnet as mx

    kv = gluon_syncbn.kvstore("horovod")
    gluon_syncbn.configure(timeout=3)
    kv.pushpull("first", mx.nd.ones(1))
    values = mx.nd.ones(int(sys.argv[2 + kv.rank]), dtype="float64")
    start = time.monotonic()
    try:
        kv.pushpull("w", values)
    except mx.MXNetError as error:
        report(kv, start, error)
        raise SystemExit(3) from None


def interrupted_sum():
    """Ctrl-C in rank 0's main thread, while rank 1 is late: it hears of it."""
    import signal

    import mxnet as mx

    kv = gluon_syncbn.kvstore("horovod")
    start = time.monotonic()
    if kv.rank == 0:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(2)
    try:
        kv.pushpull(0, mx.nd.ones(3))
    except mx.MXNetError as error:
        report(kv, start, error)
        raise SystemExit(3) from None


def another_thread():
    import mxnet as mx

    errors = []

    def create():
        try:
            gluon_syncbn.kvstore("horovod")
        except mx.MXNetError as error:
            errors.append(str(error))

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert "initialised on the main thread" in errors[0]
    kv = gluon_syncbn.kvstore("horovod")
    value = mx.nd.ones(2)
    kv.pushpull(0, value)
    kv.broadcast(1, value, out=value)
    assert (kv.rank, kv.num_workers, value.asnumpy().tolist()) == (0, 1, [1, 1])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(f"OK {os.environ['HOROVOD_RANK']}", flush=True)

"""Threads that step a layer: one after the other, one for each replica, and two at once, which is an error."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext

import mxnet as mx
import numpy as np
import pytest
from gate import Gate
from internals import core
from mxnet import autograd, nd
from mxnet.gluon import nn
from replicas import TOLERANCE, WAYS, Batch, assert_next_step_is_right, make_batch, on_devices, prepare, ready, truth

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import callers
from gluon_syncbn.training import steps
from gluon_syncbn.training.session import session

IN_A_STEP = r"thread '{}' calls the layer while it is in a step of thread '{}'"


class Actor:
    """A thread that does one thing after the other, when it is told to."""

    def __init__(self, name):
        self.name, self.pool = f"{name}_0", ThreadPoolExecutor(1, name)

    def do(self, job):
        return self.pool.submit(job).result(timeout=60)

    def enter(self):
        self._scope = autograd.record()
        self.do(self._scope.__enter__)

    def leave(self, error=None):
        self.do(lambda: self._scope.__exit__(type(error) if error else None, error, None))


@contextmanager
def actors(*names):
    with ExitStack() as stack:
        made = [Actor(name) for name in names]
        for actor in made:
            stack.enter_context(actor.pool)
        yield made


@contextmanager
def play(layer, shards):
    """Threads A and B do what words say, one after the other: ``A(`` enters a scope, ``A0`` calls the layer with the
    first shard, ``A)`` leaves the scope, ``A!`` by an exception, and ``Ar`` is a reset. Of two layers, each has one."""
    with actors("A", "B") as made:

        def act(words):
            ys = []
            for who, what in words.split():
                number = "AB".index(who)
                actor, own = made[number], layer[number] if isinstance(layer, list) else layer
                if what.isdigit():
                    ys.append(actor.do(lambda own=own, what=what: own(shards[int(what)])))
                elif what == "r":
                    actor.do(gluon_syncbn.reset)
                elif what == "(":
                    actor.enter()
                else:
                    actor.leave(ValueError("no data") if what == "!" else None)
            return ys

        yield act, made


def a_layer(contexts, rng, way=WAYS["eager"]):
    """A layer, its batch, and the shards of that on their contexts."""
    batch = make_batch(rng, len(contexts))
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64", way)
    shards = on_devices(batch.shards, contexts, "float64")
    with autograd.predict_mode():
        layer(shards[0])  # traces, which threads may not do at once
    with autograd.record():  # and MXNet makes what a static graph repeats
        ys = [layer(x) for x in shards]
    autograd.backward(ys)
    nd.waitall()
    return layer, batch, shards


def assert_outputs(ys, batch):
    for y, want in zip(ys, truth(batch).outputs):
        np.testing.assert_allclose(y.asnumpy(), want, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("before", "refused"),
    [
        ("A0", "B0"),  # B comes between the two calls of A
        ("A0 B1", "B0"),  # cpu(0) of A would meet cpu(1) of B
        ("A0 B1", "A1"),
        ("A0 A1", "B0"),  # A may not have given its last call to MXNet's engine
    ],
)
def test_a_call_in_the_middle_of_a_step_of_another_thread(contexts, rng, way, before, refused):
    """Both threads have the error, whatever they do next, and the step after that is right."""
    places = contexts[:2]
    layer, batch, shards = a_layer(places, rng, WAYS[way])
    with play(layer, shards) as (act, made):
        act(f"A( B( {before}")
        caller, other = made if refused[0] == "A" else made[::-1]
        named = IN_A_STEP.format(caller.name, other.name)
        with pytest.raises(gluon_syncbn.StepError, match=named) as raised:
            act(refused)
        caller.leave(raised.value)
        with pytest.raises(gluon_syncbn.StepError, match=named):
            other.leave()
    assert_next_step_is_right(layer, batch, places, "float64")


@pytest.mark.parametrize("way", WAYS)
def test_two_threads_at_once(contexts, rng, way):
    """Each step is right or an error, and the first one after `reset` is right."""
    places, steps = contexts[:2], 60
    layer, batch, _ = a_layer(places, rng, WAYS[way])
    batches = [make_batch(rng, 2)._replace(gamma=batch.gamma, beta=batch.beta) for _ in range(2)]
    errors, wrong, together = [], [], threading.Barrier(2)

    def run(i):
        wanted = truth(batches[i]).outputs
        for _ in range(steps):
            shards = on_devices(batches[i].shards, places, "float64")
            together.wait(60)
            try:
                with autograd.record():
                    ys = [layer(x) for x in shards]
                    if way == "static_shape":  # see docs/limits.md
                        got = [y.asnumpy() for y in ys]
                got = [y.asnumpy() for y in ys]
                if not all(np.allclose(y, want, atol=1e-9) for y, want in zip(got, wanted)):
                    wrong.append(got)
            except mx.MXNetError as error:
                errors.append(str(error))

    with actors("A", "B") as made:
        for done in [actor.pool.submit(run, i) for i, actor in enumerate(made)]:
            done.result(timeout=100)
    assert not wrong
    assert all("in a step of thread" in error for error in errors), set(errors)
    gluon_syncbn.reset()
    assert_next_step_is_right(layer, batch, places, "float64")


# ---- what is right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, count", [("A( B( A0 B0 A) B)", 1), ("A( B( A0 B0 A1 B1 A) B)", 2)])
def test_two_threads_that_do_not_meet(contexts, rng, words, count):
    """On one context, or with layers of their own: both may be in a step."""
    made = [a_layer(contexts[:count], rng) for _ in range(count)]
    (one, batch, shards), (other, *_) = made[0], made[-1]
    other.gamma.set_data(one.gamma.data(contexts[0]))
    other.beta.set_data(one.beta.data(contexts[0]))
    with play([one, other], shards) as (act, _):
        ys = act(words)
        for outputs in (ys[::2], ys[1::2]):
            assert_outputs(outputs, batch)


def at_once(layer, xs, trains=True):
    """The outputs of calls by as many threads."""

    def call(thread, x):
        def scoped():
            with autograd.record() if trains else nullcontext():
                return layer(x)

        return thread.do(scoped)

    with actors(*map(str, range(len(xs)))) as threads, ThreadPoolExecutor(len(xs)) as pool:
        return list(pool.map(call, threads, xs))


def while_issuing(monkeypatch, way, meanwhile):
    """Calls `meanwhile` in the function of MXNet's that issues operators."""
    owner, name = (gluon_syncbn.mxnet_side.op.ARRAYS, "Custom") if way == "eager" else (mx.nd.CachedOp, "__call__")
    issue = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: (meanwhile(), issue(*args, **kwargs))[1])


@pytest.mark.parametrize("trains", [True, False], ids=["train", "predict"])
@pytest.mark.parametrize("way", ["eager", "hybrid", "static_alloc", "static_shape"])
def test_threads_that_share_a_context_issue_one_after_the_other(contexts, rng, monkeypatch, way, trains):
    """MXNet appends an operator to the queues of running mean and variance one by one. Two threads that do so at once
    would, once in some thousands of steps, let each operator wait for the other for ever.
    """
    batch = make_batch(rng, 4)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:1], "float64", WAYS[way])
    xs = on_devices(batch.shards, contexts[:1] * 4, "float64")
    with autograd.predict_mode():
        layer(xs[0]).wait_to_read()
    alone, together = threading.Lock(), []

    def meanwhile():
        if alone.acquire(blocking=False):
            time.sleep(0.02)
            alone.release()
        else:
            together.append(threading.current_thread())

    while_issuing(monkeypatch, way, meanwhile)
    with autograd.record() if trains else nullcontext():
        ys = at_once(layer, xs, trains)
    outputs = [y.asnumpy() for y in ys]
    assert not together
    for got, shard, head in zip(outputs, batch.shards, batch.heads) if trains else ():
        (want,) = truth(Batch([shard], [head], batch.gamma, batch.beta)).outputs
        np.testing.assert_allclose(got, want, atol=TOLERANCE["float64"])


@pytest.mark.parametrize("way", ["eager", "hybrid"])
def test_threads_on_contexts_of_their_own_issue_at_once(contexts, rng, monkeypatch, way):
    layer, shards = a_layer(contexts[:2], rng, WAYS[way])[::2]
    both = threading.Barrier(2)
    while_issuing(monkeypatch, way, lambda: both.wait(timeout=30))
    with autograd.record():
        for y in at_once(layer, shards):
            y.wait_to_read()


@pytest.mark.parametrize("way", ["hybrid", "static_alloc", "static_shape"])
def test_threads_that_call_a_net_first(contexts, rng, monkeypatch, way):
    """One of them records the graph; the others come while it does."""
    batch = make_batch(rng, 3)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:3], "float64", WAYS[way])
    began, recorded, build = threading.Barrier(3), [], type(layer)._call_cached_op

    def beginning(self, *args):
        began.wait(60)
        return build(self, *args)

    def recording(block):
        recorded.append(block)
        time.sleep(0.2)  # the others have come, too

    monkeypatch.setattr(type(layer), "_call_cached_op", beginning)
    monkeypatch.setitem(session.hooks, "recording", [recording])
    assert_outputs(at_once(layer, on_devices(batch.shards, contexts, "float64")), batch)
    assert recorded == [layer]


# ---- what is left of a step that has failed --------------------------------------------------------------------


def test_what_is_left_of_a_failed_step_does_not_end_the_next_one(contexts, rng):
    """A differentiates, or leaves its scope, after B has begun anew."""
    layer, batch, shards = a_layer(contexts[:2], rng)
    with play(layer, shards) as (act, (a, _)):
        (y,) = act("A( A0 A! B(")
        with pytest.raises(mx.MXNetError):
            a.do(lambda: (y.backward(), layer.gamma.grad(contexts[0]).asnumpy()))
        assert_outputs(act("B0 B1 B)"), batch)


def test_a_scope_that_is_left_after_a_reset(contexts, rng):
    layer, batch, shards = a_layer(contexts[:2], rng)
    with play(layer, shards) as (act, _):
        act("A(")
        core.fail("of a test")
        assert_outputs(act("Br B( A! B0 B1 B)"), batch)


def test_a_thread_that_records_outside_of_any_scope(contexts):
    layer = ready(SyncBatchNorm(in_channels=3), contexts=contexts[:2], way="static_shape")

    def predict():
        before = autograd.set_recording(True)
        try:
            return [layer(nd.ones((4, 3), ctx=context)).asnumpy() for context in contexts[:2]]
        finally:
            autograd.set_recording(before)

    with ThreadPoolExecutor(1) as pool:
        np.testing.assert_allclose(pool.submit(predict).result(timeout=60), 1, rtol=1e-4)


# ---- who could call a missing replica --------------------------------------------------------------------------


READS = {
    "asnumpy": lambda y, path: y.asnumpy(),
    "asscalar": lambda y, path: y.sum().asscalar(),
    "print": lambda y, path: str(y),
    "metric": lambda y, path: mx.metric.Loss().update(None, [y]),
    "wait_to_read": lambda y, path: y.wait_to_read(),
    "waitall": lambda y, path: nd.waitall(),
    "save": lambda y, path: nd.save(path, y),
    "condition": lambda y, path: CONDITION(y),
}
CONDITION = nn.HybridLambda(lambda F, x: F.contrib.cond(F.sum(x) > 0, lambda: x + 1, lambda: x + 2))
CONDITION.hybridize()
NAMES = dict(waitall="waitall", wait_to_read="wait_to_read", save="wait_to_read", condition="the call of a graph")


def answer(wanted=None):
    """What a thread says that the main thread joins: at once, or what is wanted in the end."""
    said = []

    def ask():
        end = time.monotonic() + 30
        while not said or (wanted is not None and wanted not in said[-1][0] and time.monotonic() < end):
            said.append(callers.what_callers_wait_for())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return said[-1]


@pytest.mark.parametrize("read", READS)
def test_who_could_call_while_a_thread_reads(tmp_path, read):
    gate = Gate()

    def step():
        with autograd.record():
            READS[read](gate.behind(nd.ones(3)), str(tmp_path / "array"))

    def other(trains):
        with autograd.record() if trains else nullcontext():
            began.set()
        ended.wait(60)

    reader = threading.Thread(target=step, name="reader")
    reader.start()
    try:
        text = f"thread 'reader' waits in {NAMES.get(read, 'asnumpy')} ({__file__}, line "
        said, patience = answer(text)
        assert said.startswith(text) and f'"{read}": lambda y, path: ' in said
        assert patience == {"waitall": 0.2, "condition": 10}.get(read, 3)
        for trains in (False, True):
            began, ended = threading.Event(), threading.Event()
            thread = threading.Thread(target=other, args=(trains,), daemon=True)
            thread.start()
            assert began.wait(30)
            assert answer() == ("", 0)
            ended.set()
            thread.join()
        with ThreadPoolExecutor(1) as pool:  # whose worker waits for work
            pool.submit(time.sleep, 0).result()
            assert answer(text) == (said, patience)
    finally:
        gate.open()
        reader.join()


def test_what_others_list_while_threads_begin_and_make_layers():
    """The thread of the log lists the threads that train, and all layers, whatever these do meanwhile."""

    def begin():
        with autograd.record():
            layers.append(SyncBatchNorm(in_channels=1))

    def list_all():
        while not ended and time.monotonic() < limit:
            steps.training_threads.objects()
            steps.watch()

    layers, ended, limit, interval = [], [], time.monotonic() + 60, sys.getswitchinterval()
    threads = [threading.Thread(target=begin) for _ in range(300)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            listed = pool.submit(list_all)
            for thread in threads:
                thread.start()
                thread.join()
            ended.append(True)
        listed.result()
    finally:
        sys.setswitchinterval(interval)

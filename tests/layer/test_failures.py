"""A step that cannot be finished ends in an error that says why and harms nothing; the next step is right."""

import gc
import json
import logging
import pickle
import re
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import mxnet as mx
import numpy as np
import pytest
import replicas
from gate import Gate
from internals import core, exchange_of
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import WAYS, forward_and_backward, make_batch, on_devices, prepare, ready, short_waits
from soak.events import OutOfData

import gluon_syncbn
from gluon_syncbn import StepError, SyncBatchNorm
from gluon_syncbn.mxnet_side import callers
from gluon_syncbn.mxnet_side.nodes import json_of
from gluon_syncbn.training import steps

AT_ONCE = 20  # seconds, of a layer that would wait for 60


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="gluon_syncbn")  # "starting a new step after a failed one"


def a_layer(contexts, way="eager", **kwargs):
    layer = SyncBatchNorm(in_channels=5, **kwargs)
    return prepare(layer, make_batch(np.random.RandomState(0), 2), contexts, "float32", WAYS[way])


def assert_next_step_is_right(layer, contexts, rng):
    replicas.assert_next_step_is_right(layer, make_batch(rng, len(contexts), dtype="float32"), contexts)


def recorded(layer, xs):
    with autograd.record():
        return [layer(x) for x in xs]


def shards(rng, contexts):
    return on_devices(make_batch(rng, len(contexts)).shards, contexts, "float32")


# ---- what is wrong with a step, and what its error says ------------------------------------------------------------

#: By name: what happens to a layer and its data, which yields what cannot be read or raises the error itself; how many
#: replicas there are; settings of the layer; and parts of the error, where {0} is the first context.
SCENARIOS = {}


def scenario(*said, name=None, places=2, timeout=60, **settings):
    """`timeout` is 2 where the error comes after the wait, within which all others have arrived."""

    def note(happens):
        SCENARIOS[name or happens.__name__] = contextmanager(happens), places, {"timeout": timeout, **settings}, said

    return note


@scenario("2 of 3 replicas arrived ({0}, {2})", "missing {1} after 2 s", "Nobody has called", places=3, timeout=2)
def a_replica_is_never_called(layer, xs):
    yield recorded(layer, xs[::2])


@scenario("backward of call 2: 1 of 2 replicas arrived ({1}), missing {0}", "0 * output.sum() if it", timeout=2)
def the_backward_of_one_loss(layer, xs):
    for x in xs:
        x.attach_grad()
    recorded(layer, xs)[1].backward()
    yield [xs[1].grad]


@scenario("forward of call 2: 1 of 2 replicas arrived ({1}), missing {0}", "Meanwhile {0} waits in Sync", timeout=2)
def a_device_leaves_out_a_stage(layer, xs):
    """It waits in the backward of the layer before, as long as the others wait for it in that stage."""
    before = a_layer([x.context for x in xs])
    with autograd.record():
        ys = [before(xs[0]), layer(before(xs[1]))]
    autograd.backward(ys)
    yield [before.gamma.grad(xs[0].context)]


@scenario("missing {1}. Nobody has called", "waits in asnumpy", __file__, "layer(x).asnumpy()  # between)", timeout=100)
def a_read_between_replicas(layer, xs):
    with autograd.record():
        for x in xs:
            layer(x).asnumpy()  # between
    yield []


@scenario("OutOfData left the recorded step (hook)")
def an_exception_in_a_hook(layer, xs):
    def fails(block, inputs):
        if inputs[0].context == xs[1].context:
            raise OutOfData("hook")

    handle, ys = layer.register_forward_pre_hook(fails), []
    with suppress(OutOfData), autograd.record():
        for x in xs:
            ys.append(layer(x))
    yield ys
    handle.detach()


@scenario("1 of 2 replicas arrived", "after 2 s. Every replica has issued its call", timeout=2)
def a_call_that_an_operator_before_kept_from_running(layer, xs):
    """MXNet skips it. The other replica waits for it, and does not meet the call of the next step."""
    with autograd.record():
        skipped = layer(nd.linalg.potrf(nd.full((2, 5, 3, 3), -1.0, ctx=xs[0].context)))
        waits = layer(xs[1])
    with pytest.raises(mx.MXNetError, match="potrf"):
        skipped.wait_to_read()
    yield [waits]


@scenario("of 3 replicas arrived", places=3, timeout=2)
def a_device_is_busy(layer, xs):
    """MXNet looks for an operator's error with the device's own worker, when that has nothing else to do."""
    big = nd.ones((300, 300), ctx=xs[0].context)
    ys = recorded(layer, xs[:2])
    for _ in range(60):
        nd.dot(big, big)
    yield ys


@scenario("on {2}: the layer was called here", "only_on(...) lets only {0}, {1} take part", places=3)
def a_call_on_another_device(layer, xs):
    with gluon_syncbn.only_on([x.context for x in xs[:2]]):
        with pytest.raises(ValueError, match="active already"):
            gluon_syncbn.only_on(xs[0].context).__enter__()
        yield recorded(layer, xs)[2:]
        steps.drain()  # the others heard of it too, or had met before


@scenario("MXNetError left the recorded step")
def another_number_of_channels_on_one_replica(layer, xs):
    with suppress(mx.MXNetError), autograd.record():
        first = layer(xs[0])
        layer(xs[1].slice_axis(axis=1, begin=0, end=4))
    yield [first]


for _said, _data in (
    ("data has 1 dimensions and axis is 1; expected 2 to 5 dimensions", nd.ones(5)),
    ("data has 6 dimensions and axis is 1; expected 2 to 5 dimensions", nd.ones((2, 5, 1, 1, 1, 1))),
    ("data must be bfloat16, float16, float32 or float64; uint8", nd.ones((2, 5), dtype="uint8")),
):
    scenario(_said, name=_said)(lambda layer, xs, data=_data: (yield recorded(layer, [data])))


def a_batch_that_is_not_finite(layer, xs):
    gluon_syncbn.configure(nonfinite="error")
    xs[-1][0, 2, 0, 1] = np.nan
    before = every_value(layer)
    yield recorded(layer, xs)
    assert_every_value(layer, before)


for _places in (1, 2, 4):
    _said = f"on {{{_places - 1}}}: the batch is not finite: the mean of channel 2 is "
    scenario(_said, name=f"not finite on one of {_places}", places=_places)(a_batch_that_is_not_finite)


@scenario("all replicas are empty or masked, so there is no mean")
def nothing_counts(layer, xs):
    with autograd.record():
        ys = [layer(x, nd.zeros((len(x), 4, 6), ctx=x.context)) for x in xs]
    yield ys


@scenario("all replicas are empty or masked, so there is no mean")
def all_shards_are_empty(layer, xs):
    with mx.util.np_shape(True):
        yield recorded(layer, [nd.zeros((0, 5, 4, 6), ctx=x.context) for x in xs])


def failing_add(layer, xs, failing=1, adds=False, text="the link is down"):
    """The store raises in its first or second call: instead of adding, or with the sums on their way."""
    exchange, calls = exchange_of(layer), []
    add = exchange.add

    def fails(*arguments):
        calls.append(arguments)
        added = add(*arguments) if adds or len(calls) != failing else None
        if len(calls) == failing:
            raise ConnectionError(text)
        return added

    for x in xs:
        x.attach_grad()
    with mock.patch.object(exchange, "add", fails):
        ys = recorded(layer, xs)
        if failing == 2:
            autograd.backward(ys, on_devices([x.asnumpy() for x in xs], [x.context for x in xs], "float32"))
        yield ys if failing == 1 else [x.grad for x in xs]
        assert len(calls) == failing


FAILS = "the KVStore could not add the statistics: ConnectionError: "
for _name, _how, _said in (
    ("the first call of a store fails", {}, "the link is down"),
    ("the second call of a store fails", {"failing": 2}, "the link is down"),
    ("a store fails after its sums", {"adds": True}, "the link is down"),
    ("a store fails, and names an even number of letters", {"text": "é" * 2000}, ""),
    ("a store fails, and names an odd file", {"text": "\udce9.jpg" + "é" * 2000}, ""),  # whatever names of files are
):
    scenario(FAILS + _said, name=_name, places=3, kvstore="device")(partial(failing_add, **_how))


@scenario("KVStore has not answered after 1 s", "kvstore='host'", timeout=1, kvstore="device")
def a_store_whose_sum_never_comes(layer, xs):
    """MXNet's engine has it, where a read would wait for ever. All replicas have the error."""
    gate, store = Gate(), exchange_of(layer).kvstore
    late = lambda key, values, out: gate.behind(values[0]).copyto(out[0])  # noqa: E731
    with mock.patch.object(store, "pushpull", late):
        yield recorded(layer, xs)
    gate.open()


def error_of(y):
    """Which comes at once, and not after the layer's timeout."""
    start = time.monotonic()
    with pytest.raises(mx.MXNetError) as error:
        y.wait_to_read()
    assert time.monotonic() - start < AT_ONCE
    return str(error.value)


def ways_of(name):
    on_gpus = [pytest.mark.on_gpus] * (name == "a_replica_is_never_called" or "store fails" in name)
    eager = pytest.param(name, "eager", marks=on_gpus)
    return [eager] if "kept_from" in name or name == "nothing_counts" else [eager, (name, "static_shape")]


@pytest.mark.parametrize("name, way", [one for name in SCENARIOS for one in ways_of(name)])
def test_a_step_that_cannot_be_finished(contexts, rng, name, way):
    happens, places, settings, said = SCENARIOS[name]
    contexts = contexts[:places]
    layer = a_layer(contexts, way, **settings)
    assert_next_step_is_right(layer, contexts, rng)
    try:
        with happens(layer, shards(rng, contexts)) as unread:
            errors = [error_of(y) for y in unread]
    except mx.MXNetError as error:
        errors = [str(error)]
    assert errors
    for text in errors:
        for part in (f"SyncBatchNorm '{layer.name}'", *said):
            assert part.format(*contexts) in text
    assert_next_step_is_right(layer, contexts, rng)


def test_an_error_of_the_core_is_told_once(contexts, rng, caplog):
    """As of a graph whose layer another thread is calling. The next step does not log what has left this one."""
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    layer = a_layer(contexts[:2])
    with pytest.raises(StepError, match="a reason"), autograd.record():
        gluon_syncbn._native.fail("a reason")
        raise StepError("a reason")
    assert_next_step_is_right(layer, contexts[:2], rng)
    assert "a reason" not in caplog.text


def test_errors_in_the_thread_that_logs_and_answers(contexts, rng, monkeypatch, caplog, capsys):
    """A filter of the program's raises, and what reads the frames of its threads: that is reported, and no more."""
    layer, own = a_layer(contexts[:2], timeout=100), callers._frames

    def no_filter(record):
        raise KeyError("in a filter")

    def no_frames(of):
        monkeypatch.setattr(callers, "_frames", own)
        raise KeyError("in frames")

    monkeypatch.setattr(logging.getLogger("gluon_syncbn"), "filters", [no_filter])
    monkeypatch.setattr(callers, "_frames", no_frames)
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    gluon_syncbn.configure(nonfinite="skip")  # which warns
    autograd.backward(recorded(layer, [x * np.nan for x in shards(rng, contexts[:2])]))
    with pytest.raises(StepError, match="waits in asnumpy"), autograd.record():
        for x in shards(rng, contexts[:2]):
            layer(x).asnumpy()
    errors = capsys.readouterr().err
    assert "KeyError: 'in a filter'" in errors and "KeyError: 'in frames'" in errors


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "steps"])
def test_a_batch_on_fewer_devices_ends_soon(contexts, rng, caplog, reads):
    """Also where MXNet would speak of a stale gradient, and say how to train without it."""
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    net, trainer, xs, heads = small(rng, contexts[:2], way="eager")
    gluon_syncbn.configure(timeout=100)
    train(net, trainer, xs, heads)
    before, metric = every_value(net), mx.metric.Loss()
    with autograd.record():
        loss = net(xs[0])
    loss.backward()
    with pytest.raises(StepError) as error:
        trainer.step(2, ignore_stale_grad=reads)  # of one device
        metric.update(None, [loss])  # of one device
    for part in ("missing cpu(1)", __file__, "# of one device)", "only_on(contexts)"):
        assert part in str(error.value)
    steps.drain()
    assert_every_value(net, before)
    train(net, trainer, xs, heads)
    assert not caplog.records  # the error has been raised, and is not logged too


def test_once_failed_the_rest_of_the_step_fails_at_once(contexts, rng):
    layer = a_layer(contexts[:2])
    xs = shards(rng, contexts[:2])
    with autograd.record():
        with short_waits(), pytest.raises(StepError) as first:
            layer(xs[0]).asnumpy()
        start = time.monotonic()
        for x in [xs[1], xs[0]]:
            with pytest.raises(StepError) as later:
                layer(x).asnumpy()
            assert str(later.value) == str(first.value)
        assert time.monotonic() - start < AT_ONCE, "waited for replicas of a step that had failed"
    assert_next_step_is_right(layer, contexts[:2], rng)


def test_long_waits_say_so_and_may_end_well(contexts, rng, monkeypatch, caplog):
    """For a replica, and for a KVStore. The last replica, called then, is on its way for half a second."""
    layer, adds = a_layer(contexts[:2], timeout=200), a_layer(contexts[:3], timeout=200, kvstore="device")
    (first, second), gate, goes_on = shards(rng, contexts[:2]), Gate(), threading.Event()
    add, until = exchange_of(adds).add, time.monotonic() + 100
    monkeypatch.setattr(exchange_of(adds), "add", lambda *arguments: goes_on.wait(100) and add(*arguments))
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    with autograd.record():
        ys = [layer(first), *(adds(x) for x in shards(rng, contexts[:3]))]
        while len(caplog.records) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(0.2)
        goes_on.set()
        ys.append(layer(gate.behind(second)))
    threading.Timer(0.5, gate.open).start()
    assert all(np.isfinite(y.asnumpy()).all() for y in ys)
    store = "3 of 3 replicas arrived (cpu(0), cpu(1), cpu(2)), missing nobody. The KVStore has not answered"
    texts = {layer: "1 of 2 replicas arrived (cpu(0)), missing cpu(1)", adds: store}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    for one, text in texts.items():
        begin = re.escape(f"SyncBatchNorm '{one.name}', forward of call 1: {text}")
        assert re.search(begin + r" after \d+ s; still waiting, until 20[02] s\. ", caplog.text)
    assert "Nobody has called the layer there. Call the net on all its devices" in caplog.text


def test_a_store_that_runs_an_optimizer(contexts, rng):
    store = mx.kv.create("device")
    layer = a_layer(contexts[:2], timeout=60, kvstore=store)
    store.set_optimizer(mx.optimizer.SGD())
    for y in recorded(layer, shards(rng, contexts[:2])):
        assert re.search("has an optimizer set.*update_on_kvstore=False", error_of(y))
    assert_next_step_is_right(a_layer(contexts[:2], kvstore="device"), contexts[:2], rng)


# ---- what is saved after a failure ---------------------------------------------------------------------------


def small(rng, places, *behind, way="hybrid", optimizer="adam", **settings):
    """A net that begins with a dense layer and ours, its trainer, and data and heads of each place."""
    net = ready(nn.Dense(5, in_units=5), SyncBatchNorm(in_channels=5), *behind, contexts=places, way=way)
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1}, **settings)
    return net, trainer, *([nd.array(rng.randn(4, 5), ctx=place) for place in places] for _ in range(2))


def spoil(array):
    """Has an operator fail that writes this array, and that has nothing to do with a step."""
    array[:] = nd.linalg.potrf(nd.full((1, 1), -1, dtype=array.dtype, ctx=array.ctx))


def values_of(path):
    if path.endswith("states"):
        states, _ = pickle.loads(Path(path).read_bytes())
        return [value.asnumpy().tolist() for number in sorted(states) for value in states[number]]
    return {name: value.asnumpy().tolist() for name, value in nd.load(path).items()}


@pytest.mark.parametrize("updates", [True, False], ids=["store", "trainer"])
@pytest.mark.parametrize("what", ["net", "all", "export", "arrays", "copies", "states"])
def test_a_file_after_a_failed_step(contexts, rng, tmp_path, what, updates):
    """An error that somebody has handled costs no file, as after Ctrl-C, with the step in flight. One that nobody may
    have seen is raised once. The error of another operator is no step's: the array has no value then."""
    places = contexts[:2]
    net, trainer, xs, heads = small(rng, places, nn.Dense(5, in_units=5), update_on_kvstore=updates)

    def arrays(change=lambda array: array):
        return {name: change(p.data(places[0])) for name, p in net.collect_params().items()}

    file, save = {
        "net": ("net.params", net.save_parameters),
        "all": ("all.params", net.collect_params().save),
        "export": ("net-0000.params", lambda path: net.export(path[: -len("-0000.params")])),
        "arrays": ("arrays.params", lambda path: nd.save(path, arrays())),
        "copies": ("copies.params", lambda path: nd.save(path, arrays(lambda array: array + 0))),
        "states": ("trainer.states", trainer.save_states),
    }[what]
    path = str(tmp_path / file)

    def assert_saved(values, raises):
        if raises:
            with pytest.raises(StepError, match="1 of 2 replicas arrived"):
                save(path)
            assert values_of(path) == values
        if what != "copies":  # also of running statistics, which have no value then
            save(path)
        assert values_of(path) == values

    for handled in (True, False):
        forward_and_backward(net, xs, heads)
        trainer.step(8)
        save(path)
        before = values_of(path)
        try:
            with short_waits(), autograd.record():
                y = net(xs[0])
            y.backward()
            trainer.step(8, ignore_stale_grad=True)
            if handled:
                raise OutOfData
            assert_saved(before, raises=what in ("net", "all", "export", "copies"))
        except OutOfData:
            assert_saved(before, raises=what == "copies")
        steps.drain()
        assert all(np.isfinite(value.asnumpy()).all() for value in arrays().values())
    if what == "states" and updates:  # the store has them
        return
    content = Path(path).read_bytes()
    spoil(trainer._updaters[0].states[0][1] if what == "states" else net[0].weight.data(places[0]))
    with pytest.raises(mx.MXNetError, match="potrf"):
        save(path)
    assert Path(path).read_bytes() == content


@pytest.mark.parametrize("left", [OutOfData, KeyboardInterrupt])
def test_an_exception_and_the_error_of_an_update(left, contexts, caplog):
    """Who leaves the scope waits for the weights, and meets an error that nobody has seen. Ctrl-C goes on."""
    layer = a_layer(contexts[:2])
    gluon.Trainer(layer.collect_params(), "sgd")
    spoil(layer.gamma.data(contexts[1]))
    with pytest.raises((mx.MXNetError, KeyboardInterrupt)) as error, autograd.record():
        raise left
    assert error.type is (KeyboardInterrupt if left is KeyboardInterrupt else mx.MXNetError)
    assert "potrf" in f"{error.value}{caplog.text}"
    assert f"{left.__name__} left the recorded step, so" in core.failure()


def test_the_error_of_another_operator_before_the_next_step(contexts, caplog):
    layer = a_layer(contexts[:2])
    with pytest.raises(OutOfData), autograd.record():
        raise OutOfData
    spoil(nd.ones(1))
    with autograd.record():
        pass
    assert "failed before a new step, so reading the result no longer" in caplog.text and "potrf" in caplog.text, layer


@pytest.mark.parametrize("called", [0, 1])
@pytest.mark.parametrize("updates", [True, False], ids=["store", "trainer"])
def test_the_step_before_an_exception(contexts, rng, updates, called):
    """It is in flight, as nobody has read its results. Its update takes place, as with plain BatchNorm."""
    places = contexts[:2]
    start = nd.array(rng.randn(5, 5))

    def weights(reads):
        settings = {"way": "eager", "optimizer": "sgd", "update_on_kvstore": updates}
        net, trainer, xs, heads = small(np.random.RandomState(1), places, **settings)
        net[0].weight.set_data(start)
        gate = Gate()
        with autograd.record():
            ys = [net(xs[0]), net(gate.behind(xs[1]))]
        autograd.backward(ys, heads)
        trainer.step(8)
        if reads:
            gate.open()
            nd.waitall()
        else:
            threading.Timer(0.5, gate.open).start()
        with pytest.raises(OutOfData), autograd.record():
            for x in xs[:called]:
                net(x)
            raise OutOfData
        with autograd.record():
            pass  # starts afresh
        return [array.asnumpy() for array in net[0].weight.list_data()]

    expected = weights(reads=True)
    assert (expected[0] != start.asnumpy()).all()
    np.testing.assert_allclose(weights(reads=False), expected, rtol=0, atol=1e-5)


# ---- a failed step and the parameters ----------------------------------------------------------------------


def every_value(net):
    return {(name, i): d.asnumpy() for name, p in net.collect_params().items() for i, d in enumerate(p.list_data())}


def assert_every_value(net, before):
    assert not [key for key, value in every_value(net).items() if not np.array_equal(value, before[key])]


def train(net, trainer, xs, heads):
    """trainer.step is queued before anybody reads an output and so learns that the step has failed."""
    ys = forward_and_backward(net, xs, heads)
    trainer.step(8, ignore_stale_grad=True)
    return [y.asnumpy() for y in ys]


@pytest.mark.parametrize("way, updates", [*((way, None) for way in WAYS), ("eager", True), ("eager", False)], ids=str)
def test_a_failed_step_leaves_every_parameter_as_it_was(contexts, rng, way, updates):
    """Also where it is a Trainer's first, which hands the first context's parameters to all, running statistics too."""
    behind = [nn.Activation("relu"), nn.Dense(5, in_units=5), SyncBatchNorm(in_channels=5), nn.Dense(5, in_units=5)]
    net, trainer, xs, heads = small(rng, contexts[:2], *behind, way=way)
    train(net, trainer, xs, heads)
    if updates is not None:
        for p in net.collect_params(".*running.*").values():
            p.data(contexts[1])[:] += 1
    for turn in range(6):
        if updates is not None:
            trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=updates)
        before = every_value(net)
        with short_waits(), pytest.raises(StepError, match="1 of 2 replicas arrived"):
            train(net, trainer, xs[turn % 2 :][:1], heads[turn % 2 :][:1])
        steps.drain()
        assert_every_value(net, before)
        if updates is None:
            train(net, trainer, xs, heads)
            trained = every_value(net)
            assert all(np.isfinite(value).all() for value in trained.values())
            assert not [key for key, value in trained.items() if np.array_equal(value, before[key])], f"turn {turn}"


def test_an_error_in_the_backward_leaves_every_weight_as_it_was(contexts, rng):
    """Also those behind the layer, whose gradients are there."""
    net, trainer, xs, heads = small(rng, contexts[:2], nn.Dense(5, in_units=5), way="eager")
    train(net, trainer, xs, heads)
    before = every_value(net[2])
    with short_waits(2), pytest.raises(StepError, match="backward of call 2: 1 of 2 replicas arrived"):
        recorded(net, xs)[0].backward(heads[0])
        trainer.step(8, ignore_stale_grad=True)
        nd.waitall()
    steps.drain()
    assert_every_value(net[2], before)


# ---- what else there is --------------------------------------------------------------------------------------


@pytest.mark.on_gpus
def test_devices(contexts, rng):
    """A step on some contexts is right on those, and gives the others their running statistics."""
    layer = a_layer(contexts[:4])
    for some in (contexts[:4], [contexts[1], contexts[3]]):
        with gluon_syncbn.only_on(some):
            assert_next_step_is_right(layer, some, rng)
    assert_next_step_is_right(layer, contexts[:4], rng)


def test_room_for_errors_in_the_list_of_mxnet(contexts, monkeypatch):
    """The first layer on several devices makes it, and leaves no error there."""
    made, fail_arrays = [], core.fail_arrays
    monkeypatch.setattr(core, "fail_arrays", lambda arrays: fail_arrays(made.append(len(arrays)) or arrays))
    monkeypatch.setattr(gluon_syncbn.training.session.session, "_done", {})
    for places, room in ((1, []), (2, [256]), (2, [256])):
        SyncBatchNorm(in_channels=3).initialize(ctx=contexts[:places])
        assert made == room
    nd.waitall()


@pytest.mark.parametrize("of", ["another process", "a layer that is gone"])
def test_a_graph_that_has_no_layer_here(contexts, tmp_path, of):
    layer, path = ready(SyncBatchNorm(in_channels=3), contexts=contexts[:1]), str(tmp_path / "symbol.json")
    text = json.dumps(json_of(layer(mx.sym.var("data"))))
    Path(path).write_text(text)
    mx.sym.load(path)
    if of == "another process":
        assert core.PROCESS in text
        Path(path).write_text(text.replace(core.PROCESS, f"{0:016x}:"))
    else:
        del layer
        gc.collect()
    for load in (mx.sym.load, lambda path: gluon.SymbolBlock.imports(path, ["data"])):
        with pytest.raises(
            mx.MXNetError, match=r"of another process, or one that is gone. .* net.export, net.save and"
        ):
            load(path).infer_shape(data=(2, 4))


def test_an_error_that_stays(contexts, rng, monkeypatch):
    """MXNet fails at every wait, as with an engine that does not exist: each wait for all has an end, and says so."""
    layer = a_layer(contexts[:2], timeout=60)
    waits = []

    def fails():
        waits.append(None)
        raise mx.MXNetError("no engine")

    with monkeypatch.context() as patch:
        patch.setattr(mx.nd, "waitall", fails)
        with pytest.raises(mx.MXNetError, match="no step can begin, because MXNet fails at every wait: no engine"):
            gluon_syncbn.reset()
        with pytest.raises(OutOfData), autograd.record():
            raise OutOfData
        with pytest.raises(mx.MXNetError, match="no step can begin"), autograd.record():
            pytest.fail("the step has begun")
        assert steps.drain() == ["no engine"] * steps.MOST_WAITS
    assert len(waits) == 3 * steps.MOST_WAITS
    assert steps.current() is None
    assert_next_step_is_right(layer, contexts[:2], rng)


def test_a_layer_that_is_gone():
    number = core.layer_create("gone", 0, 1, 0, [], 0, None)
    core.layer_drop(number)
    for name, *given in (("layer_place", number, ["cpu(0)"]), ("begin_graph", "cpu(0)", [number], [0], [])):
        with pytest.raises(mx.MXNetError, match=f"no layer has the number {number}"):
            getattr(core, name)(*given)

"""A step that cannot be finished ends in an error that says why and harms nothing; the next step is right."""

import gc
import json
import logging
import pickle
import re
import threading
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import replicas
from gate import Gate
from internals import core, exchange_of
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from replicas import (
    TOLERANCE,
    WAYS,
    assert_same,
    assert_whole,
    forward_and_backward,
    in_threads,
    make_batch,
    on_devices,
    prepare,
    short_waits,
    step,
    truth,
)

import gluon_syncbn
from gluon_syncbn import StepError, SyncBatchNorm
from gluon_syncbn.mxnet_side import callers
from gluon_syncbn.mxnet_side.nodes import json_of
from gluon_syncbn.training import steps

EAGER = pytest.param("eager", marks=pytest.mark.on_gpus)
AT_ONCE = 20  # seconds, of a layer that would wait for 60


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="gluon_syncbn")  # "starting a new step after a failed one"


def a_layer(contexts, way="eager", **kwargs):
    layer = SyncBatchNorm(in_channels=5, **kwargs)
    return prepare(layer, make_batch(np.random.RandomState(0), 2), contexts, "float32", WAYS[way])


def assert_next_step_is_right(layer, contexts, rng):
    replicas.assert_next_step_is_right(layer, make_batch(rng, len(contexts), dtype="float32"), contexts)


def assert_explains(error, layer, *parts):
    text = str(error.value)
    for part in (f"SyncBatchNorm '{layer.name}'", *parts):
        assert part in text, f"{part!r} is not in: {text}"


def test_an_error_of_the_core_is_told_once(contexts, rng, caplog):
    """As of a graph whose layer another thread is calling. The next step does not log what has left this one."""
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    layer = a_layer(contexts[:2])
    with pytest.raises(StepError, match="a reason"), autograd.record():
        gluon_syncbn._native.fail("a reason")
        raise StepError("a reason")
    assert_next_step_is_right(layer, contexts[:2], rng)
    assert "a reason" not in caplog.text


def recorded(layer, xs):
    with autograd.record():
        return [layer(x) for x in xs]


def shards(rng, contexts, dtype="float32"):
    return on_devices(make_batch(rng, len(contexts)).shards, contexts, dtype)


# ---- somebody does not come ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [EAGER, *list(WAYS)[1:]])
def test_a_replica_that_is_never_called(contexts, rng, way):
    layer = a_layer(contexts[:3], way)
    xs = shards(rng, contexts[:3])
    with short_waits(2):  # within which both have arrived
        ys = recorded(layer, xs[::2])
        with pytest.raises(StepError) as error:
            ys[0].asnumpy()
    first, second, third = contexts[:3]
    arrived = f"2 of 3 replicas arrived ({first}, {third})"
    assert_explains(error, layer, arrived, f"missing {second} after 2 s", "Nobody has called")
    assert_next_step_is_right(layer, contexts[:3], rng)


@pytest.mark.parametrize("way", WAYS)
def test_backward_of_one_loss(contexts, rng, way):
    layer = a_layer(contexts[:2], way)
    xs = shards(rng, contexts[:2])
    for x in xs:
        x.attach_grad()
    with short_waits(2):  # of the step, whose forward succeeds
        ys = recorded(layer, xs)
        ys[1].backward()
        with pytest.raises(StepError) as error:
            xs[1].grad.asnumpy()
    assert_explains(
        error,
        layer,
        "backward of call 1",
        "1 of 2 replicas arrived (cpu(1))",
        "missing cpu(0)",
        "the loss of a replica",
    )
    assert_next_step_is_right(layer, contexts[:2], rng)


def test_a_device_that_leaves_out_a_layer(contexts, rng):
    """Its partner waits in the next layer, whose replicas have all been called: the error names the layer."""
    first, second = (a_layer(contexts[:2]) for _ in range(2))
    xs = shards(rng, contexts[:2])
    with autograd.record():
        second(xs[1])
        y = second(first(xs[0]))
    with pytest.raises(StepError) as error:
        y.asnumpy()
    assert_explains(
        error, first, "forward of call 1: 1 of 2 replicas arrived (cpu(0)), missing cpu(1). Nobody has called"
    )
    assert_next_step_is_right(second, contexts[:2], rng)


def test_a_stage_that_a_device_leaves_out(contexts, rng):
    """The device waits in the backward of the layer before, as long as the others wait for it in that stage."""
    first, later = (a_layer(contexts[:2]) for _ in range(2))
    xs = shards(rng, contexts[:2])
    with short_waits(2):
        with autograd.record():
            ys = [first(xs[0]), later(first(xs[1]))]
        autograd.backward(ys)
        with pytest.raises(StepError) as error:
            first.gamma.grad(contexts[0]).asnumpy()
    assert_explains(
        error, later, "forward of call 1: 1 of 2 replicas arrived (cpu(1)), missing cpu(0)", "Nobody has called"
    )
    assert f"Meanwhile cpu(0) waits in SyncBatchNorm '{first.name}', backward of call 1." in str(error.value)
    assert_next_step_is_right(later, contexts[:2], rng)


@pytest.mark.parametrize("way", ["eager", "static_shape"])
def test_a_read_between_replicas_ends_soon(contexts, rng, way):
    """A static graph executes what it has made for an earlier step."""
    layer = a_layer(contexts[:2], way, timeout=100)
    assert_next_step_is_right(layer, contexts[:2], rng)
    with pytest.raises(StepError) as error, autograd.record():
        for x in shards(rng, contexts[:2]):
            layer(x).asnumpy()  # between the replicas
    line = "layer(x).asnumpy()  # between the replicas)"
    assert_explains(error, layer, "missing cpu(1). Nobody has called", "waits in asnumpy", __file__, line)
    assert_next_step_is_right(layer, contexts[:2], rng)


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
    net = a_net(contexts[:2], "eager")
    trainer = a_trainer(net)
    gluon_syncbn.configure(timeout=100)
    train(net, trainer, contexts[:2], rng)
    before, metric = every_value(net), mx.metric.Loss()
    with autograd.record():
        loss = net(nd.ones((2, 3, 8, 8), ctx=contexts[0]))
    loss.backward()
    with pytest.raises(StepError) as error:
        trainer.step(2, ignore_stale_grad=reads)  # of one device
        metric.update(None, [loss])  # of one device
    for part in ("missing cpu(1)", __file__, "# of one device)", "only_on(contexts)"):
        assert part in str(error.value)
    steps.drain()
    assert all(np.array_equal(value, before[key]) for key, value in every_value(net).items())
    train(net, trainer, contexts[:2], rng)
    assert not caplog.records  # the error has been raised, and is not logged too


def test_a_read_while_the_thread_of_another_replica_is_late(contexts, rng):
    """It has not trained before, and comes later than a read may wait for nobody."""
    layer = a_layer(contexts[:2], timeout=100)
    batch = make_batch(rng, 2, dtype="float32")
    xs, ys = on_devices(batch.shards, contexts, "float32"), [None, None]
    layer.gamma.set_data(nd.array(batch.gamma))
    layer.beta.set_data(nd.array(batch.beta))

    def replica(i):
        time.sleep(4 * i)
        with autograd.record():
            ys[i] = layer(xs[i])
        ys[i].wait_to_read()

    in_threads(replica, 2)
    for y, want in zip(ys, truth(batch).outputs):
        np.testing.assert_allclose(y.asnumpy(), want, atol=1e-4)


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


# ---- an exception in one replica's part --------------------------------------------------------------------


class OutOfData(Exception):
    pass


def released(y):
    """The error of a replica whose partner has gone, which it gets at once and not after its timeout."""
    start = time.monotonic()
    with pytest.raises(StepError) as error:
        y.asnumpy()
    assert time.monotonic() - start < AT_ONCE
    return error


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_between_replicas(contexts, rng, way):
    layer = a_layer(contexts[:3], way, timeout=60)
    xs = shards(rng, contexts[:3])
    ys = []
    with pytest.raises(OutOfData), autograd.record():
        for x in xs[:2]:
            ys.append(layer(x))
        raise OutOfData("sample 17")
    for y in ys:
        error = released(y)
        assert "OutOfData left the recorded step (sample 17)" in str(error.value)
    assert_next_step_is_right(layer, contexts[:3], rng)


@pytest.mark.parametrize("scope", [autograd.record, autograd.train_mode], ids=["record", "train_mode"])
def test_the_next_step_without_reading_the_failed_one(contexts, rng, scope):
    """What is left of a step that nobody asks for does not meet the next one."""
    batch = make_batch(rng, 2, dtype="float32")
    layer = prepare(SyncBatchNorm(in_channels=5, timeout=60, momentum=0), batch, contexts[:2], "float32")
    for turn in range(4):
        with pytest.raises(OutOfData), scope():
            layer(on_devices(batch.shards, contexts, "float32")[turn % 2])
            raise OutOfData
        assert_same(step(layer, batch, contexts, "float32"), truth(batch, momentum=0), TOLERANCE["float32"])


@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_forward_hook"])
def test_an_exception_in_a_hook(contexts, rng, hook):
    layer = a_layer(contexts[:2], timeout=60)

    def fails(block, inputs, *output):
        if inputs[0].context == contexts[1]:
            raise OutOfData("hook")

    handle = getattr(layer, hook)(fails)
    ys = []
    with pytest.raises(OutOfData), autograd.record():
        for x in shards(rng, contexts[:2]):
            ys.append(layer(x))
    if hook == "register_forward_pre_hook":
        assert "OutOfData left the recorded step (hook)" in str(released(ys[0]).value)
    handle.detach()
    assert_next_step_is_right(layer, contexts[:2], rng)


# ---- the KVStore -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [EAGER, *list(WAYS)[1:]])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exchange_that_fails(contexts, rng, way, phase, when, monkeypatch):
    """Instead of adding, or with the sums on their way."""
    layer = a_layer(contexts[:3], way, timeout=60, kvstore="device")
    add, calls = exchange_of(layer).add, []

    def fails(*arguments):
        calls.append(arguments)
        healthy = len(calls) == 1 and phase == "backward"
        added = add(*arguments) if healthy or when == "after" else None
        if healthy:
            return added
        raise ConnectionError("the link is down")

    xs, heads = shards(rng, contexts[:3]), shards(rng, contexts[:3])
    for x in xs:
        x.attach_grad()
    with monkeypatch.context() as patch:
        patch.setattr(exchange_of(layer), "add", fails)
        ys = recorded(layer, xs)
        if phase == "backward":
            autograd.backward(ys, heads)
        for result in ys if phase == "forward" else [x.grad for x in xs]:
            assert_explains(
                released(result), layer, "the KVStore could not add the statistics: ConnectionError: the link is down"
            )
    assert len(calls) == (1 if phase == "forward" else 2)
    assert_next_step_is_right(layer, contexts[:3], rng)


@pytest.mark.parametrize("text", ["é" * 2000, "e" + "é" * 2000, "\udce9.jpg"], ids=["even", "odd", "surrogate"])
def test_an_exchange_that_fails_with_unusual_text(contexts, rng, text, monkeypatch):
    """Names of files come from the file system, whatever they are."""
    layer = a_layer(contexts[:2], kvstore="device")
    with monkeypatch.context() as patch:

        def fails(*arguments):
            raise ConnectionError(text)

        patch.setattr(exchange_of(layer), "add", fails)
        ys = recorded(layer, shards(rng, contexts[:2]))
        for y in ys:
            assert_explains(released(y), layer, "ConnectionError: ")
    assert_next_step_is_right(layer, contexts[:2], rng)


def test_a_store_whose_sum_never_comes(contexts, rng, monkeypatch):
    """MXNet's engine has it, where a read would wait for ever. All replicas have the error."""
    gate = Gate()
    layer = a_layer(contexts[:2], timeout=1, kvstore="device")
    store = exchange_of(layer).kvstore
    with monkeypatch.context() as patch:

        def late(key, values, out):
            gate.behind(values[0]).copyto(out[0])

        patch.setattr(store, "pushpull", late)
        ys = recorded(layer, shards(rng, contexts[:2]))
        for y in ys:
            assert_explains(released(y), layer, "KVStore has not answered after 1 s", "kvstore='host'")
    gate.open()
    assert_next_step_is_right(layer, contexts[:2], rng)


def test_a_store_that_runs_an_optimizer(contexts, rng):
    store = mx.kv.create("device")
    layer = a_layer(contexts[:2], timeout=60, kvstore=store)
    store.set_optimizer(mx.optimizer.SGD())
    ys = recorded(layer, shards(rng, contexts[:2]))
    for y in ys:
        assert_explains(released(y), layer, "has an optimizer set", "update_on_kvstore=False")
    assert_next_step_is_right(a_layer(contexts[:2], kvstore="device"), contexts[:2], rng)


# ---- what is saved after a failure ---------------------------------------------------------------------------


def small(rng, places, *behind, hybrid=True, optimizer="adam", **settings):
    """A net that begins with a dense layer and ours, its trainer, and data and heads of each place."""
    net = nn.HybridSequential()
    net.add(nn.Dense(5, in_units=5), SyncBatchNorm(in_channels=5), *behind)
    net.initialize(ctx=places)
    net.hybridize(hybrid)
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1}, **settings)
    return net, trainer, *([nd.array(rng.randn(4, 5), ctx=place) for place in places] for _ in range(2))


@pytest.mark.parametrize("how", ["exception", "replica", "loss"])
@pytest.mark.parametrize("updates", [True, False], ids=["store", "trainer"])
def test_a_net_is_saved_after_a_failed_step(contexts, rng, tmp_path, updates, how):
    """Where the error is handled. Elsewhere, one that nobody may have seen is raised once. Weights are unchanged."""
    places, others = contexts[:2], [SyncBatchNorm(in_channels=5) for _ in range(2)]
    net, trainer, xs, heads = small(rng, places, *others, hybrid=False, optimizer="nag", update_on_kvstore=updates)

    def save():
        net.save_parameters(str(tmp_path / "net.params"))
        net.collect_params().save(str(tmp_path / "all.params"))
        trainer.save_states(str(tmp_path / "trainer.states"))

    def fail(reads=True):
        with short_waits(), autograd.record():
            ys = [net(x) for x in (xs[:1] if how != "loss" else xs)]
            if how == "exception":
                raise OutOfData
        with short_waits():
            autograd.backward(ys[:1], heads[:1])
            trainer.step(8, ignore_stale_grad=True)
            if reads:
                xs[0].grad.asnumpy()

    def weights():
        return [p.data(places[0]).asnumpy().tolist() for p in net.collect_params("(?!.*running).*").values()]

    forward_and_backward(net, xs, heads)
    trainer.step(8)
    before = weights()
    try:
        fail()
    except (mx.MXNetError, OutOfData):
        save()
    assert weights() == before
    if how == "exception":  # which goes through the scope
        with pytest.raises(OutOfData):
            fail()
    else:
        fail(reads=False)
        with pytest.raises(StepError, match=r"1 of 2 replicas arrived"):
            save()
    save()
    net.load_parameters(str(tmp_path / "net.params"), ctx=places)
    assert weights() == before


@pytest.mark.parametrize("updates", [True, False], ids=["store", "trainer"])
def test_files_while_a_step_fails(contexts, rng, tmp_path, updates):
    """As after Ctrl-C, with the step in flight. What is computed of lost values costs no file that was there."""
    places = contexts[:2]
    net, trainer, xs, heads = small(rng, places, nn.Dense(5, in_units=5), update_on_kvstore=updates)

    def all_of(change=lambda array: array):
        return {name: change(p.data(places[0])) for name, p in net.collect_params().items()}

    def values(path):
        if path.endswith("states"):
            states, _ = pickle.loads(Path(path).read_bytes())
            return [value.asnumpy().tolist() for number in sorted(states) for value in states[number]]
        return {name: value.asnumpy().tolist() for name, value in nd.load(path).items()}

    ways = {
        "net.params": net.save_parameters,
        "net-0000.params": lambda path: net.export(path[: -len("-0000.params")]),
        "arrays.params": lambda path: nd.save(path, all_of()),
        "trainer.states": trainer.save_states,
        "copies.params": lambda path: nd.save(path, all_of(lambda array: array + 0)),
    }
    for name, save in ways.items():
        path = str(tmp_path / name)
        forward_and_backward(net, xs, heads)
        trainer.step(8)
        save(path)
        before = values(path)
        try:
            with short_waits(), autograd.record():
                y = net(xs[0])
            y.backward()
            trainer.step(8, ignore_stale_grad=True)
            raise OutOfData
        except OutOfData:
            if name == "copies.params":  # also of running statistics
                with pytest.raises(StepError, match="1 of 2 replicas arrived"):
                    save(path)
            else:
                save(path)
        assert values(path) == before, name
        steps.drain()
        assert all(np.isfinite(value.asnumpy()).all() for value in all_of().values())


def spoil(array):
    """Has an operator fail that writes this array, and that has nothing to do with a step."""
    array[:] = nd.linalg.potrf(nd.full((1, 1), -1, dtype=array.dtype, ctx=array.ctx))


@pytest.mark.parametrize("what", ["net", "all", "export", "arrays", "states", "module"])
def test_the_error_of_another_operator_after_a_failed_step(contexts, rng, tmp_path, what):
    """It is not the step's: the array has no value then, and the file stays as it was."""
    places = contexts[:2]
    net, trainer, xs, heads = small(rng, places, update_on_kvstore=False)
    forward_and_backward(net, xs, heads)
    trainer.step(8)
    symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), name="bn")
    module = mx.mod.Module(symbol, ["data"], [], context=places)
    module.bind([("data", (8, 5))])
    module.init_params()
    weight, name = net[0].weight.data(places[1]), str(tmp_path / "net")
    spoiled, file, save = {
        "net": (weight, "net", net.save_parameters),
        "all": (weight, "all", net.collect_params().save),
        "export": (weight, "net-0000.params", lambda path: net.export(name)),
        "arrays": (weight, "list", lambda path: nd.save(path, net[0].weight.list_data())),
        "states": (trainer._updaters[0].states[0][1], "states", trainer.save_states),
        "module": (
            module._exec_group.aux_arrays[0][1],
            "net-0001.params",
            lambda path: (setattr(module, "_params_dirty", True), module.save_checkpoint(name, 1)),
        ),
    }[what]
    path = tmp_path / file
    save(str(path))
    before = path.read_bytes()
    with pytest.raises(OutOfData), autograd.record():
        net(xs[0])
        raise OutOfData
    spoil(spoiled)
    with pytest.raises(mx.MXNetError, match="potrf"):
        save(str(path))
    assert path.read_bytes() == before


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
        settings = {"hybrid": False, "optimizer": "sgd", "update_on_kvstore": updates}
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


# ---- some of the contexts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [EAGER, *list(WAYS)[1:]])
def test_devices(contexts, rng, way):
    """A step on some contexts is right on those, and gives the others their running statistics."""
    layer = a_layer(contexts[:4], way)
    assert_next_step_is_right(layer, contexts[:4], rng)
    with gluon_syncbn.only_on([contexts[1], contexts[3]]):
        assert_next_step_is_right(layer, [contexts[1], contexts[3]], rng)
    assert_next_step_is_right(layer, contexts[:4], rng)


def test_devices_and_a_call_on_another_one(contexts, rng):
    layer = a_layer(contexts[:3], timeout=60)
    xs = shards(rng, contexts[:3])
    with gluon_syncbn.only_on(contexts[:2]):
        ys = recorded(layer, xs)
        assert_explains(
            released(ys[2]),
            layer,
            "on cpu(2): the layer was called here",
            "only_on(...) lets only cpu(0), cpu(1) take part",
        )
        steps.drain()  # the others heard of it too, or had met before
    assert_next_step_is_right(layer, contexts[:3], rng)


def test_devices_in_devices(contexts, rng):
    layer = a_layer(contexts[:2])
    with gluon_syncbn.only_on(contexts[:2]):
        with pytest.raises(ValueError, match="active already"), gluon_syncbn.only_on(contexts[:1]):
            pass
        with pytest.raises(ValueError, match=r"contexts: .* was given, expected a list of different mx.Context"):
            gluon_syncbn.only_on([contexts[0], contexts[0]]).__enter__()
        assert_next_step_is_right(layer, contexts[:2], rng)
    with gluon_syncbn.only_on(contexts[0]):
        pass


# ---- the order in which replicas come ----------------------------------------------------------------------


def test_200_steps_in_any_order(contexts, rng):
    """Four layers with something between them that keeps the values moderate."""
    nets = []
    for norm, places in ((SyncBatchNorm, contexts[:4]), (nn.BatchNorm, contexts[:1])):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            for _ in range(4):
                net.add(norm(in_channels=5), nn.Activation("tanh"))
        net.cast("float64")
        net.initialize(ctx=places)
        nets.append(net)
    for _ in range(200):
        batch, order = make_batch(rng, 4, spatial=(3,)), rng.permutation(4)
        for layers in zip(*(net[::2] for net in nets)):
            gamma = nd.array(rng.rand(5) + 0.5)
            for layer in layers:
                layer.gamma.set_data(gamma)
        shards, heads, places = ([of[i] for i in order] for of in (batch.shards, batch.heads, contexts))
        assert_whole(*nets, shards, heads, places, 1e-8, "float64")


def test_every_replica_has_its_error_where_its_device_is_busy(contexts, rng):
    # MXNet looks for a custom operator's error with the device's own worker, when that has nothing else to do.
    contexts = contexts[:3]
    layer = a_layer(contexts)
    big = nd.array(rng.randn(300, 300), ctx=contexts[0])
    for _ in range(5):
        xs = shards(rng, contexts)
        mx.nd.waitall()
        with short_waits(), autograd.record():
            ys = [layer(x) for x in xs[:2]]
            busy = [nd.dot(big, big) for _ in range(60)]
            for y in ys:
                with pytest.raises(StepError, match="of 3 replicas arrived"):
                    y.asnumpy()
        del busy
        steps.drain()


# ---- a failed step and the parameters ----------------------------------------------------------------------


def a_net(contexts, way):
    """Layers before, between and, which matters here, after the synchronised ones."""
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(nn.Conv2D(8, 3, padding=1), SyncBatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(8, 3, padding=1), nn.GlobalAvgPool2D(), nn.Dense(5), nn.Dense(5))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    return net


def every_value(net):
    return {(name, i): d.asnumpy() for name, p in net.collect_params().items() for i, d in enumerate(p.list_data())}


def a_trainer(net, **settings):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}, **settings)


def train(net, trainer, contexts, rng):
    """trainer.step is queued before anybody reads the loss and so learns that the step has failed."""
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.record():
        losses = [criterion(net(nd.array(rng.randn(2, 3, 8, 8), ctx=c)), nd.array([1, 2], ctx=c)) for c in contexts]
    autograd.backward(losses)
    trainer.step(4, ignore_stale_grad=True)
    return [loss.asnumpy() for loss in losses]


def failed(net, step):
    """Every value after a step that fails, which are those before it."""
    before = every_value(net)
    with short_waits(), pytest.raises(StepError, match="1 of 2 replicas arrived"):
        step()
    steps.drain()
    after = every_value(net)
    assert not [key for key in before if not np.array_equal(before[key], after[key])]
    return after


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_step_leaves_every_parameter_as_it_was(contexts, rng, way):
    contexts = contexts[:2]
    net = a_net(contexts, way)
    trainer = a_trainer(net)
    train(net, trainer, contexts, rng)
    for turn in range(6):
        after = failed(net, lambda turn=turn: train(net, trainer, [contexts[turn % 2]], rng))
        train(net, trainer, contexts, rng)
        trained = every_value(net)
        assert all(np.isfinite(value).all() for value in trained.values())
        still = [key for key in after if np.array_equal(after[key], trained[key]) and "conv" not in key[0]]
        assert not still, f"turn {turn}: the next step did not train {still}"


@pytest.mark.parametrize("on_store", [True, False], ids=["on_store", "on_devices"])
def test_a_trainer_whose_first_step_fails_leaves_every_parameter_as_it_was(contexts, rng, on_store):
    # It is then that gluon.Trainer hands the first context's parameters to all, running statistics included.
    contexts = contexts[:2]
    net = a_net(contexts, "eager")
    train(net, a_trainer(net), contexts, rng)
    for p in net.collect_params(".*running.*").values():
        p.data(contexts[1])[:] += 1
    for turn in range(6):
        trainer = a_trainer(net, update_on_kvstore=on_store)
        failed(net, lambda trainer=trainer, turn=turn: train(net, trainer, [contexts[turn % 2]], rng))


# ---- bad data ----------------------------------------------------------------------------------------------


def test_room_for_errors_in_the_list_of_mxnet(contexts, rng, monkeypatch):
    """The first layer on several devices makes it, and neither leaves an error there nor removes the user's."""
    user = nd.ones((2, 3))
    core.fail_arrays([user])
    made = []
    fail_arrays = core.fail_arrays
    monkeypatch.setattr(core, "fail_arrays", lambda arrays: fail_arrays(made.append(arrays) or arrays))
    monkeypatch.setattr(gluon_syncbn.training.session.session, "_done", {})
    for _ in range(2):
        SyncBatchNorm(in_channels=3).initialize(ctx=contexts[:1])
        assert not made
    for _ in range(2):
        SyncBatchNorm(in_channels=3).initialize(ctx=contexts[:2])
        assert [len(arrays) for arrays in made] == [256]
    with pytest.raises(mx.MXNetError, match="no value"):
        user.wait_to_read()
    nd.waitall()


@pytest.mark.parametrize(
    "data, axis, parts",
    [
        (nd.ones(5), 1, ["data has 1 dimensions", "expected 2 to 5 dimensions"]),
        (nd.ones((2, 5, 1, 1, 1, 1)), 1, ["data has 6 dimensions", "expected 2 to 5 dimensions"]),
        (nd.ones((2, 3, 4, 5)), 4, ["4 dimensions and axis is 4", "an axis among them"]),
        (nd.ones((2, 5), dtype="uint8"), 1, ["data must be bfloat16, float16, float32 or float64; uint8"]),
    ],
    ids=["1", "6", "axis", "uint8"],
)
def test_data_that_no_layer_takes(contexts, rng, data, axis, parts):
    layer = a_layer(contexts[:2], axis=axis)
    with pytest.raises(mx.MXNetError) as error, autograd.record():
        layer(data)
    assert_explains(error, layer, *parts)
    if axis == 1:
        assert_next_step_is_right(layer, contexts[:2], rng)


def test_another_number_of_channels_on_one_replica(contexts, rng):
    layer = a_layer(contexts[:2], timeout=60)
    xs = shards(rng, contexts[:2])
    with pytest.raises(mx.MXNetError, match=r"Provided = \[5\], inferred shape=\[4\]"), autograd.record():
        first = layer(xs[0])
        layer(xs[1].slice_axis(axis=1, begin=0, end=4))
    with pytest.raises(StepError, match="MXNetError left the recorded step"):
        first.asnumpy()
    assert_next_step_is_right(layer, contexts[:2], rng)


# ---- graphs that were saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["another process", "a layer that is gone"])
def test_a_graph_that_has_no_layer_here(contexts, tmp_path, of):
    layer, path = SyncBatchNorm(in_channels=3), str(tmp_path / "symbol.json")
    layer.initialize(ctx=contexts[:1])
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


def test_reset_while_a_healthy_step_is_in_flight(contexts, rng):
    """It waits for the step, whose replicas find each other and whose results stand."""
    layer = a_layer(contexts[:2])
    (first, second), gate = shards(rng, contexts[:2]), Gate()
    with autograd.record():
        ys = [layer(first), layer(gate.behind(second))]
    threading.Timer(0.5, gate.open).start()
    gluon_syncbn.reset()
    for y in ys:
        assert np.isfinite(y.asnumpy()).all()


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


def test_a_call_that_an_operator_before_the_layer_kept_from_running(contexts, rng):
    """MXNet skips it. The other replica waits for it, and does not meet the call of the next step."""
    layer = a_layer(contexts[:2], timeout=2)
    first, second = shards(rng, contexts[:2])
    with autograd.record():
        skipped = layer(nd.linalg.potrf(nd.full((2, 5, 3, 3), -1.0, ctx=contexts[0])))
        waits = layer(second)
    with pytest.raises(mx.MXNetError, match="potrf"):
        skipped.wait_to_read()
    with autograd.record():
        for x in (first, second):
            layer(x)
    with pytest.raises(mx.MXNetError) as error:
        waits.asnumpy()
    assert_explains(error, layer, "after 2 s. Every replica has issued its call")
    # The next call of cpu(0) waits for that of cpu(1), which is behind this one. Either may give up first.
    assert re.search(r"call 1: .* missing cpu\(0\)|call 2: .* missing cpu\(1\)", str(error.value))
    steps.drain()
    assert_next_step_is_right(layer, contexts[:2], rng)


def test_a_layer_that_is_gone():
    number = core.layer_create("gone", 0, 1, 0, [], 0, None)
    core.layer_drop(number)
    for name, *given in (("layer_place", number, ["cpu(0)"], ""), ("begin_graph", "cpu(0)", [number], [0], [], False)):
        with pytest.raises(mx.MXNetError, match=f"no layer has the number {number}"):
            getattr(core, name)(*given)

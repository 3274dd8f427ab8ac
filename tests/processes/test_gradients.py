"""Gradients of several processes against one process with all samples."""

import logging
import re
from contextlib import nullcontext

import mxnet as mx
import pytest
from mpi_job import Job
from mxnet import autograd, gluon
from mxnet.gluon import nn
from places import SUPPORT
from thread_transport import Job as ThreadJob

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side.comparison import update_of
from gluon_syncbn.mxnet_side.optimizers import alike
from gluon_syncbn.system.identity import OfEach
from gluon_syncbn.training import join
from gluon_syncbn.training.session import OfTrainer, session

WORKER = SUPPORT / "gradients_worker.py"
pytestmark = pytest.mark.timeout(600)  # one job does most of this
SCENARIOS = (
    "updates_alike+accumulates+scales_the_loss+leaves_out_what_is_stale+trains_two_nets+"
    "trains_in_threads+resumes+copies_a_net"
)
FAULTS = (
    "freezes+divides_otherwise+leaves_out_the_second+divides_apart+begins_elsewhere+begins_frozen+"
    "begins_with_other_states+loads_other_states"
)
JOINS = (
    "joins+joins_masked+joins_without_an_output+raises_while_joined+"
    "samples_of_all+clips_alone+updates_alone+gathers_while_joined"
)


def a_net():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    return net


@pytest.fixture
def store_of_one():
    return ThreadJob(1).stores[0]


def test_two_processes():
    """What changes no parameter, too: a step that fails."""
    job = Job(2, f"{SCENARIOS}+{FAULTS}+{JOINS}", worker=WORKER, limit=400)
    assert job.succeeded(2), job.output


def test_what_an_update_depends_on():
    """Each change gives another text, so that no process is alone with it."""
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), nn.Dense(2, in_units=2))
    net.add(SyncBatchNorm(in_channels=2, mode="shuffle", virtual_devices=2))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
    changes = [
        lambda: None,
        lambda: setattr(net[0].weight, "lr_mult", 2),
        lambda: setattr(net[1].weight, "wd_mult", 2),
        lambda: setattr(net[0].bias, "grad_req", "null"),
        lambda: setattr(net[1].bias, "grad_req", "null"),
        lambda: setattr(net[0].bias, "grad_req", "add"),
        lambda: trainer.set_learning_rate(0.2),
        lambda: setattr(trainer._optimizer, "wd", 0.5),
        lambda: gluon_syncbn.configure(seed=1),
        lambda: gluon_syncbn.configure(nonfinite="skip"),
    ]
    texts = []
    for change in changes:
        change()
        with autograd.record():
            y = net[1](net[0](mx.nd.ones((2, 2))))
        y.backward()
        trainer.step(2, ignore_stale_grad=True)
        texts.append(re.sub("num_update [0-9]+", "", update_of(trainer)))
    assert len(set(texts)) == len(changes), texts
    assert all("grad_req 'write', new gradient True of all other parameters" in text for text in texts)
    assert "lr_mult 2, new gradient False of parameters [1] (the first is 'dense" in texts[1]


def test_names_of_stores_that_are_not_ours(monkeypatch):
    """One that a program has registered with MXNet, and MXNet's own where nothing else is of this package."""
    monkeypatch.setattr(session, "stores", [])
    monkeypatch.setitem(mx.kvstore.KVStoreBase.kv_registry, "mpi", object)
    for name in ("mpi", "dist_sync"):
        trainer = gluon.Trainer(a_net().collect_params(), "sgd", kvstore=name)
        assert trainer._kvstore_params["kvstore"] == name


def test_gradients_that_a_store_does_not_compress(store_of_one):
    with pytest.raises(ValueError, match=r"compression_params: .* was given, expected None with <kvstore"):
        gluon.Trainer(a_net().collect_params(), "sgd", kvstore=store_of_one, compression_params={"type": "2bit"})


def test_parameters_of_one_name(store_of_one):
    """The sums of two would be those of one."""
    nets = [nn.Dense(2, in_units=3, prefix="same_") for _ in range(2)]
    for net in nets:
        net.initialize()
    trainer = gluon.Trainer([p for net in nets for p in net.collect_params().values()], "sgd", kvstore=store_of_one)
    with pytest.raises(ValueError, match="params: 'same_bias' was given, expected parameters with different names"):
        trainer.step(2)


MEETS_NOBODY = ["", "a store that nobody was given", "of this process alone"]
CHOSEN = ["for all layers", "for the layer", "others meet", "for the Trainer, beside a store"]


@pytest.mark.parametrize(
    "mode, started, chosen",
    [*(("sync", True, chosen) for chosen in MEETS_NOBODY + CHOSEN), ("local", True, ""), ("sync", False, "")],
)
def test_a_process_that_meets_nobody(mode, started, chosen, store_of_one, monkeypatch, caplog):
    """One warning, and only where others were started, the layers would meet, and nobody has chosen otherwise."""
    monkeypatch.setattr(session, "chosen", chosen == "for all layers")
    monkeypatch.setattr(session, "stores", [store_of_one] if chosen.endswith(("meet", "store", "given")) else [])
    monkeypatch.setattr(store_of_one, "layers", chosen == "others meet")
    of_trainer = {"kvstore": None} if chosen == "for the Trainer, beside a store" else {}
    own = {"for the layer": {"kvstore": "device"}, "of this process alone": {"kvstore": store_of_one}}.get(chosen, {})
    if started:
        monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(session, "_done", {})
    with caplog.at_level(logging.WARNING, "gluon_syncbn"):
        for _ in range(2):
            layer = gluon_syncbn.SyncBatchNorm(in_channels=3, mode=mode, **own)
            layer.initialize(ctx=mx.cpu(0))
            trainer = gluon.Trainer(layer.collect_params(), "sgd", **of_trainer)
            with autograd.record():
                y = layer(mx.nd.ones((2, 3)))
            y.backward()
            trainer.step(2)
    said = [record for record in caplog.messages if "meet no replica of the others" in record]
    assert len(said) == (mode == "sync" and started and chosen in MEETS_NOBODY)


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_loop_without_a_trainer(mode, store_of_one, monkeypatch, caplog):
    """It has a store of several processes, and its layers do not use it."""
    monkeypatch.setattr(type(store_of_one), "num_workers", 2)
    for name, value in {"stores": [store_of_one], "trainers": OfEach(OfTrainer), "chosen": False, "_done": {}}.items():
        monkeypatch.setattr(session, name, value)
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, mode=mode)
    layer.initialize()
    with caplog.at_level(logging.WARNING, "gluon_syncbn"), autograd.record():
        for _ in range(2):
            layer(mx.nd.ones((2, 3)))
    assert [text.partition(";")[0] for text in caplog.messages] == (
        ["the layers meet within this process alone"] if mode == "sync" else []
    )


def test_a_store_of_one_process_has_nobody_to_add_with(store_of_one, monkeypatch, caplog):
    monkeypatch.setattr(session, "exchange", store_of_one)
    with caplog.at_level(logging.WARNING, "gluon_syncbn"):
        trainer = gluon.Trainer(a_net().collect_params(), "sgd")
    assert trainer._kvstore_params["kvstore"] is store_of_one
    assert not caplog.messages


def test_a_trainer_that_chooses_its_parameters_later():
    trainer = gluon.Trainer(a_net().collect_params(), "sgd")
    update_of(trainer)
    trainer._params = trainer._params[1:]
    assert session.trainers(trainer).in_order(trainer) == trainer._params


@pytest.mark.parametrize("first, every", [(0, 1), (9, 1), (3, 2)])
def test_numbers_that_go_on_with_each_parameter_are_those_of_a_process_of_its_own(first, every):
    """MXNet has ``dense10`` before ``dense2``."""

    def trained(first, every, within):
        layers = [nn.Dense(1, in_units=1, prefix=f"dense{first + every * number}_") for number in range(12)]
        parameters = {name: one for layer in layers for name, one in layer.collect_params().items()}
        for one in parameters.values():
            one.initialize(mx.init.One())
        trainer = gluon.Trainer(parameters, "nadam", kvstore=None)
        for _ in range(2):
            with autograd.record():
                sum(layer(mx.nd.ones((1, 1))) for layer in layers).backward()
            with within(trainer):
                trainer.update(1)
        return [layer.weight.data().asscalar() for layer in layers]

    assert trained(first, every, alike) == trained(0, 1, lambda _: nullcontext())


@pytest.mark.parametrize("shape, samples", [((5, 2), 10), ((4, 2, 3, 8, 8), 8)])
def test_words_and_images_of_videos_are_samples(shape, samples):
    """As many as all processes would have without the second dimension."""
    assert not join._are_of_all(samples, [(mx.nd.ones(shape),)], 2)

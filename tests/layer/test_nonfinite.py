"""A batch that is not finite: left out of the running statistics, or the end of the step."""

import itertools
import logging
import re
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn
from poolings import POOLINGS, specification
from replicas import WAYS, forward_and_backward, make_batch, on_devices, prepare, ready, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize(
    "pooling",
    [pytest.param(name, marks=[pytest.mark.on_gpus] * (name in ("sync", "shuffle, 2 slots"))) for name in POOLINGS],
)
def test_it_goes_as_far_as_the_statistic_that_it_is_part_of(contexts, rng, pooling, nonfinite):
    """Whatever it is, wherever in its slot it stands."""
    gluon_syncbn.configure(nonfinite=nonfinite)
    kinds = itertools.product((np.inf, -np.inf, np.nan), ((0, 0), (1, 3), (4, -1)))
    for (value, where), axis, way in zip(kinds, itertools.cycle((1, -1)), itertools.cycle(WAYS)):
        batch = make_batch(rng, 4, axis=axis)
        np.moveaxis(batch.shards[1], axis, 1)[where[0], 2].flat[where[1]] = value
        layer = SyncBatchNorm(in_channels=5, axis=axis, **POOLINGS[pooling])
        got = step(prepare(layer, batch, contexts[:4], "float64", WAYS[way]), batch, contexts, "float64")
        with np.errstate(invalid="ignore"):
            want = specification(layer, batch, node=-1 if way == "eager" else 0, nonfinite=nonfinite)
        assert not all(np.isfinite(y).all() for y in want.outputs)
        assert np.isfinite(want.running_var).all() == (nonfinite == "skip")
        for name in ("outputs", "dxs", "running_mean", "running_var"):
            for g, w in zip(getattr(got, name), getattr(want, name)):
                finite, case = np.isfinite(w), f"{name}, {value} at {where}"
                np.testing.assert_array_equal(np.isfinite(g), finite, err_msg=case)
                np.testing.assert_allclose(g[finite], w[finite], rtol=1e-8, atol=1e-8, err_msg=case)


def logged(caplog, count):
    """So many messages, which come by way of a thread, and none that should not come."""
    end = time.monotonic() + 60
    while len(caplog.records) < count and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    assert len(messages) == count
    return messages


def test_one_warning(contexts, rng, caplog):
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    gluon_syncbn.configure(nonfinite="skip")
    blocks = SyncBatchNorm(in_channels=5, prefix="front_"), nn.Activation("tanh"), SyncBatchNorm(in_channels=5)
    net = ready(*blocks, contexts=contexts[:2])
    good, bad = (make_batch(rng, 2) for _ in range(2))
    bad.shards[1][0, 2].flat[1] = np.inf

    def steps(*batches):
        for batch in batches:
            forward_and_backward(net, on_devices(batch.shards, contexts, "float32"))
            mx.nd.waitall()
        return logged(caplog, 1)

    (text,) = steps(good, bad, bad)
    found = r"SyncBatchNorm 'front' on cpu\(1\): the batch is not finite: the mean of channel 2 is -?(inf|nan)\. The"
    assert re.match(found, text)
    gluon_syncbn.configure(nonfinite="skip")  # which speaks of the next one
    (text,) = steps(good, bad)
    assert "'front' on cpu(1)" in text


@pytest.mark.parametrize("mode, places, samples, warns", [("sync", 1, 1, 1), ("local", 2, 1, 1), ("sync", 2, 1, 0)])
def test_one_value_for_each_channel(contexts, mode, places, samples, warns, caplog):
    caplog.set_level(logging.WARNING, logger="gluon_syncbn")
    layer = ready(SyncBatchNorm(in_channels=5, mode=mode, prefix="front_"), contexts=contexts[:places])
    for _ in range(2):
        forward_and_backward(layer, [nd.random.normal(shape=(samples, 5), ctx=c) for c in contexts[:places]])
        layer(mx.nd.ones((1, 5)))  # a prediction
    mx.nd.waitall()
    for text in logged(caplog, warns):
        assert text.startswith("SyncBatchNorm 'front' on cpu(") and "a statistic has one value for each channel" in text

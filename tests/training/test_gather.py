"""The rows of all devices on each of them, against NumPy and against one device that has all rows."""

import gc
import re
from unittest import mock

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from replicas import TOLERANCE, ready

import gluon_syncbn
from gluon_syncbn import contrastive
from gluon_syncbn.exchange.store import ProcessStore
from gluon_syncbn.training.session import session

CONTEXTS = [mx.cpu(i) for i in range(4)]
SIZES = (2, 5, 0, 3)


def relative_error(got, want):
    return np.abs(got.astype("float64") - want).max() / np.abs(want).max()


def shards(rng, sizes=SIZES, shape=(3,), dtype="float64", req="write"):
    parts = [((i + 1) * rng.randn(n, *shape) + i).astype(dtype) for i, n in enumerate(sizes)]
    arrays = [nd.array(part, ctx=context, dtype=dtype) for part, context in zip(parts, CONTEXTS)]
    for array in arrays:
        array.attach_grad(req)
    return parts, arrays


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4)])
@pytest.mark.parametrize("req, count", [("write", 1), ("add", 2)])
def test_rows_and_gradients_of_uneven_parts(dtype, shape, req, count):
    """Each replica has another head gradient, and one has no row. The graph is differentiated twice."""
    rng = np.random.RandomState(0)
    with mx.util.np_shape(True):
        parts, arrays = shards(rng, shape=shape, dtype=dtype, req=req)
        heads = [rng.randn(sum(SIZES), *shape).astype(dtype) for _ in CONTEXTS]
        with autograd.record():
            gathered = contrastive.gather(arrays)
        for again in (True, False):
            given = [nd.array(h, ctx=c, dtype=dtype) for h, c in zip(heads, CONTEXTS)]
            autograd.backward(gathered, given, retain_graph=again)
        want = np.concatenate(parts)
        for rows, context in zip(gathered, CONTEXTS):
            assert rows.context == context and np.dtype(rows.dtype) == dtype
            np.testing.assert_array_equal(rows.asnumpy(), want)
        total = np.concatenate([array.grad.asnumpy() for array in arrays])
        wanted = count * sum(head.astype("float64") for head in heads)
        assert relative_error(total, wanted) < {"float64": 1e-15, "float32": 3e-7, "float16": 3e-3}[dtype]


def test_no_rows_at_all():
    with mx.util.np_shape(True):
        _, arrays = shards(np.random.RandomState(0), (0, 0))
        with autograd.record():
            gathered = contrastive.gather(arrays)
        autograd.backward(gathered)
        nd.waitall()  # which raises what a read of an empty array does not
        assert [rows.shape for rows in gathered] == [(0, 3)] * 2


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "features, expected",
    [
        (nd.ones((2, 3), dtype="int32"), "expected an NDArray with rows of float16, float32 or float64"),
        ([nd.ones((2, 3)), nd.ones((2, 4), ctx=CONTEXTS[1])], "expected rows of one shape and type"),
    ],
    ids=["int32", "apart"],
)
def test_rows_that_cannot_be_gathered(features, expected):
    with autograd.record(), pytest.raises(ValueError, match=expected):
        contrastive.gather(features)


def test_one_of_several_devices():
    """On contexts where no layer of another test is. A layer that is gone no longer counts."""
    layer = ready(gluon_syncbn.SyncBatchNorm(in_channels=3), contexts=[mx.cpu(31), mx.cpu(32)])
    rows = nd.ones((2, 3), ctx=mx.cpu(32))
    expected = "expected a list of one array for each of [cpu(31), cpu(32)], because layers are there"
    with autograd.record(), pytest.raises(ValueError, match=re.escape(expected)):
        contrastive.gather(rows)
    del layer
    gc.collect()
    assert contrastive.gather(rows) is rows


def test_within_a_hybridized_net():
    class Net(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return contrastive.gather([x])[0]

    net = Net()
    np.testing.assert_array_equal(net(nd.ones((2, 3))).asnumpy(), np.ones((2, 3)))
    net.hybridize()
    with autograd.record(), pytest.raises(ValueError, match="call gather outside of hybridized blocks"):
        net(nd.ones((2, 3)))


@pytest.mark.parametrize("way", ["given", "configured", "the only one"])
def test_within_a_block_that_is_computed_again(way, monkeypatch):
    store = ProcessStore("a test", mock.Mock(rank=0, size=2, mpi=[]))
    monkeypatch.setattr(store, "fail", mock.Mock())  # it has no MPI
    monkeypatch.setattr(session, "chosen", False)  # which another test may have left
    monkeypatch.setattr(session, "exchange", store if way == "configured" else None)
    monkeypatch.setattr(session, "stores", [store] if way == "the only one" else [])
    given = store if way == "given" else None
    block = gluon_syncbn.recompute(gluon.nn.Lambda(lambda x: contrastive.gather([x], name="twice", kvstore=given)[0]))
    expected = "gather 'twice': gather between processes does not work within a block of gluon_syncbn.recompute"
    with pytest.raises(mx.MXNetError, match=expected), autograd.record():
        block(nd.ones((2, 3)))

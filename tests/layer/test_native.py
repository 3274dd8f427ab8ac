"""The way of calls from MXNet's engine to the layer, without MXNet's `Custom` between (csrc/native)."""

import os
import shutil
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import replicas
from environments import ended
from gate import Gate
from internals import WHY_CUSTOM, core_count
from mxnet import autograd, nd
from mxnet.gluon import nn
from places import SOURCES, SUPPORT
from replicas import WAYS, in_blocks, make_batch, prepare, ready, truth
from soak.case import Case
from soak.trial import Trial

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.command import selfcheck

native = pytest.mark.skipif(bool(WHY_CUSTOM), reason=WHY_CUSTOM)

LIBRARY = Path(mx.libinfo.find_lib_path()[0])
HEADERS = Path(mx.libinfo.find_include_path())

LAYOUTS = """
#include <bits/stdc++.h>
#define private public
#include <dmlc/any.h>
#include <dmlc/logging.h>
#include <nnvm/op.h>
#include <nnvm/op_attr_types.h>
#include <mxnet/base.h>
#include <mxnet/engine.h>
#include <mxnet/ndarray.h>
#include <mxnet/op_attr_types.h>
#include <mxnet/resource.h>
#include <mxnet/storage.h>
#define dmlc ours
#define MXCallbackList OurCallbackList
#define CustomOpPropCreator OurCreator
#include "native/abi.h"

namespace n = syncbn::native;
using Function = mxnet::FStatefulComputeEx;
#define SAME(a, b) static_assert((a) == (b), #a)
#define AT(a, x, b, y) SAME(offsetof(a, x), offsetof(b, y))
#define LIKE(a, x, b, y) AT(a, x, b, y); SAME(sizeof(a::x), sizeof(b::y))

SAME(sizeof(mxnet::NDArray), sizeof(n::NDArray));
AT(mxnet::NDArray, ptr_, n::NDArray, chunk_);
AT(mxnet::NDArray::Chunk, shandle.dptr, n::Chunk, values);
LIKE(mxnet::NDArray::Chunk, mkl_mem_, n::Chunk, blocked);
SAME(sizeof(mxnet::OpStatePtr), sizeof(n::StatePointer));
AT(mxnet::OpStatePtr::OpState, state, n::State, custom);
SAME(sizeof(mxnet::OpContext), sizeof(n::OpContext));
LIKE(mxnet::OpContext, is_train, n::OpContext, training);
LIKE(mxnet::OpContext, run_ctx, n::OpContext, run);
LIKE(mxnet::OpContext, async_on_complete, n::OpContext, complete);
LIKE(mxnet::OpContext, requested, n::OpContext, resources);
LIKE(mxnet::engine::CallbackOnComplete, callback_, n::Completion, run);
LIKE(mxnet::engine::CallbackOnComplete, engine_, n::Completion, engine);
LIKE(mxnet::engine::CallbackOnComplete, param_, n::Completion, parameter);
SAME(sizeof(mxnet::OpReqType), sizeof(n::Requests::value_type));
SAME(int(mxnet::kNullOp), 0); SAME(int(mxnet::kWriteTo), 1);
SAME(int(mxnet::kWriteInplace), 2); SAME(int(mxnet::kAddTo), 3);
SAME(sizeof(mxnet::Resource), sizeof(n::Resource));
SAME(sizeof(mxnet::engine::Var), sizeof(n::Variable)); LIKE(mxnet::engine::Var, version_, n::Variable, version);
LIKE(mxnet::Resource, req, n::Resource, kind);
LIKE(mxnet::Resource, id, n::Resource, id); LIKE(mxnet::Resource, var, n::Resource, variable);
SAME(int(mxnet::ResourceRequest::kTempSpace), n::kTempSpace);
SAME(sizeof(mxnet::Storage::Handle), sizeof(n::StorageHandle));
LIKE(mxnet::Storage::Handle, ctx, n::StorageHandle, context);
LIKE(mxnet::Storage::Handle, size, n::StorageHandle, size);
SAME(sizeof(mxnet::Context), sizeof(n::Context)); LIKE(mxnet::Context, dev_type, n::Context, type);
LIKE(mxnet::Context, dev_id, n::Context, number);
SAME(int(mxnet::Context::kCPU), n::Context::kCpu); SAME(int(mxnet::Context::kGPU), n::Context::kGpu);
LIKE(nnvm::Op, index_, n::Op, index);
AT(nnvm::OpMap<Function>, data_, n::ComputeMap, by_index);
using Entry = decltype(nnvm::OpMap<Function>::data_)::value_type;
using OurEntry = decltype(n::ComputeMap::by_index)::value_type;
SAME(sizeof(Entry), sizeof(OurEntry)); AT(Entry, second, OurEntry, second);
SAME(DNNL_MAX_NDIMS, n::kMostDims); SAME(int(dnnl_f32), n::kFloat32Kind); SAME(int(dnnl_bf16), n::kBfloat16Kind);
SAME(int(dnnl_blocked), n::kBlockedKind);
using Memory = dnnl_memory_desc_t;
LIKE(Memory, ndims, n::Descriptor, dims_count); LIKE(Memory, dims, n::Descriptor, dims);
LIKE(Memory, data_type, n::Descriptor, type); LIKE(Memory, padded_dims, n::Descriptor, padded_dims);
LIKE(Memory, padded_offsets, n::Descriptor, padded_offsets); LIKE(Memory, offset0, n::Descriptor, offset);
LIKE(Memory, format_kind, n::Descriptor, kind); LIKE(Memory, format_desc.blocking.strides, n::Descriptor, strides);
LIKE(Memory, format_desc.blocking.inner_nblks, n::Descriptor, inner_count);
LIKE(Memory, format_desc.blocking.inner_blks, n::Descriptor, inner_blocks);
LIKE(Memory, format_desc.blocking.inner_idxs, n::Descriptor, inner_dims);
"""
#: As the wheel was built.
FLAGS = [
    *("-std=c++17", "-fpermissive", "-w", "-fsyntax-only", "-D_GLIBCXX_USE_CXX11_ABI=0", f"-I{SOURCES}"),
    *(
        f"-D{name}"
        for name in ("MXNET_USE_MKLDNN=1", "MSHADOW_STAND_ALONE=1", "MSHADOW_USE_CUDA=0", "MXNET_USE_CUDA=0")
    ),
    *("-DMSHADOW_USE_F16C=0", "-DDMLC_USE_CXX11=1", "-isystem", str(HEADERS), "-isystem", str(HEADERS / "mkldnn")),
]


def test_layouts_are_those_of_the_wheels_headers(tmp_path):
    source = tmp_path / "layouts.cc"
    source.write_text(LAYOUTS)
    ended([*os.environ.get("CXX", "g++").split(), *FLAGS, source], code=0)


# ---- which way is taken ----------------------------------------------------------------------------------------


def test_a_published_library_is_known():
    assert "not from a package" in selfcheck.versions() or WHY_CUSTOM in ("", "GLUON_SYNCBN_OPERATOR=custom")


NAIVE = """
import os
try:
    import light
except ValueError as error:
    print(error)
os.environ["GLUON_SYNCBN_OPERATOR"] = ""
from internals import WHY_CUSTOM
print("why", WHY_CUSTOM)
"""


def test_a_way_that_there_is_not():
    settings = {"GLUON_SYNCBN_OPERATOR": "fast", "MXNET_ENGINE_TYPE": "NaiveEngine"}
    run = ended([sys.executable, "-c", NAIVE], SUPPORT, **settings, code=0)
    assert "GLUON_SYNCBN_OPERATOR: 'fast' was given, expected 'custom' or nothing" in run.stdout
    assert "why MXNET_ENGINE_TYPE=NaiveEngine" in run.stdout


@native
def test_not_with_an_unknown_library(tmp_path):
    """One that differs in its build id alone serves through `Custom`."""
    content = bytearray(LIBRARY.read_bytes())
    at = content.index(b"GNU\0", content.index(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0")) + 4
    content[at] ^= 1
    other = tmp_path / LIBRARY.name
    other.write_bytes(content)
    for library in LIBRARY.parent.glob("lib*.so*"):  # which it is linked against
        if library.name != LIBRARY.name:
            (tmp_path / library.name).symlink_to(library)
    code = "import light, gluon_syncbn.command.selfcheck as check, internals; print(internals.WHY_CUSTOM, check.live())"
    run = ended([sys.executable, "-c", code], SUPPORT, GLUON_SYNCBN_OPERATOR="", MXNET_LIBRARY_PATH=str(other))
    assert run.stdout.startswith("this MXNet (build id ") and "2 replicas on cpu" in run.stdout, run.stderr
    shutil.rmtree(tmp_path)  # it is large


# ---- whose threads run a call ------------------------------------------------------------------------------------

#: Of a layer behind a convolution, for whose end a call has to wait: how many replicas there are, how it is called, and
#: whether it waits for another replica.
MEETINGS = {
    "one replica": (1, {}, True, False),
    "two": (2, {}, True, True),
    "two that do not share": (2, {"mode": "local"}, True, False),
    "two that predict": (2, {}, False, False),
}


@native
@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_call_that_waits_for_nobody_is_run_by_the_engine(contexts, meeting):
    count, settings, training, waits = MEETINGS[meeting]
    blocks = nn.Conv2D(32, 7, in_channels=32), SyncBatchNorm(in_channels=32, **settings)
    net = ready(*blocks, contexts=contexts[:count], way="hybrid")
    before = core_count("lone_calls")
    for _ in range(10):
        gate = Gate()
        xs = [gate.behind(nd.ones((4, 32, 40, 40), ctx=context)) for context in contexts[:count]]
        with autograd.record(training):
            ys = [net(x) for x in xs]
        if training:
            autograd.backward(ys)
        gate.open()
        nd.waitall()
    meetings = 10 * (2 if training else 1)
    calls, lone = meetings * count, core_count("lone_calls") - before
    # Of two, at least whoever comes last.
    assert (meetings if waits else calls) <= lone <= calls


@native
def test_the_engine_goes_on_while_a_replica_waits(contexts, rng):
    """Each context has one thread. Here it meets the layers in the other order, and computes something else first."""
    batch, gate, contexts = make_batch(rng, 2), Gate(), contexts[:2]
    layers = [prepare(SyncBatchNorm(in_channels=5), batch, contexts, "float64") for _ in contexts]
    first, second = (gate.behind(x) for x in replicas.on_devices(batch.shards, contexts, "float64"))
    with autograd.record():
        ys = [layer(first) for layer in layers]
        gate.open()  # so that they wait for the other replica
        assert (nd.ones(3, ctx=contexts[0]) + 1).asnumpy().tolist() == [2, 2, 2]
        ys += [layer(second) for layer in reversed(layers)]
    autograd.backward(ys)
    for k, y in enumerate(ys):
        np.testing.assert_allclose(y.asnumpy(), truth(batch).outputs[k // 2], rtol=0, atol=1e-11)


# ---- oneDNN's layouts ------------------------------------------------------------------------------------------


def blocked_calls(contexts, **settings):
    """Of a step whose data lie as a convolution leaves them."""
    places = range(settings.pop("places", 3))
    given = {"dtype": "float32", "channels": 32, "contexts": places, "in_blocks": ("x", "addend", "heads"), **settings}
    trial = Trial(Case(**given, steps=["train"]), contexts)
    before = core_count("blocked_calls")
    trial.run()
    return core_count("blocked_calls") - before


@pytest.mark.parametrize(
    "dtype, spatial",
    [*(("float32", one) for one in ((9,), (4, 6), (15, 15), (3, 4, 2))), ("bfloat16", (4, 6))],
    ids=str,
)
@pytest.mark.parametrize("addend", [None, "own"])
@pytest.mark.parametrize("activation", [None, "relu6", "leaky"])
def test_blocks_of_channels(contexts, activation, addend, spatial, dtype):
    if dtype == "bfloat16" and not replicas.convolves_bfloat16():
        pytest.skip("MXNet has no convolution of bfloat16 here")
    stays = replicas.is_in_blocks(in_blocks(np.ones((1, 32, *spatial)), contexts[0], dtype)) and not WHY_CUSTOM
    calls = blocked_calls(contexts, activation=activation, addend=addend, dtype=dtype, spatial=spatial)
    assert calls == (6 if stays else 0)


MODES = {"mode": "local", "virtual_devices": 2}, {"mode": "shuffle"}, {"group_size": 2}


@native
@pytest.mark.parametrize("settings, blocked", [
    *(({"places": 4, "pooling": pooling, "way": way}, 8) for pooling in MODES for way in WAYS),
    ({"in_blocks": ("heads",)}, 0),
    ({"in_blocks": ("x",)}, 2),  # the forwards
    ({"reqs": {"x": "add"}}, 2),
    ({"channels": 20}, 0),  # they fill no block
    *(({"masked": "all", "spatial": (5, 7), "channels": channels}, 4) for channels in (8, 16)),
], ids=str)  # fmt: skip
def test_mixed_layouts(contexts, settings, blocked):
    given = {"channels": 16, "places": 2, "in_blocks": ("x", "heads"), **settings}
    assert blocked_calls(contexts, **given) == blocked


# ---- other custom operators -----------------------------------------------------------------------------------


COPIES = "gluon_syncbn_test_copies"


class Copies(mx.operator.CustomOp):
    """Which fails on one context, in one direction."""

    failing = None

    def __init__(self, context):
        super().__init__()
        self.context = context

    def may_fail(self, direction):
        """MXNet keeps one error for all custom operators, and gives it to the next one that ends."""
        if self.failing is not None and self.failing[0] == direction:
            assert self.failing[1] != self.context, "out of memory"
            time.sleep(0.5)

    def forward(self, is_train, req, in_data, out_data, aux):
        self.may_fail("forward")
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.may_fail("backward")
        self.assign(in_grad[0], req[0], out_grad[0] + 0 * in_data[0])


@mx.operator.register(COPIES)
class CopiesProperty(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, types):
        return Copies(str(ctx))


def custom():
    return nn.HybridLambda(lambda F, x: F.Custom(x, op_type=COPIES))


@native
@pytest.mark.parametrize("way", WAYS)
def test_other_custom_operators_go_on(contexts, rng, way):
    """Behind convolutions too, of whose outputs MXNet alone hands them copies that it has freed: each of these fails
    then."""
    net = ready(nn.Conv2D(32, 3, in_channels=3), custom(), way=way)
    x = nd.array(rng.randn(2, 3, 9, 9))
    x.attach_grad()
    for _ in range(3):
        head, found = in_blocks(rng.randn(2, 32, 7, 7), mx.cpu()), []
        for one in (net, net[0]):
            with autograd.record():
                y = one(x)
            y.backward(head)
            found.append((y.asnumpy(), x.grad.asnumpy()))
        for got, want in zip(*found):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_failure_of_another_custom_operator_is_its_own(contexts, rng, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(mx.MXNetError):
        patch.setattr(Copies, "failing", ("forward", str(mx.cpu())))
        nd.Custom(nd.ones((2, 3)), op_type=COPIES).wait_to_read()
    batch = make_batch(rng, 2)
    layer = prepare(SyncBatchNorm(in_channels=5), batch, contexts[:2], "float64")
    replicas.assert_same(replicas.step(layer, batch, contexts, "float64"), truth(batch), replicas.TOLERANCE["float64"])


ENDS = {
    "waitall": lambda net, trainer, contexts: nd.waitall(),
    "read": lambda net, trainer, contexts: net[0].weight.grad(contexts[0]).asnumpy(),
    "step": lambda net, trainer, contexts: (trainer.step(8), net[0].weight.data(contexts[0]).asnumpy()),
}


@native
@pytest.mark.parametrize("way", ["eager", "hybrid", "static_shape"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("end", ENDS)
def test_an_operator_that_fails_on_one_device_ends_the_step_of_all(contexts, rng, monkeypatch, way, direction, end):
    """MXNet leaves out the calls of the layer behind it. Nobody has read its result."""
    before, behind = (SyncBatchNorm(in_channels=5, timeout=100) for _ in range(2))
    net = ready(nn.Dense(5, in_units=5), before, custom(), behind, contexts=contexts[:2], way=way)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")

    def train():
        with autograd.record():
            ys = [net(nd.array(rng.randn(4, 5), ctx=context)) for context in contexts[:2]]
        for y in ys:
            y.backward()

    start = time.monotonic()
    monkeypatch.setattr(Copies, "failing", (direction, str(contexts[1])))
    with pytest.raises(mx.MXNetError, match=f"kCustomOp{direction.title()}"):
        train()
        ENDS[end](net, trainer, contexts)
    assert time.monotonic() - start < 20
    monkeypatch.setattr(Copies, "failing", None)
    train()
    trainer.step(8)
    assert all(np.isfinite(array.asnumpy()).all() for p in net.collect_params().values() for array in p.list_data())

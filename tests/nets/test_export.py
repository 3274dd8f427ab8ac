"""What `net.export` writes of a net that is synchronised: plain operators, which anybody can load."""

import json
import logging
import re
import sys

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from mxnet import autograd, gluon, nd
from mxnet.contrib.quantization import quantize_net_v2
from mxnet.gluon import nn
from places import ROOT, SUPPORT
from replicas import forward_and_backward

from gluon_syncbn import SyncBatchNorm, convert, revert
from gluon_syncbn.mxnet_side.nodes import json_of

#: Without this package: predicts with a file what the arrays beside it say.
STRANGER = """
import os
import sys
import gluon_syncbn_first
import mxnet as mx
import numpy as np
for folder in sys.argv[1:]:
    os.chdir(folder)
    x, want = (array.asnumpy() for array in mx.nd.load("arrays"))
    net = mx.gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0007.params")
    np.testing.assert_allclose(net(mx.nd.array(x)).asnumpy(), want, rtol=1e-5, atol=1e-5, err_msg=folder)
    symbol, *parameters = mx.model.load_checkpoint("net", 7)
    module = mx.mod.Module(symbol, label_names=None)
    module.bind([("data", x.shape)], for_training=False)
    module.set_params(*parameters)
    got = module.predict(mx.io.NDArrayIter(x, batch_size=len(x))).asnumpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=folder)
assert "gluon_syncbn" not in sys.modules
"""


def trained(net, contexts, rng):
    """After a training step that gave it running statistics."""
    net.initialize(ctx=contexts)
    for name, parameter in net.collect_params().items():
        parameter.set_data(nd.array(rng.rand(*parameter.shape) + name.endswith("gamma")))
    net.hybridize()
    forward_and_backward(net, [nd.array(rng.randn(n, 3, 7, 7), ctx=ctx) for n, ctx in zip((3, 2), contexts)])
    nd.waitall()
    return net


def imported(path):
    return gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")


def recorded(norm):
    data, net = mx.sym.var("data", dtype="float32"), body(norm)
    return gluon.SymbolBlock(net(data), data, params=net.collect_params())


def body(norm):
    """Of each kind of layer one: NCHW, with a gamma that counts as 1, with ReLU, of another axis."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3, use_bias=False), norm(in_channels=4, momentum=0.5))
        net.add(nn.BatchNormReLU(in_channels=4), norm(in_channels=4, scale=False, epsilon=0.25, center=False))
        net.add(nn.HybridLambda(lambda F, x: F.transpose(x, axes=(0, 2, 3, 1))), norm(axis=3, in_channels=4))
        net.add(nn.Dense(5, in_units=4 * 5 * 5))
    return net


KINDS = {
    "made": lambda: convert(body(SyncBatchNorm)),  # the BatchNormReLU is converted
    "converted": lambda: convert(body(nn.BatchNorm)),
    "of a recorded graph": lambda: convert(recorded(nn.BatchNorm)),
}


def test_a_process_without_this_package_predicts_the_same(contexts, rng, tmp_path):
    folders = []
    for kind, make in KINDS.items():
        net = trained(make(), contexts[:2], rng)
        graph = net._cached_graph
        x = nd.array(rng.randn(2, 3, 7, 7))
        folders.append(tmp_path / kind)
        folders[-1].mkdir()
        nd.save(str(folders[-1] / "arrays"), [x, net(x)])
        net.export(str(folders[-1] / "net"), epoch=7)
        written = [node["op"] for node in json.loads((folders[-1] / "net-symbol.json").read_text())["nodes"]]
        assert written.count("BatchNorm") == 4
        assert "Custom" not in written and "SwapAxis" not in written
        assert net._cached_graph is graph  # what is in memory stays synchronised
    command = [sys.executable, "-W", "ignore", "-c", STRANGER, *map(str, folders)]
    ran = ended(command, SUPPORT)
    assert ran.returncode == 0, ran.stderr


def test_a_net_without_the_layer_is_exported_as_ever(contexts, rng, tmp_path):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3), nn.HybridLambda(lambda F, x: F.SwapAxis(x, dim1=1, dim2=1)))
    trained(net, contexts[:1], rng).export(str(tmp_path / "net"))
    assert (tmp_path / "net-symbol.json").read_text() == net._cached_graph[1].tojson()
    with pytest.raises(RuntimeError, match="run forward"):
        nn.HybridSequential().export(str(tmp_path / "net"))


def test_saved_nets_and_texts_have_plain_operators(contexts, tmp_path, capsys):
    """Another process loads them. A net that loads them keeps its own layers."""

    def made():
        net = nn.HybridSequential()
        with net.name_scope():
            net.add(nn.Conv2D(4, 1, in_channels=3), SyncBatchNorm(in_channels=4), nn.Activation("relu"))
        net.initialize(ctx=contexts[:2])
        net.hybridize()
        return convert(net, fuse=True)

    net, x = made(), mx.nd.random.normal(shape=(2, 3, 4, 4))
    y = net(x).asnumpy()
    net.save(str(tmp_path / "net"))
    texts = [(tmp_path / "net-model.json").read_text(), net._cached_graph[1].tojson()]
    assert all("BatchNorm" in text and "Custom" not in text for text in texts)
    again = made()
    again.load(str(tmp_path / "net"))
    np.testing.assert_allclose(again(x).asnumpy(), y, rtol=1e-6)
    plain = revert(made())
    with pytest.raises(KeyError, match="batchnorm2"):  # MXNet's key is the name of the class
        plain.load(str(tmp_path / "net"))
    plain.save(str(tmp_path / "plain"))
    with pytest.raises(KeyError, match="syncbatchnorm2"):
        net.load(str(tmp_path / "plain"))
    assert again._active and "Custom" in [node["op"] for node in json_of(again._cached_graph[1])["nodes"]]
    shown = []
    for symbol in (net._cached_graph[1], revert(net)(mx.sym.var("data"))):
        mx.viz.print_summary(symbol, shape={"data": (1, 3, 4, 4)})
        shown.append(capsys.readouterr().out)
    assert "Total params: 24" in shown[0] and [row.count("BatchNorm") for row in shown] == [1, 1]
    assert shown[0].count("Custom") == 0 and "Total params: 24" in shown[1]


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
@pytest.mark.parametrize("kind", ["untrained", "made", "of a file"])
def test_files_have_1_for_a_gamma_that_does_not_count(kind, contexts, rng, tmp_path):
    """Whatever stands there, which other programs read: the KVStore of a Trainer keeps the value before training."""
    net, data = body(nn.BatchNorm), mx.sym.var("data", dtype="float32")
    net = convert(gluon.SymbolBlock(net(data), data) if kind == "of a file" else net)
    net.initialize(ctx=contexts[:2])
    net(nd.zeros((1, 3, 7, 7), ctx=contexts[0]))
    gammas = {name: one for name, one in net.collect_params().items() if name.endswith("gamma")}
    for gamma in gammas.values():
        gamma.set_data(nd.full(gamma.shape, 8))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(learning_rate=0.01, wd=0.1))
    trainer.save_states(str(tmp_path / "states"))  # its KVStore takes what is there
    xs = [nd.array(rng.randn(3, 3, 7, 7), ctx=context) for context in contexts[:2]]
    for _ in range(0 if kind == "untrained" else 2):
        with autograd.record():
            losses = [(net(x) ** 2).sum() for x in xs]
        autograd.backward(losses)
        trainer.step(6)
    net(xs[0])
    with autograd.train_mode():
        net.save_parameters(str(tmp_path / "within"))
    for reverts in (False, True):
        net.save_parameters(str(tmp_path / "net"))
        net.collect_params().save(str(tmp_path / "all"))
        net.export(str(tmp_path / "net"))
        for file in ("net", "all", "net-0000.params", "within"):
            stored = [(name, value.asnumpy()) for name, value in nd.load(str(tmp_path / file)).items()]
            ones = [(value == 1).all() for name, value in stored if name.endswith("gamma")]
            assert ones == [False, False, True, False], (file, reverts)  # the third has scale=False
        if not reverts:
            revert(net)
            net(xs[0])


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
@pytest.mark.parametrize("fuse", [False, True])
def test_onednn_takes_a_trained_net(fuse, contexts, rng, tmp_path):
    """As it takes the same net with plain layers: quantised to 8 bits, in a file of the optimised net, and from a file,
    whose normalisation and ReLU it fuses with a convolution, as deploying.md shows.
    """
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, in_channels=3), SyncBatchNorm(in_channels=8), nn.Activation("relu"))
        net.add(nn.Conv2D(5, 3, in_channels=8, use_bias=False), SyncBatchNorm(in_channels=5, activation="relu"))
        net.add(nn.Flatten(), nn.Dense(4, in_units=45))
    trained(convert(net, fuse=fuse), contexts[:2], rng)
    x = nd.array(rng.randn(2, 3, 7, 7))
    want = net(x).asnumpy()

    def quantised():
        batches = mx.io.NDArrayIter(x, batch_size=2)
        logger = logging.getLogger("quantisation")
        return quantize_net_v2(net, calib_data=batches, calib_mode="naive", ctx=mx.cpu(), logger=logger)(x).asnumpy()

    in_8_bits = quantised()
    net.export(str(tmp_path / "net"))
    predictor = imported(tmp_path / "net")
    predictor.optimize_for(x, backend="MKLDNN", static_alloc=True, static_shape=True)
    for _ in range(2):
        np.testing.assert_allclose(predictor(x).asnumpy(), want, rtol=1e-4, atol=1e-5)
    operators = [node["op"] for node in json_of(predictor._cached_graph[1])["nodes"] if node["op"] != "null"]
    assert operators == ["_sg_mkldnn_conv", "_sg_mkldnn_conv", "Flatten", "_sg_mkldnn_fully_connected"]
    for backend in ("MKLDNN", "MKLDNN_QUANTIZE"):
        net.optimize_for(x, backend=backend)
        np.testing.assert_allclose(net(x).asnumpy(), want, rtol=1e-4, atol=1e-5)
        net.export(str(tmp_path / "net"))
        assert '"Custom"' not in (tmp_path / "net-symbol.json").read_text()
        np.testing.assert_allclose(imported(tmp_path / "net")(x).asnumpy(), want, rtol=1e-4, atol=1e-5)
    revert(net).hybridize()
    np.testing.assert_array_equal(in_8_bits, quantised())
    assert 0 < np.abs(in_8_bits - want).max() < 0.1 * np.abs(want).max()


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of onnx
def test_the_recipe_for_onnx(tmp_path, monkeypatch):
    pytest.importorskip("onnx", reason="needs requirements/onnx.txt")
    runtime = pytest.importorskip("onnxruntime", reason="needs requirements/onnx.txt")
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (recipe,) = [block for block in blocks if "onnx" in block]
    names = {}
    monkeypatch.chdir(tmp_path)
    exec(recipe, names)
    session = runtime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"data": names["x"].asnumpy()})
    np.testing.assert_allclose(got, names["y"].asnumpy(), rtol=1e-4, atol=1e-4)

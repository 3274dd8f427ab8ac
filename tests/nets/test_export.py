"""Files of a net that is synchronised have plain operators, which anybody can load. Of each kind of net:
test_convert.py.
"""

import logging
import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.contrib.quantization import quantize_net_v2
from mxnet.gluon import nn
from nets import SAMPLE, filled, imported, operators
from places import ROOT
from replicas import forward_and_backward, ready

from gluon_syncbn import SyncBatchNorm, convert, revert


def test_saved_nets_and_texts_have_plain_operators(contexts, tmp_path):
    """Another process loads them. A net that loads them keeps its own layers."""

    def made():
        blocks = nn.Conv2D(4, 1, in_channels=3), SyncBatchNorm(in_channels=4), nn.Activation("relu")
        return convert(ready(*blocks, contexts=contexts[:2], way="hybrid"), fuse=True)

    net, x = made(), mx.nd.random.normal(shape=(2, 3, 4, 4))
    y = net(x).asnumpy()
    net.save(str(tmp_path / "net"))
    texts = [(tmp_path / "net-model.json").read_text(), net._cached_graph[1].tojson()]
    assert all("BatchNorm" in text and "Custom" not in text for text in texts)
    again = made()
    again.load(str(tmp_path / "net"))
    np.testing.assert_allclose(again(x).asnumpy(), y, rtol=1e-6)
    assert again._active and "Custom" in operators(again)


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
    filled(convert(net, fuse=fuse), contexts[:2], "float32").hybridize()
    forward_and_backward(net, [nd.array(rng.randn(2, *SAMPLE), ctx=context) for context in contexts[:2]])
    x = nd.array(rng.randn(2, *SAMPLE))
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
    assert operators(predictor) == ["_sg_mkldnn_conv", "_sg_mkldnn_conv", "Flatten", "_sg_mkldnn_fully_connected"]
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
    pytest.importorskip("onnx", reason="needs `make test-onnx`")
    runtime = pytest.importorskip("onnxruntime", reason="needs `make test-onnx`")
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    recipe, names = "".join(block for block in blocks if "net-symbol.json" in block), {}
    assert "onnx" in recipe
    monkeypatch.chdir(tmp_path)
    exec(recipe, names)
    session = runtime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"data": names["x"].asnumpy()})
    np.testing.assert_allclose(got, names["y"].asnumpy(), rtol=1e-4, atol=1e-4)

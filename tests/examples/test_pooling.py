"""Adaptive average pooling of the segmentation example on its way to ONNX."""

import itertools

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

SIZES = [(4, 4), (7, 5), (1, 3), (13, 6)]
WANTED = [1, 2, 3, 6, (3, 2), (1, 4), (7, 5), (1, 1)]


def test_the_matrix_is_what_the_operator_computes(segmentation_modules, rng):
    from pooling import means

    for given, wanted in itertools.product(range(1, 14), repeat=2):
        x = rng.randn(2, 3, given, 1)
        want = nd.contrib.AdaptiveAvgPooling2D(nd.array(x, dtype="float64"), output_size=(wanted, 1)).asnumpy()
        np.testing.assert_allclose(means(given, wanted) @ x, want, rtol=1e-12, atol=1e-14)


@pytest.fixture
def runtime(segmentation_modules):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("onnx", reason="needs requirements/onnx.txt")
        found = pytest.importorskip("onnxruntime", reason="needs requirements/onnx.txt")
        from pooling import register

        register()
    return found


def block_of(wanted):
    """A convolution comes before, so that the shape has to be inferred."""
    data = mx.sym.var("data", dtype="float32")
    y = mx.sym.Convolution(data, kernel=(1, 1), num_filter=3, name="conv")
    y = mx.sym.contrib.AdaptiveAvgPooling2D(y, output_size=wanted, name="pool")
    block = gluon.SymbolBlock(mx.sym.broadcast_mul(y, y), data)
    block.initialize(mx.init.Normal())
    return block


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of onnx
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_in_onnxruntime(runtime, wanted, rng, tmp_path):
    for size in SIZES:
        block, x = block_of(wanted), nd.array(rng.randn(2, 4, *size))
        want = block(x).asnumpy()
        block.export(str(tmp_path / "net"))
        files = [str(tmp_path / f"net-{end}") for end in ("symbol.json", "0000.params", "onnx")]
        mx.onnx.export_model(files[0], files[1], [x.shape], "float32", files[2])
        session = runtime.InferenceSession(files[2], providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {"data": x.asnumpy()})
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of onnx
def test_a_size_that_is_not_known(runtime, tmp_path):
    block, x = block_of(2), nd.ones((1, 4, 6, 6))
    block(x)
    block.export(str(tmp_path / "net"))
    files = [str(tmp_path / f"net-{end}") for end in ("symbol.json", "0000.params", "onnx")]
    with pytest.raises(ValueError, match="in_shapes: with them conv has the shape"):
        mx.onnx.export_model(files[0], files[1], [x.shape], "float32", files[2], dynamic=True)

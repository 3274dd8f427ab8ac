"""A trained network as an ONNX file, for programs without MXNet."""

from __future__ import annotations

import importlib.util
import os

import mxnet as mx
import numpy as np
from errors import UserError
from model import outputs
from mxnet.gluon import HybridBlock
from pooling import register

NEEDED = ("onnx", "onnxruntime")
TOLERANCE = 1e-3  # of the largest score, because another runtime rounds differently


class Prediction(HybridBlock):
    """The network without the auxiliary outputs, which only serve the loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, image):
        return outputs(self.net, image)[0]


def write_onnx(net, folder, name, window) -> str:
    """Write NAME.onnx, and compare its scores with those of the network.

    The window is a (1, 3, crop, crop) array. Return a line about the file.
    """
    path = os.path.join(folder, f"{name}.onnx")
    missing = [one for one in NEEDED if importlib.util.find_spec(one) is None]
    if missing:
        return f"{path}: not written, {' and '.join(missing)} missing (pip install -r requirements/onnx.txt)"
    import onnxruntime

    prediction = Prediction(net)
    prediction.hybridize()
    prediction(window)
    stem = os.path.join(folder, name)
    prediction.export(stem)
    register()
    mx.onnx.export_model(f"{stem}-symbol.json", f"{stem}-0000.params", [window.shape], "float32", path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only, not a line for each weight
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"data": window.asnumpy()})
    want = outputs(net, window)[0].asnumpy()
    away = float(np.abs(scores - want).max() / np.abs(want).max())
    if away > TOLERANCE:
        raise UserError(f"{path}: onnxruntime's scores differ from MXNet's by {away:.0e} of the largest")
    return f"{path}: onnxruntime's scores are MXNet's, to {away:.0e} of the largest"

"""Adds a translation that MXNet's ONNX exporter lacks: adaptive average pooling to more than 1 x 1."""

from __future__ import annotations

import ast
import sys
from typing import Any, Dict, List

import mxnet as mx
import numpy as np

from .nodes import Graph, json_of, symbol_of

#: The newest opset of MXNet 1.9.1. The exporter tries the translations of this opset before those of older ones.
_OPSET = 13
POOLING = "_contrib_AdaptiveAvgPooling2D"


def of_exporter() -> Dict[str, Any]:
    """Returns the exporter's translations. MXNet 1.8 has none."""
    exporter = sys.modules.get("mxnet.onnx.mx2onnx._export_onnx")
    return exporter.MXNetGraph.registry_.setdefault(_OPSET, {}) if exporter else {}


def adaptive_average_pooling(node: Dict[str, Any], **kwargs: Any) -> List[Any]:
    """Writes the pooling as a product with a matrix on each side, which ONNX has for all sizes.

    MXNet computes the matrices from unit vectors.
    """
    from onnx import helper, numpy_helper

    name, ((at, output, *_),) = node["name"], node["inputs"]
    source = kwargs["outputs_lookup"][at][output]
    wanted = np.atleast_1d(ast.literal_eval(node.get("attrs", {}).get("output_size", "()"))).astype(int)
    sizes = np.broadcast_to(wanted if len(wanted) else 1, 2)
    if (sizes == 1).all():
        return [helper.make_node("GlobalAveragePool", [source.name], [name], name=name)]
    rows, columns = (
        _means(given, size).astype(source.dtype) for given, size in zip(_shape(node["inputs"][0], kwargs)[2:], sizes)
    )
    kwargs["initializer"] += [
        numpy_helper.from_array(rows, f"{name}_rows"),
        numpy_helper.from_array(np.ascontiguousarray(columns.T), f"{name}_columns"),
    ]
    return [
        helper.make_node("MatMul", [f"{name}_rows", source.name], [f"{name}_by_rows"], name=f"{name}_by_rows"),
        helper.make_node("MatMul", [f"{name}_by_rows", f"{name}_columns"], [name], name=name),
    ]


def _means(given: int, wanted: int) -> np.ndarray:
    vectors = mx.nd.eye(given, dtype="float64").reshape((1, given, given, 1))
    matrix: np.ndarray = mx.nd.contrib.AdaptiveAvgPooling2D(vectors, output_size=(wanted, 1)).asnumpy()
    return matrix[0, :, :, 0].T.copy()


def _shape(entry: List[int], kwargs: Dict[str, Any]) -> List[int]:
    """Returns the shape of an output in the graph: the exporter knows only those of the graph's inputs and weights."""
    of_any = json_of(mx.sym.var("any"))  # the version, without which MXNet assumes an old one
    symbol = symbol_of(Graph().rewrite({**of_any, "nodes": kwargs["mx_graph"], "heads": [entry]}, lambda *_: None))
    shapes = {name: value.shape for name, value in kwargs["weights"].items()}
    for one in kwargs["proc_nodes"]:
        if hasattr(one, "type"):  # a ValueInfoProto: an input
            shapes[one.name] = tuple(dimension.dim_value for dimension in one.type.tensor_type.shape.dim)
    names = set(symbol.list_inputs())
    _, (shape,), _ = symbol.infer_shape_partial(**{name: shape for name, shape in shapes.items() if name in names})
    if not shape or 0 in shape[2:]:
        name = kwargs["mx_graph"][entry[0]]["name"]
        raise ValueError(
            f"in_shapes: with them {name} has the shape {shape}; adaptive average pooling expects a height and a width "
            "that are known: omit dynamic=True"
        )
    return list(shape)

"""Adaptive average pooling to more than 1 x 1 as ONNX operators, which MXNet's exporter does not translate."""

from __future__ import annotations

import ast
import json
from typing import Any, Dict, List

import mxnet as mx
import numpy as np

# The newest opset of MXNet 1.9.1. The exporter tries the translations of this opset before those of older ones.
OPSET = 13


def register() -> None:
    """Give MXNet's exporter the translation. It needs known input shapes: `export_model` without `dynamic=True`."""
    from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph

    MXNetGraph.register("_contrib_AdaptiveAvgPooling2D", OPSET)(adaptive_average_pooling)


def adaptive_average_pooling(node: Dict[str, Any], **kwargs: Any) -> List[Any]:
    """Write the pooling as a product with a matrix on each side, which ONNX has for all sizes.

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
        means(given, size).astype(source.dtype) for given, size in zip(shape_of(node["inputs"][0], kwargs)[2:], sizes)
    )
    kwargs["initializer"] += [
        numpy_helper.from_array(rows, f"{name}_rows"),
        numpy_helper.from_array(np.ascontiguousarray(columns.T), f"{name}_columns"),
    ]
    return [
        helper.make_node("MatMul", [f"{name}_rows", source.name], [f"{name}_by_rows"], name=f"{name}_by_rows"),
        helper.make_node("MatMul", [f"{name}_by_rows", f"{name}_columns"], [name], name=name),
    ]


def means(given: int, wanted: int) -> np.ndarray:
    vectors = mx.nd.eye(given, dtype="float64").reshape((1, given, given, 1))
    matrix: np.ndarray = mx.nd.contrib.AdaptiveAvgPooling2D(vectors, output_size=(wanted, 1)).asnumpy()
    return matrix[0, :, :, 0].T.copy()


def shape_of(entry: List[int], kwargs: Dict[str, Any]) -> List[int]:
    """The shape of an output in the graph: the exporter knows only those of the graph's inputs and weights."""
    nodes = kwargs["mx_graph"]
    graph = {"nodes": nodes, "arg_nodes": [i for i, node in enumerate(nodes) if node["op"] == "null"]}
    version = json.loads(mx.sym.var("any").tojson())["attrs"]  # without it, MXNet assumes an old one
    symbol = mx.sym.load_json(json.dumps({**graph, "heads": [entry], "attrs": version}))
    shapes = {name: value.shape for name, value in kwargs["weights"].items()}
    for one in kwargs["proc_nodes"]:
        if hasattr(one, "type"):  # a ValueInfoProto: an input
            shapes[one.name] = tuple(dimension.dim_value for dimension in one.type.tensor_type.shape.dim)
    names = set(symbol.list_inputs())
    _, (shape,), _ = symbol.infer_shape_partial(**{name: shape for name, shape in shapes.items() if name in names})
    if not shape or 0 in shape[2:]:
        name = nodes[entry[0]]["name"]
        raise ValueError(
            f"in_shapes: with them {name} has the shape {shape}; adaptive average pooling expects a height and a width "
            "that are known: omit dynamic=True"
        )
    return list(shape)

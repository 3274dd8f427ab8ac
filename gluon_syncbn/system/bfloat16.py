"""The type bfloat16 of MXNet, whose NumPy arrays are structures with one field."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

DTYPE = np.dtype([("bfloat16", np.uint16)])


def is_bfloat16(dtype: Any) -> bool:
    """Whether ``dtype`` is bfloat16, as a type or as a name."""
    return dtype == "bfloat16" if isinstance(dtype, str) else dtype == DTYPE


def is_float(array: mx.nd.NDArray) -> bool:
    return np.dtype(array.dtype).kind == "f" or is_bfloat16(array.dtype)


def values(array: mx.nd.NDArray) -> np.ndarray:
    """Returns the values as NumPy can compute with them, bfloat16 as float32."""
    found = array.asnumpy()
    return (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if is_bfloat16(found.dtype) else found

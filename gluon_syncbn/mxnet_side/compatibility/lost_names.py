"""Provides NumPy and onnx as MXNet and GluonCV see them: with the names that they have lost."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, NoReturn

import numpy as np

#: Aliases of Python's own types. NumPy 2 uses `bool` and `long` anew; MXNet and GluonCV mean the old ones.
TYPES = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}
CONSTANTS = {
    **dict.fromkeys(("Inf", "Infinity", "infty", "PINF"), np.inf),
    **dict.fromkeys(("NaN", "NAN"), np.nan),
    "NINF": -np.inf,
    "PZERO": 0.0,
    "NZERO": -0.0,
}
#: Names with two spellings, and the spelling that stayed.
RENAMED = {
    "alltrue": "all",
    "asfarray": "asarray",
    "cfloat": "complex128",
    "complex_": "complex128",
    "cumproduct": "cumprod",
    "float_": "float64",
    "longfloat": "longdouble",
    "mat": "asmatrix",
    "product": "prod",
    "round_": "round",
    "row_stack": "vstack",
    "singlecomplex": "complex64",
    "sometrue": "any",
    "string_": "bytes_",
    "trapz": "trapezoid",
    "unicode_": "str_",
}
#: NumPy 1.20 to 1.23 have these too, and every call of them raises an error.
FINANCIAL = ("fv", "ipmt", "irr", "mirr", "nper", "npv", "pmt", "ppmt", "pv", "rate")


class Names(ModuleType):
    """Forwards missing names to the module of this name, and keeps the results, so that the second access is a look-up.

    The module is imported then: few programs that import MXNet export a net to onnx.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


class _Onnx(Names):
    """Has ``mapping``, which onnx has lost since 1.14."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "mapping":
                raise
        helper = importlib.import_module("onnx.helper")
        return SimpleNamespace(
            NP_TYPE_TO_TENSOR_TYPE=_Table(helper.np_dtype_to_tensor_dtype),
            TENSOR_TYPE_TO_NP_TYPE=_Table(helper.tensor_dtype_to_np_dtype),
        )


class _Table:
    """A dictionary whose values a function computes."""

    def __init__(self, value_of: Callable[[Any], Any]) -> None:
        self._value_of = value_of

    def __getitem__(self, key: Any) -> Any:
        return self._value_of(key)


def modules() -> Dict[str, ModuleType]:
    """Returns what imports give instead; the modules themselves stay as they are."""
    numpy = Names("numpy", np.__doc__)
    vars(numpy).update(
        {name: value for name, value in vars(np).items() if name.startswith("__") and name != "__getattr__"}
    )
    vars(numpy).update(supplied())
    # Without onnx, its import fails as it does.
    onnx = sys.modules.get("onnx") if "onnx" in sys.modules else importlib.util.find_spec("onnx")
    return {"numpy": numpy, "onnx": _Onnx("onnx")} if onnx else {"numpy": numpy}


def supplied() -> Dict[str, Any]:
    """Returns the names that this NumPy lacks or has changed, with their values."""
    old: Dict[str, Any] = {**TYPES, **CONSTANTS, **OTHERS}
    old.update((name, getattr(np, new)) for name, new in RENAMED.items() if hasattr(np, new))
    return {name: value for name, value in old.items() if vars(np).get(name, np) is not value}


def _array(object: Any, dtype: Any = None, **rest: Any) -> np.ndarray:
    """Wraps integers that do not fit into ``dtype``, which is an error since NumPy 2."""
    try:
        return np.array(object, dtype, **rest)
    except OverflowError:
        return np.array(object, **rest).astype(dtype)


def _removed(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("NumPy removed its financial functions in 1.20: `pip install numpy-financial` has them")


OTHERS: Dict[str, Any] = {
    "array": _array,
    "compat": SimpleNamespace(basestring=str),
    "in1d": lambda ar1, ar2, assume_unique=False, invert=False: np.isin(np.ravel(ar1), ar2, assume_unique, invert),
    "msort": lambda a: np.sort(a, axis=0),
    **dict.fromkeys(FINANCIAL, _removed),
}
if hasattr(np.lib, "array_utils"):  # NumPy 2 makes `np.core` private and warns of its use
    normalize = np.lib.array_utils.normalize_axis_tuple
    OTHERS["core"] = SimpleNamespace(numeric=SimpleNamespace(normalize_axis_tuple=normalize))

"""Provides onnx as MXNet's exporter sees it: the package with ``mapping``, which it has lost since 1.14."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict


class Names(ModuleType):
    """Imports onnx at the first access to a name, because few programs that import MXNet export a net."""

    def __getattr__(self, name: str) -> Any:
        import onnx

        lost = name == "mapping" and not hasattr(onnx, name)
        value = _mapping(onnx.helper) if lost else getattr(onnx, name)
        setattr(self, name, value)
        return value


class _Table:
    """A dictionary whose values a function computes."""

    def __init__(self, value_of: Callable[[Any], Any]) -> None:
        self._value_of = value_of

    def __getitem__(self, key: Any) -> Any:
        return self._value_of(key)


def names() -> Dict[str, ModuleType]:
    """Returns what ``import onnx`` gives instead; nothing without onnx, so that the import fails as it does."""
    there = sys.modules.get("onnx") if "onnx" in sys.modules else importlib.util.find_spec("onnx")
    return {"onnx": Names("onnx")} if there else {}


def _mapping(helper: Any) -> SimpleNamespace:
    return SimpleNamespace(
        NP_TYPE_TO_TENSOR_TYPE=_Table(helper.np_dtype_to_tensor_dtype),
        TENSOR_TYPE_TO_NP_TYPE=_Table(helper.tensor_dtype_to_np_dtype),
    )

"""Changes modules of MXNet beyond their imports, where NumPy has changed a rule and not a name."""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, Optional

import numpy as np


def written_plainly(module: ModuleType) -> None:
    """Writes tuples of NumPy's integers as plain text.

    MXNet's library reads the parameters of operators from text, and reads ``(3, 4)``. NumPy 2 writes
    ``(np.int64(3), 4)`` for such a tuple.
    """
    module.str = _Text  # type: ignore[attr-defined]


_BEFORE_NUMPY_2: Any = {"legacy": "1.25"}  # NumPy's own types differ in what they allow here


class _Strings(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


class _Text(metaclass=_Strings):
    """Replaces ``str``, and returns one."""

    def __new__(cls, value: Any = "") -> str:  # type: ignore[misc]
        text = str(value)
        if "np." not in text or isinstance(value, str):
            return text
        with np.printoptions(**_BEFORE_NUMPY_2):
            return str(value)


def sums_in_float64(metric: ModuleType) -> None:
    """Keeps the sums of metrics in float64.

    A metric adds ``np.float32`` to a sum that begins as Python's 0.0. Before NumPy 2 the result was float64. Since then
    it is float32, which stops counting at 2**24 batches.
    """

    def set_attribute(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, np.float64(value) if isinstance(value, np.floating) else value)

    metric.EvalMetric.__setattr__ = set_attribute


def arrays_for_numpy(ndarray: ModuleType) -> None:
    """Gives NDArrays an ``__array__``, which NumPy asks first.

    Otherwise NumPy takes an NDArray for an endless sequence, because each element is again an NDArray of one element.
    Until 1.23 NumPy made an array of objects, today it raises an error.
    """

    def array(self: Any, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an NDArray becomes a NumPy array only by a copy, but copy=False was given")
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    ndarray.NDArray.__array__ = array


def sparse_in_its_place(module: ModuleType) -> None:
    """Replaces ``scipy.sparse.csr``, which warns at each call and leaves with SciPy 2.0, by its parent module."""
    sparse = module.spsp
    if sparse is not None:  # SciPy is installed
        here = SimpleNamespace(csr=sparse, csr_matrix=sparse.csr_matrix, coo_matrix=sparse.coo_matrix)
        module.spsp = here  # type: ignore[attr-defined]


def bytes_by_their_name(recordio: ModuleType) -> None:
    """Makes functions call ``tobytes``, which since NumPy 2.3 is the only name of ``tostring``."""
    for function in vars(recordio).values():
        if isinstance(function, FunctionType):
            names = function.__code__.co_names
            if "tostring" in names:
                new = tuple("tobytes" if name == "tostring" else name for name in names)
                function.__code__ = function.__code__.replace(co_names=new)


#: {module: the function that changes it after it was loaded}
CHANGES: Dict[str, Callable[[ModuleType], None]] = {
    "mxnet._ctypes.ndarray": written_plainly,
    "mxnet._ctypes.symbol": written_plainly,
    "mxnet.symbol.symbol": written_plainly,
    "mxnet.metric": sums_in_float64,
    "mxnet.ndarray.ndarray": arrays_for_numpy,
    "mxnet.ndarray.sparse": sparse_in_its_place,
    "mxnet.ndarray.utils": sparse_in_its_place,
    "mxnet.recordio": bytes_by_their_name,
}

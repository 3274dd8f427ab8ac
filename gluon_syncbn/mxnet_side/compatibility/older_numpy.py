"""Provides NumPy as MXNet and GluonCV see it: with the names that it has lost and MXNet or GluonCV uses.

Where NumPy has changed a rule and not a name, modules of MXNet are changed after they were loaded.
"""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, NoReturn, Optional

import numpy as np


class Names(ModuleType):
    """Forwards missing names to NumPy, and keeps the results, so that the second access is a look-up."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        setattr(self, name, value)
        return value


def numpy() -> ModuleType:
    """Returns what imports give instead; NumPy itself stays as it is."""
    names = Names("numpy", np.__doc__)
    own = {name: value for name, value in vars(np).items() if name.startswith("__") and name != "__getattr__"}
    vars(names).update(own, **VALUES)
    return names


def _array(object: Any, dtype: Any = None, **rest: Any) -> np.ndarray:
    """Wraps integers that do not fit into ``dtype``, which is an error since NumPy 2."""
    try:
        return np.array(object, dtype, **rest)
    except OverflowError:
        return np.array(object, **rest).astype(dtype)


def _removed(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("NumPy removed its financial functions in 1.20: `pip install numpy-financial` has them")


VALUES: Dict[str, Any] = {
    # Aliases of Python's own types. NumPy 2 uses `bool` anew; MXNet and GluonCV mean the old ones.
    **{kind.__name__: kind for kind in (bool, int, float, complex, object, str)},
    **dict.fromkeys(("Inf", "PINF"), np.inf),
    **dict.fromkeys(("NaN", "NAN"), np.nan),
    "NINF": -np.inf,
    "PZERO": 0.0,
    "NZERO": -0.0,
    "alltrue": np.all,
    "product": np.prod,
    "round_": np.round,
    "row_stack": np.vstack,
    "sometrue": np.any,
    "array": _array,
    "compat": SimpleNamespace(basestring=str),
    "in1d": lambda ar1, ar2, assume_unique=False, invert=False: np.isin(np.ravel(ar1), ar2, assume_unique, invert),
    "msort": lambda a: np.sort(a, axis=0),
    # NumPy 1.20 to 1.23 have these too, and every call of them raises an error.
    **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), _removed),
}
if hasattr(np.lib, "array_utils"):  # NumPy 2 makes `np.core` private and warns of its use
    normalize = np.lib.array_utils.normalize_axis_tuple
    VALUES["core"] = SimpleNamespace(numeric=SimpleNamespace(normalize_axis_tuple=normalize))
    VALUES["trapz"] = vars(np)["trapezoid"]


def print_plainly(module: ModuleType) -> None:
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


def sum_in_float64(metric: ModuleType) -> None:
    """Keeps the sums of metrics in float64.

    A metric adds ``np.float32`` to a sum that begins as Python's 0.0. Before NumPy 2 the result was float64. Since then
    it is float32, which stops counting at 2**24 batches.
    """

    def set_attribute(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, np.float64(value) if isinstance(value, np.floating) else value)

    metric.EvalMetric.__setattr__ = set_attribute


def give_array(ndarray: ModuleType) -> None:
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


def replace_scipy_sparse_csr(module: ModuleType) -> None:
    """Replaces ``scipy.sparse.csr``, which warns at each call and leaves with SciPy 2.0, by its parent module."""
    sparse = module.spsp
    if sparse is not None:  # SciPy is installed
        here = SimpleNamespace(csr=sparse, csr_matrix=sparse.csr_matrix, coo_matrix=sparse.coo_matrix)
        module.spsp = here  # type: ignore[attr-defined]


def rename_tostring(recordio: ModuleType) -> None:
    """Makes functions call ``tobytes``, which since NumPy 2.3 is the only name of ``tostring``."""
    for function in vars(recordio).values():
        if isinstance(function, FunctionType):
            names = function.__code__.co_names
            if "tostring" in names:
                new = tuple("tobytes" if name == "tostring" else name for name in names)
                function.__code__ = function.__code__.replace(co_names=new)


#: {module: the function that changes it after it was loaded}
CHANGES: Dict[str, Callable[[ModuleType], None]] = {
    "mxnet._ctypes.ndarray": print_plainly,
    "mxnet._ctypes.symbol": print_plainly,
    "mxnet.symbol.symbol": print_plainly,
    "mxnet.metric": sum_in_float64,
    "mxnet.ndarray.ndarray": give_array,
    "mxnet.ndarray.sparse": replace_scipy_sparse_csr,
    "mxnet.ndarray.utils": replace_scipy_sparse_csr,
    "mxnet.recordio": rename_tostring,
}

"""The functions of the native core, which ``SYNCBN_API`` declares in ``csrc``. Only this module uses ctypes.

Texts, lists, truth values and arrays are passed as Python has them. Some functions have a wrapper here.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np
from mxnet.autograd import Function
from mxnet.base import _LIB as _mxnet
from mxnet.base import MXCallbackList, MXNetError, NDArrayHandle, c_array, c_handle_array, check_call
from mxnet.ndarray import NDArray

from .system import arguments
from .system.environment import read

PATH = Path(__file__).with_name("_core.so")
_SOURCES = PATH.parent / "csrc"
#: Begins the name of each layer of this process in a graph.
PROCESS = f"{os.urandom(8).hex()}:"


def _bytes(text: Any) -> bytes:
    """Returns the bytes of a text; names of files may contain bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace") if isinstance(text, str) else text


class _Span(ctypes.Structure):  # in csrc/types.h
    _fields_ = [("count", ctypes.c_int64), ("values", ctypes.c_void_p)]
    array: Any


class _List:
    """The type of a parameter that is a list in Python and a `Span` in the core."""

    def __init__(self, kind: Any, convert: Callable[[Any], Any] = int) -> None:
        self._kind, self._convert = kind, convert

    def from_param(self, values: Sequence[Any]) -> Any:
        array = (self._kind * len(values))(*map(self._convert, values))
        span = _Span(len(values), ctypes.addressof(array))
        span.array = array  # lives as long
        return ctypes.byref(span)


_NUMBERS = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
}
#: The results, as it hands them over, and its parameters. Any other pointer is an address.
_RESULTS = {
    **_NUMBERS,
    "void": ctypes.c_int,
    "bool": ctypes.c_int,
    "const char*": ctypes.c_char_p,
    **dict.fromkeys(("Asked", "std::string", "Bytes"), ctypes.c_void_p),
}
_GIVEN: Dict[str, Any] = {
    **_NUMBERS,
    "bool": ctypes.c_bool,
    "const char*": SimpleNamespace(from_param=_bytes),
    "const syncbn::Mpi*": SimpleNamespace(from_param=lambda words: (ctypes.c_int64 * len(words))(*words)),
    "const Span<const char*>&": _List(ctypes.c_char_p, _bytes),
    "const Span<const int>&": _List(ctypes.c_int),
    "const Span<const size_t>&": _List(ctypes.c_size_t),
    "const Span<NDArrayHandle>&": _List(ctypes.c_void_p, lambda array: array.handle.value),
}
#: Their results may be -1.
_UNCHECKED = {"issue_on", "tape_end"}
_OF_STEPS = {"begin_graph", "bytes_of", "sum"}  # a step has failed if they do


class StepError(MXNetError):
    """A step has failed: a replica or a process was late, has failed, or has called something else.

    The text says who and why. No weight has changed. ``autograd.record()`` begins a new step; a job of processes ends.
    """

    __module__ = __package__ or ""  # where users find it


def _type(text: str, known: Dict[str, Any]) -> Any:
    return ctypes.c_void_p if text.endswith("*") and text not in known else known[text]


class _Core:
    """The functions of the core by their names. The declaration that stands beside each says its types."""

    def __getattr__(self, name: str) -> Any:
        try:
            library = ctypes.CDLL(str(PATH))
            address = ctypes.c_void_p.in_dll(library, f"syncbn_{name}").value
            declared = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"syncbn_declared_{name}")))
        except (OSError, ValueError) as error:  # ValueError: the core is older than this package
            raise ImportError(
                f"gluon_syncbn's native core {PATH} cannot be loaded ({error}). Build it with `make core`, or `pip "
                "install --force-reinstall .`, in the checkout (needs g++ with C++17 and OpenMP)",
                name=__package__,
            ) from None
        result, _, *given = declared.decode().split(", ")
        function = library._FuncPtr(address or 0)
        function.restype = _type(result, _RESULTS)
        function.argtypes = [_type(one.rpartition(" ")[0], _GIVEN) for one in given if one]
        function.raises = StepError if name in _OF_STEPS else MXNetError  # type: ignore[attr-defined]
        if name not in _UNCHECKED:
            function.errcheck = _READ.get(result, _checked)
        setattr(self, name, function)
        return function


def _checked(result: Any, function: Any, given: Any) -> Any:
    if result is None or result == -1:
        raise function.raises(_core.problem())
    return result.decode(errors="replace") if isinstance(result, bytes) else result


def _bytes_at(*result: Any) -> Any:
    span = _Span.from_address(_checked(*result))
    return ctypes.string_at(span.values, span.count)


_READ = {"Bytes": _bytes_at, "std::string": lambda *result: _bytes_at(*result).decode(errors="replace")}
_core = _Core()


def __getattr__(name: str) -> Any:
    """Returns a function of the core."""
    if name.startswith("_"):
        raise AttributeError(name)
    globals()[name] = function = getattr(_core, name)
    return function


#: The published libraries of whose C++ side csrc/native/abi.h knows enough: the linker's build id, and the wheel.
_WHEELS = {
    "cpu": ("472988f6268780302be9ee15d6c53d9a07b534f5", "mxnet-1.9.1-py3-none-manylinux2014_x86_64"),
    "gpu": ("9523fbda21d9ef14722537c1896afda0cdd1778e", "mxnet_cu112-1.9.1-py3-none-manylinux2014_x86_64"),
}


def _register() -> Dict[str, str]:
    """Registers the operator ``gluon_syncbn`` with the MXNet library that Python has loaded. Returns why calls on
    ``'cpu'`` and ``'gpu'`` contexts come through MXNet's ``Custom``; empty if they come directly from MXNet's engine.
    """
    cache = os.path.join(read("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "gluon_syncbn")
    _core.find_in(_mxnet._handle, os.fsencode(_SOURCES), os.fsencode(cache))
    _core.register(PROCESS)
    asked = read("GLUON_SYNCBN_OPERATOR")
    if asked not in ("", "custom"):
        arguments.refuse("GLUON_SYNCBN_OPERATOR", asked, "'custom' or nothing")
    if asked == "custom":
        return dict.fromkeys(_WHEELS, "GLUON_SYNCBN_OPERATOR=custom")
    with open(_mxnet._name, "rb") as library:
        *_, after = library.read(4096).partition(b"\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0")  # a note of the linker
    own = after[:20].hex() or "none"
    return {
        device: _core.take_calls(device) if own == build_id else f"this MXNet (build id {own}) is not {wheel}"
        for device, (build_id, wheel) in _WHEELS.items()
    }


WHY_CUSTOM = _register()


def differs(how: str) -> MXNetError:
    """Returns the error of a block that `recompute` computes again."""
    text = f"the second forward {how}. A block of gluon_syncbn.recompute must compute the same each time."
    return MXNetError(text)


class Tape:
    """Stores what the calls of a forward pass to their repetition: see ``csrc/meeting/tape.h``."""

    def __init__(self) -> None:
        self._tape = _core.tape_create()
        weakref.finalize(self, _core.tape_free, self._tape).atexit = False

    @contextmanager
    def running(self, again: bool) -> Iterator[None]:
        """Makes calls on this thread write to the tape, or repeat from it."""
        _core.tape_begin(self._tape, again)
        try:
            yield
        finally:
            left = _core.tape_end()
        if left:
            layers = f"{abs(left)} layer{'s' if abs(left) > 1 else ''} of SyncBatchNorm"
            raise differs(f"called {layers} {'fewer' if left > 0 else 'more'} than the first")


#: MXNet's requests for a gradient: none, or to add it. Otherwise it is written.
NULL, ADD = 0, 3

Backward = Callable[[List[NDArray], List[NDArray], List[int]], None]

_functions: Dict[int, Tuple[Any, Any]] = {}  # in graphs: what MXNet has pointers to


def record_function(what: str, inputs: Sequence[NDArray], outputs: Sequence[NDArray], backward: Backward) -> None:
    """Records that the outputs, which have their values, come from the inputs.

    ``backward(heads, gradients, requests)`` runs in a thread of MXNet's custom operators. It fills the gradients, or
    issues operators that do. An exception in it fails the step; the message contains ``what``. In contrast, MXNet's
    ``autograd.Function`` prints exceptions, ignores ``grad_req='add'``, and stops at the first gradient that is not
    requested.
    """

    @Function._bwd_functype
    def run(heads: int, gradients: int, handles: Any, requests: Any, training: int, key: int) -> int:
        arrays = [
            NDArray(NDArrayHandle(handle), writable=i >= heads) for i, handle in enumerate(handles[: heads + gradients])
        ]
        try:
            backward(arrays[:heads], arrays[heads:], requests[:gradients])
        except BaseException as problem:  # it must not pass through C++; the reader of a gradient gets it
            _core.fail(f"{what}: {type(problem).__name__}: {problem}")
            _core.gate(arrays[heads:])
        return 1

    key, kind = id(run), ctypes.CFUNCTYPE(ctypes.c_int)
    functions = c_array(kind, [ctypes.cast(function, kind) for function in (run, _forget)])
    callbacks = MXCallbackList(2, functions, (ctypes.c_void_p * 2)(key, key))
    _functions[key] = run, callbacks
    handles = c_handle_array(inputs), c_handle_array(outputs)
    check_call(
        _mxnet.MXCustomFunctionRecord(len(inputs), handles[0], len(outputs), handles[1], ctypes.byref(callbacks))
    )


@Function._del_functype
def _forget(key: int) -> int:
    del _functions[key]  # MXNet drops its pointers
    return 1


# ---- exchanges -------------------------------------------------------------------------------------------------


def python_exchange(store: Any, processes: int = 0) -> int:
    """Returns an exchange that calls ``store.add(contexts, rows, timeout, call)``, of a process or of so many."""
    number, array = ctypes.c_int64, ctypes.POINTER(ctypes.c_double)
    numbers = ctypes.POINTER(number), ctypes.c_double, number, number

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, *numbers, array, array)
    def run(contexts: bytes, call: Any, timeout: float, count: int, length: int, rows: Any, out: Any) -> bool:
        try:
            values, places = np.ctypeslib.as_array(rows, (count, length)), processes or count
            found = store.add(contexts.decode(), values, timeout, tuple(call[:4]))
            np.ctypeslib.as_array(out, (places, length))[:] = found
            return True
        except BaseException as error:  # it must not pass through C++; its text goes to every replica
            known = isinstance(error, StepError)
            told = "" if known else f"the KVStore could not add the statistics: {type(error).__name__}: "
            _core.failed_in_python(f"{told}{error}")
            return False

    store.in_core = run  # lives as long, because the core may call it at any time
    exchange: int = _core.python_exchange(run, processes)
    return exchange


def addresses(file: str, names: Sequence[str]) -> List[int]:
    """Finds functions in the libraries of this file. MXNetError: one of them is missing."""
    library = ctypes.CDLL(file)
    try:
        return [ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names]
    except AttributeError as error:
        raise MXNetError(f"kvstore 'mpi' needs functions of MPI 3 that this library lacks: {error}") from None


def bytes_of(processes: int, ranks: int, key: int, what: str, own: Sequence[bytes]) -> List[np.ndarray]:
    """Sends bytes to all ranks, one for each or the same, under a key. Returns those of each, this one included.
    MXNetError, with ``what``: some rank does not come, or has failed.
    """
    found = np.frombuffer(_core.bytes_of(processes, key, what, list(map(len, own)), b"".join(own)), np.uint8)
    return np.split(found[8 * ranks :], np.cumsum(found[: 8 * ranks].view(np.int64))[:-1])


def merge_moments(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Returns ``[count, mean[C], m2[C]]`` of the values of both, float64: see csrc/pooling/statistics.h."""
    merged, part = np.array(total, np.float64), np.ascontiguousarray(part, np.float64)
    _core.merge_moments(merged.ctypes.data, part.ctypes.data, merged.size // 2)
    return merged


def summands(names: Sequence[str], arrays: List[List[NDArray]]) -> Tuple[Any, ...]:
    """Returns the arrays of some sums, equally many for each, as ``sum`` of the core takes them. They live as long."""
    count, contexts = len(names), len(arrays[0]) if arrays else 1
    types, sizes = (ctypes.c_int * count)(), (ctypes.c_size_t * count)()
    lines = ""
    for i, (array, *_) in enumerate(arrays):
        check_call(_mxnet.MXNDArrayGetDType(array.handle, ctypes.byref(types, i * ctypes.sizeof(ctypes.c_int))))
        sizes[i] = array.size
        lines += f"{names[i]} ({sizes[i]} values of {_FLOATS[types[i]]})\n"
    handles = c_handle_array([array for of_sum in arrays for array in of_sum])
    return lines.encode(), count, types, sizes, contexts, handles


_FLOATS = {0: "float32", 1: "float64", 2: "float16", 12: "bfloat16"}  # as kTypes in csrc/types.h

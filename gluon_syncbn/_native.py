"""The native core: the only place that knows ctypes.

Plain values go in and out; what they mean is said in ``csrc/api.cc``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mxnet.base import _LIB as _mxnet
from mxnet.base import MXNetError, NDArrayHandle, check_call
from mxnet.ndarray import NDArray
from mxnet.ndarray import ndarray as _dlpack

from .system import arguments
from .system.environment import read

_PATH = Path(__file__).with_name("_core.so")


class Ticket(ctypes.Structure):
    """Which handing-in this is; phase 0 is the forward of a call, 1, 2 ... its backwards."""

    _fields_ = [(name, ctypes.c_int64) for name in ("layer", "node", "call", "phase")]
    _fields_ += [("name", ctypes.c_char_p), ("timeout", ctypes.c_double)]

    layer: int
    node: int  # of a graph; -1 for an eager call
    call: int  # of this node
    phase: int
    name: bytes  # of the layer
    timeout: float  # seconds that the layer waits


class Total(NamedTuple):
    """What an exchange makes of contributions: see ``csrc/exchange/exchange.h``."""

    values: np.ndarray
    first: int  # of the values that are of this process
    key: int  # of the layer, the same in every process


class Turn(NamedTuple):
    """The place of a collective among those of all processes: see ``csrc/exchange/exchange.h``."""

    channel: int
    number: int
    clique: int
    world: int
    first: int
    identity: bytes
    counts: np.ndarray  # of the slots of all replicas
    key: int


class Agreed(ctypes.Structure):
    """What the processes have agreed on about a layer, as in csrc/exchange/exchange.h."""

    _fields_ = [
        ("key", ctypes.c_int64),
        ("in_groups", ctypes.c_bool),
        ("ranks", ctypes.c_uint64),
        ("channels", ctypes.c_int64),
        ("replicas", ctypes.c_int64),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
    ]

    key: int
    in_groups: bool
    ranks: int
    channels: int
    replicas: int
    begin: int
    end: int


class _OnDevice(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("gathered", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    ]


class _Problem(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 1024)]


def _function(*arguments: Any) -> Any:
    """Of an exchange that is written in Python; the number of that comes first."""
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(Ticket), *arguments, ctypes.POINTER(_Problem))


_Rows = _function(ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_double), ctypes.c_void_p)


class _Functions(ctypes.Structure):  # PythonFunctions in csrc/exchange/python_transport.h
    _fields_ = [
        ("merge", _Rows),
        ("add", _Rows),
        ("gather", _Rows),
        ("add_on_devices", _function(ctypes.c_int64, ctypes.POINTER(_OnDevice))),
        ("gpus_of_all_processes", _function(ctypes.POINTER(ctypes.c_int64))),
        (
            "turn",
            _function(
                ctypes.c_int64,
                ctypes.c_int64,
                ctypes.POINTER(ctypes.c_int64),
                ctypes.POINTER(ctypes.c_double),
                ctypes.c_void_p,
            ),
        ),
        ("agreed", _function(ctypes.POINTER(Agreed))),
        ("check", _function()),
    ]


def _unusable(error: Exception) -> ImportError:
    return ImportError(
        f"gluon_syncbn's native core {_PATH} cannot be loaded ({error}); build it with `pip install .` "
        "in the checkout (needs g++ with C++17 and OpenMP)",
        name=__package__,
    )


def _load() -> ctypes.CDLL:
    try:
        core = ctypes.CDLL(str(_PATH))
    except OSError as error:
        raise _unusable(error) from None
    names = ctypes.POINTER(ctypes.c_char_p)
    signatures: dict = {
        "problem": (ctypes.c_char_p, []),
        "register": (ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64]),
        "native_operator": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_char_p]),
        "blocked_calls": (ctypes.c_int64, []),
        "lone_calls": (ctypes.c_int64, []),
        "cuda": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]),
        "cuda_close": (ctypes.c_int, []),
        "nccl_problem": (ctypes.c_char_p, []),
        "nccl_unique_id": (ctypes.c_int, [ctypes.c_char_p]),
        "layer_create": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
        "layers": (ctypes.c_int64, []),
        "contexts_are_shared": (ctypes.c_int, []),
        "layer_drop": (None, [ctypes.c_int64]),
        "layer_token": (ctypes.c_char_p, [ctypes.c_int64]),
        "layer_place": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int64, names, ctypes.c_int64]),
        "layer_timeout": (ctypes.c_int, [ctypes.c_int64, ctypes.c_double]),
        "all_reduce_from": (ctypes.c_int64, [ctypes.c_int64]),
        "layer_exchange": (ctypes.c_int, [ctypes.c_int64, ctypes.c_void_p]),
        "layer_issued": (ctypes.c_int, [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]),
        "within_graph": (None, [ctypes.c_int]),
        "timeout": (ctypes.c_int, [ctypes.c_double]),
        "exchange": (ctypes.c_int, [ctypes.c_void_p]),
        "exchange_memory": (ctypes.c_void_p, []),
        "exchange_nccl": (ctypes.c_void_p, []),
        "exchange_host": (ctypes.c_void_p, []),
        "exchange_contexts": (ctypes.c_void_p, [ctypes.c_int64]),
        "exchange_processes": (ctypes.c_void_p, [ctypes.c_int64]),
        "python_functions": (None, [ctypes.POINTER(_Functions)]),
        "total": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]),
        "turn": (
            ctypes.c_int,
            [ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
            + [ctypes.c_int64] * 2,
        ),
        "segment_create": (ctypes.c_void_p, [ctypes.c_int64]),
        "segment_open": (ctypes.c_void_p, [*[ctypes.c_int64] * 4, ctypes.c_char_p, ctypes.c_int64]),
        "segment_number": (ctypes.c_int64, [ctypes.c_void_p]),
        "segment_token": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_char_p]),
        "segment_free": (None, [ctypes.c_void_p]),
        "exchange_shared_memory": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
        "exchange_machine": (
            ctypes.c_void_p,
            [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64],
        ),
        "exchange_hierarchy": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
        "allreduce": (
            ctypes.c_int,
            [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Ticket), ctypes.c_int64]
            + [ctypes.c_void_p, ctypes.c_void_p],
        ),
        "shared_memory_fail": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
        "shared_memory_end": (ctypes.c_int, [ctypes.c_void_p]),
        "timeout_of": (ctypes.c_double, [ctypes.c_int64]),
        "interrupts": (ctypes.c_long, []),
        "wait_begin": (ctypes.c_void_p, [ctypes.c_double, ctypes.c_double, ctypes.c_long]),
        "wait_look": (ctypes.c_char_p, [ctypes.c_void_p]),
        "wait_end": (None, [ctypes.c_void_p]),
        "devices": (ctypes.c_int, [ctypes.c_int64, names]),
        "seed": (ctypes.c_int, [ctypes.c_uint64]),
        "nonfinite": (ctypes.c_int, [ctypes.c_int]),
        "tape_create": (ctypes.c_void_p, []),
        "tape_free": (None, [ctypes.c_void_p]),
        "tape_begin": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
        "tape_end": (ctypes.c_int64, []),
        "scope_enter": (ctypes.c_int, [ctypes.c_char_p]),
        "scope_leave": (ctypes.c_char_p, [ctypes.POINTER(ctypes.c_int)]),
        "fail": (None, [ctypes.c_char_p]),
        "failure": (ctypes.c_char_p, []),
        "gate_arrays": (ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64]),
        "reset": (ctypes.c_int, []),
        "nobody_left": (None, [ctypes.c_int]),
        "close": (None, []),
        "forking": (None, [ctypes.c_int]),
        "waiting": (None, [ctypes.c_int]),
        "forked": (ctypes.c_int, []),
        "debug": (None, [ctypes.c_int]),
        "next_record": (ctypes.c_int, [ctypes.c_double, ctypes.POINTER(ctypes.c_char_p)]),
        "slowest": (ctypes.c_char_p, []),
        "instruction_set": (ctypes.c_char_p, []),
    }
    for name, (result, takes) in signatures.items():
        try:
            function = getattr(core, f"syncbn_{name}")
        except AttributeError as error:  # a core that is older than this file
            raise _unusable(error) from None
        function.restype, function.argtypes = result, takes
        if name not in ("register", "problem", "tape_end", "gate_arrays"):  # whose numbers mean something else
            function.errcheck = _checked
    return core


def _checked(result: Any, function: Any, given: Any) -> Any:
    if (result is None and function.restype is not None) or result == -1:
        raise MXNetError(_core.syncbn_problem().decode(errors="replace"))
    return result


_core = _load()


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names of files may hold what UTF-8 cannot


def _names(values: Sequence[str]) -> Tuple[int, Any]:
    return len(values), (ctypes.c_char_p * len(values))(*[value.encode() for value in values])


# The order is that of `MXNet` in csrc/mxnet_api.h.
_FUNCTIONS = (
    "MXGetLastError",
    "MXCustomOpRegister",
    "MXAutogradIsTraining",
    "MXNDArrayGetData",
    "MXNDArrayFree",
    "MXEnginePushSyncND",
)


def register() -> None:
    """Registers the operator ``gluon_syncbn`` with the MXNet library that Python has loaded."""
    pointers = [ctypes.cast(getattr(_mxnet, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    check_call(_core.syncbn_register((ctypes.c_void_p * len(pointers))(*pointers), len(pointers)))
    global _why_custom
    _why_custom = _ways_of_calls(read("GLUON_SYNCBN_OPERATOR"))
    source = _PATH.parent / "csrc" / "cuda" / "kernels.cu"
    _core.syncbn_cuda(_mxnet._handle, os.fsencode(source), os.fsencode(cache()))


_why_custom: Dict[str, str] = {}


def why_custom(device: str = "cpu") -> str:
    """Why calls on ``'cpu'`` or ``'gpu'`` contexts come through MXNet's ``Custom``; empty where they come straight from
    its engine."""
    return _why_custom[device]


def blocked_calls() -> int:
    """How many forwards and backwards have had their data as oneDNN lays them out, with channels in blocks."""
    return _core.syncbn_blocked_calls()


def lone_calls() -> int:
    """How many forwards and backwards were run by MXNet's own threads to the end, as nobody had to be waited for."""
    return _core.syncbn_lone_calls()


def _ways_of_calls(asked: str) -> Dict[str, str]:
    if asked not in ("", "custom", "native"):
        arguments.refuse("GLUON_SYNCBN_OPERATOR", asked, "'native', 'custom' or nothing")
    devices = ("cpu", "gpu")
    if asked == "custom":
        return dict.fromkeys(devices, "GLUON_SYNCBN_OPERATOR=custom")
    problems = {device: _core.syncbn_native_operator(_mxnet._handle, device.encode()).decode() for device in devices}
    if asked and all(problems.values()):
        raise ImportError(
            f"GLUON_SYNCBN_OPERATOR=native: {'; '.join(dict.fromkeys(problems.values()))}", name=__package__
        )
    return problems


def cache() -> Path:
    """Where compiled kernels are kept."""
    base = read("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "gluon_syncbn"


def nccl_problem() -> str:
    """Why GPUs cannot hand their statistics to each other by NCCL; empty where they can."""
    return _core.syncbn_nccl_problem().decode()


def nccl_unique_id() -> bytes:
    """With it NCCL makes a communicator over several processes, each of which has to have it. MXNetError where NCCL has
    none."""
    identity = ctypes.create_string_buffer(128)
    _core.syncbn_nccl_unique_id(identity)
    return identity.raw


# Of `ResourceManager::Get` in src/resource.cc: what `dmlc::ThreadLocalStore` keeps for each thread.
_COPIES = "_ZZN4dmlc16ThreadLocalStoreIN5mxnet8resource19ResourceManagerImplEE3GetEvE3ptr"


def copies_are_made() -> bool:
    """Whether MXNet has made this thread's copies of temporary space and of random states, as many as the settings said
    then: it does so at the first operator that takes one. False where it cannot be told: no function of MXNet's tells,
    and another build may keep the pointer to itself.
    """
    try:
        return bool(ctypes.c_void_p.in_dll(_mxnet, _COPIES).value)  # looked up anew: it is another in each thread
    except ValueError:
        return False


def layer_create(name: str, mode: int, slots: int, group: int) -> int:
    return _core.syncbn_layer_create(name.encode(), mode, slots, group)


def layers() -> int:
    """How many layers there are."""
    return _core.syncbn_layers()


def contexts_are_shared() -> bool:
    """Whether some layer has several replicas on a context."""
    return bool(_core.syncbn_contexts_are_shared())


def layer_drop(layer: int) -> None:
    _core.syncbn_layer_drop(layer)


def layer_token(layer: int) -> str:
    return _core.syncbn_layer_token(layer).decode()


def layer_place(layer: int, contexts: Sequence[str], replicas: int) -> None:
    """The contexts that hold its parameters, and how many replicas they have in all."""
    _core.syncbn_layer_place(layer, *_names(contexts), replicas)


def all_reduce_from(replicas: int) -> int:
    """For tests: GPUs use an all-reduce from so many replicas on, in layers that meet later. Returns the old value."""
    return _core.syncbn_all_reduce_from(replicas)


def layer_timeout(layer: int, seconds: float) -> None:
    _core.syncbn_layer_timeout(layer, seconds)


def layer_exchange(layer: int, exchange: Handle) -> None:
    """The layer has one of its own."""
    _core.syncbn_layer_exchange(layer, exchange)


@contextmanager
def graph_issued(layer: int, context: str, graph: int) -> Iterator[None]:
    """The caller executes a graph that has the layer in it, whose calls MXNet issues once. ``graph`` is a number below
    -1. MXNetError where the layer is in the middle of a step of another thread."""
    _core.syncbn_layer_issued(layer, context.encode(), graph)
    _core.syncbn_within_graph(True)
    try:
        yield
    finally:
        _core.syncbn_within_graph(False)


def default_timeout(seconds: float) -> None:
    _core.syncbn_timeout(seconds)


def timeout_of(layer: int = 0) -> float:
    """Seconds that the layer waits; without one, those of the process."""
    return _core.syncbn_timeout_of(layer)


def interrupts() -> int:
    """How often the process was interrupted by Ctrl-C while something waited."""
    return _core.syncbn_interrupts()


class Wait:
    """A wait outside the native core that ends when it would, and is bounded alike: see ``csrc/waiting/wait.h``.

    ``since`` is what `interrupts` said when it began.
    """

    def __init__(self, timeout: float, warn_after: float, since: int) -> None:
        self._wait = _core.syncbn_wait_begin(timeout, warn_after, since)
        weakref.finalize(self, _core.syncbn_wait_end, self._wait).atexit = False

    def look(self) -> str:
        """Why it should end: ``'failed'``, ``'asked to end'``, ``'forked'`` or ``'late'``. Once ``'long'``, for a
        warning. Empty where it goes on."""
        return _core.syncbn_wait_look(self._wait).decode()


def devices(contexts: Sequence[str]) -> None:
    _core.syncbn_devices(*_names(contexts))


def seed(value: int) -> None:
    _core.syncbn_seed(value)


#: What becomes of a batch that is not finite; the order is that of `Nonfinite` in csrc/meeting/meeting.h.
NONFINITE = ("propagate", "skip", "error")


def nonfinite(what: str) -> None:
    _core.syncbn_nonfinite(NONFINITE.index(what))


class OnDevice(NamedTuple):
    """What a replica contributes on its GPU: see ``csrc/exchange/exchange.h``."""

    own: NDArray
    total: NDArray


# By device, address and length, each with its shape. The core never gives memory back, and keeps it for numbers of the
# same length: so the array of an address is right for as long as the process lives.
_on_devices: Dict[Tuple[int, int, int], Tuple[NDArray, Any]] = {}


def _on_device(device: int, address: int, length: int) -> NDArray:
    """Numbers of the core's on a GPU as an array of MXNet's, without a copy."""
    known = _on_devices.get((device, address, length))
    if known is not None:
        return known[0]
    shape = (ctypes.c_int64 * 1)(length)
    tensor = _dlpack.DLManagedTensor()
    tensor.dl_tensor.data, tensor.dl_tensor.shape = address, shape
    tensor.dl_tensor.ctx = _dlpack.DLContext(2, device)  # kDLGPU
    tensor.dl_tensor.ndim = 1
    tensor.dl_tensor.dtype = _dlpack.DLDataType.TYPE_MAP["float64"]
    handle = NDArrayHandle()
    check_call(_mxnet.MXNDArrayFromDLPackEx(ctypes.byref(tensor), True, ctypes.byref(handle)))
    array = NDArray(handle)
    _on_devices[device, address, length] = array, shape
    return array


class Tape:
    """What the calls of a forward leave behind for those that repeat it: see ``csrc/operator/tape.h``."""

    def __init__(self) -> None:
        self._tape = _core.syncbn_tape_create()
        weakref.finalize(self, _core.syncbn_tape_free, self._tape).atexit = False

    @contextmanager
    def running(self, again: bool) -> Iterator[None]:
        """On this thread, calls leave something, or repeat."""
        _core.syncbn_tape_begin(self._tape, again)
        try:
            yield
        except BaseException:
            _core.syncbn_tape_end()
            raise
        left = _core.syncbn_tape_end()
        if left:
            raise MXNetError(
                f"the second forward called {abs(left)} layer{'s' if abs(left) > 1 else ''} of SyncBatchNorm "
                f"{'fewer' if left > 0 else 'more'} than the first"
            )


def scope_enter(thread: str) -> None:
    """The caller, a thread of that name, enters its outermost scope."""
    _core.syncbn_scope_enter(_bytes(thread))


def scope_leave() -> Tuple[str, bool]:
    """The caller leaves that scope. Why its step could not go on, empty where it could; and whether the scope was part
    of the step that goes on now, or that step began later."""
    current = ctypes.c_int()
    reason = _core.syncbn_scope_leave(ctypes.byref(current)).decode(errors="replace")
    return reason, bool(current.value)


def fail(reason: str) -> None:
    _core.syncbn_fail(_bytes(reason))


def failure() -> str:
    return _core.syncbn_failure().decode()


def gate(arrays: Sequence[NDArray]) -> None:
    """What is issued later and uses these arrays fails where the step has failed by then. Does not wait."""
    handles = (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])
    check_call(_core.syncbn_gate_arrays(handles, len(arrays)))


#: What MXNet asks for of a gradient: nothing, or to add it. Else it is written.
NULL, ADD = 0, 3

Backward = Callable[[List[NDArray], List[NDArray], List[int]], None]


class _Callbacks(ctypes.Structure):  # MXCallbackList
    _fields_ = [("count", ctypes.c_int), ("functions", ctypes.c_void_p), ("states", ctypes.c_void_p)]


class _Function:
    """Of a graph: its backward, and what MXNet has pointers to."""

    def __init__(self, key: int, what: str, backward: Backward) -> None:
        self.what, self.backward = what, backward
        self._functions = (ctypes.c_void_p * 2)(*[ctypes.cast(f, ctypes.c_void_p) for f in (_run_backward, _forget)])
        self._states = (ctypes.c_void_p * 2)(key, key)
        self.callbacks = _Callbacks(2, ctypes.addressof(self._functions), ctypes.addressof(self._states))


_functions: Dict[int, _Function] = {}  # in graphs
_keys = itertools.count(1)


def record_function(what: str, inputs: Sequence[NDArray], outputs: Sequence[NDArray], backward: Backward) -> None:
    """Records that the outputs, which have their values, come from the inputs.

    ``backward(heads, gradients, requests)`` runs in a thread of MXNet's custom operators and fills the gradients, or
    issues what does. What it raises fails the step, with ``what`` was done. MXNet's ``autograd.Function`` prints it
    instead, takes ``grad_req='add'`` for nothing, and ends at the first gradient that nobody asks for.
    """
    key = next(_keys)
    _functions[key] = _Function(key, what, backward)
    handles = [(ctypes.c_void_p * len(some))(*[array.handle.value for array in some]) for some in (inputs, outputs)]
    check_call(
        _mxnet.MXCustomFunctionRecord(
            len(inputs), handles[0], len(outputs), handles[1], ctypes.byref(_functions[key].callbacks)
        )
    )


# int heads, int gradients, void** arrays, const int* requests, int training, void* state
@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.c_void_p,
)
def _run_backward(heads: int, gradients: int, handles: Any, requests: Any, training: int, key: int) -> int:
    arrays = [
        NDArray(NDArrayHandle(handle), writable=i >= heads) for i, handle in enumerate(handles[: heads + gradients])
    ]
    function = _functions[key]
    try:
        function.backward(arrays[:heads], arrays[heads:], requests[:gradients])
    except BaseException as problem:  # it must not pass through C++; whoever reads a gradient has it
        fail(f"{function.what}: {type(problem).__name__}: {problem}")
        gate(arrays[heads:])
    return 1


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _forget(key: int) -> int:
    del _functions[key]  # MXNet forgets the pointers
    return 1


def reset() -> None:
    _core.syncbn_reset()


def nobody_left(so: bool) -> None:
    """Whether no thread is left that could call a replica that others wait for."""
    _core.syncbn_nobody_left(so)


def close() -> None:
    """The process ends: from now on, whatever comes to run is a failure."""
    _core.syncbn_close()
    _core.syncbn_cuda_close()


def forking(inside: bool) -> None:
    """Before a fork, whether the thread that forks is in the middle of a step; after it, false."""
    _core.syncbn_forking(inside)


def out_of_batches(so: bool) -> None:
    """The calls of this process contribute empty batches from now on, or do not any more."""
    _core.syncbn_out_of_batches(so)


def waiting(inside: bool) -> None:
    """Before a wait for all that MXNet has in flight, whether the only thread that trains waits so in the middle of a
    step; after it, false."""
    _core.syncbn_waiting(inside)


def forked() -> None:
    """In the child of a fork."""
    _core.syncbn_forked()


def debug(so: bool) -> None:
    """Whether there is a record of every meeting."""
    _core.syncbn_debug(so)


def next_record(seconds: float) -> Optional[Tuple[int, str]]:
    """What the core has to say next, within these seconds: the level, as `logging` has it, and the text."""
    text = ctypes.c_char_p()
    level = _core.syncbn_next_record(seconds, ctypes.byref(text))
    return (level, text.value.decode(errors="replace")) if level and text.value is not None else None


def slowest() -> str:
    """Who was waited for, in all meetings of which there are records; empty where there are none."""
    return _core.syncbn_slowest().decode(errors="replace")


def instruction_set() -> str:
    return _core.syncbn_instruction_set().decode()


def path() -> Path:
    return _PATH


# ---- exchanges -------------------------------------------------------------------------------------------------

#: An exchange of the core's; it lasts as long as the process.
Handle = int


def memory_exchange(gpus: str = "") -> Handle:
    """In memory of this process; GPUs by ``'nccl'``, over the ``'host'``, or as it may be."""
    make = {"": _core.syncbn_exchange_memory, "nccl": _core.syncbn_exchange_nccl, "host": _core.syncbn_exchange_host}
    return make[gpus]()


def default_exchange(exchange: Handle) -> None:
    """Of layers that have none of their own."""
    _core.syncbn_exchange(exchange)


_exchanges: Dict[int, Any] = {}  # those that are written in Python; the core may call one for as long as it lives
_numbers = itertools.count(1)


def python_exchange(exchange: Any, spans_processes: bool) -> Handle:
    """One that is written in Python: `gluon_syncbn.exchange.base.PythonExchange` says what it has."""
    number = next(_numbers)
    _exchanges[number] = exchange
    return (_core.syncbn_exchange_processes if spans_processes else _core.syncbn_exchange_contexts)(number)


def set_layers(layer_of: Callable[[Any, Ticket], Any]) -> None:
    """Once: what an exchange is told of the layer that a ticket names, before it is called for that."""

    def reduction(method: str) -> Any:
        def call(exchange: Any, layer: Any, ticket: Ticket, count: int, length: int, rows: Any, out: int) -> None:
            total = getattr(exchange, method)(layer, ticket, np.ctypeslib.as_array(rows, (count, length)))
            values = np.ascontiguousarray(total.values, np.float64)
            _core.syncbn_total(out, values.size, values.ctypes.data, total.first, total.key)

        return call

    def add_on_devices(exchange: Any, layer: Any, ticket: Ticket, count: int, parts: Any) -> None:
        exchange.add_on_devices(
            layer,
            ticket,
            [
                OnDevice(*[_on_device(part.device, address, part.length) for address in (part.own, part.gathered)])
                for part in parts[:count]
            ],
        )

    def gpus_of_all_processes(exchange: Any, layer: Any, ticket: Ticket, out: Any) -> None:
        out[0] = exchange.gpus_of_all_processes(layer)

    def turn(
        exchange: Any, layer: Any, ticket: Ticket, parts: int, slots: int, devices: Any, counts: Any, out: int
    ) -> None:
        turn = exchange.turn(layer, ticket, devices[:parts], np.ctypeslib.as_array(counts, (parts, slots)))
        values = np.ascontiguousarray(turn.counts, np.float64)
        head = turn[:5]
        _core.syncbn_turn(out, *head, turn.identity, len(turn.identity), values.ctypes.data, values.size, turn.key)

    def agreed(exchange: Any, layer: Any, ticket: Ticket, out: Any) -> None:
        out[0] = exchange.agreed(layer)

    def check(exchange: Any, layer: Any, ticket: Ticket) -> None:
        exchange.check(layer, ticket)

    calls = {
        **{name: reduction(name) for name in ("merge", "add", "gather")},
        **{call.__name__: call for call in (add_on_devices, gpus_of_all_processes, turn, agreed, check)},
    }

    def guarded(call: Callable[..., None]) -> Callable[..., int]:
        def function(number: int, ticket: Any, *arguments: Any) -> int:
            *given, problem = arguments
            try:
                exchange = _exchanges[number]
                call(exchange, layer_of(exchange, ticket.contents), ticket.contents, *given)
                return 0
            except BaseException as error:  # it must not pass through C++; its text goes to every replica
                text = _bytes(f"{type(error).__name__}: {error}")[:1023]
                problem.contents.text = text.decode(errors="ignore").encode()  # no half of a character
                return 1

        return function

    global _functions_of_exchanges
    assert _functions_of_exchanges is None
    types: Any = _Functions._fields_
    _functions_of_exchanges = _Functions(*[kind(guarded(calls[name])) for name, kind in types])
    _core.syncbn_python_functions(_functions_of_exchanges)


_functions_of_exchanges: Optional[_Functions] = None  # the core keeps pointers into it: it is never replaced


#: Processes that a segment serves, as in csrc/exchange/segment.h.
MOST_RANKS = 64
#: Numbers that one outbox of a segment holds; as there.
MOST_VALUES = 4608


class Segment:
    """Memory that the processes of this machine share: see ``csrc/exchange/segment.h``."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    @classmethod
    def create(cls, ranks: int) -> Segment:
        """On rank 0. MXNetError where there is no such memory."""
        return cls(_core.syncbn_segment_create(ranks))

    @classmethod
    def open(cls, ranks: int, rank: int, process: int, number: int, token: bytes) -> Segment:
        """What rank 0 has made; it is the file of that number in that process. MXNetError where it cannot be seen."""
        return cls(_core.syncbn_segment_open(ranks, rank, process, number, token, len(token)))

    def number(self) -> int:
        return _core.syncbn_segment_number(self._pointer)

    def token(self) -> bytes:
        token = ctypes.create_string_buffer(64)
        size = _core.syncbn_segment_token(self._pointer, token)
        return token.raw[:size]

    def free(self) -> None:
        _core.syncbn_segment_free(self._pointer)

    def exchange(self, transport: Handle) -> Handle:
        """Takes the segment."""
        return _core.syncbn_exchange_shared_memory(self._pointer, transport)

    def exchange_of_machine(self, transport: Handle, ranks: Sequence[int], of: int) -> Handle:
        """Takes the segment, which these ranks of a job share. The job has so many."""
        numbers = (ctypes.c_int64 * len(ranks))(*ranks)
        return _core.syncbn_exchange_machine(self._pointer, transport, numbers, len(ranks), of)


def hierarchy(machine: Handle, leaders: Handle, transport: Handle) -> Handle:
    """The exchange in levels: see ``csrc/exchange/hierarchy.h``."""
    return _core.syncbn_exchange_hierarchy(machine, leaders, transport)


def allreduce(exchange: Handle, ticket: Ticket, row: np.ndarray, merges: bool = False) -> np.ndarray:
    """What an exchange makes of float64 rows, one of each process: their sum, or the moments of all. MXNetError where
    it fails."""
    out = np.empty_like(row)
    allreduce_at(exchange, ticket, row.size, row.ctypes.data, out.ctypes.data, merges)
    return out


def allreduce_at(exchange: Handle, ticket: Ticket, length: int, row: int, out: int, merges: bool = False) -> None:
    """The same by the addresses of both, which take as long to find as two processes need to exchange a vector."""
    _core.syncbn_allreduce(exchange, merges, ticket, length, row, out)


def shared_memory_failed(exchange: Handle, reason: str) -> None:
    """Tells the other processes of this machine that nothing is exchanged any more."""
    _core.syncbn_shared_memory_fail(exchange, _bytes(reason))


def shared_memory_ended(exchange: Handle) -> None:
    """Tells them that this process ends."""
    _core.syncbn_shared_memory_end(exchange)

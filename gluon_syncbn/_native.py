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

from . import arguments

_PATH = Path(__file__).with_name("_core.so")


class Ticket(ctypes.Structure):
    """Which handing-in this is; phase 0 is the forward of a call, 1, 2 ... its backwards."""

    _fields_ = [(name, ctypes.c_int64) for name in ("layer", "node", "call", "phase")]

    layer: int
    node: int  # of a graph; -1 for an eager call
    call: int  # of this node
    phase: int


class Total(NamedTuple):
    """What an exchange makes of it: see ``csrc/meeting/reduction.h``."""

    values: np.ndarray
    first: int  # of the values that are of this process
    key: int  # of the layer, the same in every process


# const Ticket*, int reduction, int64 rows, int64 length, const double* values, Total* out, char* error, int64 size
_Hook = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Ticket),
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_int64,
)


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
        "layer_reach": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int]),
        "layer_issued": (ctypes.c_int, [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]),
        "timeout": (ctypes.c_int, [ctypes.c_double]),
        "hook": (ctypes.c_int, [_Hook]),
        "reach": (ctypes.c_int, [ctypes.c_int]),
        "total": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]),
        "timeout_of": (ctypes.c_double, [ctypes.c_int64]),
        "interrupts": (ctypes.c_long, []),
        "wait_begin": (ctypes.c_void_p, [ctypes.c_long]),
        "wait_goes_on": (ctypes.c_int, [ctypes.c_void_p]),
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
    _why_custom = _ways_of_calls(os.environ.get("GLUON_SYNCBN_OPERATOR", ""))
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
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
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


def layer_timeout(layer: int, seconds: float) -> None:
    _core.syncbn_layer_timeout(layer, seconds)


def layer_reach(layer: int, reach: int) -> None:
    """How far the layer's own exchange reaches."""
    _core.syncbn_layer_reach(layer, reach)


def layer_issued(layer: int, context: str, graph: int) -> None:
    """The caller executes a graph again that has the layer in it; MXNet issues its calls once. ``graph`` is a number
    below -1. MXNetError where the layer is in the middle of a step of another thread."""
    _core.syncbn_layer_issued(layer, context.encode(), graph)


def default_timeout(seconds: float) -> None:
    _core.syncbn_timeout(seconds)


def timeout_of(layer: int = 0) -> float:
    """Seconds that the layer waits; without one, those of the process."""
    return _core.syncbn_timeout_of(layer)


def interrupts() -> int:
    """How often the process was interrupted by Ctrl-C while something waited."""
    return _core.syncbn_interrupts()


class Wait:
    """A wait outside the native core that ends when it would: a failed step, Ctrl-C, the end of the main thread.

    ``since`` is what `interrupts` said when it began.
    """

    def __init__(self, since: int) -> None:
        self._stall = _core.syncbn_wait_begin(since)
        weakref.finalize(self, _core.syncbn_wait_end, self._stall).atexit = False

    def goes_on(self) -> bool:
        return bool(_core.syncbn_wait_goes_on(self._stall))


def devices(contexts: Sequence[str]) -> None:
    _core.syncbn_devices(*_names(contexts))


def seed(value: int) -> None:
    _core.syncbn_seed(value)


#: What becomes of a batch that is not finite; the order is that of `Nonfinite` in csrc/meeting/meeting.h.
NONFINITE = ("propagate", "skip", "error")


def nonfinite(what: str) -> None:
    _core.syncbn_nonfinite(NONFINITE.index(what))


class OnDevice(NamedTuple):
    """What a replica hands in on its GPU: see ``csrc/meeting/reduction.h``."""

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


def on_devices(rows: np.ndarray) -> List[OnDevice]:
    """From the rows of ``add_on_devices``: integers, ``[device, address of own, address of total, length]``."""
    return [
        OnDevice(_on_device(device, own, length), _on_device(device, total, length))
        for device, own, total, length in rows.view(np.int64).tolist()
    ]


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


#: How far an exchange reaches; the numbers are those of `Reach` in csrc/meeting/reduction.h.
MEMORY, CONTEXTS, PROCESSES, NCCL, HOST = range(5)

#: Called for what leaves shared memory; the place in `REDUCTIONS` says what becomes of the rows, float64, one for each
#: context, or to gather one for the process.
PutTogether = Callable[[Ticket, str, np.ndarray], Total]
#: The order is that of `Reduction` in csrc/meeting/reduction.h, then of `Question` in csrc/meeting/turn.cc and of
#: `kAddOnDevices` in csrc/meeting/reduction.cc.
REDUCTIONS = ("merge", "add", "gather", "spread", "turn", "look", "add_on_devices")

_hook = None  # the native side keeps a pointer to it, and a thread may be inside: it is never replaced


def set_hook(put_together: PutTogether) -> None:
    """Sets what puts rows together, once. An exception in it becomes the failure of the step."""

    def call(ticket: Any, reduction: int, count: int, length: int, rows: Any, out: int, error: Any, size: int) -> int:
        try:
            values = np.ctypeslib.as_array(rows, (count, length))
            total = put_together(ticket.contents, REDUCTIONS[reduction], values)
            values = np.ascontiguousarray(total.values, np.float64)
            _core.syncbn_total(out, values.size, values.ctypes.data, total.first, total.key)
            return 0
        except BaseException as problem:  # it must not pass through C++; its text goes to every replica
            message = _bytes(f"{type(problem).__name__}: {problem}")[: size - 1]
            message = message.decode(errors="ignore").encode()  # no half of a character
            ctypes.memmove(error, message + b"\0", len(message) + 1)
            return 1

    global _hook
    assert _hook is None
    _hook = _Hook(call)
    _core.syncbn_hook(_hook)


def default_reach(reach: int) -> None:
    """How far layers reach that name no exchange."""
    _core.syncbn_reach(reach)

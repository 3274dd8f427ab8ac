"""Loads the native core and wraps its functions. Only this module uses ctypes.

Arguments and results are plain values; ``csrc/api.cc`` explains them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mxnet.base import _LIB as _mxnet
from mxnet.base import MXNetError, NDArrayHandle, check_call
from mxnet.ndarray import NDArray

from .system import arguments
from .system.environment import read

_PATH = Path(__file__).with_name("_core.so")
NO_GROUPS = np.zeros(0, np.int32)


class Ticket(ctypes.Structure):
    """Identifies a contribution; phase 0 is the forward of a call, 1, 2 ... its backwards."""

    _fields_ = [(name, ctypes.c_int64) for name in ("layer", "node", "call", "phase")]
    _fields_ += [("name", ctypes.c_char_p), ("timeout", ctypes.c_double), ("interrupts", ctypes.c_int64)]

    layer: int
    node: int  # of a graph; -1 for an eager call
    call: int  # of this node
    phase: int
    name: bytes  # of the layer
    timeout: float  # seconds that the layer waits
    interrupts: int  # their number when the first replica came


class Agreed(NamedTuple):
    """The processes' agreement about a layer, as in csrc/exchange/exchange.h."""

    key: int
    ranks: Sequence[int] = ()  # that share groups with this process, including it; none without groups
    channels: int = 0
    replicas: int = 0
    members: np.ndarray = NO_GROUPS
    groups: np.ndarray = NO_GROUPS
    first: int = 0


class _Problem(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 1024)]


def _function(*arguments: Any) -> Any:
    """The type of a function of a Python exchange, whose number is the first argument."""
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(Ticket), *arguments, ctypes.POINTER(_Problem))


class _Functions(ctypes.Structure):  # PythonFunctions in csrc/exchange/python.h
    _fields_ = [
        ("add", _function(*[ctypes.c_int64] * 2, *[ctypes.POINTER(ctypes.c_double)] * 2)),
        (
            "gather",
            _function(
                *(ctypes.c_char_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int64, ctypes.POINTER(ctypes.c_size_t)),
                *(ctypes.c_int64, ctypes.POINTER(ctypes.c_double), ctypes.c_void_p),
            ),
        ),
        ("agreed", _function(ctypes.c_int64, ctypes.c_void_p)),
    ]


class _MachinesInPython(ctypes.Structure):  # in csrc/exchange/machines.h
    _fields_ = [
        ("tell", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(_Problem))),
        (
            "add",
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(_Problem)),
        ),
        ("check", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Problem))),
        ("fail", ctypes.CFUNCTYPE(None, ctypes.c_char_p)),
    ]


class Mpi(ctypes.Structure):
    """MPI's functions and handles: see ``csrc/exchange/mpi.h``."""

    _FUNCTIONS = ("Isend", "Improbe", "Imrecv", "Get_count", "Test", "Iallreduce", "Ibcast")
    _fields_ = [(name, ctypes.c_void_p) for name in (*_FUNCTIONS, "in_place")]
    _fields_ += [(name, ctypes.c_ssize_t) for name in ("bytes", "float32", "float64", "int64", "add")]
    _fields_ += [("any_rank", ctypes.c_int64), ("any_tag", ctypes.c_int64)]
    _fields_ += [("communicator", ctypes.c_ssize_t), ("leaders", ctypes.c_ssize_t)]

    @classmethod
    def of(cls, file: str, **fields: int) -> Mpi:
        """Finds the functions in the libraries of this file. MXNetError: one of them is missing."""
        library = ctypes.CDLL(file)
        try:
            found = {name: ctypes.cast(library[f"MPI_{name}"], ctypes.c_void_p).value for name in cls._FUNCTIONS}
        except AttributeError as error:
            raise MXNetError(f"kvstore 'mpi' needs functions of MPI 3 that this library lacks: {error}") from None
        return cls(**found, **fields)


def _unusable(error: Exception) -> ImportError:
    return ImportError(
        f"gluon_syncbn's native core {_PATH} cannot be loaded ({error}); build it with `pip install .` "
        "in the checkout (needs g++ with C++17 and OpenMP)",
        name=__package__,
    )


#: The types of `csrc/api.cc` that are not pointers. A pointer to anything but a text is passed as it comes.
_TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "long": ctypes.c_long,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
}
#: Their results are not whether they have failed.
_UNCHECKED = {"register", "problem", "issue_on", "tape_end", "tape_runs", "gate_arrays"}


def _type(text: str) -> Any:
    return _TYPES[text] if text in _TYPES or not text.endswith("*") else ctypes.c_void_p


def _load() -> ctypes.CDLL:
    try:
        core = ctypes.CDLL(str(_PATH))
    except OSError as error:
        raise _unusable(error) from None
    source = (_PATH.parent / "csrc" / "api.cc").read_text(encoding="utf-8")
    # a result, a name, and parameters, each a type and a name
    for result, name, given in re.findall(r"^SYNCBN_API ([^(]+?) ?syncbn_(\w+)\(([^)]*)\)", source, re.MULTILINE):
        try:
            function = getattr(core, f"syncbn_{name}")
        except AttributeError as error:  # the core is older than its source
            raise _unusable(error) from None
        function.restype = _type(result)
        function.argtypes = [_type(one.strip().rpartition(" ")[0]) for one in given.split(",") if given]
        if name not in _UNCHECKED:
            function.errcheck = _checked
    return core


def _checked(result: Any, function: Any, given: Any) -> Any:
    if (result is None and function.restype is not None) or result == -1:
        raise MXNetError(_core.syncbn_problem().decode(errors="replace"))
    return result


_core = _load()


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names of files may contain bytes that are not UTF-8


def _names(values: Sequence[str]) -> Tuple[int, Any]:
    return len(values), (ctypes.c_char_p * len(values))(*[value.encode() for value in values])


# The order is that of `MXNet` in csrc/mxnet_api.h.
_FUNCTIONS = (
    "MXGetLastError",
    "MXCustomOpRegister",
    "MXAutogradIsTraining",
    "MXAutogradIsRecording",
    "MXNDArrayGetData",
    "MXNDArrayGetContext",
    "MXNDArrayFree",
    "MXEnginePushSync",
    "MXEnginePushSyncND",
    "MXEnginePushAsyncND",
    "MXShallowCopyNDArray",
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
    """Returns why calls on ``'cpu'`` or ``'gpu'`` contexts come through MXNet's ``Custom``.

    The text is empty if they come directly from MXNet's engine.
    """
    return _why_custom[device]


def blocked_calls() -> int:
    """Counts forwards and backwards whose data had oneDNN's layout, with channels in blocks."""
    return _core.syncbn_blocked_calls()


def lone_calls() -> int:
    """Counts forwards and backwards that MXNet's own threads ran to the end, because they did not have to wait."""
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
    """Returns the folder of compiled kernels."""
    base = read("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "gluon_syncbn"


def nccl_problem() -> str:
    """Returns why GPUs cannot exchange their statistics by NCCL; empty if they can."""
    return _core.syncbn_nccl_problem().decode()


def separate_resources() -> str:
    """Gives each CPU context its own temporary space and random states. Returns why it cannot; empty if it has."""
    return _core.syncbn_separate_resources(_mxnet._handle).decode()


def resources() -> int:
    """Counts MXNet's objects with temporary space and random states that were made for replicas."""
    return _core.syncbn_resources()


def renew_resources() -> None:
    """Lets replicas of this thread take new resources, with the number of copies in the environment."""
    _core.syncbn_renew_resources()


def issue_for(array: NDArray) -> bool:
    """Begins to issue, in this thread, operators of the replica on an array's context.

    That is so if the replica trains on a CPU and the thread issues for no other one. Returns whether it is so. Then
    ``issue_on(-1)`` ends it.
    """
    return bool(_core.syncbn_issue_for(array.handle))


def issue_on(context: int) -> int:
    """Begins to issue, in this thread, operators of a replica on this CPU context, or of none: -1. Returns the context
    before.
    """
    return _core.syncbn_issue_on(context)


def layer_create(name: str, mode: int, slots: int, group: int, groups: Sequence[int] = ()) -> int:
    """``groups``: the group of each replica, where groups are named."""
    of_replicas = (ctypes.c_int * len(groups))(*groups)
    return _core.syncbn_layer_create(name.encode(), mode, slots, group, len(groups), of_replicas)


def layers() -> int:
    """Returns the number of layers."""
    return _core.syncbn_layers()


def contexts_are_shared() -> bool:
    """Whether some layer has several replicas on a context."""
    return bool(_core.syncbn_contexts_are_shared())


def layer_drop(layer: int, calls: Dict[Any, int]) -> None:
    """Drops a layer, and the numbers of its eager calls."""
    _core.syncbn_layer_drop(layer)
    for number in calls.values():
        del _calls[number]


_calls: Dict[int, Dict[str, str]] = {}  # the attributes of each number


def call_create(attributes: Dict[str, str]) -> int:
    """Keeps the attributes of eager calls. Returns the number that stands for them, until the layer is dropped."""
    number = _core.syncbn_call_create(*_names(list(attributes)), _names(list(attributes.values()))[1])
    _calls[number] = attributes
    return number


def call_attributes(number: int) -> Dict[str, str]:
    """Returns the attributes that a number stands for. MXNetError: their layer is gone."""
    if number not in _calls:
        raise MXNetError("a SyncBatchNorm that this graph has recorded is gone. Keep the layer as long as the graph.")
    return _calls[number]


def layer_token(layer: int) -> str:
    return _core.syncbn_layer_token(layer).decode()


def layer_place(layer: int, contexts: Sequence[str], replicas: int) -> None:
    """Sets the contexts that hold a layer's parameters, and the number of their replicas."""
    _core.syncbn_layer_place(layer, *_names(contexts), replicas)


def layer_called(layer: int, context: str) -> None:
    """An executor on this context is about to call it."""
    _core.syncbn_layer_called(layer, context.encode())


def layer_timeout(layer: int, seconds: float) -> None:
    _core.syncbn_layer_timeout(layer, seconds)


def layer_exchange(layer: int, exchange: Handle) -> None:
    """Gives a layer an exchange of its own."""
    _core.syncbn_layer_exchange(layer, exchange)


def graph_begins(layers: Sequence[int], data: NDArray, graph: int) -> None:
    """Notes that the caller executes a graph whose nodes have these layers. `graph_ends` must follow.

    MXNet issues their calls once.

    ``data`` is on the context of the graph, whose number ``graph`` is below -1. MXNetError: the layer is in the middle
    of a step of another thread.
    """
    _core.syncbn_graph_begins(len(layers), (ctypes.c_int64 * len(layers))(*layers), data.handle, graph)


def graph_ends() -> None:
    _core.syncbn_graph_ends()


def default_timeout(seconds: float) -> None:
    _core.syncbn_timeout(seconds)


def timeout_of(layer: int = 0) -> float:
    """Returns the seconds that a layer waits; for layer 0, the setting of the process."""
    return _core.syncbn_timeout_of(layer)


def interrupts() -> int:
    """Counts the interruptions of the process by Ctrl-C during a wait."""
    return _core.syncbn_interrupts()


class Wait:
    """A wait outside the native core, with the core's time limit and reasons to end: see ``csrc/waiting/wait.h``.

    ``since`` is the result of `interrupts` at its beginning.
    """

    def __init__(self, timeout: float, warn_after: float, since: int) -> None:
        self._wait = _core.syncbn_wait_begin(timeout, warn_after, since)
        weakref.finalize(self, _core.syncbn_wait_end, self._wait).atexit = False

    def poll(self) -> str:
        """Returns why the wait should end: ``'failed'``, ``'asked to end'``, ``'forked'`` or ``'late'``.

        Once it returns ``'long'``, for a warning. The result is empty if the wait goes on.
        """
        return _core.syncbn_wait_poll(self._wait).decode()


#: Why a wait ends; the order is that of `Wait::Why` in csrc/waiting/wait.h.
WHYS = ("asked to end", "forked", "late", "long")


def text_of_wait(why: str, what: str, rank: str, missing: str, limit: float, waited: float) -> str:
    """Returns the text of a wait of this rank for others, in the exchange that ``what`` names."""
    texts = [_bytes(text) for text in (what, rank, missing)]
    return _core.syncbn_text_of_wait(WHYS.index(why), *texts, limit, waited).decode(errors="replace")


def devices(contexts: Sequence[str]) -> None:
    _core.syncbn_devices(*_names(contexts))


def seed(value: int) -> None:
    _core.syncbn_seed(value)


#: The treatment of a batch that is not finite; the order is that of `Nonfinite` in csrc/meeting/meeting.h.
NONFINITE = ("propagate", "skip", "error")


def nonfinite(what: str) -> None:
    _core.syncbn_nonfinite(NONFINITE.index(what))


class Tape:
    """Stores what the calls of a forward pass to their repetition: see ``csrc/operator/tape.h``."""

    def __init__(self) -> None:
        self._tape = _core.syncbn_tape_create()
        weakref.finalize(self, _core.syncbn_tape_free, self._tape).atexit = False

    @contextmanager
    def running(self, again: bool) -> Iterator[None]:
        """Makes calls on this thread write to the tape, or repeat from it."""
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

    @staticmethod
    def runs() -> bool:
        """Whether calls on this thread write to a tape, or repeat from one."""
        return bool(_core.syncbn_tape_runs())


def scope_enter(thread: str) -> None:
    """Notes that the caller, a thread of that name, enters its outermost scope."""
    _core.syncbn_scope_enter(_bytes(thread))


def scope_leave() -> Tuple[str, bool]:
    """Notes that the caller leaves its outermost scope.

    Returns why its step failed, empty if it did not. The second result says whether the scope was part of the current
    step; otherwise that step began later.
    """
    current = ctypes.c_int()
    reason = _core.syncbn_scope_leave(ctypes.byref(current)).decode(errors="replace")
    return reason, bool(current.value)


def fail(reason: str) -> None:
    _core.syncbn_fail(_bytes(reason))


def failure() -> str:
    return _core.syncbn_failure().decode()


def gate(arrays: Sequence[NDArray]) -> None:
    """Makes later users of these arrays fail if the step has failed by then. Does not wait."""
    handles = (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])
    check_call(_core.syncbn_gate_arrays(handles, len(arrays)))


#: MXNet's requests for a gradient: none, or to add it. Otherwise it is written.
NULL, ADD = 0, 3

Backward = Callable[[List[NDArray], List[NDArray], List[int]], None]


class _Callbacks(ctypes.Structure):  # MXCallbackList
    _fields_ = [("count", ctypes.c_int), ("functions", ctypes.c_void_p), ("states", ctypes.c_void_p)]


class _Function:
    """A function in a graph: its backward, and the objects that MXNet has pointers to."""

    def __init__(self, key: int, what: str, backward: Backward) -> None:
        self.what, self.backward = what, backward
        self._functions = (ctypes.c_void_p * 2)(*[ctypes.cast(f, ctypes.c_void_p) for f in (_run_backward, _forget)])
        self._states = (ctypes.c_void_p * 2)(key, key)
        self.callbacks = _Callbacks(2, ctypes.addressof(self._functions), ctypes.addressof(self._states))


_functions: Dict[int, _Function] = {}  # in graphs
_keys = itertools.count(1)


def record_function(what: str, inputs: Sequence[NDArray], outputs: Sequence[NDArray], backward: Backward) -> None:
    """Records that the outputs, which have their values, come from the inputs.

    ``backward(heads, gradients, requests)`` runs in a thread of MXNet's custom operators. It fills the gradients, or
    issues operators that do. An exception in it fails the step; the message contains ``what``. In contrast, MXNet's
    ``autograd.Function`` prints exceptions, ignores ``grad_req='add'``, and stops at the first gradient that is not
    requested.
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
    except BaseException as problem:  # it must not pass through C++; the reader of a gradient gets it
        fail(f"{function.what}: {type(problem).__name__}: {problem}")
        gate(arrays[heads:])
    return 1


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _forget(key: int) -> int:
    del _functions[key]  # MXNet drops its pointers
    return 1


def reset() -> None:
    _core.syncbn_reset()


def nobody_left(so: bool) -> None:
    """Tells the core whether no thread is left that could call a missing replica."""
    _core.syncbn_nobody_left(so)


def asked_for_callers(seconds: float) -> bool:
    """Waits until a replica asks which thread could still call a missing one. Returns False after ``seconds``."""
    return bool(_core.syncbn_asked_for_callers(seconds))


def answer_callers(wait: str, for_all: bool) -> None:
    """Answers with what all these threads wait for, or with an empty text if one could call.

    ``for_all``: they wait for all pending operations.
    """
    _core.syncbn_answer_callers(_bytes(wait), for_all)


def nobody_reads() -> None:
    """Tells the core that all threads that train have ended, and that exit handlers run."""
    _core.syncbn_nobody_reads()


def close() -> None:
    """Notes the end of the process: from now on, every operator that runs fails."""
    _core.syncbn_close()
    _core.syncbn_cuda_close()


def forking(inside: bool) -> None:
    """Tells the core, before a fork, whether the forking thread is in the middle of a step; after the fork, False."""
    _core.syncbn_forking(inside)


def out_of_batches(so: bool) -> None:
    """Sets whether the calls of this process contribute empty batches from now on."""
    _core.syncbn_out_of_batches(so)


def forked() -> None:
    """Resets the core in the child of a fork."""
    _core.syncbn_forked()


def debug(so: bool) -> None:
    """Turns the records of every meeting on or off."""
    _core.syncbn_debug(so)


def next_record(seconds: float) -> Optional[Tuple[int, str]]:
    """Returns the core's next record within these seconds: its level, as in `logging`, and the text."""
    text = ctypes.c_char_p()
    level = _core.syncbn_next_record(seconds, ctypes.byref(text))
    return (level, text.value.decode(errors="replace")) if level and text.value is not None else None


def slowest() -> str:
    """Summarises which replicas others waited for, in all recorded meetings; empty without records."""
    return _core.syncbn_slowest().decode(errors="replace")


def instruction_set() -> str:
    return _core.syncbn_instruction_set().decode()


def path() -> Path:
    return _PATH


# ---- exchanges -------------------------------------------------------------------------------------------------

#: An exchange of the core's, which lasts as long as the process.
Handle = int


def memory_exchange(gpus: str = "") -> Handle:
    """Returns an exchange in memory of this process. GPUs use ``'nccl'``, the ``'host'``, or either if empty."""
    make = {"": _core.syncbn_exchange_memory, "nccl": _core.syncbn_exchange_nccl, "host": _core.syncbn_exchange_host}
    return make[gpus]()


def default_exchange(exchange: Handle) -> None:
    """Sets the exchange of layers that have none of their own."""
    _core.syncbn_exchange(exchange)


_exchanges: Dict[int, Any] = {}  # Python exchanges; the core may call one for as long as it lives
_numbers = itertools.count(1)


def python_exchange(exchange: Any) -> int:
    """Registers an exchange, some of whose methods the core calls. Returns its number."""
    number = next(_numbers)
    _exchanges[number] = exchange
    return number


def kvstore_exchange(number: int) -> Handle:
    """Returns the exchange over the contexts of this process that adds by a store of MXNet's."""
    return _core.syncbn_exchange_contexts(number)


def processes(number: int, rank: int, size: int, mpi: Optional[Mpi]) -> Handle:
    """Returns the exchange over the processes of a job. Without ``mpi``, it calls the exchange of this number."""
    return _core.syncbn_exchange_processes(number, rank, size, ctypes.byref(mpi) if mpi else None)


def set_layers(layer_of: Callable[[Any, Ticket], Any]) -> None:
    """Sets, once, the function that gives an exchange the layer of a ticket before a call."""

    def array_at(pointer: Any, shape: Tuple[int, ...]) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, shape) if shape[-1] else np.empty(shape)  # the pointer may be null

    def add(exchange: Any, ticket: Ticket, count: int, length: int, rows: Any, out: Any) -> None:
        total = exchange.add(layer_of(exchange, ticket), array_at(rows, (count, length)))
        array_at(out, (length,))[:] = total

    def gather(exchange: Any, ticket: Ticket, what: bytes, key: int, longer: float, *rest: Any) -> None:
        count, ranks, length, values, out = rest
        own = array_at(values, (length,))
        for part in exchange.gather(ticket, what.decode(), key, longer, ranks[:count], own):
            _core.syncbn_part(out, part.size, part.ctypes.data)

    def agreed(exchange: Any, ticket: Ticket, here: int, out: Any) -> None:
        of = exchange.agreed(layer_of(exchange, ticket), here)
        ranks = (ctypes.c_size_t * len(of.ranks))(*of.ranks)
        head = of.key, len(ranks), ranks, of.channels, of.replicas, *_address(of.members)
        _core.syncbn_agreed(out, *head, of.groups.ctypes.data, of.first)

    calls: Dict[str, Callable[..., None]] = {"add": add, "gather": gather, "agreed": agreed}

    def guarded(call: Callable[..., None]) -> Callable[..., int]:
        def function(number: int, ticket: Any, *arguments: Any) -> int:
            *given, problem = arguments
            try:
                call(_exchanges[number], ticket.contents, *given)
                return 0
            except BaseException as error:  # it must not pass through C++; its text goes to every replica
                text = _bytes(f"{type(error).__name__}: {error}")[:1023]
                problem.contents.text = text.decode(errors="ignore").encode()  # no part of a character
                return 1

        return function

    global _functions_of_exchanges
    assert _functions_of_exchanges is None
    types: Any = _Functions._fields_
    _functions_of_exchanges = _Functions(*[kind(guarded(calls[name])) for name, kind in types])
    _core.syncbn_python_functions(ctypes.byref(_functions_of_exchanges))


def _address(values: np.ndarray) -> Tuple[int, int]:
    """Returns the number and the address of numbers of type int32."""
    assert values.dtype == np.int32 and values.flags.c_contiguous
    return values.size, values.ctypes.data


_functions_of_exchanges: Optional[_Functions] = None  # the core keeps pointers into it, so it is never replaced


#: The most processes that a segment serves, as in csrc/exchange/segment.h.
MOST_RANKS = 64
#: The numbers that one outbox of a segment holds, as there.
MOST_VALUES = 4608


class Segment:
    """Memory that the processes of this machine share: see ``csrc/exchange/segment.h``."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    @classmethod
    def create(cls, ranks: int) -> Segment:
        """Creates a segment on rank 0. MXNetError: there is no such memory."""
        return cls(_core.syncbn_segment_create(ranks))

    @classmethod
    def open(cls, ranks: int, rank: int, process: int, number: int, token: bytes) -> Segment:
        """Opens rank 0's segment, a file of that number in that process. MXNetError: it cannot be seen."""
        return cls(_core.syncbn_segment_open(ranks, rank, process, number, token, len(token)))

    def number(self) -> int:
        return _core.syncbn_segment_number(self._pointer)

    def token(self) -> bytes:
        token = ctypes.create_string_buffer(64)
        size = _core.syncbn_segment_token(self._pointer, token)
        return token.raw[:size]

    def free(self) -> None:
        _core.syncbn_segment_free(self._pointer)

    def exchange(self, processes: Handle, ranks: Sequence[int], leaders: Sequence[int]) -> Handle:
        """Makes the exchange over processes use the segment, which ``ranks`` share, and takes the segment over.

        ``leaders`` has one rank of each machine.
        """
        here, of_all = ((ctypes.c_size_t * len(some))(*some) for some in (ranks, leaders))
        return _core.syncbn_exchange_machine(processes, self._pointer, len(ranks), here, len(leaders), of_all)


def bytes_of(
    processes: Handle, ranks: Sequence[int], identity: Tuple[int, int, int, int], what: str, own: bytes
) -> List[np.ndarray]:
    """Sends bytes to some ranks over MPI. Returns theirs, this one's included, in the order of ``ranks``.

    The kind, key, call and phase identify the messages. MXNetError: some rank does not come, or has failed.
    """
    some = (ctypes.c_size_t * len(ranks))(*ranks)
    found = _core.syncbn_bytes_of(processes, len(some), some, *identity, _bytes(what), timeout_of(), len(own), own)
    try:
        size, parts = ctypes.c_int64(), []
        for place in range(len(some)):
            address = _core.syncbn_bytes_at(found, place, ctypes.byref(size))
            parts.append(np.frombuffer(ctypes.string_at(address, size.value), np.uint8))
        return parts
    finally:
        _core.syncbn_bytes_free(found)


def sent(processes: Handle) -> int:
    """Returns the number of messages that this process has sent over MPI, to a rank each."""
    return _core.syncbn_sent(processes)


def merge_moments(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Returns ``[count, mean[C], m2[C]]`` of the values of both, float64: see csrc/pooling/statistics.h."""
    merged, part = np.array(total, np.float64), np.ascontiguousarray(part, np.float64)
    _core.syncbn_merge_moments(merged.ctypes.data, part.ctypes.data, merged.size // 2)
    return merged


def allreduce(exchange: Handle, ticket: Ticket, row: np.ndarray, merges: bool = False) -> np.ndarray:
    """Combines float64 rows, one of each process, by an exchange: into their sum, or the moments of all.

    MXNetError: the exchange fails.
    """
    out = np.empty_like(row)
    allreduce_at(exchange, ticket, row.size, row.ctypes.data, out.ctypes.data, merges)
    return out


def allreduce_at(exchange: Handle, ticket: Ticket, length: int, row: int, out: int, merges: bool = False) -> None:
    """Does the same by addresses. Finding them takes as long as two processes need to exchange a vector."""
    _core.syncbn_allreduce(exchange, merges, ctypes.byref(ticket), length, row, out)


class Summands:
    """Arrays of a sum, as the core takes them: see `sum_arrays`.

    Parameters
    ----------
    names : list of str
        A name for each sum, for messages.
    arrays : list of list of NDArray
        For each sum as many arrays as for the others, of float type and dense.
    gpus : Handle or None
        What `connected_gpus` returned, for arrays on these GPUs. None: they are on CPUs.
    """

    def __init__(
        self, names: Sequence[str], arrays: Sequence[Sequence[NDArray]], gpus: Optional[Handle] = None
    ) -> None:
        self.arrays = [array for of_one in arrays for array in of_one]  # whose handles stay as long as they do
        count, contexts = len(names), len(arrays[0]) if arrays else 1
        types, sizes = (ctypes.c_int * count)(), (ctypes.c_int64 * count)()
        for i, (array, *_) in enumerate(arrays):
            check_call(_mxnet.MXNDArrayGetDType(array.handle, ctypes.byref(types, i * ctypes.sizeof(ctypes.c_int))))
            sizes[i] = array.size
        handles = (ctypes.c_void_p * (count * contexts))(*[array.handle.value for array in self.arrays])
        self.given = *_names(names), types, sizes, contexts, handles, gpus


def sum_arrays(exchange: Handle, channel: int, number: int, summands: Summands) -> None:
    """Pushes operations to MXNet's engine that sum arrays over the contexts and the processes of an exchange in memory.

    Does not wait. The arrays become the sums together, or all of them raise the failure. Rounds of one ``channel`` come
    in the same order in all processes, and ``number`` counts them for messages.
    """
    _core.syncbn_sum(exchange, channel, number, timeout_of(), *summands.given)


def identify_gpus(devices: Sequence[int]) -> Tuple[List[str], str]:
    """Returns what identifies each of these GPUs, and a new id for `connected_gpus`."""
    identities, name = ctypes.create_string_buffer(16 * len(devices)), ctypes.create_string_buffer(128)
    _core.syncbn_gpus_identify((ctypes.c_int * len(devices))(*devices), len(devices), identities, name)
    return [identities.raw[16 * i : 16 * i + 16].hex() for i in range(len(devices))], name.raw.hex()


def connected_gpus(devices: Sequence[int], name: str, first: int, ranks: int, bucket: int) -> Handle:
    """Returns the way of sums between GPUs of several processes.

    Parameters
    ----------
    devices : list of int
        The GPUs of this process.
    name : str
        The same id in all processes, used once.
    first, ranks : int
        The place of the first of these GPUs among those of all processes, and their number.
    bucket : int
        Bytes that one collective adds, a multiple of 8.
    """
    numbers = (ctypes.c_int * len(devices))(*devices)
    return _core.syncbn_gpus(numbers, len(devices), bytes.fromhex(name), first, ranks, bucket)


_between: List[_MachinesInPython] = []  # the core keeps pointers into them
_ANNOUNCEMENT = 2 + 512  # numbers, as in csrc/exchange/machines.h


def sum_between(exchange: Handle, first: bool, leader: Any, mpi: Optional[Mpi]) -> None:
    """Gives the leader of a machine its way to the others, before the first sum.

    Parameters
    ----------
    exchange : Handle
        The exchange of the machine.
    first : bool
        Whether it is the first leader.
    leader : Any
        ``tell(numbers)`` returns the first leader's, ``add(values)`` adds in place, ``check()`` raises an error if
        another process has failed, ``fail(reason)`` tells the others. None with MPI.
    mpi : Mpi, optional
        Adds in place of ``leader``.
    """
    if leader is None:
        assert mpi is not None
        _core.syncbn_sum_between(exchange, first, None, ctypes.byref(mpi))
        return

    def guarded(call: Callable[..., None]) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            *given, problem = arguments
            try:
                call(*given)
                return 0
            except BaseException as error:  # it must not pass through C++
                problem.contents.text = _bytes(str(error))[:1023].decode(errors="ignore").encode()
                return 1

        return function

    def tell(numbers: Any) -> None:
        array = np.ctypeslib.as_array(numbers, (_ANNOUNCEMENT,))
        array[:] = leader.tell(array.copy())

    def add(kind: int, count: int, address: int) -> None:
        number = ctypes.c_double if kind == 1 else ctypes.c_float
        leader.add(np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(number)), (count,)))

    fields: Any = _MachinesInPython._fields_
    types = dict(fields)
    calls = {"tell": guarded(tell), "add": guarded(add), "check": guarded(leader.check)}
    calls["fail"] = lambda reason: leader.fail(reason.decode(errors="replace"))
    _between.append(_MachinesInPython(**{name: types[name](call) for name, call in calls.items()}))
    _core.syncbn_sum_between(exchange, first, ctypes.byref(_between[-1]), None)


def processes_failed(exchange: Handle, reason: str) -> None:
    """Tells the other processes that nothing is exchanged any more."""
    _core.syncbn_processes_fail(exchange, _bytes(reason))


def processes_ended(exchange: Handle) -> None:
    """Tells the other processes that this process ends."""
    _core.syncbn_processes_end(exchange)

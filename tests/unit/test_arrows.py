"""The arrows of the architecture: who may import whom, in Python, and include whom, in C++."""

import ast
import ctypes
import re

import pytest
from sources import CORE, PYTHON, TREES

from gluon_syncbn import _native


def imports(file):
    """Absolute dotted names of everything that a module of the package imports, wherever in the file."""
    parents = ["gluon_syncbn", *file.split("/")[:-1]]
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)  # `from . import op` imports ....op


MODULES = {file: file[: -len(".py")].replace("/__init__", "") for file in PYTHON}


def arrows_of_python():
    """(module, module of the package that it imports), as paths."""
    for file, module in MODULES.items():
        for name in imports(file):
            package, *path = name.split(".")
            while path and "/".join(path) not in MODULES.values():
                path.pop()
            if package == "gluon_syncbn":
                yield module, "/".join(path) or "__init__"


def arrows_of_the_core(ends=("cc", "cu", "h")):
    """(source, header that it includes), without what they end in."""
    for file, text in CORE.items():
        source, _, end = file.rpartition(".")
        if end in ends:
            yield from ((source, header) for header in re.findall(r'^#include "(.+)\.h"', text, re.MULTILINE))


#: The first level, from the bottom up: each may import what stands in the lines before it. `exchange` knows nothing of
#: layers. `reference` imports nothing, and only tests import it.
FLOORS = """
system
_native activation parallel
settings
exchange
training
mxnet_side
contrastive layer
nets
symbol
command
__init__
__main__
"""
#: Folders, and what stands in none. `pooling` is numbers alone: no lock, no layer, no array.
CORE_FLOORS = """
activation
plain lock
types
mxnet_api log failure
to_python
pooling tensor
cpu waiting
cuda
exchange
meeting
operator
native
api
"""


@pytest.mark.parametrize(
    "floors, arrows", [(FLOORS, arrows_of_python), (CORE_FLOORS, arrows_of_the_core)], ids=["Python", "C++"]
)
def test_arrows_point_one_way(floors, arrows):
    floor = {room: number for number, rooms in enumerate(floors.split("\n")) for room in rooms.split()}
    found = [[name.split("/") for name in arrow] for arrow in arrows()]
    assert {path[0] for arrow in found for path in arrow} == set(floor), "a folder or file came or went: follow it"
    for source, target in found:
        if source[0] != target[0]:
            assert floor[target[0]] < floor[source[0]], f"{'/'.join(source)} imports {'/'.join(target)}"


def test_arrows_within_a_folder_point_one_way():
    """Of modules, and of headers. A package within a folder counts as one."""
    graphlib = pytest.importorskip("graphlib", reason="of Python 3.9")
    graph = {}
    for language, arrows in (("Python", arrows_of_python()), ("C++", arrows_of_the_core("h"))):
        for source, target in arrows:
            one, other = ((language, *name.split("/")[:2]) for name in (source, target))
            if one != other and min(len(one), len(other)) > 2:
                graph.setdefault(one, set()).add(other)
    assert len(graph) > 50
    graphlib.TopologicalSorter(graph).prepare()  # which raises a CycleError that names the way


def test_each_function_of_the_core_has_its_types():
    source = "".join(text for file, text in CORE.items() if file.endswith(".cc"))
    names = re.findall(r"^SYNCBN_API\(.*?, (\w+)", source, re.MULTILINE)
    functions = [getattr(_native._core, name) for name in names]
    assert len(functions) == len(re.findall(r"^SYNCBN_API\(", source, re.MULTILINE)) > 50
    assert all(function.argtypes is not None for function in functions)
    made, given = _native.layer_create, _native._GIVEN
    types = [given["const char*"], ctypes.c_int, *[ctypes.c_int64] * 2, given["const Span<const int>&"]]
    assert (made.restype, made.argtypes) == (ctypes.c_int64, [*types, ctypes.c_double, ctypes.c_void_p])
    assert _native.close.restype == ctypes.c_int and _native.close.argtypes == []
    with pytest.raises(KeyError, match="float"):  # a type that nobody has thought of is not guessed
        _native._type("float", given)


def test_the_package_calls_only_functions_that_the_core_has():
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_native":
                assert hasattr(_native, node.attr), f"{file}: _native.{node.attr}"


def test_the_core_and_the_driver_are_behind_one_module_each():
    users = {module for file, module in MODULES.items() if any(n.split(".")[0] == "ctypes" for n in imports(file))}
    # `op` passes handles of MXNet on.
    assert users == {"_native", "system/cuda", "system/cuda_libraries", "mxnet_side/op"}


def test_what_comes_before_mxnet_does_not_import_it():
    for file in PYTHON:
        if file.startswith("mxnet_side/compatibility/"):
            assert "mxnet" not in {imported.split(".")[0] for imported in imports(file)}
    for name in ("cuda", "cuda_libraries", "distribution"):
        assert not {"mxnet", "numpy"} & {root.split(".")[0] for root in imports(f"system/{name}.py")}


def test_the_environment_is_read_in_one_function():
    """And not in each call: a thread that writes to `os.environ` moves it meanwhile."""
    assert {file: text.count("getenv(") for file, text in CORE.items() if "getenv(" in text} == {"mxnet_api.h": 2}

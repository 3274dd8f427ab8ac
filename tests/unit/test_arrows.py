"""The arrows of the architecture: who may import whom, in Python, and include whom, in C++."""

import ast
import ctypes
import re

import pytest
from places import PACKAGE, ROOT, SOURCES

from gluon_syncbn import _native

SOURCE = PACKAGE.parent


def imports(path):
    """Absolute dotted names of everything that a module of the package imports, wherever in the file."""
    parents = path.relative_to(SOURCE).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(parents[: len(parents) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:  # `from . import op` imports gluon_syncbn.mxnet_side.op
                yield ".".join([*base, alias.name])


def module_name(path):
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).replace(".__init__", "")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def arrows():
    """{module: the modules of the package that it imports}."""
    graph = {}
    for module, path in MODULES.items():
        graph[module] = set()
        for name in imports(path):
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    return graph


# The first level, from the bottom up: each may import what stands in the lines before it. `exchange` knows nothing of
# layers, `reference` nothing of the rest.
FLOORS = [
    ["reference", "system"],
    ["_native", "activation", "parallel"],
    ["settings"],
    ["exchange"],
    ["training"],
    ["mxnet_side"],
    ["contrastive", "layer"],
    ["nets"],
    ["symbol"],
    ["command"],
    [""],  # __init__
    ["__main__"],
]


def floor(floors, name):
    return next((i for i, names in enumerate(floors) if name in names), None)


def room(module):
    return module.split(".")[1] if "." in module else ""


def test_functions_are_short():
    for module, path in MODULES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1 if ast.get_docstring(node) and node.body[1:] else 0]
                code = [one for one in lines[first.lineno - 1 : node.end_lineno] if one.strip(" #")]
                assert len(code) <= 60, f"{module}.{node.name}"


def test_imports_point_one_way():
    graph = arrows()
    assert {room(module) for module in graph} == {name for names in FLOORS for name in names}, "FLOORS has to follow"
    for module, targets in graph.items():
        for target in targets:
            if room(module) != room(target):
                assert floor(FLOORS, room(target)) < floor(FLOORS, room(module)), f"{module} imports {target}"


def cycle(graph):
    """Names that lead from one to the next and back; none where the arrows point one way."""
    way, done = [], set()

    def visit(name):
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return None
        way.append(name)
        found = next(filter(None, map(visit, sorted(graph.get(name, ())))), None)
        done.add(way.pop())
        return found

    return next(filter(None, map(visit, sorted(graph))), None)


def test_imports_within_a_folder_point_one_way():
    graph = {}
    for module, targets in arrows().items():
        if module.count(".") > 1:
            own = tuple(module.split(".")[1:3])
            inside = {tuple(target.split(".")[1:3]) for target in targets if target.count(".") > 1}
            graph.setdefault(own, set()).update(one for one in inside - {own} if one[0] == own[0])
    assert len(graph) > 30
    assert cycle(graph) is None
    assert cycle({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d", "b"]


def test_each_function_of_the_core_has_the_types_of_its_source():
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.cc"))
    names = re.findall(r"^SYNCBN_API\(.*?, (\w+)", source, re.MULTILINE)
    functions = [getattr(_native._core, f"syncbn_{name}") for name in names]
    assert len(functions) == len(re.findall(r"^SYNCBN_API\(", source, re.MULTILINE)) > 50
    assert all(function.argtypes is not None for function in functions)
    made, given = _native.layer_create, _native._GIVEN
    types = [given["const char*"], ctypes.c_int, *[ctypes.c_int64] * 2, given["const Span<const int>&"]]
    assert (made.restype, made.argtypes) == (ctypes.c_int64, [*types, ctypes.c_double, ctypes.c_void_p])
    assert _native.close.restype == ctypes.c_int and _native.close.argtypes == []
    with pytest.raises(KeyError, match="float"):  # a type that nobody has thought of is not guessed
        _native._type("float", given)


def test_a_core_of_another_source_is_refused(monkeypatch, tmp_path):
    source = (SOURCES / "api.cc").read_text(encoding="utf-8")
    changed = source.replace("SYNCBN_API(void, exiting, bool is_exiting)", "SYNCBN_API(void, exiting, int is_exiting)")
    assert changed != source
    (tmp_path / "api.cc").write_text(changed, encoding="utf-8")
    monkeypatch.setattr(_native, "_SOURCES", tmp_path)
    with pytest.raises(ImportError, match=r"declares \(void, exiting, bool is_exiting\).*make core"):
        _native._load()


def test_the_package_calls_only_functions_that_the_core_has():
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_native":
                assert hasattr(_native, node.attr), f"{path}: _native.{node.attr}"


def test_the_core_and_the_driver_are_behind_one_module_each():
    users = {module for module, path in MODULES.items() if any(n.split(".")[0] == "ctypes" for n in imports(path))}
    # `op` passes handles of MXNet on, the self-check asks NVRTC for its version.
    others = {"mxnet_side.op", "command.selfcheck"}
    assert users == {f"gluon_syncbn.{name}" for name in {"_native", "system.cuda", "system.cuda_libraries"} | others}


def test_what_comes_before_mxnet_does_not_import_it():
    for path in (PACKAGE / "mxnet_side" / "compatibility").glob("*.py"):
        assert "mxnet" not in {imported.split(".")[0] for imported in imports(path)}
    for name in ("cuda", "cuda_libraries", "distribution"):
        assert not {"mxnet", "numpy"} & {root.split(".")[0] for root in imports(PACKAGE / "system" / f"{name}.py")}


# ---- C++ ---------------------------------------------------------------------------------------------------

# Folders, and what stands in none, from the bottom up. `pooling` is numbers alone: no lock, no layer, no array.
CORE_FLOORS = [
    {"activation"},
    {"plain", "lock"},
    {"types", "mxnet_api", "log", "failure", "point"},
    {"to_python"},
    {"pooling", "tensor"},
    {"cpu", "waiting"},
    {"cuda"},
    {"exchange"},
    {"meeting"},
    {"operator"},
    {"native"},
    {"api"},
]
CORE_FLOOR = {room: floor for floor, rooms in enumerate(CORE_FLOORS) for room in rooms}


def includes():
    """(source, header), both relative to csrc, without what they end in."""
    for path in SOURCES.rglob("*.*"):
        source = path.relative_to(SOURCES).with_suffix("").as_posix()
        for header in re.findall(r'^#include "(.+)\.h"', path.read_text(encoding="utf-8"), re.MULTILINE):
            yield source, header, path.suffix


def test_the_environment_is_read_in_one_function():
    """And not in each call: a thread that writes to `os.environ` moves it meanwhile."""
    uses = {path.name: path.read_text("utf-8").count("getenv(") for path in SOURCES.rglob("*.*")}
    assert {name: count for name, count in uses.items() if count} == {"mxnet_api.h": 2}


def test_includes_point_one_way():
    seen = {source.split("/")[0] for source, _, _ in includes()} | {header.split("/")[0] for _, header, _ in includes()}
    assert seen == set(CORE_FLOOR), "a folder or file came or went: this test has to follow"
    for source, header, _ in includes():
        upper, lower = source.split("/")[0], header.split("/")[0]
        if upper != lower:
            assert CORE_FLOOR[lower] < CORE_FLOOR[upper], f"{source} includes {header}"


def test_headers_point_one_way():
    graph = {}
    for source, header, suffix in includes():
        if suffix == ".h":
            graph.setdefault(source, set()).add(header)
    assert cycle(graph) is None


def test_pooling_needs_no_thread_and_no_device():
    for path in (SOURCES / "pooling").iterdir():
        used = set(re.findall(r"^#include <(.+)>", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert not used & {"mutex", "thread", "atomic", "condition_variable", "omp.h"}, path


@pytest.mark.skipif(not (ROOT / "tools").exists(), reason="needs the source tree")
def test_what_changes_has_tests(monkeypatch):
    """What `make check` runs after a change is there, and each file of the package has some."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import tests_of

    for path in [*MODULES.values(), *SOURCES.rglob("*.cc"), ROOT / "README.md", ROOT / "docs" / "index.rst"]:
        found = tests_of.tests_of(path.relative_to(ROOT).as_posix())
        assert found and all((ROOT / test).exists() for test in found), path
    assert all((ROOT / beginning).exists() for beginning in tests_of.TESTS)

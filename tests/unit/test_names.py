"""Files and symbols that comments, docstrings and pages name do exist."""

import ast
import io
import re
import subprocess
import tokenize

from environments import shell
from places import PACKAGE, ROOT

TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    env=shell(),
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
)
FILES = TRACKED.stdout.split() or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.*")]
KINDS = r"(?:py|cc|h|cu|sh|md)"
FILE = re.compile(rf"(?<![\w/.*{{}}~-])((?:[\w-]+/)*[\w-]+\.{KINDS})\b(?![\w(*-])")
# MXNet's own sources and tests begin so; NAME stands for a name, and a user's script is no file of this project.
ELSEWHERE = re.compile(
    r"^(src/|mxnet/|scripts/|c_api\.h$|test_(gluon|metric|operator|numpy_\w+)\.py$|.*NAME|script\.py$|mshadow_op\.h$|train_(cifar10|imagenet)\.py$|stem\.md$|launch\.py$)"
)
ABOUT_OTHERS = {"comparison.md", "gluoncv.md"}  # pages that name files of other projects
SYMBOLS_OF_OTHERS = {"test_utils", "list_gpus", "runpy", "run_path", "copy_buf"}


def said_in_python(path):
    text = path.read_text(encoding="utf-8")
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    return "\n".join([*comments, *filter(None, map(ast.get_docstring, nodes))])


def said_in_cpp(path):
    return "\n".join(re.findall(r"//[^\n]*|/\*.*?\*/", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def said(path):
    if path.suffix == ".py":
        return said_in_python(path)
    return said_in_cpp(path) if path.suffix in (".cc", ".h", ".cu") else path.read_text(encoding="utf-8")


SPEAKING = [
    ROOT / name for name in FILES if name.startswith(("gluon_syncbn/", "docs/", "tests/", "benchmarks/", "examples/"))
]
SPEAKING = [path for path in SPEAKING if path.suffix in (".py", ".cc", ".h", ".cu", ".md")]


def test_files_that_are_named_exist():
    known = {"/".join(name.split("/")[i:]) for name in FILES for i in range(name.count("/") + 1)}
    lost = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in SPEAKING
        for name in FILE.findall(said(path))
        if name not in known and not ELSEWHERE.match(name) and path.name not in ABOUT_OTHERS
    ]
    assert not lost, "\n".join(sorted(set(lost)))


def identifiers():
    found = set()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cc"), *PACKAGE.rglob("*.h"), *PACKAGE.rglob("*.cu")]:
        code = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"\w+", re.sub(r"`[^`]*`", "", code)))
    return found


def test_symbols_that_are_named_exist():
    known = identifiers() | SYMBOLS_OF_OTHERS
    lost = []
    for path in SPEAKING:
        if path.relative_to(ROOT).parts[0] == PACKAGE.name:
            for name in re.findall(r"(?<!`)`~?([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", said(path)):
                lost += [f"{path.relative_to(ROOT)} names {name}"] * any(part not in known for part in name.split("."))
    assert not lost, "\n".join(sorted(set(lost)))

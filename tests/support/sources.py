"""The sources of the package, read once: text by the path in `gluon_syncbn`, and in `csrc`."""

import ast

import pytest
from places import PACKAGE, SOURCES

PYTHON = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {file: ast.parse(text) for file, text in PYTHON.items()}
CORE = {path.relative_to(SOURCES).as_posix(): path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.*")}


def unparsed(node):
    if not hasattr(ast, "unparse"):
        pytest.skip("ast.unparse is of Python 3.9")
    return ast.unparse(node)

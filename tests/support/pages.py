"""What the pages and the docstrings show: blocks of code and of commands, and what those may name."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple

from places import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
for folder in ("docs", "examples", "benchmarks", "tests"):
    PAGES += sorted((ROOT / folder).rglob("*.md"))
PROGRAMS = [
    path
    for folder in ("gluon_syncbn", "examples", "benchmarks", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
#: Options of programs, targets of the Makefile and extras of the package.
OPTIONS = {"--help", *re.findall(r'"(--[a-z][\w-]*)"', "".join(path.read_text(encoding="utf-8") for path in PROGRAMS))}
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
EXTRAS = re.findall(
    r"^(\w+) = \[",
    (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2],
    re.MULTILINE,
)


class Block(NamedTuple):
    page: str
    line: int  # of its first line, from 1
    language: str  # as after the fence
    text: str
    elsewhere: str = ""  # why it is not run with the others, and what runs it

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def of_page(page: Path) -> Iterator[Block]:
    """Fenced blocks, also within lists. ``<!-- not run: REASON -->`` stands on the line above."""
    fenced = r"^(?: *<!-- not run: (.+) -->\n)?( *)```(.*)\n((?:.*\n)*?)\2```$"
    for elsewhere, _, language, text, line in _found(fenced, page.read_text(encoding="utf-8"), 4):
        if language == "diff":  # runs as what it leads to
            language, text = "python", re.sub(r"^(-.*|[ +])", "", text, flags=re.MULTILINE)
        yield Block(str(page.relative_to(ROOT)), line, language, text, elsewhere or "")


def of_the_index() -> Iterator[Block]:
    """Indented blocks of the text that an index of packages shows."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = re.search(r'\[project.readme\].*?"""(.*?)"""', project, re.DOTALL)[1]
    for block, line in _found(r"^((?: {4}.*\n)(?:(?: {4}.*)?\n)*)", text, 1):
        yield Block("pyproject.toml", line, "python", block)


def _found(pattern: str, text: str, group: int) -> Iterator[List[Any]]:
    """The groups of each match, of which one is a block, and the line where that begins."""
    for hit in re.finditer(pattern, text, re.MULTILINE):
        groups = list(hit.groups())
        groups[group - 1] = textwrap.dedent(groups[group - 1])
        yield [*groups, 1 + text.count("\n", 0, hit.start(group))]


def of_docstrings(module, names: List[str]) -> Iterator[Block]:
    """The literal blocks, each after a line that ends in ``::``, of these names and of the methods of classes."""
    for name in names:
        thing = getattr(module, name)
        owned = [(f"{module.__name__}.{name}", thing)]
        if inspect.isclass(thing):
            methods = ((key, value) for key, value in vars(thing).items() if inspect.isfunction(value))
            owned += [(f"{module.__name__}.{name}.{key}", value) for key, value in methods]
        for owner, one in owned:
            if inspect.isclass(one) or inspect.isfunction(one):
                text = (inspect.getdoc(one) or "") + "\n"
                for _, block, line in _found(r"^( *)(?!\.\.| ).*::\n((?:\1 +\S.*\n|\n)+)", text, 2):
                    yield Block(owner, line, "python", block.strip("\n"))

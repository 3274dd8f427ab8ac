"""What the pages and the docstrings show: blocks of code and of commands, and what those may name."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Iterator, List, NamedTuple

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
    lines = page.read_text(encoding="utf-8").split("\n")
    name, at = str(page.relative_to(ROOT)), 0
    while at < len(lines):
        fence = re.fullmatch(r"( *)```(.*)", lines[at])
        if fence:
            indent, language = fence.groups()
            end = lines.index(indent + "```", at + 1)
            elsewhere = re.fullmatch(r" *<!-- not run: (.+) -->", lines[at - 1])
            text = textwrap.dedent("\n".join(lines[at + 1 : end]))
            if language == "diff":  # runs as what it leads to
                language, text = "python", re.sub(r"^(-.*|[ +])", "", text, flags=re.MULTILINE)
            yield Block(name, at + 2, language, text, elsewhere[1] if elsewhere else "")
            at = end
        at += 1


def of_the_index() -> Iterator[Block]:
    """Indented blocks of the text that an index of packages shows."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = re.search(r'\[project.readme\].*?"""(.*?)"""', project, re.DOTALL)[1]
    for at, block in enumerate(re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE)):
        if block.strip():
            yield Block("pyproject.toml", at + 1, "python", textwrap.dedent(block))


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
                yield from _literal(owner, inspect.getdoc(one) or "")


def _literal(owner: str, text: str) -> Iterator[Block]:
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if not line.rstrip().endswith("::") or line.lstrip().startswith(".."):
            continue
        deeper = len(line) - len(line.lstrip())
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > deeper):
            end += 1
        block = textwrap.dedent("\n".join(lines[at + 1 : end])).strip("\n")
        yield Block(owner, at + 2, "python", block)

"""The sentences of pages, docstrings and comments, without code, tables, headings and addresses."""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import Iterator, List, Tuple

MOST_WORDS = 25


def sentences(page: Path) -> Iterator[Tuple[int, str]]:
    """Each with the number of the line on which its paragraph begins."""
    code, paragraph, begin = False, [], 0
    for number, line in enumerate([*page.read_text(encoding="utf-8").split("\n"), ""], 1):
        if line.lstrip().startswith("```"):
            code = not code
        ends = (
            code
            or line.lstrip().startswith(
                (
                    "```",
                    "|",
                    "#",
                    "<!--",
                    "![",
                    "- ",
                    "* ",
                )
            )
            or line.startswith("    ")
            or not line.strip()
        )
        if ends or re.match(r"\s*(\d+\.|\[\d+\]) ", line):
            yield from ((begin, one) for one in _split(" ".join(paragraph)))
            paragraph, begin = [], number
        if not code and re.match(r"\s*([-*]|\d+\.|\[\d+\]) ", line):
            paragraph = [re.sub(r"^\s*([-*]|\d+\.|\[\d+\]) ", "", line)]
        elif not ends:
            begin = begin if paragraph else number
            paragraph.append(line.strip())


def sentences_of_source(path: Path) -> Iterator[Tuple[int, str]]:
    """Those of docstrings and comments, each with the number of the line on which its paragraph begins."""
    text = path.read_text(encoding="utf-8")
    blocks = [*_docstrings(text), *_python_comments(text)] if path.suffix == ".py" else _cpp_comments(text)
    for begin, lines in blocks:
        for line, paragraph in _paragraphs(begin, lines):
            yield from ((line, one) for one in _split(paragraph))


def _docstrings(text: str) -> Iterator[Tuple[int, List[str]]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            said = ast.get_docstring(node)
            if said:
                yield node.body[0].lineno, said.split("\n")


def _python_comments(text: str) -> Iterator[Tuple[int, List[str]]]:
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found.append((token.start[0], alone, re.sub(r"^#:? ?", "", token.string)))
    return _joined(found)


def _cpp_comments(text: str) -> Iterator[Tuple[int, List[str]]]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        comment = re.match(r'((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?!/))*)//+ ?(.*)', line)
        if comment:
            found.append((number, not comment[1].strip(), comment[2]))
    return _joined(found)


def _joined(comments: List[Tuple[int, bool, str]]) -> Iterator[Tuple[int, List[str]]]:
    """Consecutive lines that hold only a comment are one block; a comment behind code is a block by itself."""
    block, begin, last = [], 0, -1
    for number, alone, said in comments:
        if not (alone and number == last + 1):
            if block:
                yield begin, block
            block, begin = [], number
        block.append(said)
        last = number if alone else -1
    if block:
        yield begin, block


def _paragraphs(begin: int, lines: List[str]) -> Iterator[Tuple[int, str]]:
    """Without literal blocks, directives, headings, tables and the names of arguments."""
    paragraph, indent, item, literal, start = [], 0, False, None, begin
    for number, line in enumerate([*lines, ""], begin):
        here = len(line) - len(line.lstrip())
        if line.strip() and literal is not None:
            if here > literal:
                continue
            literal = None
        if re.match(r"\s*([-=^~]){3,}$", line):
            paragraph = []
            continue
        new = line.lstrip().startswith(("- ", ".. ")) or (here <= indent if item else here != indent)
        if paragraph and (not line.strip() or new):
            yield start, " ".join(paragraph)
            if paragraph[-1].endswith("::") and not line.strip():
                literal = indent
            paragraph = []
        if line.lstrip().startswith(".. "):
            literal = here
        elif line.strip() and not re.search(r"\S {3,}\S", line):
            if not paragraph:
                indent, item, start = here, line.lstrip().startswith("- "), number
            paragraph.append(re.sub(r"^- ", "", line.strip()))


def _split(text: str) -> Iterator[str]:
    text = re.sub(r"`[^`]*`", "CODE", re.sub(r"``[^`]*``", "CODE", text))
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|etc)\.", r"\1", text)
    for sentence in re.split(r"(?<=[.!?])[*)_]*\s+(?=[A-Z*(\[])", text):
        if sentence.strip():
            yield sentence.strip()


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'./%-]*\w[\w'./%-]*", sentence))

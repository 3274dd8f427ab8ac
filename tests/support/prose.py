"""The sentences of a page: what a reader reads, without code, tables, headings and addresses."""

import re
from pathlib import Path
from typing import Iterator, Tuple

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


def _split(text: str) -> Iterator[str]:
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|etc)\.", r"\1", text)
    for sentence in re.split(r"(?<=[.!?])[*)_]*\s+(?=[A-Z*(\[])", text):
        if sentence.strip():
            yield sentence.strip()


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'./%-]*\w[\w'./%-]*", sentence))

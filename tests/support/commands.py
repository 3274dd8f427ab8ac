"""What a block of shell commands names, and what of it is not there. Nothing is run."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Iterator, List

from places import PACKAGE, ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
EXTRAS = set(re.findall(r"^(\w+) = \[", PYPROJECT[PYPROJECT.index("[project.optional-dependencies]") :], re.MULTILINE))

PYTHONS = re.compile(r"(.*/)?python3?")
FILES = re.compile(r"(\./)?(gluon_syncbn|docs|tests|tools|examples|benchmarks|requirements)/[\w./-]+")
READERS = "train.py", "script.py", "SCRIPT"  # what stands for a program of the reader's
OTHERS = "pip", "venv", "families"  # modules that are found elsewhere


def lost(text: str) -> List[str]:
    """What these commands name that does not exist, in words."""
    lines = text.replace("\\\n", " ").split("\n")
    return [one for line in lines for words in _commands(line) for one in _lost(words)]


def _commands(line: str) -> Iterator[List[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    command: List[str] = []
    for word in lexer:
        if re.fullmatch(r"[();<>|&]+", word):
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _lost(words: List[str]) -> Iterator[str]:
    yield from (f"no file {word}" for word in words if FILES.fullmatch(word) and not (ROOT / word).exists())
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if word == "make":
            targets = [word for word in rest if re.fullmatch(r"[a-z][\w-]*", word)]
            yield from (f"no target `make {target}`" for target in targets if target not in TARGETS)
            given = [option for word in rest if word.startswith("ARGS=") for option in shlex.split(word[5:])]
            for target in targets:
                for script in re.findall(rf"^{target}:(?:.*\n\t)*?.*\$\(PY\) (\S+\.py)", MAKEFILE, re.MULTILINE):
                    yield from _unknown(ROOT / script, given)
        elif word == "pip":
            extras = re.findall(r"(?:^|\s)(?:\.|gluon_syncbn\S*)\[([\w,]+)\]", " ".join(rest))
            yield from (f"no extra {extra}" for extra in ",".join(extras).split(",") if extra and extra not in EXTRAS)
        elif word == "gluon-syncbn":
            yield from _unknown(PACKAGE / "command" / "run.py", rest)
        elif PYTHONS.fullmatch(word) and rest[:1] == ["-m"]:
            if rest[1] == "gluon_syncbn":
                yield from _unknown(PACKAGE / "command" / "run.py", rest[2:])
            elif rest[1] not in OTHERS and importlib.util.find_spec(rest[1]) is None:
                yield f"no module {rest[1]}"
        elif PYTHONS.fullmatch(word) and rest and rest[0].endswith(".py") and rest[0] not in READERS:
            yield from _unknown(ROOT / rest[0], rest[1:])


def _unknown(script: Path, words: List[str]) -> Iterator[str]:
    """Options, and for `gluon-syncbn` also commands, that the script and its neighbours do not have."""
    if not script.exists():
        yield f"no script {script}"
        return
    source = "".join(path.read_text(encoding="utf-8") for path in script.parent.glob("*.py"))
    own = re.compile(r"--?[a-z].*|[a-z]+" if PACKAGE in script.parents else r"\[?--.*")
    for word in words:
        if word.endswith(".py") or word in READERS:
            return  # the rest is another program's
        option = word.strip("[]").partition("=")[0]
        if own.fullmatch(word) and f'"{option}"' not in source:
            yield f"{script.name} knows no {option}"

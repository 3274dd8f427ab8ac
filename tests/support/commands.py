"""What a block of shell commands names, and what of it is not there. Nothing is run."""

import importlib.util
import re
import shlex
from typing import Iterator, List

from places import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
EXTRAS = set(re.findall(r"^(\w+) = \[", PYPROJECT[PYPROJECT.index("[project.optional-dependencies]") :], re.MULTILINE))

PYTHONS = re.compile(r"(.*/)?python3?")
FOLDERS = re.compile(r"(\./)?(gluon_syncbn|docs|tests|tools|examples|benchmarks|requirements)/[\w./-]+")
OWN = "train.py", "script.py", "SCRIPT"  # what stands for a program of the reader's


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
    for word in words:
        if FOLDERS.fullmatch(word) and not (ROOT / word).exists():
            yield f"no file {word}"
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if word == "make":
            yield from _lost_by_make(rest)
        elif word == "pip":
            yield from _lost_by_pip(rest)
        elif word == "gluon-syncbn":
            yield from _lost_by_module("gluon_syncbn", rest)
        elif PYTHONS.fullmatch(word) and rest and rest[0] == "-m":
            yield from _lost_by_module(rest[1], rest[2:])
        elif PYTHONS.fullmatch(word) and rest and rest[0].endswith(".py"):
            yield from _lost_by_script(rest[0], rest[1:])


def _lost_by_make(words: List[str]) -> Iterator[str]:
    targets = [word for word in words if re.fullmatch(r"[a-z][\w-]*", word)]
    for target in targets:
        if target not in TARGETS:
            yield f"no target `make {target}`"
        arguments = [word.partition("=")[2] for word in words if word.startswith("ARGS=")]
        scripts = re.findall(rf"^{target}:(?:.*\n\t)*?.*\$\(PY\) (\S+\.py)", MAKEFILE, re.MULTILINE)
        for script in scripts if arguments else []:
            yield from _lost_by_script(script, shlex.split(arguments[0]))


def _lost_by_pip(words: List[str]) -> Iterator[str]:
    for at, word in enumerate(words):
        if word == "-r" and not FOLDERS.fullmatch(words[at + 1]) and not (ROOT / words[at + 1]).exists():
            yield f"no file {words[at + 1]}"
        extras = re.fullmatch(r"(?:\.|gluon_syncbn)[^\[]*\[([\w,]+)\].*", word)
        for extra in extras[1].split(",") if extras else []:
            if extra not in EXTRAS:
                yield f"no extra {extra}"


def _lost_by_module(module: str, words: List[str]) -> Iterator[str]:
    try:
        known = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        known = False
    if module not in ("pip", "venv", "families") and not known:
        yield f"no module {module}"
    if module == "gluon_syncbn":
        source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "gluon_syncbn" / "command").glob("*.py"))
        own = next((at for at, word in enumerate(words) if word.endswith(".py") or word in OWN), len(words))
        for word in words[:own]:
            if re.match(r"--?[a-z]|[a-z]+$", word) and f'"{word.partition("=")[0]}"' not in source:
                yield f"gluon_syncbn knows no {word}"


def _lost_by_script(script: str, words: List[str]) -> Iterator[str]:
    if script in OWN:
        return
    path = ROOT / script
    if not path.exists():
        yield f"no script {script}"
        return
    source = "".join(module.read_text(encoding="utf-8") for module in path.parent.glob("*.py"))
    for word in words:
        option = word.lstrip("[").rstrip("]").partition("=")[0]
        if option.startswith("--") and f'"{option}"' not in source:
            yield f"{script} has no option {option}"

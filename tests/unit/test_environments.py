"""A program that a test starts has the environment of a user's shell, not that of the pytest process."""

import ast
import re
from pathlib import Path

from environments import shell
from places import TESTS

# Started by a user, by this helper, or in this environment already.
PROGRAMS = ("families", "cuda_emulator", "support/environments.py", "support/process_worker.py")
STARTS = {"Popen", "run", "call", "check_call", "check_output"}
COPIES = re.compile(r"(\*\*|dict\(|=)os\.environ\b(?![.\[])|\bos\.environ\.copy\(")


def settings(environment):
    return {name: value for name, value in environment.items() if name.startswith("MXNET_")}


def test_a_program_has_the_settings_of_the_shell():
    started_with = Path("/proc/self/environ").read_bytes().decode().split("\0")
    assert settings(shell()) == settings(dict(entry.split("=", 1) for entry in started_with if entry))


def test_each_program_is_given_it():
    lost = []
    for path in sorted(TESTS.rglob("*.py")):
        name, text = str(path.relative_to(TESTS)), path.read_text(encoding="utf-8")
        if name.startswith(PROGRAMS):
            continue
        for call in filter(lambda node: isinstance(node, ast.Call), ast.walk(ast.parse(text))):
            started = getattr(call.func, "attr", "") in STARTS and getattr(call.func.value, "id", "") == "subprocess"
            if started and not {"env", None} & {keyword.arg for keyword in call.keywords}:
                lost.append(f"{name}:{call.lineno} starts a program without `env=`")
        if COPIES.search(text):
            lost.append(f"{name} hands os.environ on, and environments.shell() is for that")
    assert not lost, "\n".join(lost)

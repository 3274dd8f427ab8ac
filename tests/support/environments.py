"""The environment of a program that a test starts: that of a user's shell."""

import os
import subprocess

# conftest.py imports this module first. The package and the tests write settings of MXNet into the environment later,
# and a child would inherit them. A make that a child starts would print as a part of the one that started pytest.
_SHELL = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def shell(*folders, **variables):
    """The environment that pytest was started in, with ``folders`` first in PYTHONPATH, and these variables."""
    paths = [*map(str, folders), *filter(None, [_SHELL.get("PYTHONPATH")])]
    found = {**_SHELL, **({"PYTHONPATH": os.pathsep.join(paths)} if folders else {}), **variables}
    return {name: str(value) for name, value in found.items()}


def ended(command, *folders, code=None, cwd=None, input=None, timeout=200, **variables):
    """A program after its end, maybe with this exit code, in this environment; its output and its errors are text."""
    texts = {"capture_output": True, "text": True, "input": input}
    done = subprocess.run(
        [str(word) for word in command], env=shell(*folders, **variables), cwd=cwd, timeout=timeout, **texts
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done

"""The environment of a program that a test starts: that of a user's shell."""

import os

# conftest.py imports this module first. The package and the tests write settings of MXNet into the environment later,
# and a child would inherit them.
_SHELL = dict(os.environ)


def shell(*folders, **variables):
    """The environment that pytest was started in, with ``folders`` first in PYTHONPATH, and these variables."""
    paths = [*map(str, folders), *filter(None, [_SHELL.get("PYTHONPATH")])]
    found = {**_SHELL, **({"PYTHONPATH": os.pathsep.join(paths)} if folders else {}), **variables}
    return {name: str(value) for name, value in found.items()}

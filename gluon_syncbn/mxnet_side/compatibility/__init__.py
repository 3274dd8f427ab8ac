"""Lets MXNet 1.9.1 and GluonCV 0.10.5 run on newer versions of Python and NumPy.

Alone they support Python 3.11 and NumPy 1.23 at most. Their libraries depend on neither; they only lack names. `supply`
gives these names to their modules alone. ``numpy`` itself, and the imports of other packages, stay as they are.
"""

from __future__ import annotations

import re
import sys
import warnings
from types import SimpleNamespace
from typing import List, Tuple

#: The newest versions that the tests ran with.
TRIED = {"Python": "3.13", "NumPy": "2.5"}


def release(version: str) -> Tuple[int, ...]:
    """Returns the numbers at the beginning of a version: (2, 5, 5) for 2.5.5rc1."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version.strip()).group())))  # type: ignore[union-attr]


def needed() -> bool:
    """Whether this Python or this NumPy lacks names."""
    import numpy as np

    return sys.version_info >= (3, 12) or release(np.__version__) >= (1, 24)


def supply() -> None:
    """Supplies the missing names to modules of MXNet and GluonCV; once is enough.

    What remains of a failed import is forgotten, so that the next import begins anew. A module that was loaded with
    names from elsewhere keeps them, and follows NumPy's changed rules from now on.
    """
    from . import imports

    # gluon_syncbn_first has a copy of the module.
    if not needed() or any(type(one).__module__.endswith(".compatibility.imports") for one in sys.meta_path):
        return
    from . import changes, lost_names

    versions = SimpleNamespace(LooseVersion=release, StrictVersion=release)  # MXNet and GluonCV only compare
    instead = {"distutils.version": versions, **lost_names.modules()}
    sys.meta_path.insert(0, imports.Finder(instead, changes.CHANGES))
    for name in [name for name in sys.modules if name.partition(".")[0] in imports.SERVED]:
        if name.partition(".")[0] not in sys.modules:
            del sys.modules[name]
        elif name in changes.CHANGES:
            changes.CHANGES[name](sys.modules[name])


def warn() -> None:
    """Warns of a Python or NumPy that is newer than what was tried."""
    import numpy as np

    versions = {"Python": sys.version.split()[0], "NumPy": np.__version__}
    newer = [f"{name} {found}" for name, found in versions.items() if release(found)[:2] > release(TRIED[name])]
    if newer:
        tried = " and ".join(f"{name} {version}" for name, version in TRIED.items())
        warnings.warn(f"{' and '.join(newer)}: gluon_syncbn and MXNet 1.9 were tried up to {tried}", stacklevel=3)


def names() -> List[str]:
    """Returns the names that are supplied here; empty if none are needed."""
    from . import lost_names

    if not needed():
        return []
    return ["distutils.version", *(f"numpy.{name}" for name in sorted(lost_names.supplied()))]

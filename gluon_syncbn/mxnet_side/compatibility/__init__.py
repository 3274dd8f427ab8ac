"""Lets MXNet 1.9.1 and GluonCV 0.10.5 run on newer versions of Python and NumPy.

Alone they support Python 3.11 and NumPy 1.23 at most. Their libraries depend on neither; they only lack names. `supply`
gives these names to their modules alone. ``numpy`` itself, and the imports of other packages, stay as they are.

Python looks up ``__import__`` among the builtins of the module that imports. A module of these packages is loaded with
its own builtins, in which only ``__import__`` differs. This serves imports within functions too, and at run time a name
costs the same as in any module.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Mapping, Optional, Tuple

TRIED = "2.5"  # the newest NumPy that the tests ran with
SERVED = ("mxnet", "gluoncv")
Change = Callable[[ModuleType], None]


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
    # gluon_syncbn_first has a copy of this module.
    if not needed() or any(type(one).__module__.endswith(".compatibility") for one in sys.meta_path):
        return
    from . import older_numpy

    versions = SimpleNamespace(LooseVersion=release, StrictVersion=release)  # MXNet and GluonCV only compare
    instead = {"distutils.version": versions, "numpy": older_numpy.numpy()}
    sys.meta_path.insert(0, Finder(instead, older_numpy.CHANGES))
    for name in [name for name in sys.modules if name.partition(".")[0] in SERVED]:
        if name.partition(".")[0] not in sys.modules:
            del sys.modules[name]
        elif name in older_numpy.CHANGES:
            older_numpy.CHANGES[name](sys.modules[name])


class Finder:
    """Finds the modules of the served packages as Python does. Their imports give what is in ``instead``, and the
    functions in ``changes`` are called with a loaded module.
    """

    def __init__(self, instead: Mapping[str, Any], changes: Mapping[str, Change]) -> None:
        own = {"__builtins__": {**vars(builtins), "__import__": _importer(instead)}}
        self._before: Optional[Change] = (lambda module: vars(module).update(own)) if instead else None
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        if name.partition(".")[0] not in SERVED:
            return None
        spec = spec_behind(self, name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            change(spec.loader, self._before, self._changes.get(name))
        return spec


def spec_behind(finder: Any, name: str, path: Any, target: Any) -> Optional[importlib.machinery.ModuleSpec]:
    """Finds a module as Python does without this finder and those before it, which may ask this one."""
    others = sys.meta_path[sys.meta_path.index(finder) + 1 :]
    return next(filter(None, (other.find_spec(name, path, target) for other in others)), None)


def change(loader: Any, before: Optional[Change], after: Optional[Change]) -> None:
    """Has a loader change a module before it runs, and afterwards."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        for step in filter(None, (before, execute, after)):
            step(module)

    loader.exec_module = exec_module


def _importer(instead: Mapping[str, Any]) -> Any:
    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        other = None if level else instead.get(name if fromlist else name.partition(".")[0])
        if other is None:
            return builtins.__import__(name, globals, locals, fromlist, level)
        if not fromlist and "." in name:
            importlib.import_module(name)
        return other

    return import_

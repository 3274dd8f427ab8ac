"""Gives the modules of MXNet and GluonCV other results when they import NumPy or ``distutils``, and only them.

Python looks up ``__import__`` among the builtins of the module that imports. A module of these packages is loaded with
its own builtins, in which only ``__import__`` differs. This serves imports within functions too, and at run time a name
costs the same as in any module.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Mapping, Optional

SERVED = ("mxnet", "gluoncv")


class Finder:
    """Finds the modules of the served packages as Python does, and has them loaded with other builtins.

    ``instead`` holds the results of their imports. ``changes`` holds functions that are called with a loaded module.
    """

    def __init__(self, instead: Mapping[str, Any], changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._builtins = {**vars(builtins), "__import__": _importer(instead)}
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name.partition(".")[0] not in SERVED:
            return None
        spec = spec_behind(self, name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader.create_module = self._create  # type: ignore[method-assign]
            if name in self._changes:
                change_after(spec.loader, self._changes[name])
        return spec

    def _create(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__builtins__"] = self._builtins
        return module


def spec_behind(finder: Any, name: str, path: Any, target: Any) -> Optional[ModuleSpec]:
    """Finds a module as Python does without this finder and those before it, which may ask this one."""
    others = sys.meta_path[sys.meta_path.index(finder) + 1 :]
    return next(filter(None, (other.find_spec(name, path, target) for other in others)), None)


def change_after(loader: Any, change: Callable[[ModuleType], None]) -> None:
    """Has a loader change a module that it has loaded."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

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

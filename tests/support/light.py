"""Imported first, it imports this package and MXNet, which do without scikit-learn, SciPy, OpenCV and requests, and
whose thousands of generated functions are compiled when they are called.

Without this, the start of every process that a test starts would take twice as long.
"""

import builtins
import gc
import sys
import types

# Several modules of MXNet do without these.
sys.modules["sklearn"] = sys.modules["scipy"] = sys.modules["cv2"] = None  # type: ignore[assignment]
sys.modules["requests"] = types.ModuleType("requests")  # mxnet/gluon/utils.py downloads with it


def _later(code, globals=None, locals=None):
    """As `exec`, which MXNet calls without globals for the text of a function of an operator."""
    name, around, made = str(code).partition("def ")[2].partition("(")[0], sys._getframe(1).f_globals, {}

    def function(*args, **kwargs):
        if not made:
            _exec(code, around, made)
        return made[name](*args, **kwargs)

    if isinstance(code, str) and globals is None:
        locals[name] = function
    else:
        _exec(code, globals, locals)


_exec, builtins.exec = builtins.exec, _later
gc.disable()  # none of the thousands of functions that MXNet makes is garbage
import gluon_syncbn  # noqa: E402, F401

gc.freeze()
gc.enable()
builtins.exec = _exec

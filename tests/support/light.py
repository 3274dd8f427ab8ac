"""Imported first, it imports this package and MXNet, which do without scikit-learn, SciPy, OpenCV and requests.

Without this, the start of every process that a test starts would take half as long again.
"""

import gc
import sys
import types

# Several modules of MXNet do without these.
sys.modules["sklearn"] = sys.modules["scipy"] = sys.modules["cv2"] = None  # type: ignore[assignment]
sys.modules["requests"] = types.ModuleType("requests")  # mxnet/gluon/utils.py downloads with it

gc.disable()  # none of the thousands of functions that MXNet makes is garbage
import gluon_syncbn  # noqa: E402, F401

gc.enable()

"""Imported first, it keeps MXNet from importing scikit-learn, SciPy's statistics and requests. The layer uses none.

Without this, the start of every process that a test starts would take a third longer.
"""

import sys
import types

# mxnet/model.py, mxnet/contrib/quantization.py and mxnet/test_utils.py do without these.
sys.modules["sklearn"] = sys.modules["scipy.stats"] = None  # type: ignore[assignment]
sys.modules["requests"] = types.ModuleType("requests")  # mxnet/gluon/utils.py downloads with it

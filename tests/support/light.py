"""Imported first, it keeps MXNet from importing scikit-learn, as where a user has none.

MXNet takes one class of it (mxnet/model.py), for which every process that a test starts would pay.
"""

import sys

sys.modules["sklearn"] = None  # type: ignore[assignment]

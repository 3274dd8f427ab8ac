"""Environments of processes that a test starts."""

import os

from places import PACKAGE


def unprepared():
    """That of a user's script: without the settings of MXNet that this process has made for itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MXNET_")}
    return {**kept, "PYTHONPATH": str(PACKAGE.parent)}

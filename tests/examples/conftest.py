"""The examples' modules by their plain names, as their programs import them."""

import contextlib
import sys

import pytest
from places import CONTRASTIVE, SEGMENTATION


@contextlib.contextmanager
def importable(folder):
    """Within, and no longer: the examples have modules of the same names."""
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def segmentation_modules():
    with importable(SEGMENTATION):
        yield


@pytest.fixture
def contrastive_modules():
    with importable(CONTRASTIVE):
        yield

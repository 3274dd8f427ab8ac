"""The examples' modules by their plain names, as their programs import them."""

import contextlib
import sys

import pytest
from places import CONTRASTIVE, SEGMENTATION


@contextlib.contextmanager
def importable(folder):
    """Within, and no longer: the examples have modules of the same names, and so has the tests' support."""
    names = [path.stem for path in folder.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture(scope="module")
def segmentation_modules():
    with importable(SEGMENTATION):
        yield


@pytest.fixture
def contrastive_modules():
    with importable(CONTRASTIVE):
        yield

"""One pytest process holds all layers: its CPU contexts must be able to wait for each other."""

import faulthandler
import os

import mxnet as mx
import numpy as np
import pytest

import gluon_syncbn

# Before the first operator of the process, and so before any test module makes an array.
CONTEXTS = gluon_syncbn.cpu_devices(8, temp_copies=4096)
if os.environ.get("GLUON_SYNCBN_TEST_DEVICE") == "gpu":
    CONTEXTS = [mx.gpu(i) for i in range(mx.context.num_gpus())]

# Where a test does hang, show where: pytest's own time limit sees Python frames only.
faulthandler.enable()


@pytest.fixture
def contexts():
    """Eight CPU contexts that can be synchronised in this process."""
    return CONTEXTS


@pytest.fixture
def rng(request):
    """Random numbers of the test's own, the same at every run."""
    return np.random.RandomState(sum(map(ord, request.node.name)))


@pytest.fixture(autouse=True)
def afresh():
    """Each test starts with no failed step behind it and short waits ahead."""
    gluon_syncbn.configure(kvstore=None, timeout=20)
    yield
    gluon_syncbn.reset()
    gluon_syncbn.configure(kvstore=None, timeout=300)


def pytest_report_header():
    from gluon_syncbn import _native

    return f"gluon_syncbn: {_native.instruction_set()} kernels, {os.cpu_count()} cores"

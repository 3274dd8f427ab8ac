"""One pytest process holds all layers: its CPU contexts must be able to wait for each other."""

import collections
import contextlib
import ctypes
import functools
import os
import signal
from pathlib import Path

import environments  # isort: skip  # noqa: F401  (first: it keeps the environment of the shell)
import gpus
import mxnet as mx
import numpy as np
import pytest
from places import PACKAGE, SOURCES, TESTS
from replicas import release

import gluon_syncbn

CONTEXTS = gluon_syncbn.cpu_devices(8)
if os.environ.get("GLUON_SYNCBN_TEST_DEVICE") == "gpu":
    CONTEXTS = [mx.gpu(i) for i in range(mx.context.num_gpus())]

#: Of what is random: `make stress` gives each round another one.
SEED = int(os.environ.get("GLUON_SYNCBN_TEST_SEED", 0))

# A child of a fork ends with its parent: its copy of a worker's pipe would have pytest-xdist wait for ever.
PR_SET_PDEATHSIG = 1
os.register_at_fork(after_in_child=functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL))


@pytest.fixture
def contexts():
    """Eight CPU contexts that can be synchronised in this process."""
    return CONTEXTS


@pytest.fixture
def rng(request):
    """Random numbers that follow from the parameters of a test, whatever its name is."""
    case = request.node.callspec.id if hasattr(request.node, "callspec") else ""
    assert " at 0x" not in case, "an address among the parameters would seed other numbers at each run"
    return np.random.RandomState(SEED + sum(map(ord, case)))


@pytest.fixture(autouse=True)
def afresh():
    """No failed step and no `install` is behind a test, and a wait for ever would end before the limit of the test."""
    gluon_syncbn.configure(kvstore=None, timeout=60, seed=0, nonfinite="propagate")
    yield
    gluon_syncbn.uninstall()
    gluon_syncbn.reset()
    gluon_syncbn.configure(kvstore=None, timeout=300)


@pytest.fixture(autouse=True)
def sound(request):
    """On GPUs, a test leaves no error behind, and none that the emulator alone has seen."""
    yield
    if "on_gpus" in request.keywords and CONTEXTS[0].device_type == "gpu":
        with contextlib.suppress(mx.MXNetError):  # what the test of a failure has left
            mx.nd.waitall()
        gpus.assert_sound()


@pytest.fixture
def installed():
    gluon_syncbn.install()


@pytest.fixture(scope="module", autouse=True)
def released():
    yield
    release()


def pytest_configure():
    """The core in the checkout is built by hand, so that it may be older than its sources."""
    core = PACKAGE / "_core.so"
    if Path(gluon_syncbn.__file__).parent == PACKAGE:
        newer = [path for path in SOURCES.rglob("*.*") if path.stat().st_mtime > core.stat().st_mtime]
        if newer:
            names = ", ".join(sorted(path.name for path in newer))
            pytest.exit(f"{core} is older than {names}: `make core` compiles it", returncode=4)


def pytest_collection_modifyitems(items):
    """A test has the name of its folder for a marker, where there is such a marker."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in ("processes", "gpu", "examples"):
            item.add_marker(folder)


class LongFirst(collections.OrderedDict):
    """Files that wait for a worker. One that takes long would keep a single worker busy at the end."""

    def popitem(self, last=True):
        first = min(self, key=lambda file: not file.startswith(("tests/processes/", "tests/examples/")))
        return first, self.pop(first)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """pytest-xdist begins with the files of many tests, which are the fast ones."""
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler.workqueue = LongFirst()
    return scheduler


def pytest_terminal_summary(terminalreporter):
    """How many tests each reason skips, in place of a line for each test."""
    reasons = collections.Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, tests in reasons.most_common():
        terminalreporter.line(f"SKIPPED {tests}: {reason.partition('Skipped: ')[2] or reason}")


def pytest_report_header():
    from internals import core

    return f"gluon_syncbn: {core.instruction_set()} kernels, {os.cpu_count()} cores, seed {SEED}"

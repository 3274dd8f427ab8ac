"""Signals, exits, forks and engines: what ends a process in mid-step ends it soon, with its own exit code.

What a process does stands in process_worker.py.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, NamedTuple, Tuple

import pytest
from environments import ended
from internals import WHY_CUSTOM
from places import PACKAGE, SUPPORT

# Seconds: far more than anything here takes where all cores are busy, far fewer than the 300 of a replica's time limit.
LIMIT = 120


class End(NamedTuple):
    """How a process ends: one of these exit codes, and what is in its output and its errors."""

    codes: Tuple[int, ...] = (0,)
    output: str = r"\Aright\n\Z"
    errors: str = ""
    settings: Dict[str, str] = {}


MISSING = r"1 of 2 replicas arrived \(cpu\(0\)\), missing cpu\(1\)"
SILENT = r"\A\Z"
TWO_WAYS = "eager", "static_shape"
CASES = {
    "ends_in_mid_step exits": End((7,), SILENT),
    "ends_in_mid_step has one backward": End((1,), SILENT, "out of data"),
    "ends_in_mid_step ends": End(),
    "a_thread_waits_while_the_main_thread_ends": End((1,), rf"{MISSING}.*Nobody has called the layer.*'Thread-1"),
    **{f"ends_after_a_healthy_step {way}": End((0,), "failure: \n", SILENT) for way in TWO_WAYS},
    **{f"ends_beside_a_thread_that_trains {way}": End((0,), "the thread is alive: False\n") for way in TWO_WAYS},
    "fails_in_many_threads": End(settings={"MXNET_CPU_WORKER_NTHREADS": "4"}),
    "fails_before_the_first_call+a_kvstore_on_changing_contexts+is_stopped+forks+takes_note_of_signals": End(),
    "ends_after_failed_steps": End(),
    "is_signalled INT": End((-2, 1), SILENT, r"(?m)^KeyboardInterrupt|asked to end \(Ctrl-C"),
    "is_signalled TERM": End((-15,), SILENT),
    "is_interrupted_while_threads_wait": End((-2, 1), SILENT, f"KeyboardInterrupt.*{MISSING}|{MISSING}.*KeyboardInt"),
    "forks_or_waits_between_two_replicas+has_a_handler_that_calls_the_one_before_it": End(),
    "has_the_naive_engine": End(settings={"MXNET_ENGINE_TYPE": "NaiveEngine"}),
    "has_little_memory": End(settings={"MALLOC_ARENA_MAX": "1"}),
    "loads+waits_for_all_and_ends_well": End(errors=SILENT),
}


def run(name):
    scenario, _, how = name.partition(" ")
    command = [sys.executable, SUPPORT / "process_worker.py", scenario, *[how] * bool(how)]
    settings = {"OMP_NUM_THREADS": "1", **CASES[name].settings}
    return ended(command, SUPPORT, PACKAGE.parent, timeout=LIMIT, **settings)


@pytest.fixture(scope="module")
def ends(request):
    """Of the processes that were asked for, as many at a time as there are cores."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in here if "ends" in item.fixturenames]
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        yield {name: pool.submit(run, name) for name in asked}


@pytest.mark.parametrize("name", CASES)
def test_a_process_that(name, ends):
    if name == "has_little_memory" and WHY_CUSTOM:
        pytest.skip("MXNet's Custom ends an operator twice that gets no thread")
    done, want = ends[name].result(), CASES[name]
    assert done.returncode in want.codes, done.stderr
    assert re.search(want.output, done.stdout, re.DOTALL), done.stdout + done.stderr
    assert re.search(want.errors, done.stderr, re.DOTALL), done.stderr
    assert "terminate called" not in done.stderr
    assert 0 not in want.codes or "Traceback" not in done.stderr, done.stderr


def test_an_engine_that_does_not_exist():
    """MXNet fails at every wait, of which the process makes one as it ends: MXNet's error is printed, and it ends."""
    done = ended([sys.executable, "-c", "import gluon_syncbn"], PACKAGE.parent, MXNET_ENGINE_TYPE="Naive")
    assert done.returncode == 0 and "Cannot find Engine Naive" in done.stderr, done.stderr

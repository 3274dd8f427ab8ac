"""The child of a fork finds all locks open, whoever held one in its parent."""

import os
import re
import threading

import mxnet as mx
from environments import ended
from places import SOURCES, SUPPORT
from sources import CORE, PYTHON

import gluon_syncbn  # noqa: F401
from gluon_syncbn.exchange.base import DeviceExchange
from gluon_syncbn.training import steps
from gluon_syncbn.training.session import session


def test_there_are_no_others():
    """What a fork does not renew might be held for ever in its child."""
    others = re.compile(r"(std::|new )(\w*mutex|condition_variable\w*|once_flag|\w*semaphore)\b(?![>&])")
    assert not [file for file, text in CORE.items() if file != "lock.h" and others.search(text)]
    others = re.compile(r"\b(R?Lock|Condition|Event|Semaphore|Barrier)\(")
    assert not [file for file, text in PYTHON.items() if others.search(text)]


def test_the_cores(tmp_path):
    program = tmp_path / "locks"
    command = ["g++", "-std=c++17", "-pthread", f"-I{SOURCES}", SUPPORT / "locks_driver.cc", "-o", program]
    ended(command, timeout=300).check_returncode()
    ended([program], timeout=300).check_returncode()


def test_those_of_python():
    store = DeviceExchange(mx.kvstore.create("local"))
    held, end = threading.Event(), threading.Event()

    def all_locks():
        return [steps._steps.beginning, session.tracing, session.issuing(mx.cpu()), store._lock]

    def hold():
        for lock in all_locks():
            assert lock.acquire(timeout=60)
        held.set()
        end.wait(60)
        for lock in all_locks():
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    assert not store._lock.acquire(blocking=False)
    child = os.fork()
    if child == 0:
        opened = [lock.acquire(timeout=20) for lock in all_locks()]
        os._exit(0 if all(opened) else 1)
    assert os.waitpid(child, 0)[1] == 0
    end.set()
    holder.join()

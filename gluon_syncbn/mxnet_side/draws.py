"""Seeds for random operators that have to draw the same numbers twice.

MXNet keeps a generator for each thread and tells nobody where it stands, and to read a number from it would wait for
what is in flight. So a forward that will be recomputed takes its seed here, from a generator that starts where
``mx.random.seed`` says.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import Any, Iterator, List

import mxnet as mx

_UNSEEDED = 0  # where MXNet's own generators start
_seed = mx.random.seed  # `patches` has another one tell of its calls
_of_thread = threading.local()


def _generators() -> List[random.Random]:
    """The thread's own, and those of the forwards that it is within."""
    if not hasattr(_of_thread, "generators"):
        _of_thread.generators = [random.Random(_UNSEEDED)]
    return _of_thread.generators


def seeded(seed: Any) -> None:
    """``mx.random.seed`` was called in this thread."""
    _generators()[0] = random.Random(int(seed))


def seed() -> int:
    """The next one."""
    return _generators()[-1].getrandbits(31)


@contextmanager
def drawn_from(seed: int, context: mx.Context) -> Iterator[None]:
    """Random operators on this context draw from the seed, and so do the seeds that are taken meanwhile."""
    _seed(seed, context)
    _generators().append(random.Random(seed))
    try:
        yield
    finally:
        _generators().pop()


def make_generators(context: mx.Context) -> None:
    """Has MXNet make those of this thread, and its temporary space with them."""
    _seed(_UNSEEDED, context)

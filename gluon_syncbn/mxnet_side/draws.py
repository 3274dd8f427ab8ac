"""Seeds random operators that have to draw the same numbers twice.

MXNet keeps a generator for each thread and does not expose its state. Drawing a number from it would wait for the
operators in flight. So a forward that will be recomputed takes its seed here. The generator here starts with the seed
of ``mx.random.seed``.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import Any, Iterator, List

import mxnet as mx

_UNSEEDED = 0  # the initial seed of MXNet's own generators
_seed = mx.random.seed  # `patches` replaces it by a function that calls `seeded`
_of_thread = threading.local()


def _generators() -> List[random.Random]:
    """Returns the thread's own generator, and the generators of the forwards that the thread is within."""
    if not hasattr(_of_thread, "generators"):
        _of_thread.generators = [random.Random(_UNSEEDED)]
    return _of_thread.generators


def seeded(seed: Any) -> None:
    """Notes that ``mx.random.seed`` was called in this thread."""
    _generators()[0] = random.Random(int(seed))


def seed() -> int:
    """Draws the next seed."""
    return _generators()[-1].getrandbits(31)


@contextmanager
def drawn_from(seed: int, context: mx.Context) -> Iterator[None]:
    """Makes random operators on this context draw from the seed, and `seed` too."""
    _seed(seed, context)
    _generators().append(random.Random(seed))
    try:
        yield
    finally:
        _generators().pop()

"""Everything random is a function of the seed and the position in the run."""

from __future__ import annotations

import random

import mxnet as mx
import numpy as np


def seed_device(context, seed: int, epoch: int, step: int, device: int) -> None:
    """Seed a device's generator for what it does next.

    MXNet's random state can be set but not read, so it is set for each step: Dropout resumes exactly. And it is set
    for each device by its number in the whole job: then it does not matter which process the device belongs to.
    """
    words = [seed, epoch, step, device]
    mx.random.seed(int(np.random.RandomState(words).randint(2**31 - 1)), ctx=context)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    mx.random.seed(seed)


def random_state() -> dict:
    """Python's and NumPy's global generators, for JSON. MXNet's is a function of the position."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}


def set_random_state(state):
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(state["numpy"])

"""Everything random is a function of the seed and the position in the run."""

from __future__ import annotations

import random

import mxnet as mx
import numpy as np


def step_seed(seed: int, epoch: int, step: int) -> int:
    return int(np.random.RandomState([seed, epoch, step]).randint(2**31 - 1))


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

"""All random numbers are a function of the seed and the position in the run."""

from __future__ import annotations

import random

import mxnet as mx
import numpy as np


class Xavier(mx.init.Initializer):
    """The distribution of mx.init.Xavier, drawn by NumPy, whose state a program can read."""

    def _init_weight(self, name, array):
        outputs, inputs, *window = array.shape
        bound = (6 / (np.prod(window) * (inputs + outputs))) ** 0.5
        array[:] = np.random.uniform(-bound, bound, array.shape)


def seed_device(context, seed: int, epoch: int, step: int, device: int) -> None:
    """Seed a device's generator for its next step.

    A program can set MXNet's random state, but cannot read it. A seed for each step lets Dropout resume exactly. The
    seed depends on the device's number in the whole job, so the assignment of devices to processes does not matter.
    """
    words = [seed, epoch, step, device]
    mx.random.seed(int(np.random.RandomState(words).randint(2**31 - 1)), ctx=context)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    mx.random.seed(seed)


def random_state() -> dict:
    """The state of Python's and NumPy's global generators, for JSON. MXNet's state is a function of the position."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}


def set_random_state(state):
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(state["numpy"])

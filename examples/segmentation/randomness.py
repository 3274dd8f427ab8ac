"""Everything random is a function of the seed and the position in the run."""

from __future__ import annotations

import random

import mxnet as mx
import numpy as np


class Xavier(mx.init.Initializer):
    """mx.init.Xavier's distribution, drawn by NumPy.

    MXNet would draw from generators whose number depends on that of the CPU devices (`gluon_syncbn.cpu_devices`), and
    the same seed would be another network on another number of devices or in another number of processes.
    """

    def _init_weight(self, name, array):
        outputs, inputs, *window = array.shape
        bound = (6 / (np.prod(window) * (inputs + outputs))) ** 0.5
        array[:] = np.random.uniform(-bound, bound, array.shape)


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

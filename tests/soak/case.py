"""A case: a net, where its replicas live, how it is trained. Drawn from one seed, within what README.md supports."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

#: Few sizes: oneDNN keeps what it has prepared for each shape, which would look like a leak.
CHANNELS, SAMPLES = (3, 4, 6), (1, 2, 3, 5)
#: At least six values in a slot: one or two have no variance worth the name, and gradients that are all rounding.
SPATIAL = ((7,), (3, 4), (6, 6), (2, 3, 2))
PLANES = ((6, 6), (5, 8))  # for convolutions


@dataclass
class Case:
    seed: int
    rng: np.random.RandomState  # goes on to draw what happens to the net
    steps: int
    contexts: List[mx.Context]  # of the replicas, in their order
    net: str
    settings: Dict[str, Any]  # of nn.BatchNorm, and the activation
    fused: bool  # whether `convert` takes in what stands behind a plain layer
    pooling: Dict[str, Any]
    kvstore: Optional[str]  # the layer's own
    dtype: str
    channels: int
    spatial: Tuple[int, ...]
    deferred: bool  # whether the channels come from the first batch
    dropout: bool
    way: str
    threads: bool  # one for each replica
    empty: bool  # whether some shards are
    grad_req: str
    trainer: Optional[Dict[str, Any]]  # its arguments

    @property
    def mode(self) -> str:
        return self.pooling.get("mode", "sync")

    @property
    def meets(self) -> bool:
        """Whether a replica waits for others."""
        return self.mode != "local" and len(self.contexts) > 1

    @property
    def axis(self) -> int:
        return self.settings["axis"]

    def __str__(self) -> str:
        said = {key: value for key, value in vars(self).items() if key not in ("rng", "seed", "contexts") and value}
        said["contexts"] = " ".join(map(str, self.contexts))
        return f"case {self.seed}: " + ", ".join(f"{key} {value}" for key, value in said.items())

    # ---- data --------------------------------------------------------------------------------------------------

    def shards(self, replicas: int) -> List[np.ndarray]:
        """A batch: of each replica another size, mean and spread."""
        rng, shards = self.rng, []
        fewest = 2 if self.mode == "shuffle" and self.pooling.get("virtual_devices", 1) == 1 else 1
        full = (
            set(rng.permutation(replicas)[: max(fewest, rng.randint(replicas + 1))]) if self.empty else range(replicas)
        )
        least = 2 if self.mode == "shuffle" and len(full) < 2 else 1  # samples, so that there are two slots
        for i in range(replicas):
            samples = max(least, _one(rng, SAMPLES)) if i in full else 0
            if self.net == "layer":
                spread, mean = rng.uniform(0.5, 4), rng.uniform(-3, 3)
            else:
                spread, mean = rng.uniform(0.8, 1.2), rng.uniform(-0.2, 0.2)
            shards.append((spread * rng.randn(*self._shape(samples)) + mean).astype(self.dtype))
        return shards

    def heads(self, shards: Sequence[np.ndarray]) -> List[np.ndarray]:
        """Gradients of the outputs."""
        return [(self.rng.randn(*shard.shape) + 0.3 * i).astype(self.dtype) for i, shard in enumerate(shards)]

    def _shape(self, samples: int) -> List[int]:
        if self.axis == 0:
            return [self.channels, samples, *self.spatial]
        shape = [samples, *self.spatial]
        shape.insert(self.axis % (len(shape) + 1), self.channels)
        return shape


def draw(seed: int, contexts: Sequence[mx.Context]) -> Case:
    rng = np.random.RandomState(seed)

    def perhaps(chance: float) -> bool:
        return rng.rand() < chance

    net = _one(rng, ("layer",) * 4 + ("chain", "residual") * 2 + ("branches", "twice", "shared"))
    count = rng.randint(1, len(contexts) + 1)
    places = [contexts[i] for i in rng.permutation(len(contexts))[:count]]
    threads = count > 1 and perhaps(0.2)
    layout = {"axis": 1, "spatial": _one(rng, SPATIAL)}
    if net == "layer":
        layout["axis"] = _one(rng, (1, 1, -1, -1, 0))
    elif perhaps(0.6):
        layout["spatial"] = _one(rng, PLANES)
    else:
        layout["axis"] = -1
    pooling = _one(rng, _poolings(count, layout["axis"]))

    ways = ["eager", "hybrid"] + ["static_alloc"] * (not threads)
    if count == 1 and net != "shared":  # where a static graph may run two nodes of a layer in either order
        ways.append("static_shape")
    way = _one(rng, ways)
    dtype = _one(rng, ("float32", "float64") + ("float16",) * (net == "layer"))
    # Of an empty array, MXNet's convolution leaves the gradient of its weight as it was. In float32, oneDNN's operators
    # are errors.
    dense = layout["axis"] == -1 and dtype == "float64"
    may_be_empty = count > 1 and (net == "layer" or dense)
    empty = may_be_empty and perhaps(0.3)
    trains = perhaps(0.5)
    # Rounding decides on which side of 0 a value is, and with it about a gradient: in float64 too seldom to be seen.
    activation = _one(rng, (None, "relu", "relu6", "leaky")) if dtype == "float64" and perhaps(0.5) else None
    trainer = {"kvstore": _one(rng, ("device", "local")), "update_on_kvstore": perhaps(0.5)}
    return Case(
        seed=seed,
        rng=rng,
        steps=rng.randint(4, 25),
        contexts=places,
        net=net,
        settings={
            "axis": layout["axis"],
            "epsilon": _one(rng, (1e-5, 1e-3)),
            "momentum": _one(rng, (0.9, 0.9, 0.5, 0.0)),
            "scale": not perhaps(0.1),
            "center": not perhaps(0.1),
            "activation": activation,
        },
        fused=net == "residual" and perhaps(0.5),
        pooling=pooling,
        kvstore=_one(rng, (None, None, "device", "local")),
        dtype=dtype,
        channels=_one(rng, CHANNELS),
        spatial=layout["spatial"],
        # Under NumPy's shape rules, which an empty array needs, 0 is no extent that is not known.
        deferred=layout["axis"] != 0 and not (empty and net != "layer") and perhaps(0.3),
        dropout=net == "chain" and not threads and perhaps(0.3),
        way=way,
        threads=threads,
        empty=empty,
        grad_req="write" if trains else _one(rng, ("write", "add")),
        trainer=(trainer if count > 1 else {"kvstore": None}) if trains else None,
    )


def _poolings(replicas: int, axis: int) -> List[Dict[str, Any]]:
    slots = (1,) if axis == 0 else (1, 2, 3)  # parts of the batch along axis 0
    sync = [{}, {}, {}, *({"virtual_devices": v} for v in slots)]
    groups = [{"group_size": size} for size in range(1, replicas + 1) if replicas % size == 0]
    local = [{"mode": "local", "virtual_devices": v} for v in slots]
    shuffle = [{"mode": "shuffle", "virtual_devices": v} for v in slots if replicas * v > 1]
    return sync + groups + local + shuffle * 2


def _one(rng: np.random.RandomState, options: Sequence[Any]) -> Any:
    return options[rng.randint(len(options))]

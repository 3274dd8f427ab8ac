"""A case: one layer, where its replicas live, and its steps. Drawn from one seed, within docs/limits.md."""

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

DTYPES = ("float16", "float32", "float64")
MASKS = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool")
OFFSETS = {"float16": 30.0, "float32": 1e3, "float64": 1e6}
CONTEXTS = 4


@dataclass
class Case:
    seed: int
    rng: np.random.RandomState  # goes on to draw the data
    door: str
    dtype: str
    channels: int
    axis: int
    spatial: Tuple[int, ...]
    contexts: List[int]  # of the replicas, in their order
    pooling: Dict[str, Any]
    settings: Dict[str, Any]  # of nn.BatchNorm
    unbiased: bool
    activation: Optional[str]
    slope: float
    addend: Optional[str]  # "own", or "x": the data itself
    fused: bool  # by `convert`, from plain BatchNorm and what stands behind it
    way: str
    reqs: Dict[str, str]  # grad_req
    empty: bool  # whether some shards are
    offset: float
    steps: List[str]
    masked: Optional[str]  # "all" replicas, or "some" of them
    of_masks: str  # their type
    rng_of_masks: np.random.RandomState
    rng_of_events: np.random.RandomState
    threads: bool  # one for each replica
    emulated: bool = False  # on GPUs, where no operator of MXNet's own runs

    @property
    def predicts(self) -> bool:
        return not (self.emulated and self.way == "eager")

    @property
    def mode(self) -> str:
        return self.pooling.get("mode", "sync")

    @property
    def slots(self) -> int:
        """Of a replica."""
        return self.pooling.get("virtual_devices", 1)

    @property
    def separate(self) -> bool:
        """Whether MXNet's own operators may stand behind the layer, with arrays in between."""
        return self.fused or self.settings["use_global_stats"]

    def __str__(self) -> str:
        said = {name: value for name, value in vars(self).items() if not name.startswith(("rng", "seed")) and value}
        return f"case {self.seed}: " + ", ".join(f"{name} {value}" for name, value in said.items())

    # ---- data --------------------------------------------------------------------------------------------------

    def shards(self) -> List[np.ndarray]:
        """A batch: of each replica another size, mean and spread."""
        count = len(self.contexts)
        samples = self.rng.choice((1, 2, 3, 5), count)
        if self.empty:
            samples[self.rng.permutation(count)[: self.rng.randint(1, count)]] = 0
        if self.mode == "shuffle" and np.minimum(samples, self.slots).sum() < 2:
            samples[self.rng.randint(count)] = 2
            if self.slots == 1:
                samples[:2] = 2
        rng = self.rng
        return [
            (rng.uniform(0.5, 4) * rng.randn(*self._shape(n)) + rng.uniform(-3, 3) + self.offset).astype(self.dtype)
            for n in samples
        ]

    def like(self, shards: List[np.ndarray]) -> List[np.ndarray]:
        """Gradients of the outputs, or addends."""
        return [(self.rng.randn(*x.shape) + 0.3 * i).astype(self.dtype) for i, x in enumerate(shards)]

    def masks(self, shards: List[np.ndarray]) -> List[Optional[np.ndarray]]:
        """What counts of each shard: much, little or nothing. None: a replica without a mask."""
        if self.masked is None:
            return [None] * len(shards)
        rng = self.rng_of_masks
        masks = [None if self.masked == "some" and rng.rand() < 0.5 else self._mask(x.shape) for x in shards]
        filled = sum(
            x[part].size > 0 if mask is None else bool(np.broadcast_to(self._wide(mask, x), x.shape)[part].any())
            for x, mask in zip(shards, masks)
            for part in (np.array_split(np.arange(len(x)), self.slots) if self.mode == "shuffle" else [slice(None)])
        )
        needed = {"sync": not {"group_size", "groups"} & set(self.pooling), "local": 0, "shuffle": 2}[self.mode]
        if filled >= needed:
            return masks
        return [None if mask is None else np.ones_like(mask) for mask in masks]

    def _mask(self, shape: Sequence[int]) -> np.ndarray:
        rng, axis = self.rng_of_masks, self.axis % len(shape)
        extents = [1 if i == axis or rng.rand() < 0.15 else extent for i, extent in enumerate(shape)]
        counts = rng.rand(*extents) < rng.choice((0, 0.2, 0.5, 0.8, 1))
        mask = np.where(counts, rng.choice((1, 1, 3)), 0).astype(self.of_masks)
        return mask if rng.rand() < 0.5 else mask.squeeze(axis)

    def _wide(self, mask: np.ndarray, x: np.ndarray) -> np.ndarray:
        return mask if mask.ndim == x.ndim else np.expand_dims(mask, self.axis % x.ndim)

    def _shape(self, samples: int) -> List[int]:
        shape = [samples, *self.spatial]
        axis = self.axis % (len(shape) + 1)
        if axis == 0:
            return [self.channels, *shape]
        shape.insert(axis, self.channels)
        return shape


def draw(seed: int) -> Case:
    rng = np.random.RandomState(seed)

    def one(options: Any) -> Any:
        return options[rng.randint(len(options))]

    def perhaps(chance: float) -> bool:
        return rng.rand() < chance

    dtype = one(DTYPES)
    dimensions = one((2, 3, 4, 4, 5))
    spatial = tuple(int(one((1, 2, 3, 4, 7))) for _ in range(dimensions - 2))
    axis = one((1, 1, 1, -1, -1, int(rng.randint(-dimensions, dimensions))))
    contexts = [int(i) for i in rng.permutation(CONTEXTS)[: rng.randint(1, CONTEXTS + 1)]]
    replicas = len(contexts)
    frozen = perhaps(0.05)

    most = 1 if axis % dimensions == 0 else 4
    pooling: Dict[str, Any] = {"mode": one(("sync", "sync", "local", "shuffle"))}
    if perhaps(0.5):
        pooling["virtual_devices"] = int(rng.randint(1, most + 1))
    if pooling["mode"] == "shuffle" and replicas * pooling.get("virtual_devices", 1) < 2:
        pooling = {"mode": "shuffle", "virtual_devices": 2} if most > 1 else {"mode": "local"}
    if pooling["mode"] == "sync" and perhaps(0.3):
        pooling["group_size"] = int(one([n for n in range(1, replicas + 1) if replicas % n == 0]))
    elif pooling["mode"] == "sync" and perhaps(0.3):
        group_of = rng.randint(replicas, size=replicas)
        pooling["groups"] = [np.flatnonzero(group_of == group).tolist() for group in np.unique(group_of)]

    addend = one((None, None, "own", "x"))
    activation = one((None, "relu", "relu6", "leaky"))
    way = one(("eager", "hybrid", "static_alloc", "static_shape"))
    reqs = {name: one(("write", "write", "add", "null")) for name in ("x", "addend", "gamma", "beta")}
    if addend != "own":
        reqs["addend"] = "null"
    scale, center = not perhaps(0.15), not perhaps(0.15)
    reqs["gamma"] = reqs["gamma"] if scale else "null"
    reqs["beta"] = reqs["beta"] if center else "null"
    if set(reqs.values()) == {"null"}:
        reqs["x"] = "write"
    fused = perhaps(0.25)
    of_mxnet = frozen or (fused and (way == "eager" or activation is None))  # what stands behind it
    if of_mxnet and way != "eager":
        # MXNet's own addition stands in the graph, and plain BatchNorm has wrong gradients there where that of the
        # addend is not written.
        reqs.update({None: {}, "own": {"addend": "write"}, "x": {"x": "write"}}[addend])
    rng_of_masks = np.random.RandomState([seed, 1])
    masked = None
    if not fused and rng_of_masks.rand() < 0.35:
        # A graph has a mask or none.
        masked = "some" if way == "eager" and rng_of_masks.rand() < 0.4 else "all"
    rng_of_events = np.random.RandomState([seed, 2])
    return Case(
        seed=seed,
        rng=rng,
        door="custom" if seed % 2 else "native",
        dtype=dtype,
        channels=int(one((1, 2, 3, 5, 8, 17))),
        axis=axis,
        spatial=spatial,
        contexts=contexts,
        pooling=pooling,
        settings={
            "axis": axis,
            "epsilon": one((1e-5, 1e-5, 1e-3)),
            "momentum": one((0.9, 0.9, 0.5, 0.0, 1.0)),
            "scale": scale,
            "center": center,
            "use_global_stats": frozen,
        },
        unbiased=perhaps(0.2),
        activation=activation,
        slope=one((0.25, 0.0625) + (0.01, 0.3) * (dtype != "float64")),
        addend=addend,
        fused=fused,
        way=way,
        reqs=reqs,
        # Several operators of oneDNN, which MXNet takes in float32, are errors for an empty array.
        empty=replicas > 1 and not (of_mxnet and dtype == "float32") and perhaps(0.3),
        offset=OFFSETS[dtype] if perhaps(0.15) else 0.0,
        steps=["train", *(one(("train", "train", "forward", "predict")) for _ in range(rng.randint(0, 4)))],
        masked=masked,
        of_masks=str(rng_of_masks.choice(MASKS)),
        rng_of_masks=rng_of_masks,
        rng_of_events=rng_of_events,
        threads=replicas > 1 and way in ("eager", "hybrid") and rng_of_events.rand() < 0.2,
    )


def draw_for_emulator(seed: int) -> Case:
    """The case of that seed, without what MXNet's own operators would do."""
    case = draw(seed)
    reqs = case.reqs
    if case.addend == "x":  # whose gradient MXNet adds up
        reqs = {**reqs, "addend": "write"}
    return replace(
        case,
        settings={**case.settings, "use_global_stats": False},
        addend=case.addend and "own",
        fused=case.fused and case.way != "eager" and case.activation is not None,
        reqs=reqs,
        empty=case.seed % 3 == 0 and len(case.contexts) > 1,
        steps=[step for step in case.steps if step != "predict" or case.way != "eager"],
        threads=False,
        emulated=True,
    )

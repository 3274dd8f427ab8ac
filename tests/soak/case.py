"""A case: one layer, where its replicas live, and its steps. Chosen, or drawn from one seed, within docs/limits.md."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from replicas import rounded

MASKS = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool")
#: Of the data: that of a float16 keeps its digits.
OFFSETS = {"bfloat16": 4.0, "float16": 30.0, "float32": 1e3, "float64": 1e6}


@dataclass
class Case:
    """Defaults are those of a chosen case."""

    seed: int = 0  # of the data
    dtype: str = "float64"
    channels: int = 5
    axis: int = 1
    spatial: Tuple[int, ...] = (4, 6)
    contexts: Sequence[int] = range(4)  # of the replicas, in their order
    pooling: Dict[str, Any] = field(default_factory=dict)
    settings: Dict[str, Any] = field(default_factory=dict)  # of nn.BatchNorm, beside its axis
    activation: Optional[str] = None
    slope: float = 0.1  # float32 has no such number
    addend: Optional[str] = None  # "own", or "x": the data itself
    fused: bool = False  # by `convert`, from plain BatchNorm and what stands behind it
    reverted: bool = False  # by `revert`, to plain BatchNorm
    way: str = "eager"
    reqs: Dict[str, str] = field(default_factory=dict)  # grad_req, where it is not "write"
    empty: Optional[str] = None  # what some shards have none of: a "sample" or a "position"
    offset: float = 0.0
    steps: Sequence[str] = ("train", "train")
    masked: Optional[str] = None  # "all" replicas, or "some" of them
    of_masks: str = "float32"  # their type
    of_np: bool = False  # whether arrays are those of mx.np
    threads: bool = False  # one for each replica
    emulated: bool = False  # on GPUs, where no operator of MXNet's own runs
    in_blocks: Sequence[str] = ()  # what lies as a convolution leaves it: "x", "addend", "heads"
    stype: Optional[str] = None  # of the data, where they are sparse

    def __post_init__(self) -> None:
        self.rng = np.random.RandomState([self.seed, 1])
        usual = {"epsilon": 1e-5, "momentum": 0.9, "scale": True, "center": True, "use_global_stats": False}
        self.settings = {"axis": self.axis, **usual, **self.settings}
        no_addend = {} if self.addend == "own" else {"addend": "null"}
        self.reqs = {**dict.fromkeys(("x", "addend", "gamma", "beta"), "write"), **self.reqs, **no_addend}

    def scope(self) -> ExitStack:
        """What each thread of a program with such arrays sets."""
        scope = ExitStack()
        scope.enter_context(mx.util.np_shape(self.of_np or self.empty is not None))
        scope.enter_context(mx.util.np_array(self.of_np))
        return scope

    @property
    def predicts(self) -> bool:
        return self.dtype != "bfloat16" and not (self.emulated and self.way == "eager")

    @property
    def mode(self) -> str:
        return self.pooling.get("mode", "sync")

    @property
    def unbiased(self) -> bool:
        return self.pooling.get("running_variance") == "unbiased"

    @property
    def slots(self) -> int:
        """Of a replica."""
        return self.pooling.get("virtual_devices", 1)

    @property
    def separate(self) -> bool:
        """Whether MXNet's own operators may stand behind the layer, with arrays in between."""
        left = self.fused and (self.way == "eager" or self.activation is None)  # what `convert` cannot fuse
        return left or self.reverted or self.settings["use_global_stats"]

    # ---- data --------------------------------------------------------------------------------------------------

    def shards(self) -> List[np.ndarray]:
        """A batch: of each replica another size, mean and spread."""
        count = len(self.contexts)
        samples = self.rng.choice((1, 2, 3, 5), count)
        empty = self.rng.permutation(count)[: self.rng.randint(1, count)] if self.empty else []
        filled = np.minimum(samples, self.slots)
        filled[empty] = 0
        if self.mode == "shuffle" and filled.sum() < 2:
            samples[:2], empty = 2, []
        if self.empty == "sample":
            samples[empty] = 0
        shards, rng = [], self.rng
        for i, n in enumerate(samples):
            shape = self._shape(n, [0] * len(self.spatial) if i in empty else self.spatial)
            values = rng.uniform(0.5, 4) * rng.randn(*shape) + rng.uniform(-3, 3) + self.offset
            shards.append(rounded(values, self.dtype))
        return shards

    def like(self, shards: List[np.ndarray]) -> List[np.ndarray]:
        """Gradients of the outputs, or addends."""
        return [rounded(self.rng.randn(*x.shape) + 0.3 * i, self.dtype) for i, x in enumerate(shards)]

    def masks(self, shards: List[np.ndarray]) -> List[Optional[np.ndarray]]:
        """What counts of each shard: much, little or nothing. None: a replica without a mask."""
        if self.masked is None:
            return [None] * len(shards)
        rng = self.rng
        masks = [None if self.masked == "some" and rng.rand() < 0.5 else self._mask(x.shape) for x in shards]
        if self.filled(shards, masks) >= {"shuffle": 2}.get(self.mode, 1):
            return masks
        return [None if mask is None else np.ones_like(mask) for mask in masks]

    def filled(self, shards: List[np.ndarray], masks: List[Optional[np.ndarray]]) -> int:
        """The number of slots with a value that counts."""
        return sum(
            x[part].size > 0 if mask is None else bool(np.broadcast_to(self.wide(mask, x), x.shape)[part].any())
            for x, mask in zip(shards, masks)
            for part in np.array_split(np.arange(len(x)), self.slots)
        )

    def _mask(self, shape: Sequence[int]) -> np.ndarray:
        rng, axis = self.rng, self.axis % len(shape)
        extents = [1 if i == axis or rng.rand() < 0.15 else extent for i, extent in enumerate(shape)]
        counts = rng.rand(*extents) < rng.choice((0, 0.2, 0.5, 0.8, 1))
        floats = np.dtype(self.of_masks).kind == "f"
        some = rng.choice((1.0, -3.0, 0.5, np.finfo(self.of_masks).tiny) if floats else (1, 3))
        mask = np.where(counts, some, rng.choice((0, -0.0))).astype(self.of_masks)
        return mask if rng.rand() < 0.5 else mask.squeeze(axis)

    def wide(self, mask: np.ndarray, x: np.ndarray) -> np.ndarray:
        return mask if mask.ndim == x.ndim else np.expand_dims(mask, self.axis % x.ndim)

    def _shape(self, samples: int, spatial: Sequence[int]) -> List[int]:
        shape = [samples, *spatial]
        axis = self.axis % (len(shape) + 1)
        if axis == 0:
            return [self.channels, *shape]
        shape.insert(axis, self.channels)
        return shape


def draw(seed: int, contexts: int = 8, emulated: bool = False) -> Case:
    """On up to four of so many contexts. Emulated: without what MXNet's own operators would do."""
    rng = np.random.RandomState(seed)

    def one(options: Any) -> Any:
        return options[rng.randint(len(options))]

    def perhaps(chance: float) -> bool:
        return rng.rand() < chance

    dtype = one(("float16", "float32", "float64") if emulated or perhaps(0.9) else ("bfloat16",))
    alone = emulated or dtype == "bfloat16"  # which MXNet's operators compute with on few processors
    dimensions = one((2, 3, 4, 4, 5))
    spatial = tuple(int(one((1, 2, 3, 4, 7))) for _ in range(dimensions - 2))
    axis = one((1, 1, 1, -1, -1, int(rng.randint(-dimensions, dimensions))))
    places = [int(i) for i in rng.permutation(contexts)[: rng.randint(1, 5)]]
    replicas = len(places)
    frozen = perhaps(0.05) and not alone

    slots = (1,) if axis % dimensions == 0 else (1, 2, 3, 4, 8)
    pooling: Dict[str, Any] = {"mode": one(("sync", "sync", "local", "shuffle"))}
    if perhaps(0.5):
        pooling["virtual_devices"] = one(slots)
    if pooling["mode"] == "shuffle" and replicas * pooling.get("virtual_devices", 1) < 2:
        pooling = {"mode": "shuffle", "virtual_devices": 2} if len(slots) > 1 else {"mode": "local"}
    if pooling["mode"] == "sync" and perhaps(0.3):
        pooling["group_size"] = int(one([n for n in range(1, replicas + 1) if replicas % n == 0]))
    elif pooling["mode"] == "sync" and perhaps(0.3):
        group_of = rng.randint(replicas, size=replicas)
        pooling["groups"] = [np.flatnonzero(group_of == group).tolist() for group in np.unique(group_of)]

    if perhaps(0.2):
        pooling["running_variance"] = "unbiased"

    addend = one((None, None, "own", "own" if alone else "x"))  # MXNet adds the two gradients up
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
    fused = perhaps(0.25) and not (alone and (way == "eager" or activation is None))
    of_mxnet = fused and (way == "eager" or activation is None or frozen)  # what stands behind it
    if of_mxnet and way != "eager":
        # MXNet's own addition stands in the graph, and plain BatchNorm has wrong gradients there where that of the
        # addend is not written.
        reqs.update({None: {}, "own": {"addend": "write"}, "x": {"x": "write"}}[addend])
    masked = None
    if not fused and perhaps(0.35):
        # A graph has a mask or none.
        masked = "some" if way == "eager" and perhaps(0.4) else "all"
    case = Case(
        seed=seed,
        dtype=dtype,
        channels=int(one((1, 2, 3, 5, 8, 17))),
        axis=axis,
        spatial=spatial,
        contexts=places,
        pooling=pooling,
        settings={
            "epsilon": one((1e-5, 1e-5, 1e-3)),
            "momentum": one((0.9, 0.9, 0.5, 0.0, 1.0)),
            "scale": scale,
            "center": center,
            "use_global_stats": frozen,
        },
        activation=activation,
        slope=one((0.25, 0.01, 0.3)),
        addend=addend,
        fused=fused,
        way=way,
        reqs=reqs,
        # Several operators of oneDNN, which MXNet takes in float32, are errors for an empty array.
        empty=one(("sample", "sample", "position")) if replicas > 1 and perhaps(0.3) else None,
        offset=OFFSETS[dtype] if perhaps(0.15) else 0.0,
        steps=["train", *(one(("train", "train", "forward", "predict")) for _ in range(rng.randint(0, 4)))],
        masked=masked,
        of_masks=one(MASKS),
        of_np=perhaps(0.15) and not (fused or alone),
        threads=replicas > 1 and way in ("eager", "hybrid") and not emulated and perhaps(0.2),
        emulated=emulated,
    )
    if ((of_mxnet or frozen) and dtype == "float32") or (case.empty == "position" and not spatial):
        case.empty = None
    case.steps = [step for step in case.steps if step != "predict" or case.predicts]
    return case

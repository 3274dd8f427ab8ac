"""Every way of pooling, and what a layer computes with it: gluon_syncbn.reference on the batch of a test."""

import numpy as np
from internals import replicas_of
from permutations import derangement
from replicas import Result

from gluon_syncbn import reference
from gluon_syncbn.activation import NONE

#: Every way of pooling that some number of replicas can have.
POOLINGS = {
    "sync": {},
    "sync, unbiased": {"running_variance": "unbiased"},
    "sync, 3 slots": {"virtual_devices": 3},
    "groups of 2": {"group_size": 2},
    "groups of 2, 3 slots": {"group_size": 2, "virtual_devices": 3},
    "named groups": {"groups": [[0, 2], [1, 3]]},
    "named groups, uneven": {"groups": [[0, 3], [1], [2]]},
    "local": {"mode": "local"},
    "local, 2 slots": {"mode": "local", "virtual_devices": 2},
    "local, 8 slots": {"mode": "local", "virtual_devices": 8},  # more than some shards have samples
    "shuffle": {"mode": "shuffle"},
    "shuffle, 2 slots": {"mode": "shuffle", "virtual_devices": 2},
    "shuffle, 8 slots": {"mode": "shuffle", "virtual_devices": 8},
}


def fits(pooling, replicas):
    if "groups" in pooling:
        return replicas == 4
    if "group_size" in pooling:
        return replicas % pooling["group_size"] == 0
    return pooling.get("mode") != "shuffle" or replicas * pooling.get("virtual_devices", 1) > 1


def permutation(layer, batch, virtual_devices, *, call=0, node=-1, seed=0, masks=None):
    """Of the slots that have a value that counts."""
    counting = [np.ones(x.shape) for x in batch.shards] if masks is None else masks
    slots = sum(x[part].any() for x in counting for part in np.array_split(np.arange(len(x)), virtual_devices))
    return derangement(seed, replicas_of(layer).id, node, call, slots)


def pooling_of(layer):
    return {name: getattr(layer, name) for name in ("mode", "virtual_devices", "group_size", "groups")}


def settings_of(layer):
    """What `reference.forward` takes of a layer, also of a plain one."""
    kwargs, activation = layer._kwargs, getattr(layer, "_activation", NONE)
    momentum = float(np.float32(kwargs["momentum"]))  # as MXNet keeps it
    settings = {"axis": kwargs["axis"], "epsilon": kwargs["eps"], "momentum": momentum}
    return {**settings, **activation._asdict(), "scale": not kwargs["fix_gamma"]}


def specification(
    layer, batch, *, call=0, node=-1, seed=0, nonfinite="propagate", addends=None, masks=None, **settings
):
    """What `layer` computes for the batch, in float64 NumPy, starting from mean 0 and variance 1."""
    pooling = pooling_of(layer)
    if pooling["mode"] == "shuffle":
        draw = {"call": call, "node": node, "seed": seed, "masks": masks}
        pooling["permutation"] = permutation(layer, batch, pooling["virtual_devices"], **draw)
    channels = len(batch.gamma)
    forward = reference.forward(
        batch.shards, batch.gamma, batch.beta, np.zeros(channels), np.ones(channels), **settings_of(layer), **pooling,
        running_variance=layer.running_variance, nonfinite=nonfinite, addends=addends, masks=masks,
    )  # fmt: skip
    gradients = reference.backward(batch.shards, batch.heads, batch.gamma, forward)
    return Result(
        forward.outputs,
        gradients.dxs,
        sum(gradients.dgammas),
        sum(gradients.dbetas),
        forward.running_mean,
        forward.running_var,
    )

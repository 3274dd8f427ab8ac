"""Specifies what the layer computes, in float64 NumPy over a list of shards.

A shard is the mini-batch of one device. A device holds ``virtual_devices`` *slots*. Each slot is a contiguous part of
the shard along axis 0, split as ``numpy.array_split`` does. Slots are numbered over all devices in order. A slot
without a value takes no part and has no number. Slots whose values share a statistic are a *pool*::

    mode        a pool is                                               a slot is normalised with
    sync        all slots of the devices, or of those in a group        the pool that it feeds
    local       one slot                                                the pool that it feeds
    shuffle     one slot                                                slot i: the pool of slot permutation[i]

For one channel and one pool, ``x`` are the channel's values in all slots that feed the pool, over samples and
positions. ``n`` is their number::

    mean = sum(x) / n               var = sum((x - mean)**2) / n  (biased)          r = 1 / sqrt(var + epsilon)

For a slot that feeds pool ``f`` and is normalised with pool ``u``::

    xhat = (x - mean[u]) * r[u]
    z    = gamma * xhat + beta [+ addend]
    y    = min(z, ceiling) where z > 0, else slope * z          (slope 1: y = z; slope 0: ReLU)

Let ``L`` be the sum of the shards' losses and ``dz = dL/dz``. Where 0 < z < ceiling, ``dz`` is ``dL/dy``. It is 0 above
the ceiling and ``slope * dL/dy`` elsewhere::

    dgamma[d] = sum over the slots of device d of sum(dz * xhat)            dbeta[d] = the same of sum(dz)
    S1[k]     = sum over the slots normalised with k of sum(dz)             S2[k]    = the same of sum(dz * xhat)
    dx        = gamma * (r[u] * dz - r[f] / n[f] * (S1[f] + (x - mean[f]) * r[f] * S2[f]))          daddend = dz

A mask names the positions that count: those where it is not 0. Only these are among the ``x`` and ``n`` of a pool. The
output is that of all positions, and so are ``dz``, ``S1`` and ``S2``. Where the mask is 0, ``dx`` has no second term::

    mean = sum over counting positions of x / n         dx = gamma * r[u] * dz                (where the mask is 0)

A slot whose positions all have mask 0 feeds no pool. In sync, the pool of its group normalises it. A slot without such
a pool has ``xhat = 0``.

The second term of ``dx`` is the gradient that flows through mean and variance, back to the slots that feed them. With
``f = u`` it is the gradient of plain batch normalisation. Each device keeps its own ``dgamma[d]`` and ``dbeta[d]``. A
trainer adds them up over devices, and their sum is the gradient of the parameter. Each device also has running
statistics of its own::

    running <- momentum * running + (1 - momentum) * batch                  (of mean and var)

In sync, ``batch`` is the statistic of the device's pool. Otherwise it is the unweighted mean over the pools of the
device's own slots. With ``running_variance='unbiased'`` each pool's variance is multiplied by ``n / (n - 1)`` before
that, except for ``n = 1``. Where there is no pool, ``running`` stays. With ``nonfinite='skip'`` it also stays where
some value of ``batch`` is not finite.

Sources: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
Shift", ICML 2015. This module applies Algorithm 1 and the gradients in section 3 to each pool. For shuffle: He, Fan,
Wu, Xie and Girshick, "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020, arXiv 1911.05722,
section 3.3. The paper shuffles samples; this layer shuffles statistics.
"""

from typing import List, NamedTuple, Optional, Sequence

import numpy as np


class Slot(NamedTuple):
    """A part of a shard, with the indices of the two pools that it feeds and uses."""

    device: int
    samples: np.ndarray  # along axis 0 of the shard
    feeds: Optional[int]  # the pool that it is part of; None: no gradient flows through statistics
    uses: Optional[int]  # the pool that normalises it; None: xhat is 0


class Pool(NamedTuple):
    """The statistics of one pool."""

    mean: np.ndarray  # [C]
    var: np.ndarray  # [C], biased
    r: np.ndarray  # [C], 1 / sqrt(var + epsilon)
    n: int  # values per channel; 0 for the running statistics

    def normalised(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) * self.r


class Forward(NamedTuple):
    """The results of `forward`, and what `backward` needs of it."""

    outputs: List[np.ndarray]  # of each shard, in its shape
    running_mean: List[np.ndarray]  # the new one of each shard, [C]
    running_var: List[np.ndarray]
    pools: List[Pool]
    slots: List[Slot]  # the slots that hold a value, in order
    axis: int
    scale: bool
    slopes: List[np.ndarray]  # dy/dz of each value of a shard, channels last
    counts: List[np.ndarray]  # whether each position of a shard counts


class Gradients(NamedTuple):
    """One entry per shard: the gradients of shard and addend, in the shard's shape; dgamma and dbeta of shape [C]."""

    dxs: List[np.ndarray]
    dgammas: List[np.ndarray]
    dbetas: List[np.ndarray]
    daddends: List[np.ndarray]


def forward(
    shards: Sequence[np.ndarray],
    gamma: np.ndarray,
    beta: np.ndarray,
    running_mean: np.ndarray,
    running_var: np.ndarray,
    *,
    axis: int = 1,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    scale: bool = True,
    use_global_stats: bool = False,
    mode: str = "sync",
    virtual_devices: int = 1,
    group_size: Optional[int] = None,
    groups: Optional[Sequence[Sequence[int]]] = None,
    permutation: Sequence[int] = (),
    running_variance: str = "biased",
    nonfinite: str = "propagate",
    slope: float = 1,
    ceiling: float = np.inf,
    addends: Optional[Sequence[np.ndarray]] = None,
    masks: Optional[Sequence[Optional[np.ndarray]]] = None,
) -> Forward:
    """Normalises every slot with the statistics that `mode` selects. The module docstring has the formula.

    **Arguments:**

    - `shards`: one array per device, with the same number of dimensions and the same extent C along `axis`. A negative
        `axis` counts from the back. A shard may be empty as long as one is not.
    - `gamma`, `beta`, `running_mean`, `running_var`: [C], the same for all devices.
    - `scale`, `use_global_stats`, `mode`, `virtual_devices`, `group_size`, `groups`, `running_variance`: those of the
        layer. A group without a value has no statistic.
    - `permutation`: in shuffle, over the slots that hold a value. Slot i uses the statistics of slot
        ``permutation[i]``, never its own. The layer draws one at random (csrc/pooling/pooling.cc).
    - `nonfinite`: ``'propagate'``, ``'skip'`` or ``'error'``: the treatment of statistics that are not finite.
    - `slope`, `ceiling`: the factor for values that are not above 0, and the largest output.
    - `addends`: one per shard, of its shape, added before the activation.
    - `masks`: one per shard, or None where all positions count. Their extents are those of the shard, or 1; the channel
        axis has extent 1, or is left out.

    **Returns:** `Forward`. The arguments are not changed.

    **Raises:** `ValueError` for a batch without a value and, with ``nonfinite='error'``, statistics that are not
    finite. The layer checks its arguments; here, they have to fit.
    """
    arrays = _channels_last(shards, axis)
    channels = arrays[0].shape[-1]
    old = np.array([running_mean, running_var], np.float64)
    counts = _counts(shards, masks, axis)
    parts = [
        (device, samples)
        for device, x in enumerate(arrays)
        for samples in np.array_split(np.arange(len(x)), virtual_devices)
        if x[samples].size
    ]
    # Devices of one group have the same running statistics.
    together = (group_size or len(arrays)) if mode == "sync" else 1
    group_of = [device // together for device in range(len(arrays))]
    for number, group in enumerate(groups or []):
        for device in group:
            group_of[device] = number
    if use_global_stats:
        slots, statistics = [Slot(*part, None, 0) for part in parts], [(*old, 0)]
    else:
        values = [arrays[device][samples][counts[device][samples]] for device, samples in parts]
        group_of_slot = [group_of[device] if mode == "sync" else i for i, (device, _) in enumerate(parts)]
        present = sorted({group for group, x in zip(group_of_slot, values) if x.size})
        if not present:
            raise ValueError("the shards hold no value that counts, expected at least one")
        own = [present.index(group) if group in present else None for group in group_of_slot]
        uses = [k if k is None else permutation[k] for k in own] if mode == "shuffle" else own
        slots = [Slot(*part, k if x.size else None, u) for part, x, k, u in zip(parts, values, own, uses)]
        pooled = [np.concatenate([x for x, k in zip(values, own) if k == pool]) for pool in range(len(present))]
        statistics = [(x.mean(0), x.var(0), len(x)) for x in pooled]

    if nonfinite == "error" and not all(np.isfinite(part).all() for statistic in statistics for part in statistic):
        raise ValueError("the statistics are not finite")
    pools = [Pool(mean, var, 1 / np.sqrt(var + epsilon), n) for mean, var, n in statistics]

    outputs = [np.zeros_like(x) for x in arrays]
    weight = np.asarray(gamma, np.float64) if scale else np.ones(channels)
    for device, samples, _, u in slots:
        xhat = 0.0 if u is None else pools[u].normalised(arrays[device][samples])
        outputs[device][samples] = weight * xhat + np.asarray(beta, np.float64)
    if addends is not None:
        outputs = [z + a for z, a in zip(outputs, _channels_last(addends, axis))]
    slopes = [np.where(z > 0, (z < ceiling) | np.isinf(ceiling), slope) for z in outputs]
    outputs = [np.where(z <= 0, slope * z if slope else 0.0, np.minimum(z, ceiling)) for z in outputs]

    running = []
    for device in range(len(arrays)):
        fed = {slot.feeds for slot in slots if group_of[slot.device] == group_of[device]}
        tracked = [pools[k] for k in sorted(k for k in fed if k is not None)]
        unbiased = [pool.n / max(pool.n - 1, 1) if running_variance == "unbiased" else 1 for pool in tracked]
        batch = np.array([(pool.mean, pool.var * factor) for pool, factor in zip(tracked, unbiased)])
        moves = len(batch) > 0 and (nonfinite != "skip" or np.isfinite(batch).all())
        running.append(momentum * old + (1 - momentum) * batch.mean(0) if moves else old.copy())

    outputs = [np.moveaxis(y, -1, axis) for y in outputs]
    means, variances = ([pair[i] for pair in running] for i in range(2))
    return Forward(outputs, means, variances, pools, slots, axis, scale, slopes, counts)


def backward(
    shards: Sequence[np.ndarray],
    head_grads: Sequence[np.ndarray],
    gamma: np.ndarray,
    state: Forward,
) -> Gradients:
    """Returns the gradients of the summed losses with respect to each shard, and each shard's part of dgamma and dbeta.

    **Arguments:** the shards and `gamma` that `forward` got, and what it returned. `head_grads` are the
    gradients of the loss with respect to each output, in the shapes of the shards.

    **Returns:** `Gradients`. dgamma is zero where `scale` was false.
    """
    arrays = _channels_last(shards, state.axis)
    heads = [dy * slopes for dy, slopes in zip(_channels_last(head_grads, state.axis), state.slopes)]

    channels = arrays[0].shape[-1]
    dgammas, dbetas = np.zeros((len(arrays), channels)), np.zeros((len(arrays), channels))
    s1, s2 = np.zeros((len(state.pools), channels)), np.zeros((len(state.pools), channels))
    for device, samples, _, u in state.slots:
        dz = heads[device][samples]
        dbetas[device] += _sum(dz)
        if u is None:
            continue
        dz_xhat = dz * state.pools[u].normalised(arrays[device][samples])
        dgammas[device] += _sum(dz_xhat) if state.scale else 0
        s1[u] += _sum(dz)
        s2[u] += _sum(dz_xhat)

    dxs = [np.zeros_like(x) for x in arrays]
    weight = np.asarray(gamma, np.float64) if state.scale else np.ones(channels)
    for device, samples, f, u in state.slots:
        if u is None:
            continue
        dx = state.pools[u].r * heads[device][samples]
        if f is not None:
            pool = state.pools[f]
            through = pool.r / pool.n * (s1[f] + pool.normalised(arrays[device][samples]) * s2[f])
            dx -= np.where(state.counts[device][samples][..., None], through, 0)
        dxs[device][samples] = weight * dx
    dxs, daddends = ([np.moveaxis(part, -1, state.axis) for part in parts] for parts in (dxs, heads))
    return Gradients(dxs, list(dgammas), list(dbetas), daddends)


def _counts(
    shards: Sequence[np.ndarray], masks: Optional[Sequence[Optional[np.ndarray]]], axis: int
) -> List[np.ndarray]:
    """Whether each position counts."""
    counts = []
    for x, mask in zip(shards, [None] * len(shards) if masks is None else masks):
        extents = np.delete(np.shape(x), axis)
        where = np.ones(extents, bool) if mask is None else np.asarray(mask) != 0
        if where.ndim > len(extents):
            where = where.squeeze(axis)
        counts.append(np.broadcast_to(where, extents))
    return counts


def _channels_last(shards: Sequence[np.ndarray], axis: int) -> List[np.ndarray]:
    """Returns the shards in float64 with the channels at the end."""
    return [np.moveaxis(np.asarray(x, np.float64), axis, -1) for x in shards]


def _sum(x: np.ndarray) -> np.ndarray:
    """[..., C] -> [C]."""
    return x.sum(tuple(range(x.ndim - 1)))

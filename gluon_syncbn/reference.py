"""What the layer computes, as a specification: float64 NumPy over a list of shards, written to be read.

For one channel, with ``x`` the values of that channel over the samples and positions of *all* shards and
``n`` their number::

    mean = sum(x) / n                      var = sum((x - mean)**2) / n          (biased)
    xhat = (x - mean) / sqrt(var + epsilon)
    y    = gamma * xhat + beta
    running <- momentum * running + (1 - momentum) * batch                       (mean and biased var)

and, for a loss ``L`` that is the sum of the shards' losses, with ``dy = dL/dy``::

    dgamma[k] = sum over shard k of dy * xhat           dbeta[k] = sum over shard k of dy
    dx        = gamma / sqrt(var + epsilon) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)

where ``sum`` without a shard runs over all shards: that is the part of the gradient that flows through the
shared mean and variance. Each replica keeps its own ``dgamma[k]`` and ``dbeta[k]``, whose sum is the gradient
of the parameter, as a trainer adds them up over devices.

Source: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal
Covariate Shift", ICML 2015 (Algorithm 1 and the gradients in section 3), applied to the concatenated batch.
"""

from dataclasses import dataclass
from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

__all__ = ["Forward", "Gradients", "Statistics", "backward", "forward", "moments"]


@dataclass(frozen=True)
class Statistics:
    """What the backward needs to know of the forward: C numbers each, and how they were used."""

    mean: np.ndarray  # [C]
    var: np.ndarray  # [C], biased
    count: int  # values per channel over all shards
    axis: int
    epsilon: float
    scale: bool
    fixed: bool  # the running statistics were used: no gradient flows through mean and var


class Forward(NamedTuple):
    """Outputs (one per shard, each of its shard's shape), statistics and the new running statistics ([C])."""

    outputs: List[np.ndarray]
    state: Statistics
    running_mean: np.ndarray
    running_var: np.ndarray


class Gradients(NamedTuple):
    """One entry per shard: dx of the shard's shape, dgamma and dbeta of shape [C]."""

    dxs: List[np.ndarray]
    dgammas: List[np.ndarray]
    dbetas: List[np.ndarray]


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
) -> Forward:
    """Normalise every shard with the statistics of all of them (see the module for the formula).

    **Arguments:**

    - `shards`: one array per replica, with the same number of dimensions and the same extent C along `axis`
        (counted from the back where negative). A shard may be empty as long as one is not.
    - `gamma`, `beta`, `running_mean`, `running_var`: [C].
    - `scale`: false takes gamma as 1 and gives it no gradient (MXNet's ``fix_gamma``).
    - `use_global_stats`: true normalises with the running statistics and leaves them as they are.

    **Returns:** outputs, statistics, new running mean and variance. The arguments are not changed.

    **Raises:** `ValueError` for shards without a common channel extent, for parameters of another extent, and
    for a batch without a single value.
    """
    arrays, axis = _checked(shards, axis)
    channels = arrays[0].shape[axis]
    vectors = {"gamma": gamma, "beta": beta, "running_mean": running_mean, "running_var": running_var}
    for name, vector in vectors.items():
        if np.shape(vector) != (channels,):
            raise ValueError(f"{name} has shape {np.shape(vector)}, expected ({channels},), one per channel")
    old_mean, old_var = np.asarray(running_mean, np.float64), np.asarray(running_var, np.float64)

    if use_global_stats:
        count = sum(_rows(x, axis).shape[0] for x in arrays)
        state = Statistics(old_mean.copy(), old_var.copy(), count, axis, epsilon, scale, True)
        new_mean, new_var = old_mean.copy(), old_var.copy()
    else:
        mean, var, count = moments(arrays, axis)
        state = Statistics(mean, var, count, axis, epsilon, scale, False)
        new_mean = momentum * old_mean + (1 - momentum) * mean
        new_var = momentum * old_var + (1 - momentum) * var

    weight = np.asarray(gamma, np.float64) if scale else np.ones(channels)
    outputs = [
        _along(weight, x, axis) * _normalised(x, state) + _along(np.asarray(beta, np.float64), x, axis) for x in arrays
    ]
    return Forward(outputs, state, new_mean, new_var)


def backward(
    shards: Sequence[np.ndarray],
    head_grads: Sequence[np.ndarray],
    gamma: np.ndarray,
    state: Statistics,
) -> Gradients:
    """The gradient of all shards' losses with respect to each shard, and each shard's part of dgamma, dbeta.

    **Arguments:** the shards and `gamma` given to `forward`, the gradient of the loss with respect to each of
    its outputs (same shapes as the shards) and the statistics that it returned.

    **Returns:** `Gradients`. dgamma is zero where `scale` was false.

    **Raises:** `ValueError` where a head gradient is missing or of another shape than its shard.
    """
    arrays, axis = _checked(shards, state.axis)
    heads = [np.asarray(dy, np.float64) for dy in head_grads]
    if [dy.shape for dy in heads] != [x.shape for x in arrays]:
        raise ValueError(
            f"head_grads have shapes {[dy.shape for dy in heads]}, expected those of the shards, "
            f"{[x.shape for x in arrays]}"
        )

    xhats = [_normalised(x, state) for x in arrays]
    dbetas = [_rows(dy, axis).sum(0) for dy in heads]
    dgammas = [_rows(dy * xhat, axis).sum(0) for dy, xhat in zip(heads, xhats)]

    weight = np.asarray(gamma, np.float64) if state.scale else np.ones_like(state.var)
    factor = weight / np.sqrt(state.var + state.epsilon)
    if state.fixed:
        dxs = [_along(factor, x, axis) * dy for x, dy in zip(arrays, heads)]
    else:
        mean_dy = np.sum(dbetas, axis=0) / state.count
        mean_dy_xhat = np.sum(dgammas, axis=0) / state.count
        dxs = [
            _along(factor, dy, axis) * (dy - _along(mean_dy, dy, axis) - xhat * _along(mean_dy_xhat, dy, axis))
            for dy, xhat in zip(heads, xhats)
        ]
    if not state.scale:
        dgammas = [np.zeros_like(dgamma) for dgamma in dgammas]
    return Gradients(dxs, dgammas, dbetas)


def moments(shards: Sequence[np.ndarray], axis: int = 1) -> Tuple[np.ndarray, np.ndarray, int]:
    """Mean [C], biased variance [C] and number of values per channel over all shards.

    Two passes: the squares are taken of centred values, so that a large offset costs no digits.

    **Raises:** `ValueError` where all shards are empty.
    """
    arrays, axis = _checked(shards, axis)
    rows = [_rows(x, axis) for x in arrays]
    count = sum(r.shape[0] for r in rows)
    if count == 0:
        raise ValueError(f"shards of shapes {[x.shape for x in arrays]} hold no value, expected at least one")
    mean = np.sum([r.sum(0) for r in rows], axis=0) / count
    var = np.sum([((r - mean) ** 2).sum(0) for r in rows], axis=0) / count
    return mean, var, count


def _checked(shards: Sequence[np.ndarray], axis: int) -> Tuple[List[np.ndarray], int]:
    """The shards in float64 and the axis counted from the front."""
    arrays = [np.asarray(x, np.float64) for x in shards]
    if not arrays:
        raise ValueError("shards is empty, expected one array per replica")
    ndim = arrays[0].ndim
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis is {axis}, expected one of the {ndim} dimensions of the shards")
    axis %= ndim
    if len({(x.ndim, x.shape[axis] if x.ndim == ndim else None) for x in arrays}) != 1:
        raise ValueError(
            f"shards have shapes {[x.shape for x in arrays]}, expected the same number of dimensions and the "
            f"same extent along axis {axis}"
        )
    return arrays, axis


def _rows(x: np.ndarray, axis: int) -> np.ndarray:
    """The values as [values per channel, C]; the count is spelled out: -1 is ambiguous for an empty shard."""
    channels = x.shape[axis]
    count = int(np.prod([extent for dim, extent in enumerate(x.shape) if dim != axis]))
    return np.moveaxis(x, axis, -1).reshape(count, channels)


def _along(vector: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    """A [C] vector shaped to broadcast along `axis` of `x`."""
    return vector.reshape([-1 if dim == axis else 1 for dim in range(x.ndim)])


def _normalised(x: np.ndarray, state: Statistics) -> np.ndarray:
    inverse = 1 / np.sqrt(state.var + state.epsilon)
    return (x - _along(state.mean, x, state.axis)) * _along(inverse, x, state.axis)

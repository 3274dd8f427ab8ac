"""The specification against the definition in operators of MXNet, whose gradients are MXNet's own."""

from collections import Counter
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from permutations import derangement
from soak.case import draw
from soak.truth import Truth

from gluon_syncbn import reference


def leaves(arrays):
    made = [mx.np.array(array, dtype="float64") for array in arrays]
    for leaf in made:
        leaf.attach_grad()
    return made


def slots_of(case, x, mask):
    """Of each one with a value, the numbers of its elements and of those that count, ``[M, C]``."""
    numbers = np.moveaxis(np.arange(x.size).reshape(x.shape), case.axis, -1)
    counts = np.ones(x.shape) if mask is None else np.broadcast_to(case.wide(mask, x), x.shape)
    slots = [part.reshape(-1, case.channels) for part in np.array_split(numbers, case.slots)]
    return [(rows, rows[counts.ravel()[rows[:, 0]] != 0]) for rows in slots if rows.size]


def elements(x, numbers):
    return mx.np.take(x.reshape(-1), mx.np.array(numbers, dtype="int64"))


def statistic_of(parts):
    x = mx.np.concatenate(parts)
    mean = x.mean(0)
    return mean, ((x - mean) ** 2).mean(0), len(x)


def activated(case, z):
    if case.activation is None:
        return z
    y = mx.np.where(z > 0, z, (case.slope if case.activation == "leaky" else 0) * z)
    return mx.np.where(y < 6, y, 0 * z + 6) if case.activation == "relu6" else y


def by_autograd(case, truth, shards, addends, masks, permutation, heads):
    """The definition in operators of MXNet, and MXNet's gradients: outputs, gradients of data, addends, gamma and beta,
    and new running statistics, of each replica."""
    settings, count = case.settings, len(shards)
    xs, others = leaves(shards), leaves(shards if addends is None else addends)
    gammas, betas = leaves([truth.gamma if settings["scale"] else truth.weight] * count), leaves([truth.beta] * count)
    running = [[mx.np.array(near.value, dtype="float64") for near in truth.running[place]] for place in case.contexts]
    slots = [(i, *numbers) for i in range(count) for numbers in slots_of(case, shards[i], masks[i])]
    together = case.pooling.get("group_size", count)
    groups = case.pooling.get("groups", [range(i, i + together) for i in range(0, count, together)])
    group_of = {i: f"group {number}" for number, group in enumerate(groups) for i in group}
    pool_of = [group_of[i] if case.mode == "sync" else number for number, (i, *_) in enumerate(slots)]
    with autograd.record():
        parts, ys = {}, []
        for pool, (i, _, counting) in zip(pool_of, slots):
            if len(counting):
                parts.setdefault(pool, []).append(elements(xs[i], counting))
        pools = {pool: statistic_of(some) for pool, some in parts.items()}
        source = dict(zip(pools, [list(pools)[k] for k in permutation] if permutation else pools))
        for pool, (i, numbers, _) in zip(pool_of, slots):
            x = elements(xs[i], numbers)
            mean, var, *_ = running[i] if settings["use_global_stats"] else pools.get(source.get(pool), (x, 0 * x))
            z = gammas[i] * (x - mean) / mx.np.sqrt(var + settings["epsilon"]) + betas[i]
            ys.append(activated(case, z if addends is None else z + elements(others[i], numbers)))
    autograd.backward(ys, [mx.np.array(heads[i].ravel()[numbers], dtype="float64") for i, numbers, _ in slots])

    outputs, momentum = [np.zeros(x.size) for x in shards], float(np.float32(settings["momentum"]))
    for (i, numbers, _), y in zip(slots, ys):
        outputs[i][numbers] = y.asnumpy()
    for i, old in enumerate(running):
        own = [group_of[i]] if case.mode == "sync" else [pool for pool, (j, *_) in zip(pool_of, slots) if j == i]
        fed = [pools[pool] for pool in own if pool in pools and not settings["use_global_stats"]]
        for k in range(2 if fed else 0):
            factors = [n / max(n - 1, 1) if case.unbiased and k else 1 for *_, n in fed]
            batch = sum(pool[k] * factor for pool, factor in zip(fed, factors)) / len(fed)
            old[k] = momentum * old[k] + (1 - momentum) * batch
    gradients = [[leaf.grad for leaf in some] for some in (xs, others if addends else [], gammas, betas)]
    return outputs, *([array.asnumpy() for array in some] for some in (*gradients, *zip(*running)))


def assert_near(name, got, wants):
    """As near as the rounding of sums in another order lets it be."""
    for found, want in zip(got, wants):
        assert (np.abs(found.reshape(want.value.shape) - want.value) <= 8 * want.slack + 1e-13).all(), name


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_random_layers_are_those_of_the_definition(first):
    for seed in range(first, first + 100):
        case = draw(seed)
        exact = {"dtype": "float64", "offset": case.offset and 30.0}
        case = replace(case, **exact, addend=case.addend and "own", fused=False)
        shards, frozen = case.shards(), case.settings["use_global_stats"]
        addends, masks = None if case.addend is None else case.like(shards), case.masks(shards)
        gamma, beta = case.rng.uniform(0.5, 2, (2, case.channels)) * case.rng.choice((-1, 1), (2, case.channels))
        mean, var = case.rng.randn(case.channels), case.rng.uniform(0.5, 2, case.channels)
        shuffles = case.mode == "shuffle" and not frozen
        permutation = derangement(seed, 1, 2, 3, case.filled(shards, masks)) if shuffles else None
        truth, before = (Truth(case, gamma, beta, mean, var) for _ in range(2))
        forward = truth.forward(shards, addends, masks, permutation)
        # No gradient where rounding decides on which side of a kink of the activation a value is.
        heads = [case.rng.randn(*z.value.shape) * ~truth.undecided(z, 8) for z in forward.zs]
        wants = forward.ys, *truth.backward(forward, shards, heads), *zip(*truth.running.values())
        with mx.util.np_shape(True), mx.util.np_array(True):
            founds = by_autograd(case, before, shards, addends, masks, permutation, heads)
        for name, found, want in zip(("y", "x", "addend", "gamma", "beta", "mean", "var"), founds, wants):
            if name != "gamma" or case.settings["scale"]:
                assert_near(f"{name} of {case}", found, want)


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "local", "shuffle"])
def test_frozen_statistics_need_no_value_and_no_second_slot(mode, samples):
    shard, gamma, beta, mean, var = np.ones((samples, 3)), *np.arange(1, 13.0).reshape(4, 3)
    got = reference.forward([shard], gamma, beta, mean, var, use_global_stats=True, mode=mode)
    np.testing.assert_allclose(got.outputs[0], (shard - mean) * gamma / np.sqrt(var + 1e-5) + beta)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shards": [np.ones((0, 3)), np.ones((0, 3))]}, "hold no value"),
        ({"shards": [np.full((2, 3), np.nan)], "nonfinite": "error"}, "not finite"),
        ({"masks": [np.zeros((1, 1))]}, "hold no value"),
        ({"shards": [np.ones((0, 3))] * 2, "group_size": 1}, "hold no value"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    arguments = {"shards": [np.ones((2, 3))], "gamma": np.ones(3), "beta": np.ones(3)}
    arguments.update(running_mean=np.zeros(3), running_var=np.ones(3), axis=1)
    with pytest.raises(ValueError, match=message):
        reference.forward(**{**arguments, **change})


def test_a_derangement_is_that_of_the_same_formula_in_c():
    drawn = [3, 0, 5, 1, 14, 2, 9, 11, 4, 6, 13, 7, 8, 15, 12, 10]
    assert derangement(20250101, 12, 0, 3, 16) == drawn and derangement(2**64 - 1, 7, -1, 10**6, 5) == [4, 3, 1, 2, 0]


@pytest.mark.parametrize("varied", range(4))
def test_derangements_are_uniform_in_each_argument(varied):
    """The 9 derangements of 4, equally often. The bound is the 99.9 % quantile for 8 degrees of freedom."""
    base = [3, 1, 0, 5]
    counts = Counter(tuple(derangement(*base[:varied], value, *base[varied + 1 :], 4)) for value in range(4500))
    assert len(counts) == 9 and not any(i == j for p in counts for i, j in enumerate(p))
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 26.1

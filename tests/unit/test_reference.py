"""The specification against a second one that shares no code with it."""

import ast
import inspect
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from permutations import derangement
from soak.case import draw
from soak.tape import Value
from soak.truth import Truth

from gluon_syncbn import reference

THREE = [np.ones((2, 3))] * 3


def problem(shapes, axis=1, seed=0):
    """Shards of different distributions, random head gradients, parameters unlike 0 and 1."""
    rng = np.random.default_rng(seed)
    channels = shapes[0][axis]
    shards = [rng.normal(rng.normal(), 1 + k, shape) for k, shape in enumerate(shapes)]
    heads = [rng.normal(0.3, 1, shape) for shape in shapes]
    gamma, var = rng.uniform(0.5, 2, channels), rng.uniform(0.5, 2, channels)
    beta, mean = rng.normal(0, 1, channels), rng.normal(0, 1, channels)
    return shards, heads, gamma, beta, mean, var


def layer_of(seed):
    """A random layer that the specification knows, in float64."""
    case = draw(seed)
    exact = {"dtype": "float64", "offset": case.offset and 30.0}
    return replace(case, **exact, addend=case.addend and "own", fused=False)


def forward_of(case, truth, shards, addends, masks, permutation):
    kwargs = {**case.settings, **case.pooling}
    del kwargs["center"]
    kwargs["permutation"] = permutation
    if case.activation is not None:
        kwargs.update(slope=case.slope if case.activation == "leaky" else 0)
        kwargs.update(ceiling=6 if case.activation == "relu6" else np.inf)
    kwargs["momentum"] = float(np.float32(kwargs["momentum"]))
    mean, var = (value.data[:, 0].astype(float) for value in truth.running[case.contexts[0]])
    return reference.forward(shards, truth.gamma, truth.beta, mean, var, **kwargs, addends=addends, masks=masks)


def assert_near(got, want, times=8):
    """As near as the rounding of sums in another order lets it be."""
    assert (np.abs(got.reshape(want.data.shape) - want.data) <= times * want.slack + 1e-13).all()


def assert_same_layers(seeds):
    for seed in seeds:
        case = layer_of(seed)
        shards, frozen = case.shards(), case.settings["use_global_stats"]
        addends, masks = None if case.addend is None else case.like(shards), case.masks(shards)
        gamma, beta = case.rng.uniform(0.5, 2, (2, case.channels)) * case.rng.choice((-1, 1), (2, case.channels))
        truth = Truth(case, gamma, beta, case.rng.randn(case.channels), case.rng.uniform(0.5, 2, case.channels))
        slots = [
            (part if where is None else part[:, where]).size > 0
            for shard, mask in zip(shards, masks)
            for part, where in zip(truth.cut(shard), truth.counting(shard, mask))
        ]
        if not any(slots):
            continue  # the specification has no statistics of nothing
        shuffles = case.mode == "shuffle" and not frozen
        permutation = derangement(seed, 1, 2, 3, sum(slots)) if shuffles else None
        want = truth.forward(shards, addends, masks, permutation)
        got = forward_of(case, truth, shards, addends, masks, permutation)
        ys = [part for y in got.outputs for part in truth.cut(y)]
        for y, value in zip(ys, want.ys):
            assert_near(y, value)

        # No gradient where rounding decides on which side of a kink of the activation a value is.
        heads = [case.rng.randn(*y.shape) * ~truth.undecided(z, 8) for y, z in zip(ys, want.zs)]
        wanted = truth.backward(want, heads)
        given = reference.backward(shards, truth.joined(heads, shards), gamma, got)
        for found, values in ((given.dxs, wanted.xs), (given.daddends if addends else [], wanted.addends)):
            for part, value in zip([part for array in found for part in truth.cut(array)], values):
                assert_near(part, value)
        for i in range(len(shards)):
            if case.settings["scale"]:
                assert_near(given.dgammas[i], wanted.gammas[i])
            else:
                assert not given.dgammas[i].any()
            assert_near(given.dbetas[i], wanted.betas[i])
        truth.move(want)
        for i, context in enumerate(case.contexts if not frozen else []):
            for running, value in zip((got.running_mean[i], got.running_var[i]), truth.running[context]):
                assert_near(running, value)


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_random_layers_are_those_of_the_second_implementation(first):
    """tests/soak/truth.py, which shares no code with the specification; its gradients come from a tape."""
    assert_same_layers(range(first, first + 100))


def without_gradients(self, xs, statistic=Truth.statistic):
    found = statistic(self, xs)
    return found and found._replace(mean=Value(found.mean.data), variance=Value(found.variance.data))


#: What may be wrong with a layer, planted into a method of the second implementation.
FAULTS = {
    "all shards are as large": ("count", lambda self, xs: len(xs) * xs[0].data.shape[1]),
    "nothing flows through the statistics": ("statistic", without_gradients),
    "the other running variance": ("correction", lambda self, n: 1 if self.case.unbiased else n / max(n - 1, 1)),
    "the inverse permutation": ("sources", lambda self, permutation: np.argsort(permutation).tolist()),
    "running statistics of every slot": ("_moving", lambda self, of, moving=Truth._moving: moving(self, of[:1])),
    "everything counts": ("counted", lambda self, part: part.x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(monkeypatch, fault):
    """So the values that random layers are compared with can see it."""
    monkeypatch.setattr(Truth, *FAULTS[fault])
    with pytest.raises(AssertionError):
        assert_same_layers(range(100))


@pytest.mark.parametrize("mode", ["sync", "local", "shuffle"])
def test_frozen_statistics_need_no_value_and_no_second_slot(mode):
    shards, heads, *rest = problem([(0, 3, 5), (1, 3, 5)])
    for some in (slice(1), slice(1, 2)):
        got = reference.forward(shards[some], *rest, use_global_stats=True, mode=mode)
        gradients = reference.backward(shards[some], heads[some], rest[0], got)
        (x,), (dx,), (gamma, beta, mean, var) = shards[some], gradients.dxs, (one[:, None] for one in rest)
        scale = gamma / np.sqrt(var + 1e-5)
        np.testing.assert_allclose(got.outputs[0], (x - mean) * scale + beta, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(dx, heads[some][0] * scale, rtol=1e-11, atol=1e-11)


def test_arguments_are_not_changed():
    shards, heads, gamma, beta, mean, var = problem([(4, 3, 5), (2, 3, 5)])
    arguments = [*shards, *heads, gamma, beta, mean, var]
    before = [a.copy() for a in arguments]
    for kwargs in ({}, {"use_global_stats": True}, {"mode": "shuffle", "permutation": [1, 0]}):
        result = reference.forward(shards, gamma, beta, mean, var, **kwargs)
        grads = reference.backward(shards, heads, gamma, result)
        pools = [array for pool in result.pools for array in (pool.mean, pool.var)]
        for results in (result.outputs, result.running_mean, result.running_var, *grads, pools):
            for array in results:  # and are not part of what is returned
                array += 1
        for now, then in zip(arguments, before):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shards": []}, "shards have shapes .*expected at least one"),
        ({"shards": [np.ones((2, 3)), np.ones((2, 4))]}, r"shards have shapes .*\(2, 4\)"),
        ({"shards": [np.ones((2, 3)), np.ones((2, 3, 1))]}, "shards have shapes"),
        ({"shards": [np.ones((0, 3)), np.ones((0, 3))]}, "hold no value"),
        ({"shards": [np.full((2, 3), np.nan)], "nonfinite": "error"}, "not finite"),
        ({"axis": 2}, "axis 2 is out of bounds"),
        ({"gamma": np.ones(2)}, r"gamma has shape \(2,\), expected \(3,\)"),
        ({"running_var": np.ones((3, 1))}, "running_var has shape"),
        ({"masks": [np.ones((2, 3))]}, r"a mask has shape \(2, 3\), expected that of its shard, \(2, 3\), with 1"),
        ({"masks": [np.zeros((1, 1))]}, "hold no value"),
        ({"addends": [np.ones((2, 1))]}, r"addends have shapes \[\(2, 1\)\], expected those of the shards"),
        ({"shards": [np.ones((0, 3))] * 2, "group_size": 1}, "hold no value"),
        ({"mode": "shuffle", "permutation": [0]}, "of the 1 slots that hold a value"),
        ({"mode": "shuffle", "shards": [np.ones((1, 3)), np.ones((0, 3))], "virtual_devices": 3}, "of the 1 slots"),
        ({"mode": "shuffle", "shards": THREE}, "permutation is None, expected one without fixed points of the 3"),
        ({"mode": "shuffle", "shards": THREE, "permutation": [1, 0, 2]}, r"permutation is \[1, 0, 2\]"),
        ({"mode": "shuffle", "shards": THREE, "permutation": [1, 2, 1]}, r"permutation is \[1, 2, 1\]"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    arguments = {"shards": [np.ones((2, 3))], "gamma": np.ones(3), "beta": np.ones(3)}
    arguments.update(running_mean=np.zeros(3), running_var=np.ones(3), axis=1)
    with pytest.raises(ValueError, match=message):
        reference.forward(**{**arguments, **change})


def test_a_head_gradient_of_another_shape_is_named():
    shards, _, gamma, beta, mean, var = problem([(2, 3)])
    state = reference.forward(shards, gamma, beta, mean, var)
    with pytest.raises(ValueError, match=r"head_grads have shapes \[\(1, 3\)\]"):
        reference.backward(shards, [np.ones((1, 3))], gamma, state)


@pytest.mark.parametrize(
    "arguments, permutation",
    [  # from the same formula in C, on uint64_t
        ((0, 0, 0, 0, 2), [1, 0]),
        ((0, 0, 0, 0, 3), [2, 0, 1]),
        ((0, 0, -1, 0, 8), [7, 4, 6, 1, 2, 0, 5, 3]),
        ((1, 2, 3, 4, 8), [6, 5, 4, 0, 1, 3, 7, 2]),
        ((2**64 - 1, 7, -1, 1000000, 5), [4, 3, 1, 2, 0]),
        ((20250101, 12, 0, 3, 16), [3, 0, 5, 1, 14, 2, 9, 11, 4, 6, 13, 7, 8, 15, 12, 10]),
    ],
)
def test_derangements_are_the_same_everywhere(arguments, permutation):
    assert derangement(*arguments) == permutation


def test_derangements_have_no_fixed_point():
    rng = np.random.default_rng(0)
    for slots in range(2, 200):
        p = derangement(*map(int, rng.integers(2**64, size=2, dtype=np.uint64)), rng.integers(-1, 2), 2**64 - 1, slots)
        assert sorted(p) == list(range(slots))
        assert all(i != j for i, j in enumerate(p))


@pytest.mark.parametrize("varied", range(4))
def test_derangements_are_uniform_in_each_argument(varied):
    """The 9 derangements of 4, equally often. The bound is the 99.9 % quantile for 8 degrees of freedom."""
    base = [3, 1, 0, 5]
    counts = Counter(tuple(derangement(*base[:varied], value, *base[varied + 1 :], 4)) for value in range(4500))
    assert len(counts) == 9
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 26.1


@pytest.mark.parametrize("slots", [1, 0, -1])
def test_fewer_than_two_slots_have_no_derangement(slots):
    with pytest.raises(ValueError, match=f"slots is {slots}, expected at least two"):
        derangement(0, 0, 0, 0, slots)


def test_the_specification_needs_numpy_alone():
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(reference))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
    assert imported == {"numpy", "typing"}

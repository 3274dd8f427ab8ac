"""The specification against what does not share its code: definitions, differences, MXNet's own layer."""

import ast
import inspect

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluon_syncbn import reference

EPSILON = 1e-3


def problem(shapes, axis=1, seed=0):
    """Shards of different distributions, random head gradients, parameters unlike 0 and 1."""
    rng = np.random.default_rng(seed)
    channels = shapes[0][axis]
    shards = [rng.normal(rng.normal(), 1 + k, shape) for k, shape in enumerate(shapes)]
    heads = [rng.normal(0.3, 1, shape) for shape in shapes]
    gamma, var = rng.uniform(0.5, 2, channels), rng.uniform(0.5, 2, channels)
    beta, mean = rng.normal(0, 1, channels), rng.normal(0, 1, channels)
    return shards, heads, gamma, beta, mean, var


def loss(shards, heads, gamma, beta, mean, var, **kwargs):
    outputs = reference.forward(shards, gamma, beta, mean, var, **kwargs).outputs
    return sum(float((y * dy).sum()) for y, dy in zip(outputs, heads))


def difference(function, array, step=1e-5):
    """The central difference of `function()` in every element of `array`, changed in place and put back."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(*array.shape):
        value = array[index]
        array[index] = value + step
        above = function()
        array[index] = value - step
        gradient[index] = (above - function()) / (2 * step)
        array[index] = value
    return gradient


@st.composite
def shard_shapes(draw):
    """2 to 5 dimensions, any axis, one to four shards that differ in batch size and may be empty."""
    ndim = draw(st.integers(2, 5))
    axis = draw(st.integers(-ndim, ndim - 1))
    extents = draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim))
    batch = 0 if axis % ndim else 1  # the dimension that the shards split
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    shapes = []
    for size in sizes:
        shape = list(extents)
        shape[batch] = size
        shapes.append(tuple(shape))
    return shapes, axis, batch


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("use_global_stats", [False, True])
def test_gradients_are_those_of_finite_differences(scale, use_global_stats):
    shards, heads, gamma, beta, mean, var = problem([(2, 3, 2), (1, 3, 3), (3, 3, 1)])
    kwargs = {"epsilon": EPSILON, "scale": scale, "use_global_stats": use_global_stats}
    state = reference.forward(shards, gamma, beta, mean, var, **kwargs).state
    grads = reference.backward(shards, heads, gamma, state)

    def value():
        return loss(shards, heads, gamma, beta, mean, var, **kwargs)

    for shard, dx in zip(shards, grads.dxs):
        np.testing.assert_allclose(dx, difference(value, shard), atol=1e-8)
    np.testing.assert_allclose(sum(grads.dgammas), difference(value, gamma), atol=1e-8)
    np.testing.assert_allclose(sum(grads.dbetas), difference(value, beta), atol=1e-8)


def test_each_replica_keeps_its_own_part_of_dgamma_and_dbeta():
    """The part of a replica is what its own loss alone would give, its statistics held."""
    shards, heads, gamma, beta, mean, var = problem([(2, 3, 2), (1, 3, 2)])
    state = reference.forward(shards, gamma, beta, mean, var, epsilon=EPSILON).state
    both = reference.backward(shards, heads, gamma, state)
    only = reference.backward(shards, [heads[0], np.zeros_like(heads[1])], gamma, state)
    np.testing.assert_array_equal(both.dgammas[0], only.dgammas[0])
    np.testing.assert_array_equal(both.dbetas[0], only.dbetas[0])
    assert not only.dgammas[1].any()
    assert not only.dbetas[1].any()
    assert only.dxs[1].any(), "the loss of one replica reaches the input of the other through the statistics"


@settings(max_examples=150, deadline=None)
@given(case=shard_shapes(), seed=st.integers(0, 2**32 - 1))
def test_shards_are_one_concatenated_batch(case, seed):
    shapes, axis, batch = case
    shards, heads, gamma, beta, mean, var = problem(shapes, axis, seed)
    whole, head = np.concatenate(shards, batch), np.concatenate(heads, batch)
    kwargs = {"axis": axis, "epsilon": EPSILON, "momentum": 0.7}
    parts = reference.forward(shards, gamma, beta, mean, var, **kwargs)
    one = reference.forward([whole], gamma, beta, mean, var, **kwargs)
    part_grads = reference.backward(shards, heads, gamma, parts.state)
    one_grads = reference.backward([whole], [head], gamma, one.state)

    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(np.concatenate(parts.outputs, batch), one.outputs[0], **close)
    np.testing.assert_allclose(np.concatenate(part_grads.dxs, batch), one_grads.dxs[0], **close)
    np.testing.assert_allclose(sum(part_grads.dgammas), one_grads.dgammas[0], **close)
    np.testing.assert_allclose(sum(part_grads.dbetas), one_grads.dbetas[0], **close)
    np.testing.assert_allclose(parts.running_mean, one.running_mean, **close)
    np.testing.assert_allclose(parts.running_var, one.running_var, **close)
    assert [y.shape for y in parts.outputs] == [dx.shape for dx in part_grads.dxs] == shapes


@settings(max_examples=50, deadline=None)
@given(case=shard_shapes(), seed=st.integers(0, 2**32 - 1))
def test_statistics_are_the_definition(case, seed):
    """Against NumPy's own mean and var, and the running statistics against the formula."""
    shapes, axis, batch = case
    shards, _, gamma, beta, mean, var = problem(shapes, axis, seed)
    whole = np.concatenate(shards, batch)
    others = tuple(dim for dim in range(whole.ndim) if dim != axis % whole.ndim)
    result = reference.forward(shards, gamma, beta, mean, var, axis=axis, momentum=0.8)
    np.testing.assert_allclose(result.state.mean, whole.mean(others), atol=1e-12)
    np.testing.assert_allclose(result.state.var, whole.var(others), atol=1e-12)
    assert result.state.count == whole.size // whole.shape[axis]
    np.testing.assert_allclose(result.running_mean, 0.8 * mean + 0.2 * whole.mean(others), atol=1e-12)
    np.testing.assert_allclose(result.running_var, 0.8 * var + 0.2 * whole.var(others), atol=1e-12)


@pytest.mark.parametrize("axis, shape", [(1, (6, 3)), (1, (6, 3, 5)), (1, (6, 3, 4, 5)), (3, (6, 4, 5, 3))])
@pytest.mark.parametrize("scale", [True, False])
def test_equals_mxnet_batch_norm_on_one_device(axis, shape, scale):
    split = [(4, *shape[1:]), (2, *shape[1:])]
    shards, heads, gamma, beta, mean, var = problem(split, axis)
    momentum = 0.875  # MXNet keeps it in float32, where 0.9 is another number
    result = reference.forward(shards, gamma, beta, mean, var, axis=axis, momentum=momentum, scale=scale)
    grads = reference.backward(shards, heads, gamma, result.state)

    layer = mx.gluon.nn.BatchNorm(axis=axis, scale=scale, momentum=momentum, epsilon=1e-5, in_channels=3)
    layer.initialize()
    layer.cast("float64")
    for name, value in [("gamma", gamma), ("beta", beta), ("running_mean", mean), ("running_var", var)]:
        getattr(layer, name).set_data(mx.nd.array(value, dtype="float64"))
    x = mx.nd.array(np.concatenate(shards), dtype="float64")
    x.attach_grad()
    with mx.autograd.record():
        y = layer(x)
    y.backward(mx.nd.array(np.concatenate(heads), dtype="float64"))

    close = {"rtol": 1e-11, "atol": 1e-11}
    np.testing.assert_allclose(np.concatenate(result.outputs), y.asnumpy(), **close)
    np.testing.assert_allclose(np.concatenate(grads.dxs), x.grad.asnumpy(), **close)
    np.testing.assert_allclose(sum(grads.dbetas), layer.beta.grad().asnumpy(), **close)
    np.testing.assert_allclose(result.running_mean, layer.running_mean.data().asnumpy(), **close)
    np.testing.assert_allclose(result.running_var, layer.running_var.data().asnumpy(), **close)
    if scale:
        np.testing.assert_allclose(sum(grads.dgammas), layer.gamma.grad().asnumpy(), **close)
    else:
        assert not sum(grads.dgammas).any()


def test_global_statistics_equal_mxnet_and_stay():
    shards, heads, gamma, beta, mean, var = problem([(4, 3, 5), (2, 3, 5)])
    result = reference.forward(shards, gamma, beta, mean, var, use_global_stats=True)
    grads = reference.backward(shards, heads, gamma, result.state)
    np.testing.assert_array_equal(result.running_mean, mean)
    np.testing.assert_array_equal(result.running_var, var)

    arrays = [mx.nd.array(a, dtype="float64") for a in (np.concatenate(shards), gamma, beta, mean, var)]
    arrays[0].attach_grad()
    with mx.autograd.record():
        y = mx.nd.BatchNorm(*arrays, eps=1e-5, fix_gamma=False, use_global_stats=True)
    y.backward(mx.nd.array(np.concatenate(heads), dtype="float64"))
    np.testing.assert_allclose(np.concatenate(result.outputs), y.asnumpy(), atol=1e-11)
    np.testing.assert_allclose(np.concatenate(grads.dxs), arrays[0].grad.asnumpy(), atol=1e-11)


@pytest.mark.parametrize("offset", [1e5, -1e8])
def test_a_large_offset_costs_no_digits(offset):
    """Shifting the input shifts the mean and nothing else; the difference of raw moments would give noise."""
    shards, heads, gamma, beta, mean, var = problem([(4, 3, 5), (2, 3, 5)])
    shifted = [x + offset for x in shards]
    at_zero = reference.forward([x - offset for x in shifted], gamma, beta, mean, var)
    far = reference.forward(shifted, gamma, beta, mean, var)
    np.testing.assert_allclose(far.state.var, at_zero.state.var, rtol=1e-7)
    for near_dx, far_dx in zip(
        reference.backward([x - offset for x in shifted], heads, gamma, at_zero.state).dxs,
        reference.backward(shifted, heads, gamma, far.state).dxs,
    ):
        np.testing.assert_allclose(far_dx, near_dx, rtol=1e-5, atol=1e-6)


def test_an_empty_shard_changes_nothing():
    shards, heads, gamma, beta, mean, var = problem([(4, 3, 5), (2, 3, 5)])
    empty = np.zeros((0, 3, 5))
    without = reference.forward(shards, gamma, beta, mean, var)
    with_empty = reference.forward([shards[0], empty, shards[1]], gamma, beta, mean, var)
    np.testing.assert_array_equal(with_empty.state.var, without.state.var)
    assert with_empty.outputs[1].shape == (0, 3, 5)
    grads = reference.backward([shards[0], empty, shards[1]], [heads[0], empty, heads[1]], gamma, with_empty.state)
    assert grads.dxs[1].shape == (0, 3, 5)
    assert not grads.dgammas[1].any()
    assert not grads.dbetas[1].any()


def test_one_value_per_channel_gives_beta():
    """var is 0 then: finite, and no gradient reaches the input."""
    _, _, gamma, beta, mean, var = problem([(1, 3)])
    result = reference.forward([np.array([[5.0, -1.0, 2.0]])], gamma, beta, mean, var)
    np.testing.assert_array_equal(result.outputs[0][0], beta)
    dx = reference.backward([np.array([[5.0, -1.0, 2.0]])], [np.ones((1, 3))], gamma, result.state).dxs[0]
    assert not dx.any()


def test_arguments_are_not_changed():
    shards, heads, gamma, beta, mean, var = problem([(4, 3, 5), (2, 3, 5)])
    arguments = [*shards, *heads, gamma, beta, mean, var]
    before = [a.copy() for a in arguments]
    state = reference.forward(shards, gamma, beta, mean, var).state
    reference.backward(shards, heads, gamma, state)
    for now, then in zip(arguments, before):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shards": []}, "shards is empty"),
        ({"shards": [np.ones((2, 3)), np.ones((2, 4))]}, r"shards have shapes .*\(2, 4\)"),
        ({"shards": [np.ones((2, 3)), np.ones((2, 3, 1))]}, "shards have shapes"),
        ({"shards": [np.ones((0, 3)), np.ones((0, 3))]}, "hold no value"),
        ({"axis": 2}, "axis is 2"),
        ({"gamma": np.ones(2)}, r"gamma has shape \(2,\), expected \(3,\)"),
        ({"running_var": np.ones((3, 1))}, "running_var has shape"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    arguments = {"shards": [np.ones((2, 3))], "gamma": np.ones(3), "beta": np.ones(3)}
    arguments.update(running_mean=np.zeros(3), running_var=np.ones(3), axis=1)
    with pytest.raises(ValueError, match=message):
        reference.forward(**{**arguments, **change})


def test_a_head_gradient_of_another_shape_is_named():
    shards, _, gamma, beta, mean, var = problem([(2, 3)])
    state = reference.forward(shards, gamma, beta, mean, var).state
    with pytest.raises(ValueError, match=r"head_grads have shapes \[\(1, 3\)\]"):
        reference.backward(shards, [np.ones((1, 3))], gamma, state)


def test_the_specification_needs_numpy_alone():
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(reference))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
    assert imported == {"dataclasses", "numpy", "typing"}

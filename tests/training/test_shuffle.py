"""Sample shuffle: samples change places, features come back, and only what must move does."""

import math
import pickle
import re
from collections import Counter
from itertools import chain

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from gluon_syncbn.contrastive import SampleShuffle, ShuffleSampler, shuffle_shards, split_and_load

LENGTHS = (3, 1, 4, 2)  # of shards on devices


def numbered(n, *shape):
    """Samples that differ from each other in each value."""
    return np.arange(n * math.prod(shape), dtype="float32").reshape(n, *shape)


def assert_same(got, want):
    assert [g.ctx for g in got] == [w.ctx for w in want]
    for g, w in zip(got, want):
        assert type(g) is type(w) and g.dtype == w.dtype
        np.testing.assert_array_equal(g.asnumpy(), w.asnumpy())


@pytest.fixture
def kind(request):
    """Of data; where it begins with "np", under `npx.set_np`."""
    of_np = request.param.startswith("np")
    with mx.util.np_shape(of_np), mx.util.np_array(of_np):
        yield request.param


@pytest.fixture
def copies(monkeypatch):
    """(rows, from, to) of each copy from one context to another."""
    seen = []
    original = nd.NDArray.copyto

    def copyto(self, other):
        target = other if isinstance(other, mx.Context) else other.context
        seen.append((self.shape[0], self.context, target))
        return original(self, other)

    monkeypatch.setattr(nd.NDArray, "copyto", copyto)
    return seen


# ---- the order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, n", [(1, 11), (2, 12), (3, 11), (4, 12), (4, 4)])
@pytest.mark.parametrize("kind", ["nd", "float64", "uint8", "np", "np float32"], indirect=True)
@pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed")
def test_features_come_back_where_split_and_load_puts_their_samples(contexts, count, n, kind):
    data = numbered(n, 2, 3)
    if kind in ("nd", "np"):
        data = getattr(mx, kind).array(data, ctx=contexts[5], dtype="float16")
    else:
        data = data.astype(kind.split()[-1])
    shuffle = SampleShuffle(seed=3)
    for _ in range(3):
        batch = split_and_load(data, contexts[:count], even_split=n % count == 0, shuffle=shuffle)
        plain = gluon.utils.split_and_load(data, contexts[:count], even_split=False)
        assert [s.shape for s in batch.shuffled_shards] == [s.shape for s in plain]
        shuffled = np.concatenate([s.asnumpy() for s in batch.shuffled_shards])
        whole = data if isinstance(data, np.ndarray) else data.asnumpy()
        np.testing.assert_array_equal(shuffled, whole[batch.order])
        assert sorted(batch.order) == list(range(n))
        assert_same(batch.apply(lambda x: x), plain)
        assert_same(batch.apply(lambda x: x[:, 1, 1] * 2), [p[:, 1, 1] * 2 for p in plain])


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_samples_along_another_axis(contexts, axis):
    data = nd.array(np.moveaxis(numbered(7, 2, 3), 0, axis))
    plain = gluon.utils.split_and_load(data, contexts[:3], axis % 3, False)
    loaded = split_and_load(data, contexts[:3], axis, False, shuffle=SampleShuffle(4))
    moved = shuffle_shards(plain, axis, shuffle=SampleShuffle(4))
    assert_same(moved.shuffled_shards, loaded.shuffled_shards)
    whole = np.concatenate([s.asnumpy() for s in loaded.shuffled_shards], axis)
    np.testing.assert_array_equal(whole, np.take(data.asnumpy(), loaded.order, axis))
    for batch in (loaded, moved):
        features = batch.apply(lambda x: x.sum(axis=axis, exclude=True))
        assert_same(features, [p.sum(axis=axis, exclude=True) for p in plain])


def test_the_shards_are_no_list_that_a_training_loop_takes_by_accident(contexts):
    batch = split_and_load(numbered(4, 2), contexts[:2], shuffle=SampleShuffle(1))
    for use in (iter, len, lambda b: b[0], lambda b: zip(b, b)):
        with pytest.raises(TypeError):
            use(batch)


# ---- gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nd", "np"], indirect=True)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_are_those_without_shuffling(contexts, rng, count, kind):
    net = nn.Dense(4, in_units=3)
    net.initialize(mx.init.Normal(1), ctx=contexts[:count])
    net.cast("float64")
    array, places = getattr(mx, kind).array, list(zip(LENGTHS, contexts))[:count]
    shards = [array(rng.randn(n, 3), ctx=place, dtype="float64") for n, place in places]
    heads = [array(rng.randn(n, 4), ctx=place, dtype="float64") for n, place in places]

    def step(forward):
        for x in shards:
            x.attach_grad()
        with autograd.record():
            outputs = forward()
        autograd.backward(list(outputs), heads)
        weight = sum(g.asnumpy() for g in net.weight.list_grad())
        return [y.asnumpy() for y in outputs] + [x.grad.asnumpy() for x in shards] + [weight]

    want = step(lambda: [net(x) for x in shards])
    for seed in range(3):
        got = step(lambda: shuffle_shards(shards, shuffle=SampleShuffle(seed)).apply(net))
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-12 * np.abs(w).max())


# ---- the permutation --------------------------------------------------------------------------------


def test_permutations_are_fresh_reproducible_and_resumable():
    shuffle, again, other = SampleShuffle(7), SampleShuffle(7), SampleShuffle(8)
    drawn = [shuffle.permutation(32).tolist() for _ in range(5)]
    assert [again.permutation(32).tolist() for _ in range(5)] == drawn
    assert len({tuple(d) for d in drawn + [other.permutation(32).tolist()]}) == 6
    assert SampleShuffle(7, position=3).permutation(32).tolist() == drawn[3]
    assert shuffle.position == 5
    after = shuffle.permutation(32).tolist()
    assert pickle.loads(pickle.dumps(again)).permutation(32).tolist() == after
    again.position = 1
    assert again.permutation(32).tolist() == drawn[1]


def test_permutations_are_the_same_in_each_version():
    assert SampleShuffle(2**64 - 1, position=2**33).permutation(8).tolist() == [2, 4, 5, 1, 6, 0, 7, 3]
    sampler = ShuffleSampler(8, 2, 2, 1, seed=3)
    sampler.set_epoch(4)
    assert list(sampler) == [[(5, 3), (6, 2)], [(7, 7), (4, 4)]]


def test_no_other_generator_is_touched(contexts):
    np.random.seed(1)
    before = np.random.get_state()[1].tolist(), np.random.get_state()[2]
    split_and_load(numbered(8, 2), contexts[:2], shuffle=SampleShuffle(1))
    list(ShuffleSampler(8, 2, 2, 1, seed=3))
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before


# ---- what moves -------------------------------------------------------------------------------------


def crossing(order, lengths):
    """Which rows change shard, from the definition."""
    shard = [i for i, n in enumerate(lengths) for _ in range(n)]
    return sum(shard[place] != shard[sample] for place, sample in enumerate(order))


@pytest.mark.parametrize("seed", range(4))
def test_only_rows_that_change_device_move(contexts, rng, copies, seed):
    shards = [nd.array(rng.randn(n, 3), ctx=c, dtype="float64") for n, c in zip(LENGTHS, contexts)]
    copies.clear()
    batch = shuffle_shards(shards, shuffle=SampleShuffle(seed))
    want = crossing(batch.order, LENGTHS)
    assert 0 < want < sum(LENGTHS)
    assert sum(rows for rows, _, _ in copies) == want
    assert len({(a, b) for _, a, b in copies}) == len(copies)  # at most one for each pair of devices
    assert all(a != b for _, a, b in copies)
    there = Counter({(str(a), str(b)): rows for rows, a, b in copies})
    features = [x * 2 for x in batch.shuffled_shards]
    copies.clear()
    batch.unshuffle(features)
    assert Counter({(str(b), str(a)): rows for rows, a, b in copies}) == there


@pytest.mark.parametrize("count", [1, 2, 3])
def test_loading_moves_each_sample_once(contexts, copies, count):
    host, devices = contexts[7], contexts[:count]
    data = nd.array(numbered(9, 2), ctx=host)
    copies.clear()
    batch = split_and_load(data, devices, even_split=False, shuffle=SampleShuffle(6))
    assert sorted(copies, key=str) == sorted([(x.shape[0], host, x.context) for x in batch.shuffled_shards], key=str)
    copies.clear()
    split_and_load(numbered(9, 2), devices, even_split=False, shuffle=SampleShuffle(6))
    assert not copies  # each device's samples are gathered and loaded
    batch.apply(lambda x: x)
    assert sum(rows for rows, _, _ in copies) == crossing(batch.order, [len(x) for x in batch.shuffled_shards])


# ---- several processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [24, 31])
def test_keys_come_back_to_their_queries_from_other_processes(ranks, length):
    whole = 3 * ranks
    samplers = [ShuffleSampler(length, 3, ranks, rank, seed=5) for rank in range(ranks)]
    batches = length // whole
    table = np.random.RandomState(1).randn(length, 4)  # the feature of each sample
    orders = []
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        pairs = [list(sampler) for sampler in samplers]
        assert [len(p) for p in pairs] == [len(s) for s in samplers] == [batches] * ranks
        seen = []
        for batch in range(batches):
            queries = [[q for q, _ in pairs[rank][batch]] for rank in range(ranks)]
            keys = [[k for _, k in pairs[rank][batch]] for rank in range(ranks)]
            flat, flat_keys = list(chain(*queries)), list(chain(*keys))
            seen += flat
            assert [len(q) for q in queries] == [len(k) for k in keys] == [3] * ranks
            assert sorted(flat) == sorted(flat_keys)
            gathered = np.concatenate([table[k] for k in keys])
            for rank, sampler in enumerate(samplers):
                np.testing.assert_array_equal(sampler.restore(gathered, batch), table[queries[rank]])
                for array in (nd.array, mx.np.array):
                    got = sampler.restore(array(gathered, dtype="float64"), batch)
                    np.testing.assert_array_equal(got.asnumpy(), table[queries[rank]])
            orders.append((tuple(flat), tuple(flat_keys)))
        assert len(set(seen)) == len(seen) == length - length % whole
    assert len(set(orders)) == len(orders)
    if ranks > 1:
        assert len({tuple(map(flat.index, keys)) for flat, keys in orders[: length // whole]}) == length // whole
    assert list(samplers[0]) == pairs[0]  # the same epoch again
    other = ShuffleSampler(length, 3, ranks, 0, seed=6)
    other.set_epoch(1)
    assert list(other) != pairs[0]


def test_an_iterator_keeps_its_epoch():
    sampler = ShuffleSampler(24, 2, 2, 0, seed=1)
    first = list(sampler)
    under_way = iter(sampler)
    sampler.set_epoch(1)
    assert list(under_way) == first != list(sampler)


def test_gradients_go_through_restore(rng):
    """Of features that have been gathered; those that it gathers itself are mpi_worker.py's."""
    sampler, gathered, head = ShuffleSampler(6, 3, 2, 1, seed=1), nd.ones((6, 3)), rng.randn(3, 3)
    gathered.attach_grad()
    with autograd.record():
        keys = sampler.restore(gathered, 0)
    keys.backward(nd.array(head))
    want = np.zeros((6, 3))
    want[sampler.restore(np.arange(6), 0)] = head
    np.testing.assert_allclose(gathered.grad.asnumpy(), want, rtol=1e-6)


# ---- mistakes ---------------------------------------------------------------------------------------


def unshuffled(change):
    batch = split_and_load(numbered(7, 2), [mx.cpu(i) for i in range(3)], even_split=False, shuffle=SampleShuffle(1))
    batch.unshuffle(change([nd.ones((len(x), 2), ctx=x.context) for x in batch.shuffled_shards]))


REFUSED = SampleShuffle(1)  # draws nothing


def split(samples):
    split_and_load(numbered(samples, 2), [mx.cpu(0), mx.cpu(1)], shuffle=REFUSED)


def moved(shard):
    shuffle_shards([nd.ones((2, 2)), shard], shuffle=REFUSED)


def sampled(**changes):
    ShuffleSampler(**{"length": 20, "batch_size": 4, "num_workers": 2, "rank": 0, "seed": 1, **changes})


def restored(features):
    return ShuffleSampler(14, 3, 2, 0, seed=1).restore(features, 1)


ROWS = "expected 3 rows, those of this process in batch 1, or 6, all of them"
#: Beside what tests/unit/test_arguments.py has of each argument by itself.
MISTAKES = {
    "features: NDArray of shape (3, 2) and type float32 on cpu(0)": lambda: unshuffled(lambda f: f[0]),
    "features: list of 2 was given, expected a list of 3": lambda: unshuffled(lambda f: f[:2]),
    "features[1]: 3 was given, expected an NDArray": lambda: unshuffled(lambda f: [f[0], 3, f[2]]),
    "expected 2 rows on cpu(2)": lambda: unshuffled(lambda f: [*f[:2], nd.ones((3, 2), ctx=f[2].context)]),
    "expected 2 rows on cpu(1)": lambda: unshuffled(lambda f: [x.as_in_context(f[0].context) for x in f]),
    "expected samples like those of": lambda: unshuffled(lambda f: [f[0], nd.ones((2, 3), ctx=f[1].context), f[2]]),
    "data: 1 samples were given, expected at least 2": lambda: split(1),
    "data: 5 samples were given, expected a multiple of 2 or even_split=False": lambda: split(5),
    "shards[1]: numpy.ndarray of shape (2, 2) was given": lambda: moved(np.ones((2, 2))),
    "shards[1]: NDArray of shape (2, 2) and type uint8": lambda: moved(nd.ones((2, 2), dtype="uint8")),
    "shards[1]: mx.np.ndarray of shape (2, 2)": lambda: moved(mx.np.ones((2, 2))),
    "shards[1]: NDArray of shape (0, 2)": lambda: moved(nd.ones((2, 2))[1:1]),
    "length: 7 was given, expected at least 8": lambda: sampled(length=7),
    f"features: numpy.ndarray of shape (8, 2) was given, {ROWS}": lambda: restored(np.ones((8, 2))),
    "features: NDArray of shape (4, 2) and type float32": lambda: restored(nd.ones((4, 2))),
    "expected an NDArray, a list of them or a numpy.ndarray": lambda: restored([np.ones((3, 2))] * 2),
    "kvstore: this process is rank 0 of 1 in it": lambda: restored(nd.ones((3, 2))),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MISTAKES[said]()
    assert REFUSED.position == 0


def test_features_are_unshuffled_once(contexts):
    shuffle = SampleShuffle(1)
    one, other = (split_and_load(numbered(6, 2), contexts[:2], shuffle=shuffle) for _ in range(2))
    features = one.unshuffle([x * 2 for x in one.shuffled_shards])
    for batch in (one, other):
        with pytest.raises(ValueError, match="features: these have been unshuffled before"):
            batch.unshuffle(features)
    one.unshuffle([x * 2 for x in one.shuffled_shards])  # other features of the same batch

"""What is the same for all transports, over one between threads: the store, groups, and how a wait ends."""

import itertools
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from allreduce import allreduce, reach, sent
from moments import moments
from thread_transport import Job, everywhere

import gluon_syncbn
from gluon_syncbn import StepError, _native
from gluon_syncbn.settings import Settings
from gluon_syncbn.system import kinds

CHANNELS = 3


class Layer:
    """What a store knows of a layer. In a process, each rank has its own."""

    store, key = None, None

    def __init__(self, replicas=1, name="bn", channels=CHANNELS, **pooling):
        self.name, self.channels = name, channels
        self.contexts, self.settings = [mx.cpu()] * replicas, Settings(**pooling)

    def agrees(self, store, key, replicas):
        self.store, self.key = store, key


jobs = []  # of a test


@pytest.fixture(autouse=True)
def _jobs_end():
    yield
    while jobs:
        jobs.pop().end()


def stores(size):
    jobs.append(Job(size))
    return jobs[-1].stores


def sent_by(stores):
    return sum(sent(store.handle) for store in stores)


def packed(x):
    mean, var, count = moments([x])
    return np.concatenate([[count], mean, var * count])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8])
def test_moments_of_all_processes(size):
    rng = np.random.RandomState(0)
    shards = [1e4 + (rank + 1) * rng.randn(2 + rank % 2, CHANNELS, 3) for rank in range(size)]
    all_stores = stores(size)

    def work(store):
        return allreduce(store.handle, (0, -1, 0, 0, "bn", 60.0), packed(shards[store.rank]), True)

    totals = everywhere(all_stores, work)
    want = packed(np.concatenate(shards))
    for total in totals:
        np.testing.assert_array_equal(total, totals[0], err_msg="the same bits everywhere")
        np.testing.assert_allclose(total, want, rtol=1e-12)
    # Those of all for a prime number; of 6, a pair's and then those of three totals.
    assert sent_by(all_stores) == {1: 0, 2: 2, 3: 6, 5: 20, 6: 18, 8: 24}[size]


def test_a_script_that_pushes():
    (store,) = stores(1)
    with pytest.raises(ValueError, match="expected another store for a Module and for push: this one has pushpull"):
        store.init("accuracy", mx.nd.zeros(1))


GROUPS = [
    # replicas of each process, group_size, pairs of processes of which one needs the other's
    ([2, 2, 2], 2, 0),
    ([4, 2], 2, 0),
    ([1, 1, 1, 1], 2, 4),
    ([2, 1, 1], 2, 2),
    ([3, 3, 2], 4, 4),
    # the same with groups of named replicas
    ([1, 1, 1, 1], [[0, 2], [1, 3]], 4),
    ([2, 2], [[0, 2], [1, 3]], 2),
    ([2, 1, 2], [[0, 4], [1, 3], [2]], 2),
    ([1, 2, 1, 2], [[1, 5, 0], [2, 3], [4]], 8),
]


@pytest.mark.parametrize("replicas, named, messages", GROUPS, ids=str)
def test_groups_that_stay_at_home(replicas, named, messages):
    """The processes that share a group with one, and their rows, are all that it needs."""
    rng = np.random.RandomState(1)
    values = [rng.randn(n, 3) for n in replicas]
    pooling = Settings(**{"groups" if isinstance(named, list) else "group_size": named})
    all_values = np.concatenate(values)
    starts = np.cumsum([0, *replicas])
    if isinstance(named, int):
        named = [range(first, first + named) for first in range(0, sum(replicas), named)]
    needed = 0
    for rank in range(len(replicas)):
        ranks, members, groups, first = reach(pooling, replicas, rank)
        got = np.concatenate([values[other] for other in ranks])[members]
        own = slice(starts[rank], starts[rank + 1])
        np.testing.assert_array_equal(got[first : first + replicas[rank]], all_values[own])
        for i in range(replicas[rank]):  # the group of each replica, in the order of the ranks
            (in_group,) = [sorted(group) for group in named if starts[rank] + i in group]
            np.testing.assert_array_equal(got[groups == groups[first + i]], all_values[in_group])
        needed += len(ranks) - 1
    assert needed == messages


def agreed(layers, calls=((0,), (0,)), eager=False):
    """The numbers that the processes agree on, of the layers that each of them calls, or the error of each. ``eager``:
    rank 1 initialises a layer when it is called.
    """

    def work(store):
        own = layers[store.rank]
        for number in calls[store.rank]:
            placed = own[: number + 1] if eager and store.rank == 1 else own
            while own[number].store is not store:
                store.agree(own[number], placed, len(placed) < len(own))
        return [own[number].key for number in calls[store.rank]]

    return everywhere(stores(2), work)


NETS = [
    # the settings of the layer of each rank, and what the error has
    ([{"groups": ((0, 2),)}] * 2, ["expected each of the 4 replicas in one group: no group has rank 2, 3"]),
    ([{"groups": ((0, 2), (1, 3), (4,))}] * 2, ["of the 4 replicas in one group: there is no replica of rank 4"]),
    (
        [{"groups": ((0, 2), (1, 3))}, {"groups": ((0, 3), (1, 2))}],
        ["disagree about the net", "groups ((0, 2), (1, 3))), number 1 of its kind on rank 0", "(1, 2))), number 1"],
    ),
    ([{"channels": 5}, {"channels": 6}], ["disagree about the net", "(5 channels", "(6 channels"]),
]


@pytest.mark.parametrize("settings, expected", NETS, ids=str)
def test_nets_that_do_not_fit(settings, expected):
    for error in agreed([[Layer(2, **one)] for one in settings]):
        assert all(text in str(error) for text in expected), error


def test_layers_that_one_process_alone_has(caplog):
    """Rank 0 has copies that do not train. The layers meet that are called, if all call them in one order."""

    def made():  # bn9, bn10 and their copies
        return [[Layer(name=f"bn{number % 2 + 9}") for number in range(4)], [Layer(name=f"bn{n}") for n in range(2)]]

    assert agreed(made(), [[0, 1], [0, 1]]) == [[0, 1]] * 2
    assert agreed(made(), [[1, 0], [1, 0]]) == [[0, 1]] * 2
    assert sum("the processes have different layers: layer 3 is" in one for one in caplog.messages) == 4
    for error in agreed(made(), [[0, 1], [1, 0]]):
        assert "the processes disagree about the net: layer 1 is SyncBatchNorm 'bn" in str(error)
        assert "number 1 of its kind" in str(error) and "number 2 of its kind" in str(error)


def test_layers_that_one_process_has_earlier(caplog):
    layers = [[Layer(name=f"bn{number}") for number in range(3)] for _ in range(2)]
    assert agreed(layers, [range(3)] * 2, eager=True) == [[0, 1, 2]] * 2
    assert not caplog.messages


@pytest.mark.parametrize(
    "send, values, expected",
    [
        (lambda store, value: store.allgather("a", value), [mx.nd.ones(3), np.array([object()])], "array: .* a NumPy "),
        (lambda store, value: store.pushpull("a", value), [np.ones(3), []], "value: .* expected an array of MXNet's"),
        (lambda store, value: store.broadcast("a", mx.nd.ones(3), value), [np.ones(3), []], "out: .* of MXNet's"),
    ],
    ids=["allgather", "pushpull", "broadcast"],
)
def test_what_is_no_array(send, values, expected):
    (store,) = stores(1)
    for value in (1.0, [1, 2], *values):
        with pytest.raises(ValueError, match=expected):
            send(store, value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_sums_of_all_processes(dtype, contexts):
    """Over two contexts of each, in the order of the ranks, to the bit; of numbers that float64 does not have, too."""
    all_stores, rng = stores(3), np.random.RandomState(2)
    kind = kinds.BFLOAT16 if dtype == "bfloat16" else dtype
    wide = {"float64": dtype, "int32": "int64", "int64": dtype}.get(dtype, "float32")
    values = rng.randint(-9, 9, (3, 2, 4, 2)) * (2**53 + 1 if wide == dtype == "int64" else 1.1)
    frameworks = [mx.nd, mx.np] if dtype == "float32" else [mx.nd]

    def given(rank, of=mx.nd):
        source = "int64" if dtype == "int64" else "float64"
        return [of.array(values[rank, k], ctx=contexts[k], dtype=source).astype(kind) for k in range(2)]

    def work(store):
        store.meet()
        found = []
        for of in frameworks:
            own = given(store.rank, of)
            store.pushpull("weight", own)
            out, first = of.zeros((4, 2)), [of.zeros((4, 2), ctx=context).astype(kind) for context in contexts[:2]]
            store.pushpull("apart", given(store.rank, of), out=out)
            store.broadcast("weight", given(store.rank, of)[0], first)
            found.append([[array.astype(wide).asnumpy() for array in arrays] for arrays in (own, [out], first)])
        return found

    parts = [sum(array.astype(wide).asnumpy() for array in given(rank)) for rank in range(3)]
    total = mx.nd.array(parts[0] + parts[1] + parts[2], dtype=wide)
    want = total.astype(kind).astype(wide).asnumpy()
    for found in everywhere(all_stores, work):
        for own, (apart,), first in found:
            assert all((array == want).all() for array in own)
            np.testing.assert_array_equal(apart, total.astype("float32").astype(wide).asnumpy())
            assert all((array == given(0)[0].astype(wide).asnumpy()).all() for array in first)
    # Machines, then two sums and a broadcast.
    assert sent_by(all_stores) == 6 + len(frameworks) * (2 * 6 + 6)


class Trainer:
    """What a store knows a Trainer by."""

    _optimizer = mx.optimizer.SGD()


def test_gradients_that_other_arrays_replace():
    """What was prepared for the arrays of a step serves the next one, but no other arrays."""
    all_stores = stores(2)

    def work(store):
        store.meet()
        trainer, found = Trainer(), []
        arrays = [mx.nd.ones(3), mx.nd.ones((2, 2))]
        for step in range(4):
            if step == 2:
                arrays[1] = mx.nd.ones(5, dtype="float64")
            for array in arrays:
                array[:] = 1 + store.rank + step
            store.add_gradients(trainer, {f"weight{i}": [array] for i, array in enumerate(arrays)})
            found.append([array.asnumpy() for array in arrays])
        return found

    for found in everywhere(all_stores, work):
        for step, arrays in enumerate(found):
            assert [array.shape for array in arrays] == [(3,), (2, 2) if step < 2 else (5,)]
            assert all((array == 3 + 2 * step).all() for array in arrays)


@pytest.mark.parametrize("size", [2, 3])
def test_trainers_in_any_order(size):
    """Arrays of any type and length, on two contexts, some of which share a bucket, and some of which take several."""
    all_stores, types = stores(size), ["float16", "float32", "float64", "float32"]
    rng = np.random.RandomState(3)
    lengths = [[3, 300_001, 70_000, 1], [600_000, 1, 2, 9], [30_000] * 20]  # of each Trainer
    values = [[rng.randint(-9, 9, (size, 2, n)) for n in of_one] for of_one in lengths]

    def work(store):
        trainers, random = [Trainer() for _ in lengths], np.random.RandomState(store.rank)
        for trainer in trainers:
            store.expect(trainer)
        for _ in range(3):
            given = [
                {str(i): [mx.nd.array(x, dtype=kind) for x in one[store.rank]] for i, (kind, one) in enumerate(each)}
                for each in (list(zip(types if len(one) == 4 else len(one) * ["float32"], one)) for one in values)
            ]
            for number in random.permutation(len(trainers)):
                store.add_gradients(trainers[number], given[number])
            for arrays, want in zip(given, values):
                for both, one in zip(arrays.values(), want):
                    assert all((array.asnumpy() == one.sum((0, 1))).all() for array in both)
        return True

    assert everywhere(all_stores, work) == [True] * size


def test_a_trainer_without_a_communicator():
    """As MPICH's 2,046th in a process."""

    def work(store):
        array = mx.nd.ones(3)
        with pytest.raises(StepError, match=r"step 1 of trainer 1 gets no communicator: MPI reports error 16\. "):
            store.add_gradients(Trainer(), {"weight": [array]})
            array.asnumpy()
        return True

    all_stores = stores(2)
    jobs[-1].fail(0, "MPI_Comm_idup", 16)
    assert everywhere(all_stores, work) == [True] * 2


# ---- how a wait ends -----------------------------------------------------------------------------------------


def test_time_is_up():
    gluon_syncbn.configure(timeout=0.3)
    late, other, _ = stores(3)
    with pytest.raises(mx.MXNetError, match=r"rank 0 of 3 waits for rank 1, 2 in exchange 7, round 1 after 0\.3 s\. A"):
        late.allgather(7, np.ones(2))
    first = r"nothing is exchanged any more\. Start the job again\. The first error was: rank 0 of 3 waits for rank 1"
    with pytest.raises(mx.MXNetError, match=first):
        late.allgather(7, np.ones(2))
    gluon_syncbn.configure(timeout=60)
    failed = r"rank 0 of 3 has failed: rank 0 of 3 waits .*\(rank 1 was in exchange 8, round 1\)"
    with pytest.raises(mx.MXNetError, match=failed):
        other.allgather(8, np.ones(2))


def test_a_step_that_failed_ends_a_wait():
    store = stores(2)[0]
    _native.fail("KeyboardInterrupt left the recorded step.")
    with pytest.raises(mx.MXNetError, match="KeyboardInterrupt left the recorded step"):
        store.allgather(7, np.ones(2))


def test_an_error_of_mpi():
    """The others hear of it, and no array is a sum."""

    def work(store):
        store.meet()
        array = mx.nd.ones(3)
        try:
            store.add_gradients(Trainer(), {"weight": [array]})
            array.asnumpy()
        finally:
            while not (failure := _native.fate_of(store.handle, 1)):
                pass
            failures.append(failure)

    stores_of_job, failures = stores(2), []
    jobs[-1].fail(1, "MPI_Iallreduce", 16)
    assert all(isinstance(error, mx.MXNetError) for error in everywhere(stores_of_job, work))
    assert failures == ["has failed: MPI reports error 16"] * 2


FAULTS = {
    None: "",
    "fails": "rank {last} of {size} has failed: the disk is full",
    "ends": "rank {last} of {size} has ended (rank",
    "skips": "one of them has skipped or repeated a step",
}


@pytest.mark.parametrize("fault, size", itertools.product(FAULTS, (2, 3, 5)))
def test_a_rank_that_goes(fault, size):
    """All others have an error that says why. Before, vectors of any length are added, in any order of the layers."""
    lengths, all_stores = [1, 7, 300, 4097, 20_000], stores(size)
    vectors = [np.random.RandomState(rank).randn(20_004) for rank in range(size)]

    def work(store):
        def add(layer):
            number = step + (fault == "skips" and step == 2 and store.rank == size - 1)
            row = vectors[store.rank][step:][: lengths[layer]]
            return allreduce(store.handle, (layer, -1, number, 0, f"layer{layer}", 60.0), row)

        for step in range(4):
            if step == 2 and store.rank == size - 1 and fault in ("fails", "ends"):
                store.fail("the disk is full") if fault == "fails" else _native.processes_ended(store.handle)
                break
            order = list(map(int, np.random.RandomState([store.rank, step]).permutation(len(lengths))))
            with ThreadPoolExecutor(len(order)) as pool:
                for layer, total in zip(order, pool.map(add, order)):
                    want = sum(vector[step:][: lengths[layer]] for vector in vectors)
                    np.testing.assert_allclose(total, want, rtol=1e-12, atol=1e-12)

    errors = everywhere(all_stores, work)
    text = FAULTS[fault].format(last=size - 1, size=size)
    for error in errors[: size - 1]:
        assert (error is None) is (fault is None), error
        assert fault is None or text in str(error), error


@pytest.mark.parametrize(
    "ends, told",
    [(True, "rank 1 of 2 has ended (rank 0 was in {}"), (False, "rank 0 of 2 waits for rank 1 in {} after 2.5 s")],
)
def test_a_rank_that_does_not_come_to_a_sum(ends, told):
    gluon_syncbn.configure(timeout=20 if ends else 0.5)  # what it has sent before its end has 5 s to arrive

    def work(store):
        trainer, array = Trainer(), mx.nd.ones(3)
        for _ in range(2 - store.rank):
            store.add_gradients(trainer, {"weight": [array], "bias": [mx.nd.ones(1)]})
            array.asnumpy()
        if ends and store.rank == 1:
            _native.processes_ended(store.handle)

    error = everywhere(stores(2), work)[0]
    assert told.format("the gradient of 'weight' and 1 more, step 2 of trainer 1") in str(error)


def test_a_message_that_mpi_refuses():
    """Its request is none, and nobody asks for its end."""
    store, _ = stores(2)
    jobs[-1].fail(0, "MPI_Isend", 16)
    for _ in range(2):
        with pytest.raises(mx.MXNetError, match="MPI reports error 16"):
            store.allgather("something", np.zeros(2))
    jobs[-1].fail(0, "MPI_Isend", 0)


def gradients_that_differ(store):
    trainer = Trainer()
    for last in (1, 1 + store.rank // 2):
        gradients = {f"bn{10 * store.rank}_{i}": [mx.nd.ones(1)] for i in range(3)}
        gradients["last"] = [mx.nd.ones(last)]
        store.add_gradients(trainer, gradients)
        gradients["last"][0].asnumpy()


def a_rank_that_does_not_come(store):
    """Those who wait for it may be some hops away."""
    if store.rank != 1:
        allreduce(store.handle, (0, -1, 0, 0, "bn", 2.0), np.ones(3))


def another_length(store):
    """What another process sends is never read past its end."""
    allreduce(store.handle, (0, -1, 0, 0, "bn", 60.0), np.ones(7 if store.rank else 11))


def another_size_or_type(store):
    store.allgather(7, np.ones(3, "float32") if store.rank else np.ones(2))


WAITS = r"waits for rank 1(, through rank [0-9, ]+,)? in the forward"
LENGTHS = (
    r"in the forward of call 1 of SyncBatchNorm 'bn', rank [01] sent (7|11) values where rank [01] has (7|11)\. All "
    "processes must build the same net"
)
DIFFER = (
    r"their arrays in the gradient of 'bn\d+_0' and 3 more, step 2 of trainer 1: the gradient of 'last' \(2 values of "
    r"float32\) on rank 2 and the gradient of 'last' \(1 values of float32\) on rank 0\. Build"
)


@pytest.mark.parametrize(
    "work, sizes, told",
    [
        (gradients_that_differ, [3], DIFFER),
        (a_rank_that_does_not_come, [3, 6, 8], WAITS),
        (another_length, [2, 4], LENGTHS),
        (another_size_or_type, [2], "values of float.*All processes must build the same net and cast it alike"),
    ],
)
def test_what_every_rank_learns(work, sizes, told):
    for size in sizes:
        for rank, error in enumerate(everywhere(stores(size), work)):
            assert re.search(told, str(error)) or (work, rank) == (a_rank_that_does_not_come, 1), error


def test_an_exchange_has_one_limit():
    """Of four ranks, rank 2 needs rank 3, which is late, and then rank 0, which comes when rank 2 has given up."""
    failed = threading.Event()

    def work(store):
        if store.rank == 0:
            failed.wait(6)
        elif store.rank == 3:
            failed.wait(1.5)
        try:
            allreduce(store.handle, (0, -1, 0, 0, "bn", 2.0 if store.rank == 2 else 60.0), np.ones(3))
        except mx.MXNetError:
            failed.set()
            raise

    error = everywhere(stores(4), work)[2]
    assert "rank 2 of 4 waits for rank 0 in the forward of call 1 of SyncBatchNorm 'bn' after 3 s" in str(error)


def test_a_child_of_a_fork_is_no_member():
    store, _ = stores(2)
    child = os.fork()
    if child == 0:
        try:
            told = "this process was forked from rank 0 of 2 and is no member of its job"
            with pytest.raises(mx.MXNetError, match=told):
                store.allgather("something", np.zeros(2))
            store.fail("nothing to tell")
            store.close()
            assert _native.fate_of(store.handle, 0) == ""
            os._exit(5)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 5 << 8
    assert not any(_native.fate_of(store.handle, rank) for rank in range(2))

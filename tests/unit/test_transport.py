"""What is the same for all transports, over one between threads: the store, groups, and how a wait ends."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from thread_transport import Post, ThreadTransport

import gluon_syncbn
from gluon_syncbn import _native, reference
from gluon_syncbn.exchange import base
from gluon_syncbn.exchange import store as store_module
from gluon_syncbn.exchange.base import LayerInfo
from gluon_syncbn.exchange.store import ProcessStore
from gluon_syncbn.exchange.transport import Label
from gluon_syncbn.exchange.waiting import Wait
from gluon_syncbn.training.session import session

CHANNELS = 3


@pytest.fixture
def layer_id():
    """Of a layer in the native core, for its time limit."""
    number = _native.layer_create("bn", 0, 1, 0)
    yield number
    _native.layer_drop(number)


def stores(size):
    post = Post(size)
    return post, [ProcessStore("threads", ThreadTransport(post, rank)) for rank in range(size)]


def everywhere(stores, work):
    """``work(rank, store)`` in a thread for each rank; the results in their order."""
    with ThreadPoolExecutor(len(stores)) as pool:
        jobs = [pool.submit(work, rank, store) for rank, store in enumerate(stores)]
        return [job.exception() or job.result() for job in jobs]


def info(layer_id, replicas, **pooling):
    settings = {"mode": "sync", "virtual_devices": 1, "group_size": None, **pooling}
    return LayerInfo(layer_id, "bn", [], replicas, CHANNELS, **settings)


def moments(x):
    mean, var, count = reference.moments([x])
    return np.concatenate([[count], mean, var * count])


def ticket(layer_id, phase=0, call=0):
    return _native.Ticket(layer_id, -1, call, phase)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_moments_of_all_processes(layer_id, size):
    rng = np.random.RandomState(0)
    shards = [[1e4 + (rank + 1) * rng.randn(2 + i, CHANNELS, 3) for i in range(1 + rank % 2)] for rank in range(size)]
    post, all_stores = stores(size)

    def work(rank, store):
        layer = info(layer_id, len(shards[rank]))
        store.learn([layer])
        assert store.knows(layer)
        return store.merge(layer, ticket(layer_id), np.stack([moments(x) for x in shards[rank]]))

    totals = everywhere(all_stores, work)
    want = moments(np.concatenate([x for own in shards for x in own]))
    for total in totals:
        np.testing.assert_array_equal(total.values, totals[0].values, err_msg="the same bits everywhere")
        np.testing.assert_allclose(total.values, want, rtol=1e-12)
        assert total.key == 0
    assert post.sent == {"agreement": size * (size - 1), "statistics": size * (size - 1)}


GROUPS = [
    # replicas of each process, group_size, pairs of processes of which one needs the other's
    ([2, 2, 2], 2, 0),
    ([4, 2], 2, 0),
    ([1, 1, 1, 1], 2, 4),
    ([1, 1, 1, 1], 4, 12),
    ([2, 1, 1], 2, 2),
    ([3, 3, 2], 4, 4),
    ([3, 1, 2, 2], 4, 4),
    ([1, 3, 1, 3], 2, 4),
    # the same with groups of named replicas
    ([1, 1, 1, 1], [[0, 2], [1, 3]], 4),
    ([1, 1, 1, 1], [[0, 3], [1], [2]], 2),
    ([2, 2], [[0, 2], [1, 3]], 2),
    ([2, 2], [[0, 1], [2], [3]], 0),
    ([2, 1, 2], [[0, 4], [1, 3], [2]], 2),
    ([1, 2, 1, 2], [[1, 5, 0], [2, 3], [4]], 8),
]


@pytest.mark.parametrize("replicas, named, messages", GROUPS, ids=str)
@pytest.mark.parametrize("partial", [True, False])
def test_groups_that_stay_at_home(layer_id, monkeypatch, replicas, named, messages, partial):
    """Only processes that share a group exchange something, and all get what they would get from all."""
    monkeypatch.setattr(ThreadTransport, "partial", partial)
    rng = np.random.RandomState(1)
    length = 1 + 2 * CHANNELS
    values = [rng.randn(n, length) for n in replicas]
    post, all_stores = stores(len(replicas))

    def work(rank, store):
        layer = info(layer_id, replicas[rank], **{"groups" if isinstance(named, list) else "group_size": named})
        store.learn([layer])
        forward = store.gather(layer, ticket(layer_id), values[rank].reshape(1, -1))
        backward = store.gather(layer, ticket(layer_id, phase=1), values[rank][:, 1:].reshape(1, -1))
        return forward, backward

    results = everywhere(all_stores, work)
    all_values = np.concatenate(values)
    starts = np.cumsum([0, *replicas])
    if isinstance(named, int):
        named = [range(first, first + named) for first in range(0, sum(replicas), named)]
    for rank, (forward, backward) in enumerate(results):
        own = slice(starts[rank], starts[rank + 1])
        for total, width, want in ((forward, length, all_values), (backward, length - 1, all_values[:, 1:])):
            got = total.values.reshape(-1, width)
            first = total.first // width
            np.testing.assert_array_equal(got[first : first + replicas[rank]], want[own])
            for i in range(replicas[rank]):  # the group of each replica, in the order of the ranks
                (members,) = [sorted(group) for group in named if starts[rank] + i in group]
                np.testing.assert_array_equal(got[total.groups == total.groups[first + i]], want[members])
    everybody = len(replicas) * (len(replicas) - 1)
    assert post.sent["statistics"] == 2 * (messages if partial or messages == 0 else everybody)


@pytest.mark.parametrize(
    "pooling, expected",
    [
        ({"group_size": 2}, "group_size: 2 was given, expected all 3 devices in every step, not 2"),
        ({"group_size": 3}, "group_size: 3 was given, expected a divisor of the 2 devices of this step"),
        ({"groups": ((0, 5), (1, 2, 3, 4))}, "expected all 3 devices of this process in every step, not 2"),
        ({"groups": ((0, 1, 2), (3, 4, 5))}, "expected all 3 devices of this process in every step, not 2"),
    ],
    ids=str,
)
def test_groups_and_fewer_devices(layer_id, pooling, expected):
    _, all_stores = stores(2)

    def work(rank, store):
        layer = info(layer_id, 3, **pooling)
        store.learn([layer])
        return store.gather(layer, ticket(layer_id), np.zeros((1, 2 * (1 + 2 * CHANNELS))))

    for error in everywhere(all_stores, work):
        assert isinstance(error, ValueError)
        assert expected in str(error)


@pytest.mark.parametrize(
    "groups, expected",
    [
        (((0, 2),), "expected each of the 4 replicas in one group: no group has rank 2, 3"),
        (((0, 2), (1, 3), (4,)), "expected each of the 4 replicas in one group: there is no replica of rank 4"),
    ],
    ids=str,
)
def test_groups_of_other_replicas(layer_id, groups, expected):
    for error in everywhere(stores(2)[1], lambda rank, store: store.learn([info(layer_id, 2, groups=groups)])):
        assert isinstance(error, ValueError)
        assert expected in str(error)


def test_other_groups_in_another_process(layer_id):
    groups = [((0, 2), (1, 3)), ((0, 3), (1, 2))]
    for error in everywhere(stores(2)[1], lambda rank, store: store.learn([info(layer_id, 2, groups=groups[rank])])):
        assert "the processes disagree about the net" in str(error)
        assert all(f"groups {[*map(list, one)]}) on rank {rank}" in str(error) for rank, one in enumerate(groups))


# ---- GPUs of several processes -------------------------------------------------------------------------------


@pytest.fixture
def no_gpus(monkeypatch):
    """What is asked of GPUs here; nothing is computed."""
    monkeypatch.setattr(_native, "nccl_problem", lambda: "")
    monkeypatch.setattr(store_module.cuda, "identity", lambda number: f"{threading.get_ident()} {number}")


def ticket_of(layer, call=0, timeout=60.0):
    return _native.Ticket(layer, -1, call, 0, f"layer {layer}".encode(), timeout)


def turn_of(turn):
    """(number, clique, world, first), the id, the counts."""
    return (turn.number, turn.clique, turn.world, turn.first), turn.identity, turn.counts


@contextmanager
def registered(count, **settings):
    """Layers of the native core that all stores of this process find."""
    layers = [_native.layer_create("bn", 0, 1, 0) for _ in range(count)]
    infos = [LayerInfo(i, "bn", [mx.gpu(0)], 1, CHANNELS, "sync", 1, None)._replace(**settings) for i in layers]
    for one in infos:
        session.register(one, None)
    yield infos
    for layer in layers:
        del session._layers[layer]
        _native.layer_drop(layer)


@pytest.mark.parametrize("replicas", [[1, 2], [2, 2, 1]], ids=str)
def test_turns_are_the_same_everywhere(no_gpus, replicas):
    """Calls come in another order in each process; all find the same order, and in it who takes part with how much."""
    _, all_stores = stores(len(replicas))

    def work(rank, store):
        contexts = [mx.gpu(i) for i in range(replicas[rank])]
        infos = [one._replace(contexts=contexts, replicas=len(contexts)) for one in layers]
        store.learn(infos)
        turns = _native.Turns(store.handle)

        def one(i):
            assert store.gpus_of_all_processes(infos[i]) == sum(replicas)
            here = 1 if i % 2 else replicas[rank]  # with the first GPU of each alone: another clique
            counts = np.array([[10 * i + rank + 0.5 * device, 0] for device in range(here)])
            return turn_of(turns.next(ticket_of(layers[i].id), range(here), counts))

        with ThreadPoolExecutor(8) as pool:
            jobs = {int(i): pool.submit(one, i) for i in np.random.RandomState(rank).permutation(8)}
            return [jobs[i].result(60) for i in range(8)]

    with registered(8) as layers:
        ranks = everywhere(all_stores, work)
    assert sorted(head[0] for head, _, _ in ranks[0]) == list(range(8))
    for i in range(8):
        here = [1] * len(replicas) if i % 2 else replicas
        counts = [value for r, n in enumerate(here) for d in range(n) for value in (10 * i + r + 0.5 * d, 0)]
        for rank, results in enumerate(ranks):
            head, identity, got = results[i]
            assert head == (ranks[0][i][0][0], ranks[0][i][0][1], sum(here), sum(here[:rank]))
            assert identity == ranks[0][i][1]
            np.testing.assert_array_equal(got, counts)
    by_number = sorted((head[:2], identity) for head, identity, _ in ranks[0])
    made = {}
    for (_, clique), identity in by_number:
        assert (len(identity) == 128) == (clique not in made)  # the first of each clique, and none else
        made.setdefault(clique, identity)
    assert len(made) == len(set(made.values())) == 2


@pytest.fixture
def processes(no_gpus):
    """Three, with what numbers their collectives, the messages that they send, and ten layers."""
    post, all_stores = stores(3)
    with registered(10) as layers:
        everywhere(all_stores, lambda rank, store: store.learn(layers))
        yield post, [_native.Turns(store.handle) for store in all_stores], [one.id for one in layers]


def ask(turns, layer, call=0, timeout=60.0):
    return turns.next(ticket_of(layer, call, timeout), [0], np.array([[1.0]])).number


def test_a_net_without_branches_takes_a_ballot_for_each_call(processes):
    post, turns, layers = processes
    numbers = everywhere(turns, lambda rank, one: [ask(one, layer) for layer in layers])
    assert numbers == [list(range(10))] * 3
    assert post.sent["turn"] == (10 + 1) * 3 * 2  # and one for the identity of the communicator


@pytest.mark.parametrize("reader", range(3))
def test_a_process_that_reads_one_branch_before_it_calls_the_other(processes, reader):
    """Where a process posted what comes first in it, or what came first in the last step, all would wait for ever."""
    _, turns, layers = processes

    def work(rank, one):
        found = []
        for call in range(20):
            if rank == reader:
                found.append([ask(one, layer, call) for layer in layers[:2]])
                continue
            with ThreadPoolExecutor(2) as pool:
                second = pool.submit(ask, one, layers[1], call)
                time.sleep(0.002)
                first = pool.submit(ask, one, layers[0], call)
                found.append([first.result(60), second.result(60)])
        return found

    ranks = everywhere(turns, work)
    assert ranks == [[[2 * call, 2 * call + 1] for call in range(20)]] * 3


def test_a_call_that_does_not_come(processes):
    """The error names the layer and the rank, though that rank is there with another layer."""
    _, turns, layers = processes
    ours, theirs = (f"the forward of call 1 of SyncBatchNorm 'layer {layer}'" for layer in layers[:2])
    errors = [str(error) for error in everywhere(turns, lambda rank, one: ask(one, layers[rank == 1], timeout=1.0))]
    # the first whose time is up tells the others
    first = f"rank [02] of 3 waits for rank 1 in {ours} after 1 s|rank 1 of 3 waits for rank 0, 2 in {theirs} after 1 s"
    assert any(re.search(first, error) for error in errors), errors


def test_a_step_that_one_process_skips(processes):
    _, turns, layers = processes
    errors = [str(error) for error in everywhere(turns, lambda rank, one: ask(one, layers[0], call=5 + (rank == 1)))]
    said = "rank [02] is in the forward of call 6 .*, but rank 1 is in number 7: one of them has skipped or repeated"
    other = "rank 1 is in the forward of call 7 .*, but rank 0 is in number 6: one of them has skipped or repeated"
    assert any(re.search(f"{said}|{other}", error) for error in errors), errors


@pytest.mark.parametrize(
    "group_size, groups, alone",
    [
        (2, None, True),
        (4, None, False),
        (None, [[0], [1], [2, 3]], True),
        (None, [[0, 3], [1], [2]], False),
    ],
)
def test_turns_of_groups(no_gpus, group_size, groups, alone):
    """Groups that stay within a process ask nobody; where one does not, all take part."""
    post, all_stores = stores(2)

    def work(rank, store):
        store.learn(layers)
        turns = _native.Turns(store.handle)
        return turn_of(turns.next(ticket_of(layers[0].id), [0, 1], np.array([[3.0], [4.0]])))

    settings = {"contexts": [mx.gpu(0), mx.gpu(1)], "replicas": 2, "group_size": group_size, "groups": groups}
    with registered(1, **settings) as layers:
        found = everywhere(all_stores, work)
    for rank, (head, _, counts) in enumerate(found):
        assert head == ((-1, 0, 2, 0) if alone else (0, 0, 4, 2 * rank))
        np.testing.assert_array_equal(counts, [3, 4] if alone else [3, 4, 3, 4])
    assert post.sent["turn"] == (0 if alone else 4)  # a ballot, and the identity of the communicator


REASONS = {
    "no NCCL": "rank 1: this build has none",
    "a CPU": r"rank 1: it is on gpu\(0\), cpu\(1\) there",
    "two replicas": "rank 1: it has 4 replicas on 2 GPUs there",
    "the same GPU": r"gpu\(0\) of rank 0 and gpu\(0\) of rank 1 are the same GPU",
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("gpus", [None, "nccl", "host"])
def test_why_gpus_go_over_the_host(no_gpus, monkeypatch, caplog, layer_id, gpus, reason):
    """All agree on it, and say it once; an error where NCCL was asked for, and nothing where the host was."""
    here = threading.local()
    if reason == "no NCCL":
        monkeypatch.setattr(_native, "nccl_problem", lambda: "this build has none" if here.rank else "")
    if reason == "the same GPU":
        monkeypatch.setattr(store_module.cuda, "identity", str)
    post = Post(2)
    all_stores = [ProcessStore("threads", ThreadTransport(post, rank), gpus) for rank in range(2)]

    def work(rank, store):
        here.rank = rank
        second = mx.cpu(1) if rank and reason == "a CPU" else mx.gpu(1)
        replicas = 4 if rank and reason == "two replicas" else 2
        layers = [
            LayerInfo(layer_id + i, "bn", [mx.gpu(0), second], replicas, CHANNELS, "sync", 1, None) for i in (0, 1)
        ]
        store.learn(layers)
        return [store.gpus_of_all_processes(layer) for layer in layers]

    results = everywhere(all_stores, work)
    said = [record.getMessage() for record in caplog.records]
    if gpus == "nccl":
        assert all(isinstance(error, ValueError) for error in results)
        assert re.search(f"gpus: 'nccl' was given, .*: {REASONS[reason]}", str(results[0]))
    else:
        assert results == [[0, 0]] * 2
    assert len(said) == (0 if gpus else 2)  # each process once
    assert all(re.search(REASONS[reason], text) for text in said)


@pytest.mark.parametrize("gpus", [None, "nccl", "host"])
def test_a_layer_that_comes_to_gpus_later(no_gpus, caplog, layer_id, gpus):
    """What was agreed on stays, and is said."""
    post = Post(2)
    all_stores = [ProcessStore("threads", ThreadTransport(post, rank), gpus) for rank in range(2)]

    def work(rank, store):
        layer = LayerInfo(layer_id, "bn", [mx.cpu(0)], 1, CHANNELS, "sync", 1, None)
        store.learn([layer])
        moved = layer._replace(contexts=[mx.gpu(0)])
        assert store.knows(moved)
        return [store.gpus_of_all_processes(moved) for _ in range(2)]

    results = everywhere(all_stores, work)
    text = "'bn' was on no GPU when the processes agreed on their layers"
    if gpus == "nccl":
        assert all(isinstance(error, ValueError) and text in str(error) for error in results)
    else:
        assert results == [[0, 0]] * 2
    assert len(caplog.records) == (0 if gpus else 2)
    assert all(text in record.getMessage() for record in caplog.records)


def test_processes_that_want_gpus_to_go_another_way(layer_id):
    post = Post(2)
    all_stores = [ProcessStore("threads", ThreadTransport(post, rank), [None, "host"][rank]) for rank in range(2)]
    for error in everywhere(all_stores, lambda rank, store: store.learn([info(layer_id, 1)])):
        assert re.search("kvstore: gpus=(None|'host') was given on rank . and (None|'host') on rank .", str(error))


@pytest.mark.parametrize("kind", [mx.nd, mx.np])
def test_gradients_of_all_processes(kind):
    post, all_stores = stores(3)
    rng = np.random.RandomState(2)
    values = [rng.randn(4, 2).astype("float32") for _ in range(3)]

    def work(rank, store):
        out = kind.array(values[rank])
        store.pushpull("weight", out)
        first = kind.zeros((4, 2))
        store.broadcast("weight", kind.array(values[rank]), first)
        return out.asnumpy(), first.asnumpy()

    for total, first in everywhere(all_stores, work):
        np.testing.assert_allclose(total, sum(values), rtol=1e-6)
        np.testing.assert_array_equal(first, values[0])
    assert post.sent == {"gradient of": 6, "broadcast of": 6}


# ---- how a wait ends -----------------------------------------------------------------------------------------


LABEL = Label("gradient", 7, what="gradient 7, round 1")


def test_time_is_up():
    gluon_syncbn.configure(timeout=0.3)
    post = Post(3)
    late, other = ThreadTransport(post, 0), ThreadTransport(post, 1)
    other._post.parts[tuple(LABEL[:5])][1] = np.ones(2)
    with pytest.raises(
        mx.MXNetError, match=r"rank 0 of 3 waits for rank 2 in gradient 7, round 1 after 0 s\. A process"
    ):
        late.allgather(LABEL, np.ones(2), equal=True)
    first = r"nothing is exchanged any more\. Start the job again\. The first error was: rank 0 of 3 waits for rank 2"
    with pytest.raises(mx.MXNetError, match=first):
        late.allgather(LABEL, np.ones(2), equal=True)
    with pytest.raises(mx.MXNetError, match=r"rank 0 of 3 has failed: rank 0 of 3 waits .*\(rank 1 was in another\)"):
        other.allgather(Label("gradient", 8, what="another"), np.ones(2), equal=True)


def test_a_long_wait_is_warned_of_once(caplog, monkeypatch):
    from gluon_syncbn.exchange import waiting

    monkeypatch.setattr(waiting, "_WARN_AFTER", 0.1)
    post = Post(2)
    transports = [ThreadTransport(post, rank) for rank in range(2)]
    release = threading.Event()

    def second():
        release.wait(20)
        return transports[1].allgather(LABEL, np.ones(2), equal=True)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(transports[0].allgather, LABEL, np.ones(2), equal=True)
        last = pool.submit(second)
        while not caplog.records:
            assert not first.done()
        threading.Event().wait(0.3)
        release.set()
        first.result(20), last.result(20)
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 0 of 2 waits for rank 1 in gradient 7, round 1 after 0 s. Still waiting, until 60 s."
    )


def test_a_step_that_failed_ends_a_wait():
    transport = ThreadTransport(Post(2), 0)
    _native.fail("KeyboardInterrupt left the recorded step.")
    with pytest.raises(mx.MXNetError, match="KeyboardInterrupt left the recorded step"):
        transport.allgather(LABEL, np.ones(2), equal=True)


def test_a_fork_ends_a_wait():
    wait, end = Wait(ThreadTransport(Post(2), 0), LABEL), time.monotonic() + 50
    _native.forking(True)
    try:
        with pytest.raises(mx.MXNetError, match=r"the process was forked .* rank 0 was in gradient 7, round 1"):
            while time.monotonic() < end:
                wait.poll([1])
                time.sleep(0.3)
    finally:
        _native.forking(False)


def test_another_size_or_type():
    post = Post(2)
    transports = [ThreadTransport(post, rank) for rank in range(2)]
    parts = [np.ones(2), np.ones(3, "float32")]

    def work(rank, transport):
        return transport.allgather(LABEL, parts[rank], equal=True)

    for error in everywhere(transports, work):
        assert "values of float" in str(error)
        assert "All processes must build the same net and cast it alike" in str(error)


def test_a_child_of_a_fork_is_no_member():
    _, (store, _) = stores(2)
    store.forked()
    with pytest.raises(mx.MXNetError, match="this process was forked from rank 0 of 2 and is no member of its job"):
        store.pushpull("weight", mx.nd.zeros(2))
    store.fail("nothing to tell")
    store.close()


def test_merged_moments_are_those_of_all_values():
    rng = np.random.RandomState(3)
    parts = [1e6 + rng.randn(n, CHANNELS, 2) for n in (1, 4, 2)]
    total = moments(parts[0])
    for part in parts[1:]:
        total = base.merge_moments(total, moments(part))
    np.testing.assert_allclose(total, moments(np.concatenate(parts)), rtol=1e-9)  # 1e6 beside 1 costs 6 digits
    empty = np.zeros(1 + 2 * CHANNELS)
    np.testing.assert_array_equal(base.merge_moments(empty, total), total)
    np.testing.assert_array_equal(base.merge_moments(total, empty), total)

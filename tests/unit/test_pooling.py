"""csrc/pooling by itself: which slots share a statistic and what flows back to whom, against reference.py."""

import subprocess
from collections import defaultdict

import numpy as np
import pytest
from environments import shell
from places import SOURCES, SUPPORT

from gluon_syncbn import reference

MODES = ("sync", "local", "shuffle")
CHANNELS = 3
SHARING = {"nothing": "0", "total": "1", "each": "2"}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("pooling") / "pooling"
    sources = [str(SUPPORT / "pooling_driver.cc"), *map(str, sorted((SOURCES / "pooling").glob("*.cc")))]
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", *sources, "-o", str(path)]
    subprocess.run(command, check=True, timeout=120, env=shell())
    return str(path)


class Case:
    """Shards of different size and distribution, some of them empty, and what the program makes of their moments."""

    def __init__(self, mode, virtual_devices=1, group_size=None, groups=(), sizes=(2, 5, 0, 3), draw=(7, 3, -1, 2)):
        self.mode, self.virtual_devices, self.group_size, self.draw = mode, virtual_devices, group_size, draw
        self.groups = groups
        rng = np.random.RandomState(len(sizes) + virtual_devices)
        self.shards = [(i + 1) * rng.randn(n, CHANNELS, 2) + i for i, n in enumerate(sizes)]
        self.heads = [rng.randn(n, CHANNELS, 2) + 0.3 * i for i, n in enumerate(sizes)]
        self.parts = 1 if mode == "sync" else virtual_devices
        cut = [np.array_split(x, self.parts) for x in self.shards]
        self.slots = [part for shard in cut for part in shard]
        filled = sum(len(part) > 0 for part in self.slots)
        permutation = None
        if mode == "shuffle" and filled > 1:
            permutation = reference.derangement(*draw, filled)
        self.permutation = permutation
        self.gamma = rng.rand(CHANNELS) + 0.5

    def forward(self):
        zeros, ones = np.zeros(CHANNELS), np.ones(CHANNELS)
        return reference.forward(
            *(self.shards, self.gamma, zeros, zeros, ones),
            mode=self.mode, virtual_devices=self.virtual_devices, group_size=self.group_size,
            groups=self.groups or None, permutation=self.permutation, momentum=0.0,
        )  # fmt: skip

    def text(self, gradients):
        lines = [f"{MODES.index(self.mode)} {self.virtual_devices} {self.group_size or 0} {CHANNELS} {len(self.slots)}"]
        group_of = {rank: number for number, ranks in enumerate(self.groups) for rank in ranks}
        lines.append(" ".join(map(str, [len(group_of), *(group_of[rank] for rank in sorted(group_of))])))
        lines.append(" ".join(map(str, self.draw)))
        for part in self.slots:
            values = np.moveaxis(part, 1, 0).reshape(CHANNELS, -1)
            n = values.shape[1]
            mean = values.mean(axis=1) if n else np.zeros(CHANNELS)
            m2 = ((values - mean[:, None]) ** 2).sum(axis=1)
            lines.append(" ".join(map(repr, [float(n), *mean.tolist(), *m2.tolist()])))
        lines += [" ".join(map(repr, row)) for row in gradients.tolist()]
        return "\n".join(lines)


def run(program, case, gradients=None):
    """{name: text}, and of slots and replicas {(name, number): numbers}."""
    gradients = np.zeros((len(case.slots), 2 * CHANNELS)) if gradients is None else gradients
    done = subprocess.run(
        [program], input=case.text(gradients), capture_output=True, text=True, timeout=20, check=True, env=shell()
    )
    answer = {}
    for line in done.stdout.splitlines():
        name, *rest = line.split(" ", 1)
        if name in ("used", "fed", "users"):
            slot, *slots = rest[0].split()
            answer[name, int(slot)] = list(map(int, slots))
        elif name in ("moments", "gradients", "tracked", "listed"):
            number, *values = rest[0].split()
            answer[name, int(number)] = np.array(values, float)
        elif rest:
            answer[name] = rest[0]
    return answer


POOLINGS = [
    {"mode": "sync"},
    {"mode": "sync", "virtual_devices": 3},
    {"mode": "sync", "group_size": 2},
    {"mode": "sync", "group_size": 1},
    {"mode": "sync", "group_size": 4, "virtual_devices": 2},
    {"mode": "sync", "groups": [[0, 2], [1, 3]]},
    {"mode": "sync", "groups": [[0, 3], [1], [2]]},
    {"mode": "sync", "groups": [[2, 1, 3, 0]], "virtual_devices": 2},
    {"mode": "local"},
    {"mode": "local", "virtual_devices": 2},
    {"mode": "local", "virtual_devices": 8},
    {"mode": "shuffle"},
    {"mode": "shuffle", "virtual_devices": 2},
    {"mode": "shuffle", "virtual_devices": 8},
]
SIZES = [(2, 5, 0, 3), (1, 1, 1, 1), (0, 0, 4, 6), (9, 2, 3, 2), (6, 0, 0, 1)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_against_the_reference(program, pooling, sizes):
    case = Case(**pooling, sizes=sizes)
    forward = case.forward()
    state = forward.state
    # Of each slot with a value, what the reference normalises it with.
    slots = [i for i, part in enumerate(case.slots) if len(part)]
    sums = np.zeros((len(case.slots), 2 * CHANNELS))
    of_slot = {}
    if case.mode == "sync":  # its slots are parts of one, which changes nothing
        for slot in state.slots:
            of_slot[slot.device] = slot
    else:
        of_slot = dict(zip(slots, state.slots))
    for number in slots:
        device = number // case.parts
        dy = np.array_split(case.heads[device], case.parts)[number % case.parts]
        used = state.pools[of_slot[number].uses]
        xhat = (np.moveaxis(case.slots[number], 1, -1) - used.mean) / np.sqrt(used.var + state.epsilon)
        heads = np.moveaxis(dy, 1, -1)
        sums[number] = np.concatenate([heads.sum((0, 1)), (heads * xhat).sum((0, 1))])
    answer = run(program, case, sums)

    assert int(answer["parts"]) == case.parts
    for number in range(len(case.slots)):
        if number not in slots:
            assert [answer[name, number] for name in ("fed", "users")] == [[], []]
            continue
        own = of_slot[number]
        assert answer["used", number] == [other for other in slots if of_slot[other].feeds == own.uses]
        assert answer["fed", number] == [other for other in slots if of_slot[other].feeds == own.feeds]
        users = [other for other in answer["users", number] if other in slots]  # the others have no gradient
        assert users == [other for other in slots if of_slot[other].uses == own.feeds]
        if len(slots) == len(case.slots) and len(case.groups) < 2:  # of these modes, all are lists of neighbours
            assert not answer["listed", number // case.parts * case.parts]
    users = defaultdict(lambda: np.zeros(2 * CHANNELS))
    for number in slots:
        users[of_slot[number].uses] += sums[number]
    for number in slots:
        theirs = state.pools[of_slot[number].feeds]
        count, mean, m2 = np.split(answer["moments", number], [1, 1 + CHANNELS])
        assert count == theirs.n
        np.testing.assert_allclose(mean, theirs.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(m2 / count, theirs.var, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(answer["gradients", number], users[of_slot[number].feeds], rtol=1e-11, atol=1e-11)
    # The running statistics of each device, with momentum 0 the batch's.
    for device in range(len(case.shards)):
        np.testing.assert_allclose(answer["tracked", device], forward.running_mean[device], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group_size, members", [(None, [0, 1, 2, 3]), (2, [2, 3]), (1, [])])
def test_a_slot_whose_values_are_all_masked_uses_the_pool_of_its_group(program, group_size, members):
    case = Case("sync", group_size=group_size)
    sums = np.random.RandomState(0).randn(len(case.slots), 2 * CHANNELS)
    answer = run(program, case, sums)
    assert len(case.slots[2]) == 0 and not answer["fed", 2] and not answer["users", 2]
    assert [slot for slot in answer["used", 2] if slot != 2] == [slot for slot in members if slot != 2]
    if members:
        assert answer["users", 3] == members
        np.testing.assert_allclose(answer["gradients", 3], sums[members].sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_what_has_to_be_shared(program, pooling):
    expected = "nothing" if pooling["mode"] == "local" else "total" if pooling in POOLINGS[:2] else "each"
    assert run(program, Case(**pooling))["sharing"] == SHARING[expected]


@pytest.mark.parametrize("draw", [(0, 1, -1, 0), (2**64 - 1, 9, 4, 2**40), (5, 2, 0, 1), (6, 2, 0, 1)], ids=str)
def test_every_draw_is_the_references(program, draw):
    case = Case("shuffle", virtual_devices=5, sizes=(5, 6, 7), draw=draw)
    answer = run(program, case)
    assert [answer["used", slot] for slot in range(len(case.slots))] == [[other] for other in case.permutation]


def test_groups_of_other_replicas(program):
    case = Case("sync", sizes=(2, 5, 1, 3))
    case.groups = [[0, 2], [1]]
    refused = run(program, case)["refused"]
    assert refused == "groups name 3 replicas, but 4 take part in this step: call the layer on all of them."


@pytest.mark.parametrize("sizes, filled", [((1, 0), 1), ((0, 0), 0)])
def test_nobody_to_change_places_with(program, sizes, filled):
    refused = run(program, Case("shuffle", sizes=sizes))["refused"]
    assert refused.startswith(f"mode 'shuffle' had {filled} slot with values in this step, expected at least two")

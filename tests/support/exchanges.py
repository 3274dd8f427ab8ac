"""The table of what processes exchange, and of what one of them may do otherwise: see exchanges_worker.py."""

import itertools
import json
import random
import re

LIMIT = 1  # seconds that a rank waits for the others

#: What the processes do together: a method of `Calls` each, and what its errors name.
EXCHANGES = {
    "step": ["the gradient of 'first_weight'", "the weights of trainer 1"],
    "step_unread": ["the gradient of 'second_weight'", "the weights of trainer 2"],
    "layer": ["SyncBatchNorm 'norm'", "the agreement on the layers"],
    "layer_unread": ["SyncBatchNorm 'another'", "the agreement on the layers"],
    "allgather": ["exchange 'an array'"],
    "pushpull": ["the sum of 'a sum'"],
    "broadcast": ["broadcast 'a value'"],
    "gather": ["gather 'some rows'"],
    "broadcast_parameters": ["the parameters' shapes", "exchange 'parameter 0'"],
    "average_running_stats": ["running statistics"],
    "update_bn_stats": ["batches", "population"],
    "join": [
        "whether there is a batch",
        "the samples of a step",
        "the gradient of 'fourth_weight'",
        "gluon_syncbn.join",
    ],
    "save_states": [],  # which one process alone may call, as the next
    "load_states": [],
    # What follows has no other exchange between its calls.
    "allreduce_grads": ["third_weight", "samples of an update", "the weights of trainer 3"],
    "update": ["third_weight", "samples of an update", "the weights of trainer 3"],
}
FAULTS = ["skipped", "twice", "other order"]
SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP"]


def case(calls, at, fault, rank, when):
    """What all ranks call, and what the one does that has the fault: a signal, or another call. ``when``: at once, or
    when each exchange has been made once.
    """
    name, own = calls[at], list(calls)
    if fault == "skipped":
        del own[at]
    elif fault == "twice":
        own.insert(at, name)
    elif fault == "other order":
        own[at : at + 2] = reversed(own[at : at + 2])
    elif fault == "raises":
        own.insert(at, "raises")
    title = f"{'+'.join(calls)} {at} {fault} {rank} {when}"
    return {"title": title, "name": name, "calls": calls, "own": own, "fault": fault, "rank": rank, "when": when}


def program(name):
    """Most exchanges come twice, and the next one of the table between."""
    names = list(EXCHANGES)[:-2]
    if name in names:
        return [name, names[(names.index(name) + 1) % len(names)], name]
    return ["backward", "allreduce_grads", "update"] * 2


def cases(ranks, *whens):
    """Each exchange, each fault, of each of these ranks."""
    every = itertools.product(EXCHANGES, FAULTS, ranks, whens)
    return [case(program(name), program(name).index(name), *others) for name, *others in every]


def drawn(seed, ranks, ends=False):
    """A random one; ``ends``: with a signal, after which a process is gone."""
    rng = random.Random(seed)
    calls = rng.choices(list(EXCHANGES)[:-2], k=rng.randint(2, 8))
    fault = rng.choice(SIGNALS if ends else ["", "raises", *FAULTS])
    found = case(calls, rng.randrange(len(calls)), fault, rng.randrange(ranks), rng.choice(("now", "later")))
    return {**found, "title": f"{seed} {found['title']}", "delay": rng.choice((0, 0.001, 0.005, 0.02, 0.1))}


def assert_sound(output, ranks, asked):
    """Each rank has come to its end in each case, but where one is killed."""
    told = {}
    for text in re.findall("^TOLD (.*)$", output, re.MULTILINE):
        one = json.loads(text)
        told.setdefault(one["title"], {})[one["rank"]] = one
    for case in asked:
        found, fault, named = told.get(case["title"], {}), case["fault"], ["the disk is full"]
        assert fault in SIGNALS or set(found) == set(range(ranks)), f"{case}: {output}"
        for call in (*case["calls"], *case["own"]):
            named += EXCHANGES.get(call, ())
        for one in found.values():
            assert one["seconds"] < LIMIT + 10, one
            assert not one["problem"] or any(text in one["problem"] for text in named), one
        if fault not in SIGNALS:
            # Both exchanges of a step of their own may come in another order.
            wrong = fault == "raises" or bool(fault and EXCHANGES[case["name"]])
            assert any(one["problem"] for one in found.values()) is wrong or fault == "other order", found

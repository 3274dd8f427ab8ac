"""The table of what processes exchange, and of what one of them may do otherwise: see exchanges_worker.py."""

import itertools
import json
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


def program(name, fault=None):
    """What a rank calls. Most exchanges come twice, and the next one of the table between."""
    names = list(EXCHANGES)[:-2]
    if name in names:
        calls = [name, names[(names.index(name) + 1) % len(names)], name]
    else:
        calls = ["backward", "allreduce_grads", "update"] * 2
    at = calls.index(name)
    if fault == "skipped":
        del calls[at]
    elif fault == "twice":
        calls.insert(at, name)
    elif fault == "other order":
        calls[at : at + 2] = reversed(calls[at : at + 2])
    return calls


def cases(ranks, *whens):
    """Each exchange, each fault, of each of these ranks; at once, or when all have been called once before."""
    return list(map("/".join, itertools.product(EXCHANGES, FAULTS, map(str, ranks), whens)))


def assert_sound(output, ranks, asked):
    """Each rank has come to its end in each case."""
    told = {}
    for text in re.findall("^TOLD (.*)$", output, re.MULTILINE):
        one = json.loads(text)
        told.setdefault(one["case"], {})[one["rank"]] = one
    for case in asked:
        assert set(told.get(case, ())) == set(range(ranks)), f"{case}: {output}"
        name, fault, _, _ = case.split("/")
        named = [text for call in program(name) for text in EXCHANGES.get(call, ())]
        problems = [one["problem"] for one in told[case].values()]
        for one in told[case].values():
            assert one["seconds"] < LIMIT + 10, one
            assert not one["problem"] or any(text in one["problem"] for text in named), one
        # Both exchanges of a step of their own may come in another order.
        assert any(problems) is bool(EXCHANGES[name]) or fault == "other order", told[case]

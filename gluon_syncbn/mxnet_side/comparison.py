"""Compares what the processes train: the weights that they begin with, and each update."""

from __future__ import annotations

import hashlib
from numbers import Real
from typing import Any, Dict, List, Tuple

import numpy as np
from mxnet import gluon

from ..exchange.store import ProcessStore
from ..system import arguments, kinds
from ..training.replicas import followers_of
from ..training.session import session


def compare_weights(trainer: gluon.Trainer, store: ProcessStore) -> None:
    """Compares the parameters of a Trainer with those of the other processes, before its first update. MXNet would copy
    rank 0's, after a step with others. Those that cannot be trained, such as the running statistics of plain BatchNorm,
    become those of rank 0. MXNetError: the first other one that differs.
    """
    ordered = session.trainers(trainer).in_order(trainer)
    for one, following in zip(ordered, ordered[1:]):
        if one.name == following.name:  # the gradients go by their names
            arguments.refuse("params", one.name, "parameters with different names: give the nets other prefixes")
    number = store.expect(trainer).number
    weights = (p.list_data()[0].asnumpy().tobytes() for p in ordered)
    digests = np.array([hashlib.blake2b(one, digest_size=7).hexdigest() for one in weights])
    everyone = store.allgather(f"the comparison of the weights of trainer {number}", digests)
    for i, parameter in enumerate(ordered):
        arrays = parameter.list_data()
        differing = [rank for rank, theirs in enumerate(everyone) if theirs[i] != everyone[0][i]]
        if differing and parameter._differentiable:
            store.give_up(
                f"the processes begin with different weights: '{parameter.name}' of rank {differing[0]} is not that of "
                "rank 0. Call gluon_syncbn.broadcast_parameters(net) in every process, before the first step."
            )
        if differing:
            store.broadcast(f"parameter {i} of trainer {number}", arrays[0], arrays)
        for array in arrays[1:]:
            kinds.classic(arrays[0]).copyto(kinds.classic(array))


def compare_divisor(trainer: gluon.Trainer, store: ProcessStore, samples: float) -> None:
    """Compares what the sums of a Trainer are divided by, where its update does not follow them at once."""
    everyone = store.tell_all(f"the samples of an update of trainer {store.expect(trainer).number}", samples)
    if any(theirs != samples for theirs in everyone):
        store.give_up(
            f"the processes disagree about trainer.update: the ranks from 0 on say {everyone} samples. It takes the "
            "samples of all processes."
        )


def _loaded(trainer: gluon.Trainer) -> List[str]:
    """Describes the states of the optimizer in the first step after they were loaded; empty in others. MXNet's file has
    them by the place of the parameter, and a Trainer sorts ``dense10`` before ``dense9`` (gluon/trainer.py).
    """
    state, now = session.trainers(trainer), trainer._updaters[0].states
    before, state.compared = state.compared, now  # which has nothing in the first step, if none were loaded
    if before is now or not now:
        return []
    states = hashlib.blake2b(digest_size=7)
    for parameter in state.in_order(trainer):
        for array in kinds.arrays_of(now.get(trainer._param2idx[parameter.name])):
            states.update(array.asnumpy().tobytes())
        states.update(b" ")
    return [f"loaded states {states.hexdigest()}"]


#: Of a parameter in a step.
_USUAL = {"lr_mult": 1, "wd_mult": 1, "grad_req": "write", "new gradient": True}
_OTHERS = ", ".join(f"{name} {value!r}" for name, value in _USUAL.items()) + " of all other parameters"


def update_of(trainer: gluon.Trainer) -> str:
    """Describes in lines all that the update of this step depends on: the processes compare it with the sums."""
    optimizer, ordered = trainer._optimizer, session.trainers(trainer).in_order(trainer)
    lines = [type(optimizer).__name__, f"learning rate {optimizer.learning_rate}"]
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, Real) and name[0] != "_"}
    lines += [f"{name} {value}" for name, value in numbers.items()]
    pooled = followers_of(ordered)
    if pooled:
        lines.append(f"nonfinite {session.nonfinite!r}")
    if any(one.settings.mode == "shuffle" for one in pooled):
        lines.append(f"seed {session.seed}")
    special: Dict[Tuple[Any, ...], List[int]] = {}
    usual = tuple(_USUAL.values())
    for number, p in enumerate(ordered):
        if p._differentiable and p._data is not None:
            has_new = p.grad_req == "null" or any(array._fresh_grad for array in p._data)
            own = p.lr_mult, p.wd_mult, p.grad_req, has_new
            if own != usual:
                special.setdefault(own, []).append(number)
    for own, places in special.items():
        text = ", ".join(f"{name} {value!r}" for name, value in zip(_USUAL, own) if value != _USUAL[name])
        lines.append(f"{text} of parameters {places} (the first is '{ordered[places[0]].name}')")
    return "\n".join([*lines, _OTHERS, *_loaded(trainer)])

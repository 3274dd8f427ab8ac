"""Lets an optimizer of MXNet's do the same on all devices of all processes."""

from __future__ import annotations

import re
from contextlib import contextmanager
from numbers import Real
from typing import Any, Dict, Iterator, List, Sequence

import mxnet as mx
from mxnet import gluon

from ..system import arguments

_NAME = re.compile(r"(\D*)(\d*)(.*)", re.DOTALL)
_OF_ALL = frozenset(vars(mx.optimizer.Optimizer()))  # what every optimizer has: settings, and counts for each device


def check(trainer: gluon.Trainer, processes: int) -> None:
    """ValueError: devices that have added their gradients would get different weights."""
    optimizer, on_several = trainer._optimizer, any(len(p._data or ()) > 1 for p in trainer._params)
    if isinstance(optimizer, mx.optimizer.SGLD) and (on_several or processes > 1):
        expected = "an optimizer without noise between processes, or kvstore='device': each device draws its own"
        arguments.refuse("optimizer", type(optimizer).__name__, expected)
    if isinstance(optimizer, mx.optimizer.LBSGD) and on_several:
        expected = "one device for each process: it takes the devices of a process for batches that follow each other"
        arguments.refuse("optimizer", type(optimizer).__name__, expected)


@contextmanager
def alike(trainer: gluon.Trainer) -> Iterator[None]:
    """Within the block, all devices update alike. MXNet has one optimizer for all devices of a process. Some go on to
    other numbers with each parameter that they update, such as ``m_schedule`` of Nadam and ``last_lr`` of LARS. So each
    device begins with the numbers before the block, and updates the parameters in the order that they have in a process
    of its own, where Gluon's counters begin at 0: later, the name ``dense10`` comes before ``dense9``.
    """
    optimizer, updaters = trainer._optimizer, trainer._updaters
    before = _numbers(optimizer)
    if not hasattr(updaters[0], "order"):
        updaters[0].order = _order([parameter.name for parameter in trainer._params])

    def of_device(updater: Any) -> Any:
        def update(*of_parameters: Sequence[Any]) -> None:
            for name in _numbers(optimizer):
                del vars(optimizer)[name]
            vars(optimizer).update(before)
            given = {one[0]: one for one in zip(*of_parameters)}
            updater(*zip(*(given[index] for index in updaters[0].order if index in given)))

        return update

    trainer._updaters = [of_device(updater) for updater in updaters]
    try:
        yield
    finally:
        trainer._updaters = updaters


def _order(names: Sequence[str]) -> List[int]:
    """Returns the places of names as they are sorted where the first numbers of each kind are 0, 1, and so on."""
    parts = [_NAME.findall(name)[0] for name in names]
    numbers = {kind: sorted({int(one) for other, one, _ in parts if one and other == kind}) for kind, _, _ in parts}
    alone = [f"{kind}{numbers[kind].index(int(one)) if one else ''}{rest}" for kind, one, rest in parts]
    return sorted(range(len(names)), key=alone.__getitem__)


def _numbers(optimizer: mx.optimizer.Optimizer) -> Dict[str, Any]:
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_ALL}
    return {name: value for name, value in own.items() if value is None or isinstance(value, Real)}

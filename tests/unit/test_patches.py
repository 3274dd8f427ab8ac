"""What is changed in MXNet is changed once."""

import copy
import gc
import inspect
from types import FunctionType

import pytest
from mxnet import gluon
from mxnet.base import _LIB
from replicas import ready

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import patches
from gluon_syncbn.training import devices
from gluon_syncbn.training.session import session


def test_a_change_is_made_once():
    SyncBatchNorm()  # whose first one changes more
    ours = [getattr(*place) for place in patches._changes]
    for (owner, name), around in patches._changes.items():
        patches.replace(around, owner, name)
    assert [getattr(*place) for place in patches._changes] == ours


def test_arguments():
    """Each function takes what MXNet's takes, by position and, where a program calls it, by name."""
    SyncBatchNorm()  # whose first one changes more
    for (owner, name), around in patches._changes.items():
        if owner is _LIB or not isinstance(around, FunctionType):
            continue
        original = inspect.unwrap(getattr(owner, name))
        fixed = [p for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        given = {one.name: None for one in fixed}
        inspect.signature(around).bind(original, *given)
        if not name.startswith("_"):
            own = [given.pop("self")] if "self" in given else []
            inspect.signature(around).bind(original, *own, **given)


def test_a_trainer_of_a_programs_own():
    """Its methods come first, and ours stand in front of MXNet's."""

    class Own(gluon.Trainer):
        def _allreduce_grads(self):
            called.append("own")
            super()._allreduce_grads()

    called, layer = [], ready(SyncBatchNorm(in_channels=1))
    trainer = Own(layer.collect_params(), "sgd")
    assert type(trainer) is Own
    for one in (trainer, copy.copy(trainer), copy.deepcopy(trainer)):
        called.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "settle_gradients", lambda _: called.append("ours"))
            one.allreduce_grads()
        assert called == ["own", "ours"] and any(known is one for known in session.trainers.objects())


def test_what_is_kept_of_a_trainer_ends_with_it():
    class Alike(gluon.Trainer):
        __hash__ = None

        def __eq__(self, other):
            return True

    layers = [ready(SyncBatchNorm(in_channels=1)) for _ in range(2)]
    gc.collect()
    before = len(session.trainers.objects())
    trainers = [Alike(layer.collect_params(), "sgd") for layer in layers]
    assert session.trainers(trainers[0]) is not session.trainers(trainers[1])
    assert len(session.trainers.objects()) == before + 2
    del trainers, layers
    gc.collect()
    assert len(session.trainers.objects()) == len(session.trainers._kept) == before

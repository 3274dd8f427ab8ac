"""What is changed in MXNet is changed once, and can be put back."""

import copy
import inspect
from types import FunctionType

import pytest
from mxnet import gluon
from mxnet.base import _LIB

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import patches
from gluon_syncbn.training import devices


def test_install_and_remove():
    changed = {place: around for place, (around, _) in patches._originals.items()}
    ours = [getattr(*place) for place in changed]
    patches.install()
    assert [getattr(*place) for place in changed] == ours, "changed twice"
    try:
        patches.remove()
        plain = [getattr(*place) for place in changed]
        assert plain == [one.__base__ if isinstance(one, type) else inspect.unwrap(one) for one in ours]
        assert all(function.__module__.startswith(("mxnet.", "ctypes")) for function in plain)
        assert not any(hasattr(function, "__wrapped__") for function in plain)
    finally:
        for place, around in changed.items():
            patches.replace(around, *place)


def test_arguments():
    """Each function takes what MXNet's takes, by position and, where a program calls it, by name."""
    SyncBatchNorm()  # whose first one changes more
    for (owner, name), (around, _) in patches._originals.items():
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

        def __reduce_ex__(self, protocol):
            return str, ("a copy",)

    called, layer = [], SyncBatchNorm(in_channels=1)
    layer.initialize()
    trainer = Own(layer.collect_params(), "sgd")
    assert isinstance(trainer, Own) and (type(trainer).__name__, type(trainer).__module__) == ("Own", __name__)
    assert copy.copy(trainer) == "a copy"
    of_mxnet = gluon.Trainer._allreduce_grads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "settle_gradients", lambda _: called.append("ours"))
        patch.setattr(gluon.Trainer, "_allreduce_grads", lambda self: called.append("MXNet's") or of_mxnet(self))
        trainer.allreduce_grads()
    assert called == ["own", "ours", "MXNet's"]

"""What happens to a layer between its steps, and what ends a step. The next step is right."""

import os
import tempfile
from contextlib import nullcontext, suppress
from typing import Any, List

import mxnet as mx
import pytest
from mxnet import autograd, nd

import gluon_syncbn

from .case import Case

SHORT = 0.4  # seconds that a replica waits for one that does not come
LEFT = "OutOfData left the recorded step"


class OutOfData(Exception):
    pass


def choices(case: Case) -> List[str]:
    """Those that a case can have."""
    kinds = ["change_store", "change_seed"]
    if not case.of_np:  # MXNet reads the file of a net that is one layer as arrays of mx.nd
        kinds.append("save_and_load")
    if case.way in ("eager", "hybrid") and not (case.threads or case.empty or case.masked):
        kinds.append("recompute")
    if not (case.masked or case.reverted or case.emulated or case.offset):  # of which MXNet's float32 loses digits
        kinds.append("there_and_back")
    if case.mode == "local" or len(case.contexts) == 1 or case.settings["use_global_stats"] or case.empty:
        return kinds
    if case.way != "static_shape" and not case.threads:
        kinds += ["an_exception", "a_replica_that_is_never_called"]
        if case.way == "eager" and case.dtype != "float64" and case.addend is None and not case.fused:
            kinds.append("another_type")
    return kinds


# ---- what a step survives --------------------------------------------------------------------------------------


def change_store(trial: Any) -> None:
    gluon_syncbn.configure(kvstore=[None, "device", "local"][trial.rng.randint(3)])


def change_seed(trial: Any) -> None:
    trial.start_over(int.from_bytes(trial.rng.bytes(8), "little"))


def save_and_load(trial: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.params")
        trial.net.save_parameters(path)
        trial.net.load_parameters(path, ctx=trial.places)
    trial.truth.average_running()
    trial.check_running()


def recompute(trial: Any) -> None:
    gluon_syncbn.recompute(trial.net)


def there_and_back(trial: Any) -> None:
    """MXNet's own operators predict the same."""
    gluon_syncbn.revert(trial.net)
    if trial.case.predicts:
        trial.predict()
    gluon_syncbn.convert(trial.net, fuse=trial.case.fused, **trial.case.pooling)
    trial.start_over(trial.seed)  # its replicas are new


# ---- what ends a step ------------------------------------------------------------------------------------------


def an_exception(trial: Any) -> None:
    batch, ys = trial.batch(), []
    with suppress(OutOfData), autograd.record():
        ys.append(trial.net(*batch.inputs(0)))
        raise OutOfData
    if trial.rng.rand() < 0.5:  # otherwise the next step finds what nobody has read
        fails(ys[0], LEFT)
    recover(trial)


def a_replica_that_is_never_called(trial: Any) -> None:
    batch = trial.batch()
    some = trial.rng.permutation(len(trial.places))[: trial.rng.randint(1, len(trial.places))]
    gluon_syncbn.configure(timeout=SHORT)
    with autograd.record():
        ys = [trial.net(*batch.inputs(i)) for i in some]
    for y in ys:
        fails(y, "replicas arrived")
    recover(trial)


def another_type(trial: Any) -> None:
    batch = trial.batch()
    i, other = trial.rng.randint(len(batch.xs)), "float16" if trial.case.dtype == "float32" else "float32"
    batch.xs[i] = batch.xs[i].astype(other)
    with autograd.record():
        ys = trial.issue(batch)
    for y in ys:
        each = "".join(f"(?=.* channels of {one})" for one in (trial.case.dtype, other))
        fails(y, each + ".* on data of the same type")
    recover(trial)


def fails(array: nd.NDArray, text: str) -> None:
    with pytest.raises(mx.MXNetError, match=f"(?s){text}"):
        array.asnumpy()


def recover(trial: Any) -> None:
    """The next step starts afresh; nothing has changed."""
    with [gluon_syncbn.reset, autograd.record, autograd.train_mode][trial.rng.randint(3)]() or nullcontext():
        pass
    trial.start_over(trial.case.seed)  # a call that failed may have taken a permutation, or not
    trial.check_running()

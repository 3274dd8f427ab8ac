"""Every argument of every public function, by a table: what is out of range is a ValueError that names the argument,
the value and what was expected; what NumPy calculates is as good as Python's own numbers."""

import functools
import inspect
import re
from operator import attrgetter

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn
from pytorch_module import Module

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, _native, contrastive
from gluon_syncbn.contrastive import SampleShuffle, ShuffleSampler
from gluon_syncbn.system import arguments

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


class Stranger:
    def __repr__(self):
        return "<stranger>"


STRANGERS = [True, np.bool_(False), "2", [2], {}, nd.ones(1), np.ones(2), Stranger()]
#: What no argument of the kind takes, wherever its range ends.
WRONG = {
    "count": [None, 0, -1, 1.0, NAN, 2**63, 2**64, HUGE, *STRANGERS],
    "optional count": [0, -1, 1.0, NAN, 2**63, 2**64, HUGE, *STRANGERS],
    "whole from 0": [None, -1, 0.5, NAN, 2**63, HUGE, *STRANGERS],
    "optional whole from 0": [-1, 0.5, NAN, 2**63, HUGE, *STRANGERS],
    "name": [None, 3, True, "", ["a"], nd.ones(1), Stranger()],
    "whole": [None, 0.5, NAN, 2**63, -(2**63), HUGE, *STRANGERS],
    "seed": [None, -1, 0.5, NAN, 2**64, HUGE, *STRANGERS],
    "share": [None, -0.1, 1.1, NAN, INFINITE, HUGE, *STRANGERS],
    "at least 0": [None, -1e-9, NAN, INFINITE, -INFINITE, HUGE, *STRANGERS],
    "seconds": [None, 0, -1, NAN, INFINITE, HUGE, *STRANGERS],
    "optional seconds": [0, -1, NAN, INFINITE, HUGE, *STRANGERS],
    "flag": [None, 0, 1, 3, 0.0, "no", "True", [True], nd.ones(1), Stranger()],
    "mode": [None, 0, "global", "SYNC", ["sync"], nd.ones(1), nd.ones(3), np.ones(2), Stranger()],
    "shuffled": [None, "sync", ["shuffle"], nd.ones(1), Stranger()],
    "kvstore": [5, True, "dist_async", "MPI", ["local"], nd.ones(1), nd.ones(3), Stranger()],
    "process store": [None, 5, "local", "nccl", ["mpi"], nd.ones(1), nd.ones(3), Stranger()],
    "contexts": [None, [], "cpu(0)", ["cpu(0)"], [mx.cpu(0), 1], nd.ones(2), [nd.ones(2)], Stranger()],
    "optional contexts": [[], "cpu(0)", ["cpu(0)"], [mx.cpu(0), 1], nd.ones(2), [nd.ones(2)], Stranger()],
    "loss": [None, 3, "l2", [abs], nd.ones(1), Stranger()],
    "net": [None, [], "net", nn.BatchNorm, nd.ones(1), Stranger()],
    "trainer": [None, [], "trainer", nn.Dense(1), nd.ones(1), Stranger()],
    "select": [3, True, "(", ["gamma"], nd.ones(1), Stranger()],
    "norm_layer": [None, nn.BatchNorm, SyncBatchNorm(), SyncBatchNormAdd, "sync", nd.ones(1), Stranger()],
    "activation": [0, True, "sigmoid", "ReLU", ["relu"], nd.ones(1), Stranger()],
    "between 0 and 1": [None, 0, 1, -0.1, 1.1, NAN, INFINITE, HUGE, *STRANGERS],
    "shuffle": [None, 3, True, [SampleShuffle(1)], nd.ones(1), Stranger()],
    "groups": [
        0,
        2,
        {},
        "01",
        [],
        [[]],
        [[0], []],
        [0, 1],
        ["01"],
        [[0, 1], 2],
        [[0.0]],
        [[True]],
        [[None]],
        [[HUGE]],
        [[1]],
        [[0], [0]],
        [[-1, 0]],
        nd.ones((1, 1)),
        Stranger(),
    ],
    "array": [None, 3, "array", [nd.ones((4, 2))], nd.ones((4, 2)).tostype("csr"), Stranger()],
    "features": [None, 3, "array", [], [nd.ones((5, 2))], [3], nd.ones((4, 2)).tostype("csr"), Stranger()],
    "rows": [None, 3, "array", [], [3], nd.ones((4, 2)).tostype("csr"), Stranger()],
    "arrays": [None, 3, [], nd.ones((4, 2)), [nd.ones((2, 2)), 3], [nd.ones((2, 2)), nd.ones((2, 3))]],
    "symbol": [None, 3, "data", nd.ones(1), Stranger()],
    "optional text": [3, True, ["key"], nd.ones(1), Stranger()],
    "optional symbol": [3, "gamma", nd.ones(1), Stranger()],
    "weights": [
        3,
        "1",
        [],
        [0],
        [-1],
        [NAN],
        [INFINITE],
        [True],
        ["1"],
        [1, 1],
        {},
        nd.ones(1),
        [nd.ones(1)],
        Stranger(),
    ],
    "batches": [
        None,
        3,
        [],
        {},
        "batch",
        [3],
        [[]],
        [[3]],
        nd.ones(1),
        [nd.ones((2, 2))],
        [[nd.ones((2, 2))] * 2],
        Stranger(),
    ],
    "params": [None, 3, [], {}, "net", {"a": 1}, [nd.ones(1)], nn.BatchNorm, nd.ones(1), Stranger()],
    "root": [None, -1, 1, 0.0, NAN, 2**63, HUGE, *STRANGERS],
    "module": [None, 3, "module", [], nd.ones(1), Stranger()],
    "last_batch": [None, "rollover", ["keep"], nd.ones(1), Stranger()],
}

LAYER = {
    "axis": "whole",
    "momentum": "share",
    "epsilon": "at least 0",
    "center": "flag",
    "scale": "flag",
    "use_global_stats": "flag",
    "in_channels": "whole from 0",
    "num_devices": "optional count",
    "activation": "activation",
    "slope": "between 0 and 1",
    "mode": "mode",
    "virtual_devices": "count",
    "group_size": "optional count",
    "groups": "groups",
    "running_variance": "mode",
    "kvstore": "kvstore",
    "timeout": "optional seconds",
}
#: What `nn.BatchNorm` itself looks at.
GLUONS_OWN = {
    *("beta_initializer", "gamma_initializer", "running_mean_initializer", "running_variance_initializer"),
    *("prefix", "params"),
}
SAMPLER = {"length": 20, "batch_size": 4, "num_workers": 2, "rank": 0, "seed": 1}


def split(**kwargs):
    settings = {"data": nd.ones((4, 2)), "ctx_list": [mx.cpu(0), mx.cpu(1)], "shuffle": SampleShuffle(1)}
    return contrastive.split_and_load(**{**settings, **kwargs})


def shuffled(**kwargs):
    return contrastive.shuffle_shards(**{"shards": [nd.ones((2, 2))] * 2, "shuffle": SampleShuffle(1), **kwargs})


def sampler(**kwargs):
    return ShuffleSampler(**{**SAMPLER, **kwargs})


def enter(contexts):
    with gluon_syncbn.only_on(contexts):
        pass


def data_parallel(**kwargs):
    return gluon_syncbn.parallel.DataParallelModel(**{"module": nn.Dense(1), **kwargs})


def criterion(**kwargs):
    return gluon_syncbn.parallel.DataParallelCriterion(**{"module": abs, **kwargs})


def averaged(**kwargs):
    layer = nn.BatchNorm(in_channels=2)
    layer.initialize()
    return gluon_syncbn.average_running_stats(**{"net": layer, **kwargs})


def broadcast(**kwargs):
    layer = nn.BatchNorm(in_channels=2)
    layer.initialize()
    return gluon_syncbn.broadcast_parameters(**{"params": layer, **kwargs})


def updated(**kwargs):
    layer = nn.BatchNorm(in_channels=2)
    layer.initialize()
    return gluon_syncbn.update_bn_stats(**{"net": layer, "batches": [[nd.ones((2, 2))]], **kwargs})


#: Of each public name: how to call it, and the kind of each argument.
CALLS = {
    "SyncBatchNorm": (SyncBatchNorm, LAYER),
    "SyncBatchNormAdd": (SyncBatchNormAdd, LAYER),
    "ShuffleBatchNorm": (gluon_syncbn.ShuffleBatchNorm, {**LAYER, "mode": "shuffled"}),
    "recompute": (
        lambda **kwargs: gluon_syncbn.recompute(**{"block": nn.Dense(1), **kwargs}),
        {"block": "net", "active": "flag"},
    ),
    "configure": (
        gluon_syncbn.configure,
        {"kvstore": "kvstore", "timeout": "seconds", "seed": "seed", "nonfinite": "mode"},
    ),
    "convert": (
        lambda **kwargs: gluon_syncbn.convert(**{"net": nn.BatchNorm(), **kwargs}),
        {"net": "net", "norm_layer": "norm_layer", "select": "select", "fuse": "flag"},
    ),
    "freeze": (
        lambda **kwargs: gluon_syncbn.freeze(**{"net": nn.BatchNorm(), **kwargs}),
        {"net": "net", "select": "select", "active": "flag"},
    ),
    "revert": (gluon_syncbn.revert, {"net": "net"}),
    "summary": (
        lambda **kwargs: gluon_syncbn.summary(**{"net": nn.BatchNorm(), **kwargs}),
        {"net": "net", "show": "flag"},
    ),
    "assert_synchronised": (gluon_syncbn.assert_synchronised, {"net": "net"}),
    **{
        name: (
            lambda call=call, **kwargs: call(**{"net": nn.Dense(1), "module": Module({}), **kwargs}),
            {"net": "net", "module": "module"},
        )
        for name, call in (("from_torch", gluon_syncbn.from_torch), ("to_torch", gluon_syncbn.to_torch))
    },
    "average_running_stats": (averaged, {"net": "net", "weights": "weights", "kvstore": "kvstore"}),
    "join": (
        lambda **kwargs: gluon_syncbn.join(**{"net": nn.Dense(1), "trainer": None, **kwargs}).__enter__(),
        {"net": "net", "trainer": "trainer"},
    ),
    "broadcast_parameters": (broadcast, {"params": "params", "kvstore": "kvstore", "root_rank": "root"}),
    "update_bn_stats": (updated, {"net": "net", "batches": "batches", "num_iters": "count", "kvstore": "kvstore"}),
    "cpu_devices": (lambda **kwargs: gluon_syncbn.cpu_devices(**{"n": 1, **kwargs}), {"n": "count"}),
    "only_on": (enter, {"contexts": "contexts"}),
    "kvstore": (
        lambda **kwargs: gluon_syncbn.kvstore(**{"name": "mpi", **kwargs}),
        {"name": "process store"},
    ),
    "uninstall": (gluon_syncbn.uninstall, {"everything": "flag"}),
    "install": (gluon_syncbn.install, {"cpus": "optional count", "convert": "flag"}),
    "parallel.DataParallelModel": (data_parallel, {"module": "net", "ctx_list": "optional contexts", "sync": "flag"}),
    "parallel.DataParallelCriterion": (criterion, {"module": "loss", "ctx_list": "optional contexts", "sync": "flag"}),
    "parallel.parallel_apply": (
        lambda **kwargs: gluon_syncbn.parallel.parallel_apply(**{"module": abs, "inputs": [], **kwargs}),
        {"module": "loss", "sync": "flag"},
    ),
    "parallel.criterion_parallel_apply": (
        lambda **kwargs: gluon_syncbn.parallel.criterion_parallel_apply(
            **{"module": abs, "inputs": [], "targets": [], **kwargs}
        ),
        {"module": "loss", "sync": "flag"},
    ),
    "symbol.SyncBatchNorm": (
        lambda **kwargs: gluon_syncbn.symbol.SyncBatchNorm(**{"data": mx.sym.var("data"), **kwargs}),
        {
            "data": "symbol",
            **dict.fromkeys(("gamma", "beta", "moving_mean", "moving_var"), "optional symbol"),
            "eps": "at least 0",
            **dict.fromkeys(("fix_gamma", "use_global_stats", "output_mean_var"), "flag"),
            **{name: kind for name, kind in LAYER.items() if name not in ("epsilon", "center", "scale", "in_channels")},
        },
    ),
    "contrastive.SampleShuffle": (
        lambda **kwargs: SampleShuffle(**{"seed": 1, **kwargs}),
        {"seed": "seed", "position": "whole from 0"},
    ),
    "contrastive.SampleShuffle.permutation": (SampleShuffle(1).permutation, {"n": "whole from 0"}),
    "contrastive.ShuffleSampler": (
        sampler,
        {
            "length": "count",
            "batch_size": "count",
            "num_workers": "count",
            "rank": "whole from 0",
            "seed": "seed",
            "epoch": "whole from 0",
            "last_batch": "last_batch",
        },
    ),
    "contrastive.ShuffleSampler.set_epoch": (sampler().set_epoch, {"epoch": "whole from 0"}),
    "contrastive.ShuffleSampler.restore": (
        lambda **kwargs: sampler().restore(**{"features": np.ones((8, 2)), "batch": 0, **kwargs}),
        {"features": "features", "batch": "whole from 0", "kvstore": "kvstore"},
    ),
    "contrastive.gather": (
        lambda **kwargs: contrastive.gather(**{"features": [nd.ones((4, 2))], **kwargs}),
        {"features": "rows", "name": "name", "kvstore": "kvstore"},
    ),
    "contrastive.split_and_load": (
        split,
        {
            "data": "array",
            "ctx_list": "contexts",
            "batch_axis": "whole",
            "even_split": "flag",
            "shuffle": "shuffle",
        },
    ),
    "contrastive.shuffle_shards": (shuffled, {"shards": "arrays", "batch_axis": "whole", "shuffle": "shuffle"}),
}
#: They take no argument, or are made by the functions above alone.
WITHOUT = {"StepError", "assert_synchronized", "__version__", "reset"}


def test_the_table_knows_all_of_the_package():
    assert {name.partition(".")[0] for name in CALLS} | WITHOUT == set(gluon_syncbn.__all__)
    of_contrastive = {name.split(".")[1] for name in CALLS if name.startswith("contrastive.")}
    assert of_contrastive | {"ShuffledBatch"} == set(contrastive.__all__)
    for name, (_, kinds) in CALLS.items():
        if name.count(".") > name.startswith("contrastive."):
            continue
        parameters = inspect.signature(attrgetter(name)(gluon_syncbn)).parameters.values()
        named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        assert named - GLUONS_OWN == set(kinds) - GLUONS_OWN, name


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, (_, kinds) in CALLS.items() for argument in kinds]
)
def test_what_is_wrong_is_refused(name, argument):
    call, kinds = CALLS[name]
    for value in WRONG[kinds[argument]]:
        if name == "symbol.SyncBatchNorm" and _is_of_a_symbol(value, kinds[argument]):
            continue
        with pytest.raises(ValueError) as error:  # where nothing is raised, -l shows the value
            call(**{argument: value})
        assert re.match(rf"{argument}(\[\d\])?: .* (was|were) given, expected", str(error.value)), value
        assert len(str(error.value)) < 800, value


def _is_of_a_symbol(value, kind):
    """Symbols take numbers as text, and 0 and 1 for flags."""
    return (isinstance(value, str) and value in ("2", "True")) or (kind == "flag" and type(value) is int and value < 2)


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8])
def test_whole_numbers_of_numpy(kind):
    layer = SyncBatchNorm(
        axis=kind(1),
        in_channels=kind(3),
        num_devices=kind(2),
        virtual_devices=kind(2),
        group_size=kind(1),
        timeout=kind(9),
    )
    assert (layer.mode, layer.virtual_devices, layer.group_size, layer.groups) == ("sync", 2, 1, None)
    named = SyncBatchNorm(groups=[[kind(2), kind(0)], (kind(1),)]).groups
    assert named == ((0, 2), (1,)) and all(type(rank) is int for ranks in named for rank in ranks)
    layer.initialize(ctx=[mx.cpu(0)])
    assert layer.gamma.shape == (3,)
    assert gluon_syncbn.cpu_devices(kind(1)) == [mx.cpu(0)]
    assert SampleShuffle(kind(5)).permutation(kind(4)).tolist() == SampleShuffle(5).permutation(4).tolist()
    assert list(sampler(length=kind(20), rank=kind(1), seed=kind(1))) == list(sampler(rank=1))
    split(batch_axis=kind(0))
    gluon_syncbn.configure(timeout=kind(20), seed=kind(0))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_and_flags_of_numpy(kind):
    layer = SyncBatchNorm(
        momentum=kind(0.5), epsilon=kind(0.25), scale=np.bool_(False), center=np.bool_(True), timeout=kind(4)
    )
    assert layer._kwargs == {**SyncBatchNorm(momentum=0.5, epsilon=0.25, scale=False)._kwargs}
    assert all(type(value) in (int, float, bool) for value in layer._kwargs.values())
    assert not layer.gamma._differentiable


def test_nothing_is_configured_where_one_argument_is_wrong():
    before = gluon_syncbn.configure()
    assert before == {"kvstore": None, "timeout": 60, "seed": 0, "nonfinite": "propagate"}
    for wrong in ({"seed": -1}, {"kvstore": "dist_async"}):
        with pytest.raises(ValueError, match="was given, expected"):
            gluon_syncbn.configure(timeout=61, **wrong)
        assert gluon_syncbn.configure() == before


# ---- combinations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"virtual_devices": 2, "axis": 0}, "virtual_devices: 2 was given, expected 1 with axis=0"),
        (
            {"group_size": 3, "num_devices": 4},
            "group_size: 3 was given, expected a divisor of the number of devices, 4",
        ),
        ({"group_size": 2, "mode": "local"}, "group_size: 2 was given, expected None with mode 'local'"),
        ({"groups": [[0], [1]], "mode": "shuffle"}, "groups: [[0], [1]] was given, expected None with mode 'shuffle'"),
        ({"groups": [[0, 1]], "group_size": 2}, "groups: [[0, 1]] was given, expected None with group_size=2"),
        ({"groups": [[0, 1], [1, 2]]}, "expected each rank once, but 1 stands there twice"),
        ({"groups": [[0, 4], [2]]}, "expected all ranks to 4, but 1, 3 is in no group"),
        ({"groups": [[0, -1]]}, "groups: -1 was given, expected ranks in each group that are whole numbers"),
        ({"groups": [[0, 1], []]}, "groups: [[0, 1], []] was given, expected a list of groups, each a list of"),
        (
            {"groups": [[0, 1]], "num_devices": 3},
            "groups: 2 replicas were given, expected each of the 3 replicas in one group: no group has rank 2",
        ),
        ({"mode": "shuffle", "num_devices": 1}, "virtual_devices: 1 was given, expected at least 2"),
        ({"kvstore": "dist_async"}, "Other workers' statistics are of other steps"),
        ({"mode": "global"}, "mode: 'global' was given, expected one of ('sync', 'local', 'shuffle')"),
        ({"num_devices": 65536}, "num_devices: 65536 was given, expected a whole number from 1 to 65535"),
    ],
)
def test_combinations(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SyncBatchNorm(**settings)


def test_a_store_of_one_process_where_one_of_several_is_expected(monkeypatch):
    """And the other way round; where MXNet has no NCCL, neither message sends there."""
    for problem, instead in (
        ("", ": write gluon_syncbn.configure(kvstore='nccl')"),
        ("it has none", ": write no kvstore"),
    ):
        monkeypatch.setattr(_native, "nccl_problem", lambda problem=problem: problem)
        with pytest.raises(ValueError, match=re.escape("expected one of ('mpi',).") + ".*" + re.escape(instead)):
            gluon_syncbn.kvstore("nccl")
    with pytest.raises(ValueError, match=re.escape("write gluon_syncbn.configure(kvstore='device')")):
        gluon_syncbn.kvstore("device")
    with pytest.raises(ValueError, match=r"but it has none; None \(the default\), .* need none"):
        gluon_syncbn.configure(kvstore="nccl")


@pytest.mark.parametrize("norm", [SyncBatchNorm, gluon_syncbn.ShuffleBatchNorm])
@pytest.mark.parametrize(
    "given, refused, instead",
    [
        ((16,), "axis: 16 was given, expected a whole number from -5 to 4", "write in_channels=16)"),
        ((64, 2), "axis: 64 was given", "write in_channels=64, num_devices=2)"),
        ((3, 2), "momentum: 2 was given, expected a number from 0 to 1", "write in_channels=3, num_devices=2)"),
        ((np.int32(16), np.int64(4)), f"axis: {np.int32(16)!r} was given", "write in_channels=16, num_devices=4)"),
        ((1, 8), "momentum: 8 was given", "write in_channels=1, num_devices=8)"),
    ],
)
def test_positions_of_contribs_layer_are_refused(norm, given, refused, instead):
    with pytest.raises(ValueError) as error:
        norm(*given)
    assert str(error.value).startswith(refused)
    assert str(error.value).endswith(instead)


@pytest.mark.parametrize(
    "given, here, there",
    [
        ((3,), "axis=3 here", "in_channels=3 in"),
        ((1, 1), "axis=1, momentum=1 here", "in_channels=1, num_devices=1 in"),
    ],
)
def test_positions_that_may_mean_either_are_warned_about(given, here, there):
    with pytest.warns(UserWarning, match="write it by name") as warned:
        layer = SyncBatchNorm(*given)
    assert here in str(warned[0].message) and there in str(warned[0].message)
    assert warned[0].filename == __file__
    assert layer._kwargs == nn.BatchNorm(*given)._kwargs


@pytest.mark.parametrize(
    "given, named",
    [
        *[((), {"axis": 3}), ((1,), {}), ((-1,), {}), ((3, 0.9), {}), ((3, 1.0, 1e-3), {}), ((3,), {"in_channels": 8})],
        ((), {"in_channels": 16, "num_devices": 2}),
    ],
    ids=str,
)
def test_positions_of_plain_batchnorm_are_its_own(given, named):  # a warning is an error here
    layer = SyncBatchNorm(*given, **named)
    assert layer._kwargs == nn.BatchNorm(*given, **{k: v for k, v in named.items() if k != "num_devices"})._kwargs


@pytest.mark.parametrize(
    "name, here",
    [
        ("num_features", "in_channels, as nn.BatchNorm calls it"),
        ("eps", "epsilon, as nn.BatchNorm calls it"),
        ("affine", "scale and center, as nn.BatchNorm calls it"),
        ("process_group", "group_size or groups"),
        ("track_running_stats", "nothing, because a layer always has running statistics"),
        ("inplace", r"nothing; gluon_syncbn\.recompute"),
    ],
)
def test_names_of_other_layers(name, here):
    converts = functools.partial(gluon_syncbn.convert, nn.BatchNorm())
    for make in (SyncBatchNorm, SyncBatchNormAdd, gluon_syncbn.ShuffleBatchNorm, converts):
        with pytest.raises(ValueError, match=f"{name}: 1 was given, expected {here}"):
            make(**{name: 1})


def test_arrays_are_described_not_printed():
    assert arguments.described(nd.ones((2, 3))) == "NDArray of shape (2, 3) and type float32 on cpu(0)"
    assert arguments.described([nd.ones(2)] * 3) == "list of 3"
    assert arguments.described(["cpu"]) == "['cpu']"


def test_names_that_are_not_there():
    for old, new in {"checkpoint": "recompute", "devices": "only_on"}.items():
        with pytest.warns(DeprecationWarning, match=f"gluon_syncbn.{old} is gluon_syncbn.{new} now"):
            assert getattr(gluon_syncbn, old) is getattr(gluon_syncbn, new)
    ours = sampler()
    with pytest.warns(DeprecationWarning, match="sampler.set_epoch"):
        ours.epoch = 3
    assert ours.epoch == 3
    with pytest.raises(AttributeError, match=r"has no attribute 'cpu_devicez'$"):
        gluon_syncbn.cpu_devicez  # noqa: B018
    for module in (gluon_syncbn, contrastive, gluon_syncbn.parallel, gluon_syncbn.symbol):
        assert set(dir(module)) == set(module.__all__)

"""Every argument of every public function, by a table: what is out of range is a ValueError that names the argument,
the value and what was expected; what NumPy calculates is as good as Python's own numbers."""

import contextlib
import functools
import inspect
import numbers
import re
import warnings
from operator import attrgetter

import mxnet as mx
import numpy as np
import pytest
from internals import core
from mxnet import nd
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormAdd, contrastive
from gluon_syncbn.contrastive import SampleShuffle, ShuffleSampler
from gluon_syncbn.system import arguments

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


class Stranger:
    def __repr__(self):
        return "<stranger>"


#: Of all types. An argument refuses those of them that `TAKES` does not say.
VALUES = [
    *(None, True, np.bool_(False), 0, 1, -1, 0.0, 1.0, 0.5, -1e-9, 1.1, NAN, INFINITE, -INFINITE),
    *(2**63, -(2**63), 2**64, HUGE, "", "2", "True", "sync", "SYNC", "(", "cpu(0)", "nccl", "dist_async", "MPI"),
    *([], [2], ["sync"], [[]], {}, {"a": 1}, [mx.cpu(0), 1], nd.ones(1), nd.ones(3), np.ones(2), [nd.ones(5)]),
    *(nd.ones((4, 2)).tostype("csr"), abs, nn.BatchNorm, SyncBatchNormAdd, SyncBatchNorm(), Stranger()),
]
#: Of the types that an argument takes, and wrong as well.
ALIKE = {
    "groups": [
        *([[0], []], [0, 1], ["01"], [[0, 1], 2], [[0.0]], [[True]], [[None]], [[HUGE]], [[1]], [[0], [0]], [[-1, 0]])
    ],
    "batches": [[3], [[3]], [nd.ones((2, 2))], [[nd.ones((2, 2))] * 2]],
    "shards": [[nd.ones((2, 2)), 3], [nd.ones((2, 2)), nd.ones((2, 3))]],
    "contexts": [[mx.cpu(0)] * 2],
    "params": [[nd.ones(1)], [nn.Dense(1)]],
}


def whole(low, high=2**53):
    return lambda value: arguments.is_a(numbers.Integral, value) and low <= value <= high


def number(low, high):
    return lambda value: arguments.is_a(numbers.Real, value) and low <= value <= high


def of(*types):
    return lambda value: type(value) in types


def flag(value):
    return isinstance(value, (bool, np.bool_))


NONE, NO, COUNT, SECONDS = of(type(None)), of(), whole(1), number(1e-9, 1e9)
#: By the name of an argument, where need be with that of the function: what it takes of `VALUES`.
TAKES = {
    "axis": whole(-5, 4),
    "momentum": number(0, 1),
    "epsilon eps": number(0, 1e300),
    "center scale fix_gamma use_global_stats output_mean_var active fuse show convert sync even_split": flag,
    "in_channels position epoch": whole(0, 2**31),
    "rank batch": whole(0, 1),
    "root_rank": whole(0, 0),
    "num_devices group_size cpus": lambda value: value is None or COUNT(value),
    "virtual_devices length batch_size num_workers cpu_devices.n": COUNT,
    "activation groups ctx_list gamma beta moving_mean moving_var mask": NONE,
    "kvstore": lambda value: value is None or repr(value) == "'nccl'",
    "running_variance nonfinite norm_layer contexts trainer shuffle batches features": NO,
    "ShuffleBatchNorm.mode kvstore.name symbol.SyncBatchNorm.data": NO,
    "slope": number(1e-9, 0.99),
    "mode": lambda value: isinstance(value, str) and value == "sync",
    "timeout": lambda value: value is None or SECONDS(value),
    "configure.timeout": SECONDS,
    "seed": whole(0, 2**64 - 1),
    "net block params parallel.DataParallelModel.module": of(SyncBatchNorm),
    "module": callable,
    "select": lambda value: value is None or (isinstance(value, str) and value != "("),
    "n": whole(0, 1024),
    "name": lambda value: isinstance(value, str) and value,
    "contrastive.gather.features": lambda value: type([*value, 0][0] if type(value) is list else value) is nd.NDArray,
    "batch_axis": whole(-2, 1),
    "data": of(nd.NDArray, np.ndarray),
    "shards": lambda value: type(value) is list and value != [] and getattr(value[0], "shape", None) == (5,),
    "contrastive.split_and_load.ctx_list": NO,
}
TAKES = {name: takes for names, takes in TAKES.items() for name in names.split()}
#: What other arguments a call of a public name needs.
NORM, SHUFFLE = nn.BatchNorm(in_channels=2), {"shuffle": SampleShuffle(1)}
NORM.initialize()
SAMPLER = {"length": 20, "batch_size": 4, "num_workers": 2, "rank": 0, "seed": 1}
CALLS = {
    "SyncBatchNorm SyncBatchNormAdd ShuffleBatchNorm configure kvstore only_on cpu_devices install": {},
    "convert revert freeze summary assert_synchronised average_running_stats": {"net": NORM},
    "recompute": {"block": NORM},
    "join": {"net": NORM, "trainer": None},
    "broadcast_parameters": {"params": NORM},
    "update_bn_stats": {"net": NORM, "batches": [[nd.ones((2, 2))]]},
    "parallel.DataParallelModel": {"module": NORM},
    "parallel.DataParallelCriterion": {"module": abs},
    "parallel.parallel_apply": {"module": abs, "inputs": []},
    "parallel.criterion_parallel_apply": {"module": abs, "inputs": [], "targets": []},
    "symbol.SyncBatchNorm": {"data": mx.sym.var("data")},
    "contrastive.SampleShuffle": {"seed": 1},
    "contrastive.SampleShuffle.permutation": {"self": SampleShuffle(1)},
    "contrastive.ShuffleSampler": SAMPLER,
    "contrastive.ShuffleSampler.set_epoch": {"self": ShuffleSampler(**SAMPLER)},
    "contrastive.ShuffleSampler.restore": {"self": ShuffleSampler(**SAMPLER), "features": np.ones((8, 2)), "batch": 0},
    "contrastive.gather": {"features": [nd.ones((4, 2))]},
    "contrastive.split_and_load": {"data": nd.ones((4, 2)), "ctx_list": [mx.cpu(0), mx.cpu(1)], **SHUFFLE},
    "contrastive.shuffle_shards": {"shards": [nd.ones((2, 2))] * 2, **SHUFFLE},
}
CALLS = {name: needs for names, needs in CALLS.items() for name in names.split()}
#: They take no argument, or are made by the functions above alone.
WITHOUT = {"StepError", "assert_synchronized", "__version__", "reset", "uninstall"}
#: What nothing looks at, or `nn.BatchNorm` and MXNet do.
UNCHECKED = {
    *("beta_initializer", "gamma_initializer", "running_mean_initializer", "running_variance_initializer", "prefix"),
    *("params", "self", "inputs", "targets", "kwargs_tup", "ndev", "key", "name", "attr", "cudnn_off"),
}


def arguments_of(name):
    """Those of a symbol are those of a layer, too."""
    function = attrgetter(name)(gluon_syncbn)
    found = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if name == "symbol.SyncBatchNorm":
        others = ("epsilon", "center", "scale", "in_channels")
        found += [one for one in arguments_of("SyncBatchNorm") if one not in (*others, *found)]
    checked = {"broadcast_parameters": {"params"}, "kvstore": {"name"}, "contrastive.gather": {"name"}}.get(name, set())
    return [one for one in found if one not in UNCHECKED - checked]


def sampler(**kwargs):
    return ShuffleSampler(**{**SAMPLER, **kwargs})


def test_the_table_knows_all_of_the_package():
    assert {name.partition(".")[0] for name in CALLS} | WITHOUT == set(gluon_syncbn.__all__)
    for module in (contrastive, gluon_syncbn.parallel):
        known = {name.split(".")[1] for name in CALLS if name.startswith(module.__name__.split(".")[1])}
        assert known | {"ShuffledBatch", "parallel_backward"} >= set(module.__all__)


@pytest.mark.parametrize("name, argument", [(name, argument) for name in CALLS for argument in arguments_of(name)])
def test_what_is_wrong_is_refused(name, argument):
    takes = TAKES.get(f"{name}.{argument}") or TAKES[argument]
    for value in VALUES + ALIKE.get(argument, []):
        read = {"2": 2, "True": True}.get(value) if isinstance(value, str) else value
        as_text = takes(read) or (takes is flag and repr(value) in "01")  # symbols take such numbers and flags
        if takes(value) or (name == "symbol.SyncBatchNorm" and as_text):
            continue
        with pytest.raises(ValueError) as error, contextlib.ExitStack() as entered:
            made = attrgetter(name)(gluon_syncbn)(**{**CALLS[name], argument: value})
            entered.enter_context(made)  # where nothing is raised, -l shows the value
        assert re.match(rf"{argument}(\[\d\])?: .* (was|were) given, expected", str(error.value)), value
        assert len(str(error.value)) < 800, value


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint8])
def test_whole_numbers_of_numpy(kind):
    names = ("axis", "in_channels", "num_devices", "virtual_devices", "group_size", "timeout")
    layer, same = (SyncBatchNorm(**{name: of(1) for name in names}) for of in (kind, int))
    assert repr(layer) == repr(same) and layer._kwargs == same._kwargs
    named = SyncBatchNorm(groups=[[kind(2), kind(0)], (kind(1),)]).groups
    assert named == ((0, 2), (1,)) and all(type(rank) is int for ranks in named for rank in ranks)
    assert gluon_syncbn.cpu_devices(kind(1)) == [mx.cpu(0)]
    assert SampleShuffle(kind(5)).permutation(kind(4)).tolist() == SampleShuffle(5).permutation(4).tolist()
    assert list(sampler(length=kind(20), rank=kind(1), seed=kind(1))) == list(sampler(rank=1))
    contrastive.split_and_load(**CALLS["contrastive.split_and_load"], batch_axis=kind(0))
    gluon_syncbn.configure(timeout=kind(20), seed=kind(0))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_and_flags_of_numpy(kind):
    layer = SyncBatchNorm(momentum=kind(0.5), epsilon=kind(0.25), scale=np.bool_(False), center=np.bool_(True))
    assert layer._kwargs == SyncBatchNorm(momentum=0.5, epsilon=0.25, scale=False)._kwargs
    assert all(type(value) in (int, float, bool) for value in layer._kwargs.values())


def test_nothing_is_configured_where_one_argument_is_wrong():
    before = gluon_syncbn.configure()
    assert before == {"kvstore": None, "timeout": 60, "seed": 0, "nonfinite": "propagate"}
    for wrong in ({"seed": -1}, {"kvstore": "dist_async"}):
        with pytest.raises(ValueError, match="was given, expected"):
            gluon_syncbn.configure(timeout=61, **wrong)
        assert gluon_syncbn.configure() == before


class OfNCCL(mx.kvstore.KVStoreBase):
    type = "nccl"


# ---- combinations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"virtual_devices": 2, "axis": 0}, "virtual_devices: 2 was given, expected 1 with axis=0"),
        ({"group_size": 2, "mode": "local"}, "group_size: 2 was given, expected None with mode 'local'"),
        ({"groups": [[0], [1]], "mode": "shuffle"}, "groups: [[0], [1]] was given, expected None with mode 'shuffle'"),
        ({"groups": [[0, 1]], "group_size": 2}, "groups: [[0, 1]] was given, expected None with group_size=2"),
        ({"groups": [[0, 1], [1, 2]]}, "expected each rank to 2 once, but missing or twice: 1"),
        ({"groups": [[0, 4], [2]]}, "expected each rank to 4 once, but missing or twice: 1, 3"),
        ({"groups": [[0, -1]]}, "groups: -1 was given, expected ranks in each group that are whole numbers"),
        ({"kvstore": "dist_async"}, "Other workers' statistics are of other steps"),
        ({"kvstore": OfNCCL()}, "an object of one of these types but 'nccl'"),
        ({"kvstore": "horovod"}, "Beside its DistributedTrainer, layers take 'mpi', in a job that mpiexec starts"),
        ({"num_devices": 65536}, "num_devices: 65536 was given, expected a whole number from 1 to 65535"),
    ],
)
def test_combinations(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SyncBatchNorm(**settings)


@pytest.mark.parametrize("settings", [{"group_size": 2}, {"mode": "shuffle"}], ids=str)
def test_the_devices_of_a_process_need_not_be_all(settings):
    assert SyncBatchNorm(num_devices=1, **settings).num_devices == 1


@pytest.mark.parametrize("problem, instead", [("", "configure(kvstore='nccl')"), ("it has none", "write no kvstore")])
def test_a_name_that_layers_take_where_the_store_of_mpi_is_expected(monkeypatch, problem, instead):
    """And the other way round; where MXNet has no NCCL, neither message sends there."""
    with pytest.raises(ValueError, match=r"but .*; None \(the default\), .* need none"):
        gluon_syncbn.configure(kvstore="nccl")
    monkeypatch.setattr(core, "nccl_problem", lambda: problem)
    others = {name: f"configure(kvstore={name!r})" for name in ("device", "dist_sync")}
    for name, said in {**others, "nccl": instead, "horovod": "layers take 'mpi'"}.items():
        with pytest.raises(ValueError, match=re.escape("expected one of ('mpi',).") + ".*" + re.escape(said)):
            gluon_syncbn.kvstore(name)
    dense = nn.Dense(1)
    dense.initialize()
    with pytest.raises(ValueError, match="layers take 'mpi'"):  # of which MXNet makes a local one without a word
        mx.gluon.Trainer(dense.collect_params(), "sgd", kvstore="horovod")


@pytest.mark.parametrize("norm", [SyncBatchNorm, gluon_syncbn.ShuffleBatchNorm])
@pytest.mark.parametrize(
    "given, refused, said",
    [
        ((16,), "axis: 16 was given, expected a whole number from -5 to 4", "in_channels=16 in"),
        ((64, 2), "axis: 64 was given", "in_channels=64, num_devices=2 in"),
        ((3, 2), "momentum: 2 was given, expected a number from 0 to 1", "in_channels=3, num_devices=2 in"),
        (
            (np.int32(16), np.int64(4)),
            re.escape(f"axis: {np.int32(16)!r} was given"),
            "in_channels=16, num_devices=4 in",
        ),
        ((1, 8), "momentum: 8 was given", "in_channels=1, num_devices=8 in"),
    ],
)
def test_positions_of_contribs_layer_are_refused(norm, given, refused, said):
    with pytest.raises(ValueError, match=refused), pytest.warns(UserWarning, match=f"{said} contrib's layer"):
        norm(*given)


@pytest.mark.parametrize(
    "given, named, said",
    [
        ((3,), {}, "axis=3 here, .* in_channels=3 in"),
        ((1, 1), {}, "axis=1, momentum=1 here, .* in_channels=1, num_devices=1 in"),
        *[((), {"axis": 3}, ""), ((1,), {}, ""), ((-1,), {}, ""), ((3, 0.9), {}, ""), ((3, 1.0, 1e-3), {}, "")],
        *[((3,), {"in_channels": 8}, ""), ((), {"in_channels": 16, "num_devices": 2}, "")],
    ],
    ids=str,
)
def test_positions_are_those_of_plain_batchnorm(given, named, said):
    """Where contrib's layer takes them otherwise, a warning says so."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layer = SyncBatchNorm(*given, **named)
    assert layer._kwargs == nn.BatchNorm(*given, **{k: v for k, v in named.items() if k != "num_devices"})._kwargs
    assert len(seen) == bool(said)
    for warned in seen:
        assert re.search(f"{said}.*: write it by name", str(warned.message)) and warned.filename == __file__


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

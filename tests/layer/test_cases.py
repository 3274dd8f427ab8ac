"""Layers chosen, and drawn at random with what happens between their steps, against `reference.py`. `make soak` draws
more of them."""

import gc
import os
import sys

import mxnet as mx
import pytest
from environments import ended
from internals import core
from places import SUPPORT, TESTS
from poolings import POOLINGS, fits
from replicas import ON_CPUS, WAYS
from soak.case import Case, draw
from soak.events import choices
from soak.trial import run

DOOR = int(os.environ.get("GLUON_SYNCBN_OPERATOR") == "custom")
FIRST = 120 * int(os.environ.get("GLUON_SYNCBN_TEST_SEED", 0))


@pytest.fixture(scope="module", autouse=True)
def layers():
    """Cases leave none."""
    gc.collect()
    before = core.layers()
    yield
    mx.nd.waitall()
    gc.collect()
    assert core.layers() <= before


# ---- chosen ------------------------------------------------------------------------------------------------


@pytest.fixture
def check(contexts):
    """A case with each of these settings."""

    def check(*some, **settings):
        emulated = contexts[0].device_type == "gpu"
        for one in some or [{}]:
            run(Case(**settings, **one, emulated=emulated), contexts)

    return check


ACTIVATIONS = (None, "relu", "relu6", "leaky")
EPILOGUES = [{"activation": activation, "addend": addend} for addend in (None, "own") for activation in ACTIVATIONS]


@pytest.mark.on_gpus
@pytest.mark.parametrize("masked", [None, "all"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling(check, contexts, pooling, masked):
    for replicas, dtype, way in ((4, "float64", "eager"), (8, "float32", "static_shape"), (3, "bfloat16", "hybrid")):
        replicas = min(replicas, len(contexts))
        if fits(POOLINGS[pooling], replicas) and dtype in ON_CPUS:
            check(pooling=POOLINGS[pooling], contexts=range(replicas), dtype=dtype, way=way, masked=masked)


@pytest.mark.parametrize("dtype", [one for one in ON_CPUS if one in ("float64", "bfloat16")])
@pytest.mark.parametrize("empty", ["sample", "position"])
def test_an_empty_shard(check, empty, dtype):
    """MXNet gives no memory for it; a null pointer does not mean that there is no such input."""
    for req in ("write", "add"):
        reqs = dict.fromkeys(("x", "addend"), req)
        check(*EPILOGUES, contexts=[1, 0], empty=empty, dtype=dtype, reqs=reqs, steps=["train"])


@pytest.mark.parametrize(
    "axis, spatial, way", [(1, (4, 6), "eager"), (1, (5, 7), "hybrid"), (-1, (4, 6), "static_shape")], ids=str
)
def test_each_activation_in_bfloat16(check, axis, spatial, way):
    check(*EPILOGUES, dtype="bfloat16", contexts=range(3), axis=axis, spatial=spatial, way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["frozen", "reverted"])
def test_by_operators_of_mxnet(check, kind, way):
    """Its own addition is wrong in graphs where a gradient is added to an array, or wanted by nobody; it plans with the
    memory of the first step."""
    given = {"contexts": [1] if kind == "reverted" else [1, 0], "spatial": (3,)}
    given.update({"settings": {"use_global_stats": kind == "frozen"}, "reverted": kind == "reverted"})
    check(*EPILOGUES, **given, way=way, steps=["train", "predict"])
    for x, addend in (("write", "null"), ("write", "add"), ("add", "write"), ("add", "add"), ("null", "add")):
        check(*EPILOGUES[4:6], **given, way=way, reqs={"x": x, "addend": addend})
    if kind == "frozen":
        check(*EPILOGUES, **given, way=way, empty="sample")
        check(*EPILOGUES, way=way, of_np=way == "hybrid", steps=["train", "there_and_back", "train"])


@pytest.mark.parametrize("way", WAYS)
def test_sparse_data(check, way):
    """MXNet makes them dense for plain BatchNorm, too, and has a gradient for those of rows."""
    for stype, req in (("csr", "null"), ("row_sparse", "write")):
        check(spatial=(), stype=stype, reqs={"x": req}, way=way, steps=["train", "predict"])


@pytest.mark.parametrize("event", choices(Case(dtype="float32")))
def test_each_event(check, event):
    pooling = {"mode": "shuffle", "virtual_devices": 2}
    check(dtype="float32", contexts=[1, 0], pooling=pooling, steps=["train", event, "train", "train"])


@pytest.mark.on_gpus
@pytest.mark.parametrize("mode", ["sync", "shuffle"])
def test_replicas_in_threads(check, mode):
    check(contexts=range(3), pooling={"mode": mode}, threads=True, steps=["train"] * 10)


# ---- drawn -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used")  # a mask of a frozen layer
@pytest.mark.parametrize("seed", range(FIRST + DOOR, FIRST + 120, 2))
def test_random(contexts, seed):
    case = draw(seed)
    for _ in range(case.rng.randint(3)):
        place = case.rng.randint(1, len(case.steps) + 1)
        case.steps[place:place] = [str(case.rng.choice(choices(case))), "train"]
    print(case)
    run(case, contexts)


@pytest.mark.skipif(DOOR, reason="this is MXNet's Custom")
@pytest.mark.timeout(900)
def test_random_through_custom():
    seeds = range(FIRST + 3, FIRST + 120, 6)  # `make test-custom` has all that are odd
    program = "import light, gluon_syncbn, test_cases\n"
    program += f"for seed in {seeds}: test_cases.test_random(gluon_syncbn.cpu_devices(8), seed)"
    folders = SUPPORT, TESTS, TESTS / "layer"
    ended([sys.executable, "-c", program], *folders, code=0, timeout=800, GLUON_SYNCBN_OPERATOR="custom")

"""Families whose models pass `norm_layer=` on in part only, are 3-D, or segment pictures; `make gluoncv` has all.

In float64, where rounding switches no ReLU, so that statistics of one context alone would be far off.
"""

import pytest

pytest.importorskip("gluoncv", reason="GluonCV is not installed")

from families import checks
from families.models import BY_NAME
from replicas import release

QUICK = [BY_NAME[name] for name in ("mobilenetv3_small", "fastscnn")]
LARGE = [BY_NAME[name] for name in ("mobile_pose_resnet18_v1b", "hrnet_w18_small_v1_c", "fcn", "psp", "deeplab")]
LARGE += [BY_NAME["r2plus1d_resnet18_kinetics400"]._replace(inputs=((3, 4, 16, 16),))]
MODELS = [*QUICK, *(pytest.param(model, marks=pytest.mark.slow) for model in LARGE)]


@pytest.fixture(autouse=True)
def released_each():
    """As in conftest.py, but after each test: three such nets one after the other came to 5 GB."""
    yield
    release()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_family(model):
    plain = checks.make(model, dtype="float64")
    net, warning = checks.converted(checks.make(model, checks.CONTEXTS, dtype="float64"))
    layers = checks.count(plain).layers
    assert layers > 0 and not warning
    assert checks.count(net) == checks.Counts(layers=layers, synchronised=layers, frozen=0)

    (found,) = checks.compare(model, plain, net, dtype="float64", orders=[])
    assert all(one < 1e-7 for one in found.values()), found

    for one in (plain, net):
        one.cast("float32")
    assert not checks.files(model, plain, net)

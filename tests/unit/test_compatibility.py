"""MXNet on a Python or NumPy that lacks names: who gets them, and what it computes with them."""

import sys
import tempfile

import mxnet as mx
import numpy as np
import pytest
from environments import ended
from mxnet import recordio
from places import ROOT

from gluon_syncbn.mxnet_side import compatibility
from gluon_syncbn.mxnet_side.compatibility import older_numpy, release

young = pytest.mark.skipif(
    not compatibility.needed(), reason="nothing is missing of this Python and NumPy: `make test-newest` has others"
)
#: setuptools lends what Python has lost.
YOUNG = """
import sys, warnings
import numpy

GONE = 'bool int float complex object str'.split()
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "distutils":
            raise ModuleNotFoundError("No module named 'distutils'", name="distutils")
sys.meta_path.insert(0, Finder())
warnings.filterwarnings("ignore", module="scipy|matplotlib|pandas|cv2")
"""


#: As in a Python that did not read gluon_syncbn.pth at its start.
WITHOUT_FILE = """
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "gluon_syncbn_first"]
"""
ENDS = """
import gluon_syncbn, mxnet
layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
layer.initialize()
layer(mxnet.nd.ones((2, 3)).reshape((numpy.int64(2), 3))).asnumpy()
assert isinstance(mxnet.metric.Loss().sum_metric, float)
"""
ALONE = """
import gluon_syncbn_first
import {}
import mxnet
assert mxnet.numpy.bool is bool and getattr(numpy, "bool", None) is not bool
assert "gluon_syncbn" not in sys.modules
import gluon_syncbn
assert [type(finder).__name__ for finder in sys.meta_path if "gluon" in type(finder).__module__].count("Finder") == 2
"""
PROGRAMS = {
    "MXNet and GluonCV get the names, and nobody else, beside another finder": """
names = set(vars(numpy))
import gluon_syncbn
gluon_syncbn.install()
import gluoncv, mxnet
assert issubclass(gluoncv.utils.parallel.DataParallelModel, gluon_syncbn.parallel.DataParallelModel)
assert gluon_syncbn.mxnet_side.compatibility.needed()
lost = {name for name in GONE if not isinstance(getattr(numpy, name, None), (type(None), type))}
assert not lost, lost
assert names >= {name for name in vars(numpy) if not hasattr(vars(numpy)[name], "__path__")}
assert sys.modules["numpy"] is numpy
assert "distutils" not in sys.modules and "distutils.version" not in sys.modules
try:
    exec("import distutils.version", {"__name__": "another"})
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
assert mxnet.numpy.bool is bool and getattr(numpy, "bool", None) is not bool
assert mxnet.ndarray.ndarray.np.float32 is numpy.float32
mxnet.nd.ones(3).asnumpy()
""",
    "an import of mxnet alone": ALONE.format("mxnet") + ENDS,
    "an import of gluoncv alone": ALONE.format("gluoncv") + ENDS,
    "a failed import is forgotten": f"""{WITHOUT_FILE}
try:
    import mxnet
except (ImportError, AttributeError):
    assert "mxnet.base" in sys.modules
else:
    raise AssertionError
{ENDS}""",
    "a script gives NumPy the names by itself, before it imports MXNet": f"""{WITHOUT_FILE}
from gluon_syncbn_first.mxnet_side.compatibility import older_numpy, release
vars(numpy).update((name, value) for name, value in older_numpy.VALUES.items() if not hasattr(numpy, name))
sys.modules["distutils"] = sys.modules["distutils.version"] = versions = type(sys)("distutils")
versions.LooseVersion = versions.StrictVersion = release
import mxnet
{ENDS}
assert mxnet._ctypes.ndarray.str is not str
""",
}


@young
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name):
    ended([sys.executable, "-W", "ignore", "-c", YOUNG + PROGRAMS[name]], ROOT, code=0)


def test_where_no_name_is_missing_an_import_is_what_it_was():
    program = """
import sys
import gluon_syncbn_first
assert not {"numpy", "mxnet", "gluon_syncbn", "importlib.util"} & set(sys.modules) - before
numpy = type(sys)("numpy")
numpy.__version__ = "1.23.5"
sys.version_info = (3, 11)
with open(folder + "/mxnet.py", "w") as file:
    file.write("import sys, absent" if fails else "loaded = True")
sys.path.insert(0, folder)
sys.modules["numpy"] = numpy
try:
    import mxnet
    print(mxnet.loaded)
except ImportError as error:
    print(error)
"""
    for fails, printed in ((False, "True"), (True, "No module named 'absent'")):
        with tempfile.TemporaryDirectory() as folder:
            set_up = f"import sys; before = set(sys.modules); folder = {folder!r}; fails = {fails}\n"
            command = [sys.executable, "-S", "-c", set_up + program]
            done = ended(command, ROOT)
        assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


def test_versions_compare_by_their_numbers():
    assert release("1.9.1") >= release("1.9")
    assert release("0.10.5.post0") > release("0.9")
    assert release("2.5.5rc1") == release("2.5.5")
    assert not release("1.4.0") < release("1.4.0b20180917")
    assert release("1.10") > release("1.9")


# ---- what MXNet computes: the same on each NumPy


def test_parameters_of_operators_take_numpy_numbers():
    shape = (np.int64(2), np.int32(3))
    assert mx.nd.zeros(6).reshape(shape).shape == shape
    assert mx.nd.random.normal(shape=list(shape)).shape == shape
    assert mx.nd.clip(mx.nd.ones(1), np.float32(0.1), np.float64(0.25)).asscalar() == 0.25
    assert mx.sym.var("x", shape=shape).attr("__shape__") == "(2, 3)"
    assert mx.sym.reshape(mx.sym.var("x"), shape=shape).attr("shape") == "(2, 3)"
    assert mx.sym.var("np.", shape="np.int64(2)").attr("__shape__") == "np.int64(2)"
    dense = mx.gluon.nn.Dense(np.prod((2, 2)), in_units=np.int64(3))
    dense.initialize()
    dense.hybridize()
    assert dense(mx.nd.ones((1, 3))).shape == (1, 4)


def test_metrics_add_in_float64():
    metric = mx.metric.Loss()
    for value in (2.0**24, 1, 1):
        metric.update(None, [mx.nd.array([value])])
    assert metric.sum_metric == 2.0**24 + 2


@pytest.mark.filterwarnings("ignore:NumPy will stop allowing conversion")
def test_integers_that_do_not_fit_wrap_around():
    assert mx.nd.array([-1, 256, 3], dtype="uint8").asnumpy().tolist() == [255, 0, 3]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"])
def test_arrays_of_each_type_go_there_and_back(kind):
    values = np.array([[0, 1], [1, 1]], kind)
    for array in (mx.nd.array(values, dtype=kind), mx.np.array(values, dtype=kind)):
        assert array.asnumpy().dtype == kind
        assert (array.asnumpy() == values).all()


@pytest.mark.filterwarnings("ignore:Creating an ndarray from nested sequences")
def test_numpy_takes_an_ndarray():
    array = mx.nd.array([1, 2, 3])
    assert np.all(array == array)
    assert isinstance(np.float32(2) * array, mx.nd.NDArray)


@pytest.mark.filterwarnings("ignore:tostring")
def test_records_with_several_labels():
    header, data = recordio.unpack(recordio.pack(recordio.IRHeader(0, [1.0, 2.0], 3, 4), b"data"))
    assert header.label.tolist() == [1, 2] and data == b"data"


def test_old_names_mean_what_they_meant():
    names = older_numpy.numpy()
    assert names.bool is bool and names.int is int and names.float is float
    assert names.in1d([[1, 2], [3, 4]], [2, 3]).tolist() == [False, True, True, False]
    assert names.msort(np.array([[3], [1]])).tolist() == [[1], [3]]
    assert names.trapz([1, 1]) == 1 and names.product([2, 3]) == 6
    assert names.random is np.random and names.float64 is np.float64
    with pytest.raises(RuntimeError, match="numpy-financial"):
        names.npv(0.1, [1])

"""What is asked of NVIDIA's driver, on a driver that is none: a real library, loaded by the dynamic loader."""

import shutil
import sys

import pytest
from environments import ended
from fake_driver import build_driver
from places import PACKAGE

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a driver of its own: needs g++")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The folder of the fake libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    build_driver(folder)
    return folder


def ask(driver, program, **environment):
    """What the program prints; `cuda` is the module, without the package, which would import MXNet."""
    head = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); from system import cuda\n"
    done = ended([sys.executable, "-c", head + program], LD_LIBRARY_PATH=driver, **environment)
    said = done.stdout + done.stderr
    assert "mxnet" not in said
    return said.strip()


CHECK = """
try:
    cuda.check_architecture({device})
    print("fine")
except (ValueError, OSError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("capability", ["50", "53", "61", "70", "75", "80", "86", "89"])
def test_gpus_that_mxnet_has_code_for(driver, capability):
    assert ask(driver, CHECK.format(device=0), FAKE_GPUS="1", FAKE_CAPABILITY=capability) == "fine"


@pytest.mark.parametrize("capability, dotted", [("90", "9.0"), ("100", "10.0"), ("120", "12.0"), ("37", "3.7")])
def test_gpus_that_it_has_none_for(driver, capability, dotted):
    said = ask(driver, CHECK.format(device=0), FAKE_GPUS="1", FAKE_CAPABILITY=capability)
    assert said.startswith(f"ValueError ctx: gpu(0) was given, First of compute capability {dotted}, expected")
    for way_out in ("8.x", "cpu_devices", f"sm_{capability}", "GLUON_SYNCBN_ANY_ARCHITECTURE=1"):
        assert way_out in said


def test_each_gpu_is_judged_by_itself(driver):
    program = CHECK.format(device=0) + CHECK.format(device=1) + CHECK.format(device=2)
    said = ask(driver, program, FAKE_GPUS="2", FAKE_CAPABILITY="86").splitlines()
    assert said[0] == "fine"
    assert said[1].startswith("ValueError ctx: gpu(1) was given, Other of compute capability 9.6")
    assert said[2] == "OSError the NVIDIA driver's cuDeviceGet failed: invalid device ordinal (101)"


def test_count_and_version(driver):
    program = "print(cuda.count(), cuda.driver_version())"
    assert ask(driver, program, FAKE_GPUS="4", FAKE_CUDA="12020") == "4 (12, 2)"


def test_a_driver_without_a_gpu(driver):
    program = "print(cuda.driver_version())" + CHECK.replace("check_architecture({device})", "count()")
    said = ask(driver, program, FAKE_CUDA="11040").splitlines()
    assert said == ["(11, 4)", "OSError the NVIDIA driver's cuInit failed: no CUDA-capable device is detected (100)"]


def test_no_driver(tmp_path):
    said = ask(tmp_path, CHECK.format(device=0))
    if "libcuda.so.1" not in said:
        pytest.skip("this machine has an NVIDIA driver")
    assert said.startswith("OSError libcuda.so.1: cannot open shared object file")

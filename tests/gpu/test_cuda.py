"""What is asked of NVIDIA's driver, on a driver that is none."""

import ctypes
import shutil

import pytest
from fake_driver import build_driver

from gluon_syncbn.system import cuda


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("compiles a driver of its own: needs g++")
    # Under another name: who asks for libcuda.so.1 later does not get this one.
    return ctypes.CDLL(str(build_driver(tmp_path_factory.mktemp("driver"), "libnone.so.1")))


@pytest.fixture
def machine(library, monkeypatch):
    """Has the driver tell this."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": library}[name])

    def tells(**settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"FAKE_{name}", str(value))

    return tells


@pytest.mark.parametrize("capability", [50, 53, 61, 70, 75, 80, 86, 89])
def test_gpus_that_mxnet_has_code_for(machine, capability):
    machine(GPUS=1, CAPABILITY=capability)
    cuda.check_architecture(0)


@pytest.mark.parametrize("capability, dotted", [(90, "9.0"), (100, "10.0"), (120, "12.0"), (37, "3.7")])
def test_gpus_that_it_has_none_for(machine, capability, dotted):
    machine(GPUS=1, CAPABILITY=capability)
    with pytest.raises(ValueError) as error:
        cuda.check_architecture(0)
    assert str(error.value).startswith(f"ctx: gpu(0) was given, First of compute capability {dotted}, expected")
    for way_out in ("8.x", "cpu_devices", f"sm_{capability}", "GLUON_SYNCBN_ANY_ARCHITECTURE=1"):
        assert way_out in str(error.value)


def test_each_gpu_is_judged_by_itself(machine):
    machine(GPUS=2, CAPABILITY=86)
    cuda.check_architecture(0)
    with pytest.raises(ValueError, match=r"ctx: gpu\(1\) was given, Other of compute capability 9\.6"):
        cuda.check_architecture(1)
    with pytest.raises(OSError, match=r"the NVIDIA driver's cuDeviceGet failed: invalid device ordinal \(101\)"):
        cuda.check_architecture(2)


def test_count_and_version(machine):
    machine(GPUS=4, CUDA=12020)
    assert (cuda.count(), cuda.driver_version()) == (4, (12, 2))
    machine(GPUS=0)
    with pytest.raises(OSError, match=r"the NVIDIA driver's cuInit failed: no CUDA-capable device is detected \(100\)"):
        cuda.count()
    assert cuda.driver_version() == (12, 2)


def test_no_driver(monkeypatch):
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(f"/nowhere/{name}"))
    with pytest.raises(OSError, match=r"libcuda\.so\.1: cannot open shared object file"):
        cuda.count()

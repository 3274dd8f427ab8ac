"""What is asked of NVIDIA's driver, on a driver that is none."""

import ctypes

import pytest

from gluon_syncbn.system import cuda


class Driver:
    """Of GPUs with these capabilities."""

    def __init__(self, *capabilities):
        self.capabilities = capabilities

    def cuInit(self, flags):
        return 0 if self.capabilities else 100

    def cuDriverGetVersion(self, version):
        version._obj.value = 12020
        return 0

    def cuDeviceGetCount(self, found):
        found._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal.value
        return 0 if ordinal.value < len(self.capabilities) else 101

    def cuDeviceGetName(self, name, size, device):
        name.value = b"GPU %d" % device.value
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = divmod(self.capabilities[device.value], 10)[attribute.value - 75]
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"error %d" % status
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Has GPUs with these capabilities."""
    return lambda *capabilities: monkeypatch.setattr(
        ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver(*capabilities)}[name]
    )


@pytest.mark.parametrize("capability", [50, 53, 61, 70, 75, 80, 86, 89])
def test_gpus_that_mxnet_has_code_for(machine, capability):
    machine(capability)
    cuda.check_architecture(0)


@pytest.mark.parametrize("capability, dotted", [(90, "9.0"), (100, "10.0"), (120, "12.0"), (37, "3.7")])
def test_gpus_that_it_has_none_for(machine, capability, dotted):
    """Each is judged by itself."""
    machine(86, capability)
    cuda.check_architecture(0)
    with pytest.raises(ValueError) as error:
        cuda.check_architecture(1)
    assert str(error.value).startswith(f"ctx: gpu(1) was given, GPU 1 of compute capability {dotted}, expected")
    for way_out in ("8.x", "cpu_devices", f"sm_{capability}", "GLUON_SYNCBN_ANY_ARCHITECTURE=1"):
        assert way_out in str(error.value)


def test_count_and_version(machine):
    machine(80, 80, 80, 80)
    assert (cuda.count(), cuda.driver_version()) == (4, (12, 2))
    with pytest.raises(OSError, match=r"the NVIDIA driver's cuDeviceGet failed: error 101 \(101\)"):
        cuda.gpu(4)
    machine()
    with pytest.raises(OSError, match=r"the NVIDIA driver's cuInit failed: error 100 \(100\)"):
        cuda.count()
    assert cuda.driver_version() == (12, 2)


def test_no_driver(monkeypatch):
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(f"/nowhere/{name}"))
    with pytest.raises(OSError, match=r"libcuda\.so\.1: cannot open shared object file"):
        cuda.count()

"""CUDA libraries are found without LD_LIBRARY_PATH: with stand-ins for MXNet and CUDA, and with the real packages.

The real ones are 1.9 GB to fetch: `pytest -m cuda_packages tests/gpu/test_cuda_libraries.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from devices import compiled
from environments import ended, shell
from mxnet import libinfo
from places import BENCHMARKS, PACKAGE, ROOT

from gluon_syncbn.system import distribution
from gluon_syncbn.system.cuda_libraries import PACKAGES

sys.path.insert(0, str(BENCHMARKS))
from _kernel_arguments import source

COMPILES = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles libraries of its own: needs g++")
FOLDERS = {soname: package[len("nvidia-") : -len("-cu11")].replace("-", "_") for soname, package in PACKAGES.items()}
NEEDS = {"libcublas.so.11": ["libcublasLt.so.11"], "libcusolver.so.11": ["libcublas.so.11", "libcublasLt.so.11"]}
# What a real mxnet does first; then it says so and leaves.
FAKE_MXNET = """
import ctypes, os, sys
ctypes.CDLL(os.path.join(os.path.dirname(__file__), "libmxnet.so"))
sys.exit("libmxnet.so is loaded")
"""
# The files of the package, which imports MXNet.
ALONE = f"""
import importlib, sys, types
package = sys.modules["alone"] = types.ModuleType("alone")
package.__path__ = [{str(PACKAGE)!r}]
libraries = importlib.import_module("alone.system.cuda_libraries")
"""


# What libmxnet.so takes from the driver.
DRIVER = """
void cuDeviceGet() {} void cuDevicePrimaryCtxRetain() {} void cuGetErrorString() {} void cuGraphNodeGetType() {}
void cuGraphKernelNodeGetParams() {} void cuLaunchKernel() {} void cuModuleGetFunction() {} void cuModuleLoadData() {}
void cuModuleLoadDataEx() {} void cuModuleUnload() {}
"""


def link(path, needs=(), source=""):
    """A library under its own name, linked against others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    # Not followed further here: that is what is being tested.
    flags.append("-Wl,--unresolved-symbols=ignore-all")
    command = ["g++", "-x", "c", "-", "-x", "none", *flags, *map(str, needs), "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, env=shell())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A site-packages folder with an MXNet that is linked as mxnet-cu112 is, its libraries, and a driver elsewhere."""
    root = tmp_path_factory.mktemp("whole")
    link(root / "driver" / "libcuda.so.1")
    places = {soname: root / "site" / "nvidia" / folder / "lib" / soname for soname, folder in FOLDERS.items()}
    for soname, place in places.items():
        link(place, [places[other] for other in NEEDS.get(soname, ())])
    direct = [place for soname, place in places.items() if soname != "libcublasLt.so.11"]
    # In an order in which nothing could be loaded one after the other.
    link(root / "site" / "mxnet" / "libmxnet.so", [root / "driver" / "libcuda.so.1", *reversed(direct)])
    (root / "site" / "mxnet" / "__init__.py").write_text(FAKE_MXNET)
    shutil.copy(libinfo.__file__, str(root / "site" / "mxnet"))
    return root


@pytest.fixture
def machine(whole, tmp_path):
    """A copy that a test may break."""
    return Path(shutil.copytree(str(whole), str(tmp_path / "machine")))


def run(machine, program="import gluon_syncbn", **environment):
    environment = {"PYTHONPATH": f"{machine}/site:{ROOT}", "LD_LIBRARY_PATH": f"{machine}/driver", **environment}
    done = ended([sys.executable, "-c", program], cwd=machine, **environment)
    return done.stdout + done.stderr


@COMPILES
@pytest.mark.parametrize("first", ["gluon_syncbn", "mxnet"])
def test_libraries_of_the_packages_are_found(machine, first):
    alone = "import sys; sys.meta_path = [finder for finder in sys.meta_path if isinstance(finder, type)]; import mxnet"
    assert "cannot open shared object file" in run(machine, alone)  # what has to be cured
    assert run(machine, f"import gluon_syncbn_first, {first}").strip() == "libmxnet.so is loaded"


@COMPILES
def test_a_library_that_mxnet_finds_by_itself_is_not_missing(machine):
    """An MXNet that its user has built may say in its file where the others are."""
    own = machine / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    os.rename(str(own), str(machine / "site" / "mxnet" / "libnccl.so.2"))
    path = machine / "site" / "mxnet" / "libmxnet.so"
    link(path, [path.with_name("libnccl.so.2"), "-Wl,-rpath,$ORIGIN"])
    assert run(machine).strip() == "libmxnet.so is loaded"


@COMPILES
def test_a_library_that_the_loader_finds_is_left_alone(machine):
    own = machine / "driver" / "libnccl.so.2"
    shutil.copy(str(machine / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"), str(own))
    program = f"""{ALONE}
libraries.load()
print(*libraries.loaded(), sep="\\n")
"""
    lines = run(machine, program).splitlines()
    assert str(own) in lines
    assert f"{machine}/site/nvidia/cudnn/lib/libcudnn.so.8" in lines
    assert {Path(line).name for line in lines} == {*FOLDERS, "libcuda.so.1"}


@COMPILES
@pytest.mark.parametrize("soname", sorted(FOLDERS))
def test_a_missing_library_is_named_with_its_package(machine, soname):
    (machine / "site" / "nvidia" / FOLDERS[soname] / "lib" / soname).unlink()
    first = "mxnet" if soname == "libnccl.so.2" else "gluon_syncbn"
    last = run(machine, f"import gluon_syncbn_first, {first}").splitlines()[-1]
    assert last.startswith("ImportError: The MXNet in ")
    # Itself alone: not those that need it.
    assert re.findall(r"lib\w+\.so[.\d]+ \([\w-]+\)", last) == [f"{soname} ({PACKAGES[soname]})"]
    assert distribution.command("cu112") in last


@COMPILES
def test_a_missing_driver_is_said_to_be_one(machine):
    (machine / "driver" / "libcuda.so.1").unlink()
    said = run(machine)
    if "is loaded" in said:
        pytest.skip("this machine has an NVIDIA driver")
    last = said.splitlines()[-1]
    assert last.startswith("ImportError: The MXNet in ")
    for advice in ("libcuda.so.1", "NVIDIA driver", "520", "--gpus all", distribution.command("cpu")):
        assert advice in last
    assert "CUDA libraries" not in last


@COMPILES
def test_a_broken_library_keeps_the_loaders_words(machine):
    (machine / "site" / "nvidia" / "cudnn" / "lib" / "libcudnn.so.8").write_bytes(b"no library")
    last = run(machine).splitlines()[-1]
    assert last.startswith("OSError: ")
    assert "libcudnn.so.8: file too short" in last or "invalid ELF header" in last


def test_a_cpu_build_loads_no_cuda():
    program = f"{ALONE}\nlibraries.load()\nprint(libraries.loaded(), 'mxnet' in sys.modules)"
    assert run(ROOT, program, PYTHONPATH="").split() == ["[]", "False"]


# ---- the packages of the extra cu112, as the index has them


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with what the extra `cu112` would bring; GLUON_SYNCBN_CUDA_SITE names one."""
    given = os.environ.get("GLUON_SYNCBN_CUDA_SITE")
    if given:
        yield Path(given)
        return
    site = tmp_path_factory.mktemp("packages")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.findall(r'"([^"]+)"', re.search(r"^cu112 = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL).group(1))
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *extra], check=True, timeout=3000, env=shell())
    yield site
    shutil.rmtree(str(site))  # 3.7 GB


@COMPILES
@pytest.mark.cuda_packages
@pytest.mark.timeout(3600)
def test_the_real_mxnet_starts_with_the_packages(packages, tmp_path):
    """Every symbol that MXNet wants is there: ctypes loads with RTLD_NOW. The driver alone is a stand-in."""
    link(tmp_path / "libcuda.so.1", source=DRIVER)
    program = """
import gluon_syncbn, mxnet
from gluon_syncbn.system import cuda_libraries
print(*cuda_libraries.loaded(), sep="\\n")
print(mxnet.runtime.Features())
"""
    environment = {"PYTHONPATH": f"{ROOT}:{packages}", "LD_LIBRARY_PATH": str(tmp_path)}
    said = run(tmp_path, program, **environment)
    for soname, folder in FOLDERS.items():
        assert f"{packages}/nvidia/{folder}/lib/{soname.partition('.')[0]}.so" in said, said
    assert "✔ CUDA," in said
    assert "✔ NCCL" in said
    # cuDNN opens its parts when it first needs them, from the folder that it is in.
    for part in ("ops", "cnn", "adv"):
        for use in ("infer", "train"):
            assert (packages / "nvidia" / "cudnn" / "lib" / f"libcudnn_{part}_{use}.so.8").is_file()


@pytest.mark.cuda_packages
@pytest.mark.timeout(3600)
def test_the_real_run_time_compiler_takes_the_kernels(packages):
    """It needs no GPU. What it makes is in PTX 7.8, which drivers from 520 on load."""
    library = packages / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.11.2"
    text = compiled(source(), library=library).value.decode()
    assert ".version 7.8" in text
    asked = re.findall(r"SYNCBN_KERNEL\((\w+), (\w+), (\w+)\)$", source(), re.MULTILINE)
    assert len(asked) == 3 * (2 * 4 + 6)
    assert {"_".join(words) for words in asked} == set(re.findall(r"\.entry (\w+)", text))

"""What `make dist` made, installed as a stranger would into environments that hold nothing else: `make test-dist`."""

import os
import platform
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from environments import shell
from places import ROOT

import gluon_syncbn

VERSION = gluon_syncbn.__version__

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]


def run(*command, cwd="/", limit=900):
    """Everything printed by a command that ends well, with none of the settings of these tests."""
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "TMP", "HOME", "SSL", "LANG"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=str(cwd),
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **kept},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def python(version):
    """The path of one, `3.9` for example, that runs; None where this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*pyenv.glob(f"versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    return next(filter(None, found), None)


def made(pattern):
    files = list((ROOT / "dist").glob(pattern))
    assert len(files) == 1, f"dist/{pattern}: {files}; `make dist` makes it"
    return files[0]


@pytest.fixture(scope="session")
def wheel():
    return made(f"gluon_syncbn-{VERSION}-*_{platform.machine()}.whl")


@pytest.fixture(scope="session")
def sdist():
    return made(f"gluon_syncbn-{VERSION}.tar.gz")


def environment(folder, version, *requirements):
    """The folder of the programs of a fresh one with these."""
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} with venv on this machine (pyenv install {version})")
    run(interpreter, "-m", "venv", folder)
    pip = [folder / "bin" / "python", "-m", "pip", "install"]
    if version == "3.13" and "[cpu" in str(requirements[0]):  # MXNet asks for a NumPy that has no wheel there
        run(*pip, "--no-deps", "mxnet==1.9.1")
    run(*pip, *requirements)
    return folder / "bin"


def check_it_works(programs, tmp_path):
    commands = [[programs / "gluon-syncbn", "check"], [programs / "python", "-m", "gluon_syncbn"]]
    # `python -m` takes the checkout's package where it starts in the checkout.
    for command, folder in zip(commands * 2, (ROOT, "/", tmp_path, ROOT / "examples")):
        output = run(*command, cwd=folder, limit=200)
        assert "gluon_syncbn works here." in output
        assert f"gluon_syncbn {VERSION}, Apache MXNet 1.9.1 (mxnet)" in output
        assert f"{programs.parent}/lib" in output  # the core that was installed, not the checkout's
    assert run(programs / "gluon-syncbn", "--version").split()[-1] == VERSION


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
def test_the_wheel(wheel, version, tmp_path):
    programs = environment(tmp_path / "venv", version, f"{wheel}[cpu]")
    check_it_works(programs, tmp_path)
    newest = {"3.8": "numpy==1.24.4", "3.11": "numpy==1.26.4"}.get(version)
    if newest:  # of which pip warns, and which lacks names
        run(programs / "python", "-m", "pip", "install", newest)
    program = "import mxnet, gluon_syncbn; print(mxnet.nd.ones(3).sum().asscalar())"
    assert run(programs / "python", "-W", "ignore", "-c", program, cwd=tmp_path).strip() == "3.0"


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.13"])
def test_the_source_archive(sdist, version, tmp_path):
    check_it_works(environment(tmp_path / "venv", version, f"{sdist}[cpu]"), tmp_path)


def test_the_wheel_for_arm64_holds_what_the_other_does(wheel):
    found = list((ROOT / "dist").glob(f"gluon_syncbn-{VERSION}-*_aarch64.whl"))
    if platform.machine() == "aarch64" or not found:
        pytest.skip("`make dist` writes it on another machine, where aarch64-linux-gnu-g++ is installed")
    names = []
    for path in (wheel, *found):
        with zipfile.ZipFile(str(path)) as archive:
            names.append(sorted(archive.namelist()))
            header = archive.read("gluon_syncbn/_core.so")[:20]
    assert names[0] == names[1]
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_opencv_needs_no_screen(wheel, version, tmp_path):
    """GluonCV asks for an OpenCV that is linked against libGL; another lies over it."""
    programs = environment(tmp_path / "venv", version, f"{wheel}[cpu,gluoncv]")
    program = "import cv2, gluoncv; print([line.split()[-1] for line in open('/proc/self/maps') if 'libGL' in line])"
    assert run(programs / "python", "-W", "ignore", "-c", program).splitlines()[-1] == "[]"


def test_the_archive_has_what_the_pages_link_to(sdist, tmp_path):
    shutil.unpack_archive(sdist, tmp_path)
    (tree,) = tmp_path.iterdir()
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", (tree / page).read_text(encoding="utf-8")):
            assert (tree / link).exists(), f"{page}: {link}"

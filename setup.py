"""Builds ``gluon_syncbn/csrc`` into ``gluon_syncbn/_core.so``; the metadata is in ``pyproject.toml``.

The core is a plain shared library that ctypes loads: it links neither Python nor MXNet, so one wheel
per platform (``py3-none-linux_x86_64``) serves every Python version. ``CXX``, ``CXXFLAGS`` and
``LDFLAGS`` are honoured. In a checkout, ``python setup.py build_core --inplace`` rebuilds the core.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build import build
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

try:  # moved from wheel to setuptools in setuptools 70.1
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "gluon_syncbn"
CSRC = PACKAGE / "csrc"
FOLDERS = ["command", "exchange", "mxnet_side", "mxnet_side.compatibility", "nets", "system", "training"]
OBJECTS = ROOT / "build" / "core"  # what was compiled before, to compile only what has changed
# Without -fno-trapping-math, loops that choose between two values are not vectorised below AVX-512: what
# they leave out might raise a floating-point exception, for which nobody here asks.
COMPILE = ["-std=c++17", "-O3", "-fno-trapping-math", "-fPIC", "-fopenmp", "-fvisibility=hidden"]
COMPILE += ["-Wall", "-Wextra", f"-I{CSRC}"]
LINK = ["-shared", "-fopenmp"]

INSTALL_COMPILER = "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL)"
INSTALL_OPENMP = "apt-get install g++ libgomp1 (for clang: libomp-dev) or dnf install gcc-c++ libgomp"


def constant(module, name):
    """A text that a module of the package holds, without importing the package (which needs MXNet)."""
    text = (PACKAGE / module).read_text(encoding="utf-8")
    return re.search(rf'^{name} = "([^"]*)"', text, re.MULTILINE).group(1)


VERSION = constant("system/version.py", "__version__")
REPOSITORY = constant("system/distribution.py", "REPOSITORY")


def description(text):
    """The README for readers who do not have the files that it links to: with whole addresses, or, as long as there is
    no public repository, with the text of such links alone and without pictures."""

    def image(match):
        return f"![{match.group(1)}]({REPOSITORY}/raw/v{VERSION}/{match.group(2)})" if REPOSITORY else ""

    def link(match):
        return f"[{match.group(1)}]({REPOSITORY}/blob/v{VERSION}/{match.group(2)})" if REPOSITORY else match.group(1)

    here = r"\((?![a-z]+:|#)([^()\s]+)\)"  # what has no scheme and is not within the page
    text = re.sub(r"!\[([^\]]*)\]" + here, image, text)
    text = re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]" + here, link, text)
    return re.sub(r"\n{3,}", "\n\n", text)


def urls():
    if not REPOSITORY:
        return {}
    pages = {"Documentation": "tree/v{0}/docs", "Changelog": "blob/v{0}/CHANGELOG.md", "Issues": "issues"}
    return {"Source": REPOSITORY, **{name: f"{REPOSITORY}/{page.format(VERSION)}" for name, page in pages.items()}}


def fail(message):
    """Ends with one line. SystemExit, because setuptools prints a traceback for any Exception in an
    editable build."""
    raise SystemExit("error: gluon_syncbn: " + message)


def run(command, source=None):
    """Runs the compiler; returns (ok, its messages), in English whatever the user's language."""
    done = subprocess.run(
        command,
        input=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, LC_ALL="C"),
    )
    return done.returncode == 0, done.stdout


def diagnose(cxx, output):
    """The one line that explains why the compilation failed, from the cheapest question to the dearest."""
    name = " ".join(cxx)
    probe = [*cxx, "-x", "c++", "-fsyntax-only", "-"]
    if not run(probe, "int main() { return 0; }\n")[0]:
        return f"the C++ compiler '{name}' cannot compile an empty program; install one: {INSTALL_COMPILER}"
    modern = (
        "#if __cplusplus < 201703L || (defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 8)\n#error old\n#endif\n"
    )
    if not run([*probe, "-std=c++17"], modern)[0]:
        return f"the C++ compiler '{name}' is too old: g++ 8 or later is needed (C++17): {INSTALL_COMPILER}"
    header = re.search(r"fatal error: '?([^\s:']+)'?(: No such file| file not found)", output)
    if header and header.group(1) != "omp.h":
        lost = header.group(1)
        if re.search(r'#\s*include\s*"' + re.escape(lost), output):
            return f"gluon_syncbn/csrc/{lost} is missing: the sources are incomplete, fetch them again"
        return f"the C++ header <{lost}> is missing; install the compiler with its headers: {INSTALL_COMPILER}"
    openmp = "#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n"
    with tempfile.TemporaryDirectory() as scratch:
        link = [*cxx, "-x", "c++", "-fopenmp", "-", "-o", os.path.join(scratch, "probe")]
        if not run(link, openmp)[0]:
            return f"the C++ compiler '{name}' has no OpenMP (-fopenmp, omp.h); install it: {INSTALL_OPENMP}"
    return None


def sources(pattern):
    return sorted(path for path in CSRC.rglob(pattern) if path.is_file())


def newest(paths):
    return max(path.stat().st_mtime_ns for path in paths)


def is_fresh(compiled, dependencies):
    """Whether it was made after all that it depends on, which a file of the compiler's lists as in a Makefile."""
    if not compiled.exists() or not dependencies.exists():
        return False
    listed = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
    paths = [Path(name) for name in listed]
    return all(path.exists() for path in paths) and newest(paths) <= compiled.stat().st_mtime_ns


def is_current(core):
    """Whether this core is newer than every source."""
    return core.exists() and core.stat().st_mtime_ns >= newest([*sources("*"), ROOT / "setup.py"])


def replace(target, make):
    """Renames to `target` what `make(path)` made, where that returns true. A process that has the old core mapped keeps
    it, and an interrupted build leaves no half-written core."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".core-", dir=str(target.parent)) as scratch:
        unfinished = os.path.join(scratch, target.name)
        if make(unfinished):
            os.replace(unfinished, str(target))


def compile_core(target, force=False):
    """Compiles csrc into ``target``, unless that is newer than every source (``force``: anyway); of the sources only
    those that are newer than what was made of them with the same compiler and options."""
    if not sources("*.cc"):
        fail("gluon_syncbn/csrc holds no .cc file: the sources are incomplete, fetch them again")
    if not force and is_current(target):
        return
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(cxx[0]) is None:
        fail(f"no C++ compiler: '{cxx[0]}' is not on PATH; install one: {INSTALL_COMPILER}, or set CXX")
    flags = COMPILE + shlex.split(os.environ.get("CXXFLAGS", ""))
    version = run([*cxx, "--version"])[1]
    objects = OBJECTS / hashlib.sha256(repr((cxx, version, flags)).encode()).hexdigest()[:16]
    made = {}
    commands = []
    for source in sources("*.cc"):
        made[source] = objects / source.relative_to(CSRC).with_suffix(".o")
        dependencies = made[source].with_suffix(".d")
        if force or not is_fresh(made[source], dependencies):
            made[source].parent.mkdir(parents=True, exist_ok=True)
            unfinished = f"{made[source]}.{os.getpid()}"  # another build may be at it, or an interrupt come
            compile_it = [*cxx, *flags, "-MMD", "-MF", str(dependencies), "-c", str(source), "-o", unfinished]
            commands.append((compile_it, unfinished, made[source]))

    def compile_one(job):
        command, unfinished, done = job
        ok, text = run(command)
        if ok:
            os.replace(unfinished, str(done))
        return ok, text

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(compile_one, commands))
    if all(ok for ok, _ in results):
        link = [*cxx, *flags, *LINK, *map(str, made.values()), *shlex.split(os.environ.get("LDFLAGS", "")), "-o"]

        def link_it(unfinished):
            results.append(run([*link, unfinished]))
            return results[-1][0]

        replace(target, link_it)
    output = "".join(text for _, text in results)
    if not all(ok for ok, _ in results):
        reason = diagnose(cxx, output)
        if reason is None:
            print(output, flush=True)
            reason = f"the native core did not compile with '{' '.join(cxx)}'; its messages are above"
        fail(reason)
    if output:
        print(output, flush=True)  # the compiler's warnings


class BuildCore(Command):
    """``build_core``: the native core, into the build folder or, with --inplace, beside its sources."""

    description = "compile gluon_syncbn/csrc into gluon_syncbn/_core.so"
    user_options = [
        ("inplace", "i", "put the library into the source tree"),
        ("force", "f", "compile even when the library is newer than its sources"),
        ("build-lib=", "b", "build folder of the Python files"),
    ]
    boolean_options = ["inplace", "force"]

    def initialize_options(self):
        self.inplace = self.editable_mode = False
        self.force = None
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"), ("force", "force"))

    def target(self):
        in_tree = self.inplace or self.editable_mode
        return (PACKAGE if in_tree else Path(self.build_lib) / "gluon_syncbn") / "_core.so"

    def run(self):
        target, beside = self.target(), PACKAGE / "_core.so"
        compile_core(target, bool(self.force))
        # Python prefers the checkout's package to the installed one wherever it starts in the checkout.
        if target != beside and not is_current(beside):
            replace(beside, lambda unfinished: shutil.copyfile(str(target), unfinished))

    # What setuptools asks of a part of `build`:

    def get_source_files(self):
        return [str(path.relative_to(ROOT)) for path in sources("*")]

    def get_outputs(self):
        return [str(Path(self.build_lib) / "gluon_syncbn" / "_core.so")]

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_core", None)]


#: A file by which a Python imports gluon_syncbn_first at its start.
AT_START = ("gluon_syncbn.pth", "import gluon_syncbn_first\n")


class BuildPy(build_py):
    """Adds the file that Python reads at its start. Leaves out the core that an editable install put beside its
    sources, as `build_core` makes a new one.
    """

    def find_data_files(self, package, src_dir):
        return [name for name in super().find_data_files(package, src_dir) if not name.endswith(".so")]

    def at_start(self):
        return Path(self.build_lib) / AT_START[0]

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            self.at_start().write_text(AT_START[1])

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), str(self.at_start())]


class EditableWheel(editable_wheel):
    """Adds the file that Python reads at its start, which comes behind setuptools' own in the alphabet."""

    def run(self):
        super().run()
        for path in Path(self.dist_dir).glob("*.editable-*.whl"):
            with zipfile.ZipFile(path, "a") as wheel:
                wheel.writestr(*AT_START)


class BdistWheel(bdist_wheel):
    """Any Python 3, this platform. `linux` and not `manylinux`, which promises an older glibc: `make dist`."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class CoreDistribution(Distribution):
    """Not pure Python, though there is no extension module: the wheel belongs to a platform."""

    def has_ext_modules(self):
        return True


commands = {"build": Build, "build_core": BuildCore, "build_py": BuildPy}
commands.update(editable_wheel=EditableWheel, bdist_wheel=BdistWheel)

setup(
    version=VERSION,
    long_description=description((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    scripts=["bin/gluon-syncbn"],
    license="Apache-2.0",
    packages=["gluon_syncbn", *(f"gluon_syncbn.{folder}" for folder in FOLDERS)],
    py_modules=["gluon_syncbn_first"],
    package_data={"gluon_syncbn": ["py.typed", "csrc/*", "csrc/*/*"]},
    include_package_data=False,
    cmdclass=commands,
    distclass=CoreDistribution,
)

"""What is shipped, what a machine that lacks something is told, and which way imports point.

Everything is built in temporary copies: the checkout stays as it is.
"""

import ast
import ctypes
import os
import re
import shutil
import sys
import tarfile
import zipfile
from email.parser import Parser

import pytest
from environments import ended
from places import PACKAGE, ROOT, SUPPORT

from gluon_syncbn.mxnet_side import compatibility
from gluon_syncbn.system import distribution

SOURCES = sorted(
    path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.suffix in (".cc", ".h", ".cu")
)

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


def run(command, cwd, **environment):
    """(exit status, everything printed) of a command that has its own environment on top of ours."""
    done = ended(command, cwd=cwd, timeout=250, **environment)
    return done.returncode, done.stdout + done.stderr


def copy_tree(target):
    """The source tree as a fresh clone has it, without anything built."""
    target.mkdir()
    files = "setup.py gluon_syncbn_first.py pyproject.toml MANIFEST.in LICENSE README.md CHANGELOG.md Makefile"
    for name in files.split():
        shutil.copy2(str(ROOT / name), str(target))
    ignore = shutil.ignore_patterns("*.so", "__pycache__", ".core-*")
    shutil.copytree(str(PACKAGE), str(target / "gluon_syncbn"), ignore=ignore)
    for folder in ("bin", "requirements", "tools"):
        shutil.copytree(str(ROOT / folder), str(target / folder))
    return target


def script(path, text):
    """An executable shell script."""
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return path


# ---- sdist and wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    tree = copy_tree(tmp_path_factory.mktemp("sdist") / "tree")
    status, output = run([sys.executable, "setup.py", "-q", "sdist", "-d", tree.parent], tree)
    assert status == 0, output
    (archive,) = tree.parent.glob("*.tar.gz")
    return archive


# A compiler that takes what the checkout's core was linked of, but for the sources that stand in no folder of csrc.
COMPILED_BEFORE = """
arguments=("$@")
while [ $# -gt 0 ]; do
    case $1 in -c) file=$2 source=${{2#*/csrc/}} ;; -o) target=$2 ;; esac
    shift
done
case $source in
    */*) object={objects}/${{source%.cc}}.o
         if [ "$object" -nt "$file" ] && cp -p "$object" "$target"; then exit; fi ;;
esac
exec g++ "${{arguments[@]}}"
"""


def objects_of_the_checkout():
    """The folder of the newest, which the last build wrote; an empty name where there is none."""
    core = ROOT / "build" / "core"
    newest = max(core.rglob("*.o"), key=lambda path: path.stat().st_mtime, default=None)
    return core / newest.relative_to(core).parts[0] if newest else ""


@pytest.fixture(scope="module")
def built(sdist, tmp_path_factory):
    """What the sdist holds, unpacked, after `pip wheel .` there without a network; `pip install .` does the same."""
    pytest.importorskip("wheel", reason="builds a wheel without a network: needs requirements/build.txt")
    out = tmp_path_factory.mktemp("built")
    status, output = run(["tar", "-xzf", sdist], out)
    assert status == 0, output
    (folder,) = out.iterdir()
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    # What the compiler's optimisation takes, which is most of the time, tells nothing of the wheel.
    compiler = script(out / "cxx", COMPILED_BEFORE.format(objects=objects_of_the_checkout()))
    environment = {"CXX": compiler, "CXXFLAGS": "-O0"}
    status, output = run([sys.executable, "-m", "pip", "wheel", *options, "-w", "out", "."], folder, **environment)
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (archive,) = built.glob("out/*.whl")
    return archive


def test_sdist_holds_the_native_sources_and_nothing_built(sdist):
    with tarfile.open(str(sdist)) as archive:
        names = [name.split("/", 1)[-1] for name in archive.getnames()]
    for source in SOURCES:
        assert f"gluon_syncbn/{source}" in names
    for needed in ("pyproject.toml", "LICENSE", "README.md", "Makefile", "requirements/run.txt"):
        assert needed in names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_serves_any_python_of_one_platform(wheel):
    assert re.fullmatch(r"gluon_syncbn-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(str(wheel)) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
        # Otherwise it would be installed where packages for any platform go.
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
    assert {"gluon_syncbn/_core.so", "gluon_syncbn/csrc/cuda/kernels.cu"} <= set(names)
    assert "gluon_syncbn/py.typed" in names
    modules = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    assert modules <= set(names)


def test_the_package_serves_in_the_checkout_that_it_was_installed_from(built):
    """`pip install .` leaves the core in the checkout, too: Python finds the checkout's package first there."""
    status, output = run([sys.executable, "-W", "ignore", "-m", "gluon_syncbn"], built)
    assert status == 0, output
    assert f"{built}/gluon_syncbn/_core.so" in output


def test_the_installation_is_the_only_one_that_python_finds_in_the_checkout(built):
    """pkg_resources warns of a second one, *Module gluon_syncbn_first was already imported*, and both are listed."""
    program = "import importlib.metadata, sys; sys.path = ['']; print(*importlib.metadata.distributions())"
    assert run([sys.executable, "-c", program], built) == (0, "\n")


@pytest.mark.parametrize("older", [False, True], ids=["without a core", "with one that is older than the package"])
def test_a_checkout_says_how_to_build_its_core(tree, older):
    if older:
        (tree / "empty.c").write_text("")
        run(["g++", "-shared", "-x", "c", "empty.c", "-o", tree / "gluon_syncbn" / "_core.so"], tree)
    status, output = run([sys.executable, "-W", "ignore", "-m", "gluon_syncbn"], tree)
    assert status != 0
    assert len(output.splitlines()) == 1 and "Build it with `make core`, or `pip install" in output


def test_the_wheel_has_python_supply_what_mxnet_lacks(wheel, tmp_path):
    with zipfile.ZipFile(str(wheel)) as archive:
        archive.extractall(str(tmp_path))
    program = "import site, sys; site.addsitedir(sys.argv[1]); from gluon_syncbn_first.system import cuda_libraries; "
    seen = "sys.modules['gluon_syncbn_first'].__file__, cuda_libraries.__file__"
    program += f"print({seen}, 'gluon_syncbn' in sys.modules)"
    status, output = run([sys.executable, "-S", "-c", program, tmp_path], "/")
    files = [tmp_path / "gluon_syncbn_first.py", tmp_path / "gluon_syncbn" / "system" / "cuda_libraries.py"]
    assert (status, output.split()) == (0, [*map(str, files), "False"])


def test_an_editable_installation_does_so_too():
    program = "import sys; print('gluon_syncbn_first' in sys.modules)"
    status, output = run([sys.executable, "-c", program], "/")
    assert (status, output.strip()) == (0, "True")


def test_wheel_metadata_names_mxnet_in_extras_only(wheel):
    with zipfile.ZipFile(str(wheel)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist")
    assert [line for line in requirements if "extra" not in line] == ["numpy"]
    mxnet = sorted(re.sub(r"\s|['\"()]", "", line) for line in requirements if line.startswith("mxnet"))
    early = "python_version<3.13andextra=="
    numpy = [re.sub(r"\s|['\"()]", "", line) for line in requirements if line.startswith("numpy<")]
    # with which MXNet imports by itself
    assert sorted(numpy) == [
        f"numpy<1.24;python_version<3.12andextra=={extra}" for extra in ("cpu", "cu112", "gluoncv")
    ]
    assert mxnet == [f"mxnet-cu112==1.9.1;{early}cu112", f"mxnet==1.9.1;{early}cpu"]
    assert metadata["License"] == "Apache-2.0"
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert "gluon-syncbn check" in metadata.get_payload() and all("://" in link for link in links)
    assert "3.8" in metadata["Requires-Python"]


def test_core_links_neither_python_nor_mxnet_and_chooses_kernels_at_run_time(wheel, tmp_path):
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (apt-get install binutils)")
    with zipfile.ZipFile(str(wheel)) as archive:
        core = archive.extract("gluon_syncbn/_core.so", str(tmp_path))
    status, output = run(["readelf", "--dynamic", "--wide", core], tmp_path)
    assert status == 0
    needed = re.findall(r"NEEDED.*\[(.+)\]", output)
    assert needed
    assert not [name for name in needed if "python" in name or "mxnet" in name]
    status, output = run(["readelf", "--symbols", "--wide", core], tmp_path)
    # The choice among clones of a function: an indirect function, resolved when the core is loaded.
    assert re.search(r"\bIFUNC\b", output)


# ---- the wheel for old systems (tools/old_symbols.py)

USES_WHAT_IS_YOUNG = """
#include <chrono>
#include <condition_variable>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
extern "C" int answer() {
    auto text = std::make_shared<std::ostringstream>();
    *text << std::string("4") << (dlopen("no such library", RTLD_NOW) == nullptr);
    std::mutex mutex;
    std::condition_variable changed;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_until(lock, std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
    try {
        throw std::runtime_error("1");
    } catch (const std::exception& error) {
        return std::stoi(text->str()) + std::stoi(error.what());
    }
}
"""
WAITS = """
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
void* no_dlsym(void* library, const char* name) { return 0; }
int pthread_cond_clockwait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
int main(void) {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    const double begin = now(), end = begin + 1.9;
    const struct timespec until = {(time_t)end, (long)((end - (time_t)end) * 1e9)};
    int status, calls = 0;
    pthread_mutex_lock(&mutex);
    do calls++;
    while ((status = pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until)) == 0);
    printf("%d %d %d", status == ETIMEDOUT, calls, now() - begin > 1.89);
    return 0;
}
"""


@pytest.fixture
def old(tmp_path):
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (apt-get install binutils)")
    status, flags = run([sys.executable, ROOT / "tools" / "old_symbols.py", tmp_path / "old"], tmp_path)
    assert status == 0, flags
    return flags.split()


def test_a_library_of_today_links_with_symbols_of_2014(old, tmp_path):
    (tmp_path / "young.cc").write_text(USES_WHAT_IS_YOUNG)
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "young.cc", "-o", "young.so"]
    assert run(command, tmp_path) == (0, "")

    def newest():
        output = run(["readelf", "--version-info", "--wide", "young.so"], tmp_path)[1]
        found = {}
        for family, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", output):
            found[family] = max(found.get(family, ()), tuple(map(int, version.split("."))))
        return found

    if newest()["GLIBC"] <= (2, 17):
        pytest.skip("this machine's own libraries are of 2014")
    status, output = run([*command, *old], tmp_path)
    assert status == 0, output
    assert newest()["GLIBC"] <= (2, 17)
    assert newest()["GLIBCXX"] <= (3, 4, 19)
    assert newest()["CXXABI"] <= (1, 3, 7)
    assert ctypes.CDLL(str(tmp_path / "young.so")).answer() == 42


def test_what_glibc_2_17_has_not_does_not_link(old, tmp_path):
    (tmp_path / "young.cc").write_text("#include <unistd.h>\nint f(void* p) { return getentropy(p, 1); }\n")
    status, output = run(["g++", "-shared", "-fPIC", "young.cc", "-o", "young.so", *old], tmp_path)
    assert status != 0
    assert "undefined reference to `getentropy'" in output


def test_waits_where_glibc_has_no_wait_on_the_steady_clock(tmp_path):
    (tmp_path / "waits.c").write_text(WAITS)
    command = ["gcc", "-Ddlsym=no_dlsym", ROOT / "tools" / "younger.c", "waits.c", "-o", "waits", "-lpthread"]
    status, output = run(command, tmp_path)
    assert status == 0, output
    assert run([tmp_path / "waits"], tmp_path) == (0, "1 2 1")


# ---- what a machine that lacks something is told


def build_core(tree, **environment):
    return run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tree, **environment)


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path / "tree")


def last_line(output):
    line = output.splitlines()[-1]
    assert line.startswith("error: gluon_syncbn: ")
    assert "g++ 8 or later" in line and "apt-get install g++ libgomp1" in line
    return line


def test_no_compiler(tree):
    status, output = build_core(tree, CXX="no-such-g++")
    assert (status, len(output.splitlines())) == (1, 1)
    assert "no C++ compiler: 'no-such-g++' is not on PATH" in last_line(output)


def test_a_compiler_that_lacks_something(tree, tmp_path):
    compiler = script(tmp_path / "cxx", 'exec g++ -nostdinc++ "$@"\n')
    status, output = build_core(tree, CXX=compiler)
    assert status == 1
    assert f"did not compile with '{compiler}'" in last_line(output)
    assert re.search(r"fatal error: \w+: No such file", output)


def test_incomplete_sources(tree):
    for path in (tree / "gluon_syncbn" / "csrc").rglob("*.cc"):
        path.unlink()
    status, output = build_core(tree)
    assert status == 1
    assert len(output.splitlines()) == 1 and "holds no .cc file: the sources are incomplete" in output


def test_rebuilds_only_what_is_newer_and_leaves_no_half_written_core(tree):
    csrc = tree / "gluon_syncbn" / "csrc"
    shutil.rmtree(str(csrc))
    csrc.mkdir()
    source = csrc / "small.cc"
    source.write_text('extern "C" int answer() { return 42; }\n')
    core = tree / "gluon_syncbn" / "_core.so"
    assert build_core(tree)[0] == 0
    first = core.stat()
    assert build_core(tree)[0] == 0
    assert core.stat().st_mtime_ns == first.st_mtime_ns

    source.write_text("not C++\n")
    later = first.st_mtime_ns + 10**9
    os.utime(str(source), ns=(later, later))
    status, output = build_core(tree)
    assert status == 1
    assert "the native core did not compile" in output
    assert "small.cc:1" in output  # the compiler's own words
    assert core.stat().st_mtime_ns == first.st_mtime_ns
    assert not list(core.parent.glob(".core-*"))


#: For `sitecustomize`, which Python imports at its start: each takes away what MXNet needs.
WITHOUT_MXNET = """
import importlib.abc, sys
class NoMXNet(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "mxnet":
            raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
sys.meta_path.insert(0, NoMXNet())
"""


def run_beside(folder, *command):
    """With what is in this folder before all else."""
    path = os.pathsep.join([str(folder), str(PACKAGE.parent), str(SUPPORT)])
    return run([sys.executable, "-W", "ignore", *(command or ("-m", "gluon_syncbn"))], folder, PYTHONPATH=path)


@pytest.mark.parametrize("command", [["-c", "import gluon_syncbn"], ["-m", "gluon_syncbn"]], ids=lambda words: words[0])
def test_no_mxnet(tmp_path, command):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MXNET)
    status, output = run_beside(tmp_path, *command)
    assert status == 1
    assert distribution.command("cpu") in output
    assert distribution.command("cu112") in output
    assert output.count("Traceback") == (command[0] == "-c")
    assert command[0] == "-c" or len(output.splitlines()) == 1


def test_a_numpy_of_tomorrow_is_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import numpy\ndel numpy.vander\n")
    status, output = run_beside(tmp_path)
    assert (status, len(output.splitlines())) == (1, 1), output
    serves = "<1.24" if sys.version_info < (3, 12) else f"=={compatibility.TRIED['NumPy']}.*"
    assert "vander" in output and f"`pip install 'numpy{serves}'`" in output


def test_a_module_that_hides_pythons_is_not_blamed_on_numpy(tmp_path):
    (tmp_path / "logging.py").write_text("")
    status, output = run_beside(tmp_path)
    assert status == 1 and "pip install" not in output
    assert output.splitlines()[-1].startswith("AttributeError: module 'logging' has no attribute"), output


def test_a_bare_system_is_told_what_mxnet_needs_of_it(tmp_path):
    loader = "raise OSError('libgomp.so.1: cannot open shared object file: No such file or directory')"
    (tmp_path / "mxnet.py").write_text(loader)
    status, output = run_beside(tmp_path)
    assert (status, len(output.splitlines())) == (1, 1), output
    assert "MXNet 1.9 cannot be loaded (libgomp.so.1: cannot open" in output
    assert "apt-get install libgomp1 libquadmath0" in output


def test_a_system_without_the_libraries_of_arm_is_told_what_takes_their_place(tmp_path):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text(
        "import os\nif not os.path.exists(os.path.join(__path__[0], 'libarmpl_lp64_mp.so')):\n"
        "    raise OSError('libarmpl_lp64_mp.so: cannot open shared object file: No such file or directory')\n"
        "__version__ = '0.0'\n"
    )
    status, output = run_beside(tmp_path)
    assert (status, len(output.splitlines())) == (1, 1), output
    assert "ARM64" in output and "libopenblas0 liblapacke" in output
    command = re.findall("`([^`]*)`", output)[-1].replace("python -c", f"{sys.executable} -c")
    made = tmp_path / "libraries"
    made.mkdir()
    for name in ("libopenblas.so.0", "liblapacke.so.3", "libm.so.6"):
        (made / name).write_text("")
    command = command.replace("/usr/lib/aarch64-linux-gnu", str(made))
    status, output = run(["bash", "-c", command], tmp_path, PYTHONPATH=f"{tmp_path}:{PACKAGE.parent}")
    assert status == 0, output
    for name in ("libarmpl_lp64_mp.so", "libamath.so", "libastring.so"):
        assert (tmp_path / "mxnet" / name).is_file()


def test_an_old_mxnet_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import gluon_syncbn_first, mxnet\nmxnet.__version__ = '1.7.0'\n")
    status, output = run_beside(tmp_path)
    assert status == 1
    assert "gluon_syncbn needs Apache MXNet 1.9, or 1.8, and this is 1.7.0" in output.splitlines()[-1]
    assert distribution.command("cpu") in output


# ---- the Makefile


@pytest.fixture
def poor_machine(tmp_path):
    """A PATH with what the Makefile needs and no Python; more programs can be put there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "env", "make", "cat", "tail", "grep", "rm", "mkdir", "touch", "cksum", "mktemp", "flock"):
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"needs {tool}")
        (tools / tool).symlink_to(found)
    return tools


def make(tree, tools, *arguments):
    keep = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
    command = ["env", "-i", f"PATH={tools}", f"HOME={tools}", *(f"{n}={v}" for n, v in keep.items())]
    return run([*command, "make", *arguments], tree)


def test_make_without_python_says_what_to_install(tree, poor_machine):
    status, output = make(tree, poor_machine, "test")
    assert status == 2
    assert "a Python from 3.8 to 3.13 is needed" in output
    assert "apt-get install python3.11" in output
    assert "make PYTHON=/path/to/python" in output
    assert not (tree / ".venv").exists()


def test_make_tells_why_each_python_does_not_serve(tree, poor_machine):
    script(poor_machine / "python3.10", 'echo "pyenv: python3.10: command not found" >&2; exit 127\n')
    script(poor_machine / "python3", 'echo "is Python 3.14.0" >&2; exit 1\n')
    (poor_machine / "poor").mkdir()
    (poor_machine / "poor" / "ensurepip.py").write_text("raise ImportError\n")
    script(poor_machine / "python3.9", f'PYTHONPATH="{poor_machine}/poor" exec "{sys.executable}" "$@"\n')
    status, output = make(tree, poor_machine, "demo")
    assert status == 2
    assert "python3.10 does not run: pyenv: python3.10: command not found" in output
    assert "python3 is Python 3.14.0" in output
    assert re.search(r"python3.9 is Python 3.\d+.\d+ without ensurepip \(apt-get install python3.\d+-venv\)", output)


def test_make_leaves_a_foreign_venv_alone(tree, poor_machine):
    (tree / ".venv").mkdir()
    (tree / ".venv" / "mine").write_text("")
    status, output = make(tree, poor_machine, "core")
    assert status == 2
    assert ".venv exists and was not made by this Makefile" in output
    assert make(tree, poor_machine, "clean")[0] == 0
    assert (tree / ".venv" / "mine").exists()


# ---- what an installed package refers to


def strings():
    """Every text in the sources that a process can show: (file, text), without the docstrings of modules."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        comments = {ast.get_docstring(tree, clean=False)}
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        yield from ((path, text) for text in texts if isinstance(text, str) and text not in comments)
    for name in SOURCES:
        text = re.sub(r"^ *(//|#include).*$", "", (PACKAGE / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        yield from ((PACKAGE / name, one) for one in re.findall(r'"((?:[^"\\\n]|\\.)*)"', text))


def test_no_message_names_a_file_that_a_wheel_lacks():
    files = re.compile(r"\b(docs|tests|tools|examples|benchmarks|requirements)/\w|\w\.md\b")
    assert [f"{path.name}: {text}" for path, text in strings() if files.search(text)] == []


# ---- versions


def distribution_version():
    text = (PACKAGE / "system" / "distribution.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"', text, re.MULTILINE).group(1)


def test_the_changelog_and_the_citation_have_the_version_and_its_date():
    version = distribution_version()
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert releases[0][0] == version
    assert len(releases) == len(re.findall(r"^## \[\d", changes, re.MULTILINE)), "a version without a date"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'\nversion: {version}\ndate-released: "{releases[0][1]}"\n' in citation

"""What is shipped, what a machine that lacks something is told, and which way imports point.

Everything is built in temporary copies: the checkout stays as it is.
"""

import ast
import ctypes
import errno
import os
import re
import shutil
import sys
import tarfile
import time
import zipfile
from email.parser import Parser

import pytest
from environments import ended
from places import PACKAGE, ROOT, SUPPORT
from sources import CORE, TREES, unparsed

from gluon_syncbn.mxnet_side import compatibility
from gluon_syncbn.system import distribution

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
    run([sys.executable, "setup.py", "-q", "sdist", "-d", tree.parent], tree, code=0)
    (archive,) = tree.parent.glob("*.tar.gz")
    return archive


# A compiler that links what the checkout's core is: what g++ makes of the sources tells nothing of the wheel.
AS_IN_THE_CHECKOUT = """
while [ $# -gt 0 ]; do
    case $1 in -shared) core={core} ;; -o) target=$2 ;; esac
    shift
done
exec cp "${{core:-/dev/null}}" "$target"
"""


@pytest.fixture(scope="module")
def built(sdist, tmp_path_factory):
    """What the sdist holds, unpacked, after `pip wheel .` there without a network; `pip install .` does the same."""
    pytest.importorskip("wheel", reason="builds a wheel without a network: needs requirements/build.txt")
    out = tmp_path_factory.mktemp("built")
    shutil.unpack_archive(sdist, out)
    (folder,) = out.iterdir()
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    compiler = script(out / "cxx", AS_IN_THE_CHECKOUT.format(core=PACKAGE / "_core.so"))
    run([sys.executable, "-m", "pip", "wheel", *options, "-w", "out", "."], folder, code=0, CXX=compiler)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (archive,) = built.glob("out/*.whl")
    with zipfile.ZipFile(str(archive)) as opened:
        yield opened


def in_dist_info(wheel, name):
    (found,) = [one for one in wheel.namelist() if one.endswith(f".dist-info/{name}")]
    return wheel.read(found).decode()


def test_sdist_holds_the_native_sources_and_nothing_built(sdist):
    with tarfile.open(str(sdist)) as archive:
        names = [name.split("/", 1)[-1] for name in archive.getnames()]
    needed = {"pyproject.toml", "LICENSE", "README.md", "Makefile", "requirements/run.txt"}
    assert needed | {f"gluon_syncbn/csrc/{file}" for file in CORE} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_serves_any_python_of_one_platform(wheel):
    assert re.search(r"/gluon_syncbn-[\d.]+-py3-none-(linux|macosx)_\w+\.whl$", wheel.filename)
    # Otherwise it would be installed where packages for any platform go.
    assert "Root-Is-Purelib: false" in in_dist_info(wheel, "WHEEL")
    modules = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    held = {"gluon_syncbn/_core.so", "gluon_syncbn/csrc/cuda/kernels.cu", "gluon_syncbn/py.typed"}
    assert modules | held <= set(wheel.namelist())


def test_the_package_serves_in_the_checkout_that_it_was_installed_from(built):
    """`pip install .` leaves the core in the checkout, too: Python finds the checkout's package first there."""
    _, output = run([sys.executable, "-W", "ignore", "-m", "gluon_syncbn"], built, code=0)
    assert f"{built}/gluon_syncbn/_core.so" in output


def test_the_installation_is_the_only_one_that_python_finds_in_the_checkout(built):
    """pkg_resources warns of a second one, *Module gluon_syncbn_first was already imported*, and both are listed."""
    program = "import importlib.metadata, sys; sys.path = ['']; print(*importlib.metadata.distributions())"
    assert run([sys.executable, "-c", program], built) == (0, "\n")


def test_the_wheel_has_python_supply_what_mxnet_lacks(wheel, tmp_path):
    wheel.extractall(str(tmp_path))
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
    metadata = Parser().parsestr(in_dist_info(wheel, "METADATA"))
    requirements = metadata.get_all("Requires-Dist")
    assert [line for line in requirements if "extra" not in line] == ["numpy"]
    assert len([line for line in requirements if line.startswith("mxnet")]) == 2
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert "gluon-syncbn check" in metadata.get_payload() and all("://" in link for link in links)


def test_core_links_neither_python_nor_mxnet_and_chooses_kernels_at_run_time():
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (apt-get install binutils)")
    _, output = run(["readelf", "--dynamic", "--symbols", "--wide", PACKAGE / "_core.so"], "/", code=0)
    needed = re.findall(r"NEEDED.*\[(.+)\]", output)
    assert needed and not [name for name in needed if "python" in name or "mxnet" in name]
    # The choice among clones of a function: an indirect function, resolved when the core is loaded.
    assert re.search(r"\bIFUNC\b", output)


# ---- the wheel for old systems: `make dist` links it by tools/old_symbols.py, and auditwheel looks at it


def test_waits_where_glibc_has_no_wait_on_the_steady_clock(tmp_path):
    lacks = "void* no_dlsym(void* library, const char* name) { return 0; }\n#define dlsym no_dlsym\n"
    (tmp_path / "waits.c").write_text(f'{lacks}#include "{ROOT / "tools" / "younger.c"}"\n')
    assert run(["gcc", "-shared", "-fPIC", "waits.c", "-o", "waits.so", "-lpthread"], tmp_path) == (0, "")
    wait = ctypes.CDLL(str(tmp_path / "waits.so")).pthread_cond_clockwait
    mutex, condition = (ctypes.create_string_buffer(64) for _ in range(2))  # zeros are what C initialises them with
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    end, answers = time.monotonic() + 1.9, []
    until = (ctypes.c_long * 2)(int(end), int(end % 1 * 1e9))
    while answers[-1:] != [errno.ETIMEDOUT]:
        answers.append(wait(condition, mutex, time.CLOCK_MONOTONIC, until))
    assert answers == [0, errno.ETIMEDOUT] and time.monotonic() > end - 0.01


# ---- what a machine that lacks something is told


def build_core(tree, **environment):
    return run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tree, **environment)


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path / "tree")


NEEDS = re.escape("It needs g++ 8 or later, with its headers and OpenMP: apt-get install g++ libgomp1")


@pytest.mark.parametrize(
    "lacks, said",
    [
        ("a compiler", rf"^error: gluon_syncbn: no C\+\+ compiler: 'no-such-g\+\+' is not on PATH. {NEEDS}.*\n$"),
        ("headers", rf"fatal error: \w+: No such file(?s:.*)\nerror: gluon_syncbn: .* compile with '.*/cxx'.* {NEEDS}"),
        ("sources", r"^error: gluon_syncbn: .* holds no .cc file: the sources are incomplete.*\n$"),
    ],
)
def test_a_build_that_lacks_something(tree, tmp_path, lacks, said):
    if lacks == "sources":
        shutil.rmtree(str(tree / "gluon_syncbn" / "csrc"))
    compiler = script(tmp_path / "cxx", 'exec g++ -nostdinc++ "$@"\n') if lacks == "headers" else "no-such-g++"
    _, output = build_core(tree, code=1, CXX=compiler)
    assert re.search(said, output), output


def test_a_checkout_says_how_to_build_its_core(tree):
    for _ in ("without a core", "with one of an older package"):
        status, output = run([sys.executable, "-W", "ignore", "-m", "gluon_syncbn"], tree)
        assert status != 0
        assert len(output.splitlines()) == 1 and "Build it with `make core`, or `pip install" in output
        run(["g++", "-shared", "-x", "c", "/dev/null", "-o", tree / "gluon_syncbn" / "_core.so"], tree)


def test_rebuilds_only_what_is_newer_and_leaves_no_half_written_core(tree):
    csrc = tree / "gluon_syncbn" / "csrc"
    shutil.rmtree(str(csrc))
    csrc.mkdir()
    source = csrc / "small.cc"
    source.write_text('extern "C" int answer() { return 42; }\n')
    core = tree / "gluon_syncbn" / "_core.so"
    build_core(tree, code=0)
    first = core.stat()
    build_core(tree, code=0)
    assert core.stat().st_mtime_ns == first.st_mtime_ns

    source.write_text("not C++\n")
    later = first.st_mtime_ns + 10**9
    os.utime(str(source), ns=(later, later))
    _, output = build_core(tree, code=1)
    assert "the native core did not compile" in output
    assert "small.cc:1" in output  # the compiler's own words
    assert core.stat().st_mtime_ns == first.st_mtime_ns
    assert not list(core.parent.glob(".core-*"))


def run_beside(folder, *command):
    """With what is in this folder before all else."""
    path = os.pathsep.join([str(folder), str(PACKAGE.parent), str(SUPPORT)])
    return run([sys.executable, "-W", "ignore", *(command or ("-m", "gluon_syncbn"))], folder, PYTHONPATH=path)


WITHOUT_MXNET = """
import importlib.abc, sys
class NoMXNet(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "mxnet":
            raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
sys.meta_path.insert(0, NoMXNet())
"""
SERVES = "<1.24" if sys.version_info < (3, 12) else f"=={compatibility.TRIED}.*"
MXNET = [distribution.command("cpu"), distribution.command("cu112")]
#: What is wrong: the file that makes it so, of which Python imports `sitecustomize` at its start; what is said.
LACKS = {
    "no MXNet": ("sitecustomize", WITHOUT_MXNET, MXNET),
    "a NumPy of tomorrow": (
        "sitecustomize",
        "import numpy\ndel numpy.vander\n",
        ["vander", f"`pip install 'numpy{SERVES}'`"],
    ),
    "a bare system": (
        "mxnet",
        "raise OSError('libgomp.so.1: cannot open shared object file: No such file or directory')",
        ["MXNet 1.9 cannot be loaded (libgomp.so.1: cannot open", "apt-get install libgomp1 libquadmath0"],
    ),
    "a system without the libraries of ARM": (
        "mxnet",
        "raise OSError('libarmpl_lp64_mp.so: cannot open shared object file: No such file or directory')",
        ["ARM64", "libopenblas0 and liblapacke"],
    ),
    "an old MXNet": (
        "sitecustomize",
        "import gluon_syncbn_first, mxnet\nmxnet.__version__ = '1.7.0'\n",
        ["gluon_syncbn needs Apache MXNet 1.9, or 1.8, and this is 1.7.0", *MXNET],
    ),
}


@pytest.mark.parametrize("lacks", LACKS)
def test_what_is_missing_is_said_in_one_line(tmp_path, lacks):
    module, text, said = LACKS[lacks]
    (tmp_path / f"{module}.py").write_text(text)
    for command in ((), (ROOT / "bin" / "gluon-syncbn", "check")):
        status, output = run_beside(tmp_path, *command)
        assert (status, len(output.splitlines())) == (1, 1), output
        assert all(one in output for one in said), output
    if lacks == "no MXNet":  # an import says the same, with a traceback
        status, output = run_beside(tmp_path, "-c", "import gluon_syncbn")
        assert status == 1 and "Traceback" in output and all(one in output for one in said), output


def test_a_module_that_hides_pythons_is_not_blamed_on_numpy(tmp_path):
    (tmp_path / "logging.py").write_text("")
    status, output = run_beside(tmp_path)
    assert status == 1 and "pip install" not in output
    assert output.splitlines()[-1].startswith("AttributeError: module 'logging' has no attribute"), output


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


def make(tree, tools, target, code):
    return run(["env", "-i", f"PATH={tools}", f"HOME={tools}", "make", target], tree, code=code)[1]


def test_make_without_a_python_that_serves_says_why_and_what_to_install(tree, poor_machine):
    script(poor_machine / "python3.10", 'echo "pyenv: python3.10: command not found" >&2; exit 127\n')
    script(poor_machine / "python3", 'echo "is Python 3.14.0" >&2; exit 1\n')
    (poor_machine / "poor").mkdir()
    (poor_machine / "poor" / "ensurepip.py").write_text("raise ImportError\n")
    script(poor_machine / "python3.9", f'PYTHONPATH="{poor_machine}/poor" exec "{sys.executable}" "$@"\n')
    output = make(tree, poor_machine, "test", code=2)
    assert not (tree / ".venv").exists()
    for said in (
        "a Python from 3.8 to 3.13 is needed",
        "make PYTHON=/path/to/python",
        "python3.10 does not run: pyenv: python3.10: command not found",
        "python3 is Python 3.14.0",
        "without ensurepip (apt-get install python3.",
    ):
        assert said in output


def test_make_leaves_a_foreign_venv_alone(tree, poor_machine):
    (tree / ".venv").mkdir()
    (tree / ".venv" / "mine").write_text("")
    assert ".venv exists and was not made by this Makefile" in make(tree, poor_machine, "core", code=2)
    make(tree, poor_machine, "clean", code=0)
    assert (tree / ".venv" / "mine").exists()


# ---- what an installed package refers to


def test_no_message_names_a_file_that_a_wheel_lacks():
    """Docstrings of modules may, as comments, for who reads the sources."""
    files = re.compile(r"\b(docs|tests|tools|examples|benchmarks|requirements)/\w|\w\.md\b")
    texts = {file: unparsed(ast.Module(tree.body[1:], [])) for file, tree in TREES.items()}
    texts.update((file, re.sub(r"//.*|#include .*", "", text)) for file, text in CORE.items())
    assert not {file: files.findall(text) for file, text in texts.items() if files.search(text)}


# ---- versions


def test_the_changelog_and_the_citation_have_the_version_and_its_date():
    version = distribution.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert releases[0][0] == version
    assert len(releases) == len(re.findall(r"^## \[\d", changes, re.MULTILINE)), "a version without a date"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'\nversion: {version}\ndate-released: "{releases[0][1]}"\n' in citation

"""A core with points at which a thread or a process is hit, and the points that its sources name."""

import re
import sys
from pathlib import Path

import libraries
from environments import ended
from places import PACKAGE, ROOT, SOURCES, SUPPORT

_MARK = re.compile(r'SYNCBN_POINT\("(\w+)"\)')
#: In the order of the sources: what each is a part of.
PARTS = {name: path.parent.name for path in sorted(SOURCES.rglob("*.cc")) for name in _MARK.findall(path.read_text())}
WITHIN, BETWEEN, GPU = (
    [name for name, part in PARTS.items() if part in parts]
    for parts in ({"operator", "meeting", "native"}, {"exchange"}, {"cuda"})
)

COMPILES = "import setuptools, sys; setuptools.setup = lambda **_: None; import setup; "
COMPILES += "setup.compile_core(setup.Path(sys.argv[1]))"


def package() -> Path:
    """A folder for PYTHONPATH, with this package around such a core. What has not changed is not compiled again."""
    library = Path(libraries.build("points", [SUPPORT / "points.cc"], ["-DSYNCBN_FAULT_POINTS"])._name)
    folder = ROOT / "build" / library.stem
    core = folder / "gluon_syncbn" / "_core.so"
    flags = "-O0 -DSYNCBN_FAULT_POINTS -DSYNCBN_CLONES= -DSYNCBN_WIDTH=2"
    done = ended([sys.executable, "-c", COMPILES, core], cwd=ROOT, timeout=500, CXXFLAGS=flags, LDFLAGS=library)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in [path for path in PACKAGE.iterdir() if path.suffix != ".so"]:
        if not (core.parent / path.name).exists():
            (core.parent / path.name).symlink_to(path)
    return folder

"""A core with points at which a thread or a process is hit, and the points that its sources name."""

import re
import sys
from pathlib import Path

import libraries
from environments import ended
from places import PACKAGE, ROOT, SOURCES, SUPPORT

_MARK = re.compile(r'SYNCBN_POINT\("(\w+)"\)')
_FOUND = {path: _MARK.findall(path.read_text()) for path in sorted(SOURCES.rglob("*.cc"))}
#: In the order of the sources: what each is a part of.
PARTS = {name: path.parent.name for path, names in _FOUND.items() for name in names}
WITHIN, BETWEEN, GPU = (
    [name for name, part in PARTS.items() if part in parts]
    for parts in ({"operator", "meeting", "native"}, {"exchange"}, {"cuda"})
)

COMPILES = """
import setuptools, sys
setuptools.setup = lambda **_: None
import setup
found, (core, *plain) = setup.sources, sys.argv[1:]
setup.sources = lambda pattern: [one for one in found(pattern) if pattern == "*" or str(one) not in plain]
setup.compile_core(setup.Path(core))
"""


def package() -> Path:
    """A folder for PYTHONPATH, with this package around such a core. What has not changed is not compiled again, and
    what has no points is that of the checkout's core.
    """
    library = Path(libraries.build("points", [SUPPORT / "points.cc"], ["-DSYNCBN_FAULT_POINTS"])._name)
    folder = ROOT / "build" / library.stem
    core = folder / "gluon_syncbn" / "_core.so"
    flags, changed = "-O0 -DSYNCBN_FAULT_POINTS", max(path.stat().st_mtime for path in SOURCES.rglob("*.*"))
    plain = {}
    for source in (source for source, names in _FOUND.items() if not names):
        for one in (ROOT / "build" / "core").glob(f"*/{source.relative_to(SOURCES).with_suffix('.o')}"):
            if one.stat().st_mtime > changed:
                plain[source] = one
    command, linked = [sys.executable, "-c", COMPILES, core, *plain], " ".join(map(str, [*plain.values(), library]))
    done = ended(command, cwd=ROOT, timeout=500, CXXFLAGS=flags, LDFLAGS=linked)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in [path for path in PACKAGE.iterdir() if path.suffix != ".so"]:
        if not (core.parent / path.name).exists():
            (core.parent / path.name).symlink_to(path)
    return folder

"""A core with points at which a thread or a process is hit, and the points that its sources name."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List

from environments import shell
from places import PACKAGE, ROOT, SOURCES, SUPPORT

MACRO = re.compile(r'SYNCBN_POINT\("(\w+)"\)')
BUILT = ROOT / "build" / "points"
FLAGS = ["-std=c++17", "-O0", "-fno-trapping-math", "-fPIC", "-fopenmp", "-fvisibility=hidden", f"-I{SOURCES}"]


def _found() -> Dict[Path, List[str]]:
    return {path: names for path in sorted(SOURCES.rglob("*.cc")) if (names := MACRO.findall(path.read_text("utf-8")))}


#: In the order of the sources, each once. Those of `cuda` need a GPU.
NATIVE = list(dict.fromkeys(name for path, names in _found().items() if path.parent.name != "cuda" for name in names))
GPU = list(dict.fromkeys(name for path, names in _found().items() if path.parent.name == "cuda" for name in names))

#: Where a replica that is hit in the forward keeps the others from a total.
BEFORE_THE_TOTAL = {"before_join", "before_contribution", "before_reduce", "after_reduce"}
#: Whether a call is handed to a worker is a matter of time.
NOT_ALWAYS = {"before_worker"}
BY_KVSTORE = {"before_exchange", "after_exchange"}
BETWEEN = {"before_post", "after_post", "after_collect", "before_copy_in", "before_add_part", "before_copy_out"}
WITHIN = [point for point in NATIVE if point not in BY_KVSTORE | BETWEEN]
assert set(NATIVE) >= BEFORE_THE_TOTAL | NOT_ALWAYS | BY_KVSTORE | BETWEEN
HANGS = 30  # seconds, of a step; nothing here takes long


def package() -> Path:
    """A folder for PYTHONPATH, with this package around such a core, which is compiled where it is too old.

    What has no points is taken from the core of the checkout.
    """
    core = BUILT / "gluon_syncbn" / "_core.so"
    core.parent.mkdir(parents=True, exist_ok=True)
    for path in [path for path in PACKAGE.iterdir() if path.suffix != ".so"]:
        link = core.parent / path.name
        if not link.exists():
            link.symlink_to(path)
    headers = max(path.stat().st_mtime for path in SOURCES.rglob("*.h"))
    marked = set(_found())

    def compiled(source: Path) -> Path:
        plain = SOURCES in source.parents and source not in marked
        name = f"*/{source.relative_to(SOURCES).with_suffix('.o')}" if plain else ""
        usable = list((ROOT / "build" / "core").glob(name)) if plain else []
        own = BUILT / f"{'_'.join(source.parts[-2:])}.o"
        target = max([*usable, own], key=lambda path: path.stat().st_mtime if path.exists() else 0)
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, headers if target == own else 0):
            target = own
            command = ["g++", *FLAGS, "-DSYNCBN_FAULT_POINTS", "-c", str(source), "-o", f"{own}.{os.getpid()}"]
            subprocess.run(command, check=True, timeout=300, env=shell())
            os.replace(f"{own}.{os.getpid()}", own)
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, [*sorted(SOURCES.rglob("*.cc")), SUPPORT / "points.cc"]))
    if not core.exists() or core.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        unfinished = f"{core}.{os.getpid()}"
        link = ["g++", "-shared", "-fopenmp", *map(str, objects), "-o", unfinished]
        subprocess.run(link, check=True, timeout=120, env=shell())
        os.replace(unfinished, core)
    return BUILT

"""Prints the tests that belong to what differs from the last commit, or to the paths given. `make check` runs them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of a path, the longest beginning counts. tests/processes and tests/gpu take minutes: `make check` leaves them out.
TESTS = {
    "gluon_syncbn/": "tests/layer",
    "gluon_syncbn/command/": "tests/command",
    "gluon_syncbn/contrastive.py": "tests/training tests/processes",
    "gluon_syncbn/csrc/": "tests/layer",
    "gluon_syncbn/csrc/cuda/": "tests/gpu",
    "gluon_syncbn/csrc/exchange/": "tests/processes",
    "gluon_syncbn/exchange/": "tests/processes",
    "gluon_syncbn/mxnet_side/": "tests/layer tests/nets tests/training",
    "gluon_syncbn/nets/": "tests/nets",
    "gluon_syncbn/parallel.py": "tests/training",
    "gluon_syncbn/symbol.py": "tests/nets",
    "gluon_syncbn/training/": "tests/training",
    "examples/contrastive/": "tests/examples/test_contrastive.py",
    "examples/quickstart/": "tests/examples/test_quickstart.py",
    "examples/segmentation/": "tests/examples/test_segmentation.py",
    "benchmarks/": "tests/examples/test_readme.py tests/examples/test_benchmarks.py",
    "docs/": "tests/examples/test_pages.py",
    "README.md": "tests/examples/test_pages.py tests/examples/test_readme.py",
    "CONTRIBUTING.md": "tests/examples/test_pages.py",
    "CHANGELOG.md": "tests/examples/test_pages.py",
    "setup.py": "tests/examples/test_packaging.py",
    "pyproject.toml": "tests/examples/test_packaging.py",
}


def tests_of(path: str) -> list:
    if path.startswith("tests/"):
        return [path] if Path(path).match("test_*.py") and (ROOT / path).exists() else []
    beginnings = [beginning for beginning in TESTS if path.startswith(beginning)]
    return TESTS[max(beginnings, key=len)].split() if beginnings else []


def changed() -> list:
    if not (ROOT / ".git").exists():  # a source archive
        return []
    names = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=all", "--no-renames", "-z"]
    return [
        line[3:] for line in subprocess.run(names, stdout=subprocess.PIPE, check=True, text=True).stdout.split("\0")
    ]


if __name__ == "__main__":
    print(*sorted({test for path in sys.argv[1:] or changed() for test in tests_of(path)}))

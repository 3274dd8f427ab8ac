"""A user's script with types: the checkers find the package's, and take the script for right."""

import sys
import sysconfig
import venv

import pytest
from environments import ended
from places import PACKAGE, ROOT, SUPPORT

SCRIPT = SUPPORT / "typed_script.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A Python that has the package among its installed ones, whose insides a checker of the user's leaves alone."""
    folder = tmp_path_factory.mktemp("typing") / "venv"
    venv.create(str(folder), with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "gluon_syncbn").symlink_to(PACKAGE)
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_mypy_takes_a_users_script_and_finds_what_is_wrong_in_another(installed, tmp_path):
    pytest.importorskip("mypy", reason="needs requirements/dev.txt")
    (tmp_path / "wrong.py").write_text(
        "import gluon_syncbn\n\nnumber: int = gluon_syncbn.__version__\ngluon_syncbn.cpu_devices('two')\n"
        "gluon_syncbn.no_such_name\n"
    )
    # Outside of the checkout, whose settings are not the user's.
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed), str(SCRIPT), "wrong.py"]
    command += ["--cache-dir", str(ROOT / "build" / "mypy")]  # the next run takes seconds
    done = ended(command, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    first, second, third = [line for line in done.stdout.splitlines() if "error:" in line]
    assert 'wrong.py:3: error: Incompatible types in assignment (expression has type "str"' in first
    assert "wrong.py:4: error: Argument 1" in second
    assert 'wrong.py:5: error: Module has no attribute "no_such_name"' in third


def test_the_script_runs():
    done = ended([sys.executable, "-W", "ignore", SCRIPT], PACKAGE.parent)
    assert done.returncode == 0, done.stderr

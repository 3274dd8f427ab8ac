"""The self-check tells what serves, and its exit code whether it works."""

import subprocess
import sys

import pytest

from gluon_syncbn import _native, reference
from gluon_syncbn import selfcheck as check


def test_a_sound_installation():
    run = subprocess.run([sys.executable, "-m", "gluon_syncbn"], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "BROKEN" not in run.stdout
    for fact in (
        "Apache MXNet 1.9.1",
        f"{_native.instruction_set()} kernels",
        "KVStore local, device",
        "(mxnet)",
        "2 replicas on cpu",
        "none: this is a CPU build of MXNet",
        "kvstore('mpi') with mpi4py",
    ):
        assert fact in run.stdout


def test_a_wrong_result_is_exit_code_1(monkeypatch, capsys):
    right = reference.forward

    def wrong(*args):
        result = right(*args)
        return result._replace(running_var=[var * 1.001 for var in result.running_var])

    monkeypatch.setattr(reference, "forward", wrong)
    assert check.main() == 1
    printed = capsys.readouterr().out
    assert "BROKEN  live      ArithmeticError: wrong by" in printed
    assert "1 of 8 checks failed" in printed


def test_two_builds_at_once_are_noticed(tmp_path, monkeypatch):
    # Both hold the module mxnet; pip does not mind.
    for name in ("mxnet", "mxnet_cu112"):
        folder = tmp_path / f"{name}-1.9.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.9.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"mxnet 1\.9\.1 and mxnet-cu112 1\.9\.1 are installed") as error:
        check.versions()
    assert "pip uninstall mxnet mxnet-cu112" in str(error.value)

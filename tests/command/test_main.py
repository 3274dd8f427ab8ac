"""The self-check reports what the machine supports, and its exit code says whether it works."""

import functools
import sys

import kernels_library
import pytest
from environments import ended

from gluon_syncbn.command import selfcheck as check


def test_a_sound_installation():
    run = ended([sys.executable, "-m", "gluon_syncbn"], code=0)
    assert "BROKEN" not in run.stdout
    for fact in (
        "Apache MXNet 1.9.1",
        f"{kernels_library.here()[0]} kernels",
        "KVStore local, device",
        "(mxnet)",
        "2 replicas on cpu",
        "live_gpu  none: this is a CPU build of MXNet",
        "kvstore('mpi') with mpi4py",
    ):
        assert fact in run.stdout


def test_a_wrong_result_is_exit_code_1(monkeypatch, capsys):
    assert check.live().count("20 steps take the loss from 4.") == 2
    monkeypatch.setattr(check, "convert", functools.partial(check.convert, mode="local"))
    assert check.main() == 1
    printed = capsys.readouterr().out
    assert "BROKEN  live      ArithmeticError: with shared memory, a step differs by " in printed
    assert "expected are differences below 3e-3\n" in printed
    assert "1 of 7 checks failed" in printed


def test_packages_that_are_installed_twice(tmp_path, monkeypatch):
    # Both builds hold the module mxnet; pip does not mind. Of one package, Python imports the first.
    for name in ("mxnet", "mxnet_cu112", "mpi4py"):
        folder = tmp_path / f"{name}-1.9.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.9.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"mxnet 1\.9\.1 and mxnet-cu112 1\.9\.1 are installed") as error:
        check.versions()
    assert "pip uninstall mxnet mxnet-cu112" in str(error.value)
    assert "kvstore('mpi') with mpi4py 1.9.1" in check.stores()

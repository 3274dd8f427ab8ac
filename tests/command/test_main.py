"""The self-check reports what the machine supports, and its exit code says whether it works."""

import functools
import sys

import pytest
from environments import ended

from gluon_syncbn import _native, reference
from gluon_syncbn.command import report
from gluon_syncbn.command import selfcheck as check


def test_a_sound_installation():
    run = ended([sys.executable, "-m", "gluon_syncbn"])
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
    assert "1 of 9 checks failed" in printed


def test_a_report_is_written_where_there_is_no_gpu(tmp_path, capsys):
    file = tmp_path / "report.txt"
    assert check.main(str(file)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert file.read_text("utf-8").splitlines() == printed[:-1] and str(file) in printed[-1]
    for fact in ("gpus ", "live_gpu ", "net_gpu ", "times_gpu "):
        (line,) = [line for line in printed if line.startswith(f"ok      {fact}")]
        assert line.endswith("none: this is a CPU build of MXNet")


def test_what_a_report_has_of_devices(contexts, monkeypatch):
    own, gluoncvs = report.trained_on_all(contexts[:3])
    assert (
        own.startswith("a net like VGG: after a step 3 replicas and a CPU differ by ")
        and "20 steps take the loss from 1." in own
    )
    assert gluoncvs.startswith(("cifar_resnet20_v1: after a step 3 replicas", "no ResNet of GluonCV: No module named"))
    lines = report.times(contexts[:2], [(2, 3, 4, 4)], rounds=1)
    assert [line.partition(":")[0] for line in lines] == [
        f"{count} x 2 x 3 x 4 x 4, {way}" for count in (1, 2) for way in ("eager", "static")
    ]
    assert all(name in line for line in lines for name in report.NORMS)
    monkeypatch.setattr(report, "SyncBatchNorm", functools.partial(report.SyncBatchNorm, mode="local"))
    with pytest.raises(ArithmeticError, match=r"3 replicas and a CPU differ by .* expected are differences below 3e-3"):
        report.trained_on_all(contexts[:3])


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
    assert "kvstore('mpi') with mpi4py 1.9.1" in check.processes()

"""`make gpu-day`: its list, what it says of a step, and what is carried to a machine without a network."""

import struct
import sys

import pytest
import test_kernels_cuda
from environments import ended
from gpus import GPUS
from places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import gpu_day
import gpu_day_files

if GPUS:
    pytest.skip("nothing here is about a GPU: `make test` runs it", allow_module_level=True)


def test_the_list_fits_into_its_time(tmp_path):
    done = ended(["make", "gpu-day", "ARGS=--list"], cwd=ROOT)
    steps = gpu_day.steps(tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [step.name for step in steps]
    assert sum(step.limit for step in steps) <= gpu_day.SECONDS == 480
    files = {
        word.partition("::")[0] for step in steps for word in step.command if word.partition("::")[0].endswith(".py")
    }
    assert len(files) == 3 and all((ROOT / file).is_file() for file in files)


def test_each_selected_test_exists():
    """pytest joins what a test is parametrized with into its id."""
    for one in gpu_day.ONCE:
        file, _, test = one.partition("::")
        name, _, case = test.rstrip("]").partition("[")
        marks = getattr(getattr(test_kernels_cuda, name), "pytestmark", [])
        cases = ["-".join(map(str, case)) for mark in marks for case in mark.args[1]]
        assert file == gpu_day.KERNELS and case in (cases or [""]), one


def code(kind, architecture, data):
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 257, 64, len(data), 0, 0, 7, 1, architecture, 0, 0, 0x11, 0, 0)
    return head + data


def test_code_for_one_capability_is_left():
    def container(*codes):
        return gpu_day_files.MAGIC + struct.pack("<HHQ", 1, 16, sum(map(len, codes))) + b"".join(codes)

    ours, other, intermediate = code(2, 90, b"H" * 40), code(2, 80, b"A" * 56), code(1, 90, b"P" * 24)
    other += code(2, 90, b"\0.text._ZN7cutlass_tensorop_h884")
    library = bytearray(
        b"before " + container(other, ours, intermediate) + b" between " + container(other) + b" behind"
    )
    want = b"before " + container(ours) + bytes(len(other + intermediate)) + b" between "
    want += bytes(16 + len(other)) + b" behind"
    assert gpu_day_files.only_for(90, library) == len(ours)
    assert bytes(library) == want


def test_parts_come_back(tmp_path, monkeypatch):
    site, out = tmp_path / "site", tmp_path / "out"
    for name in ("mxnet/libmxnet.so", "nvidia/cudnn/lib/libcudnn_cnn_infer.so.8", "mpi4py/__init__.py"):
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(name)
    out.mkdir()
    sizes = gpu_day_files.pack(site, out)
    parts = gpu_day_files.spread(sizes)
    assert sorted(archive for part in parts for archive in part) == sorted(out.iterdir())
    monkeypatch.setattr(gpu_day, "SITE", tmp_path / "there")
    gpu_day.unpack([out])
    assert ended(["diff", "-r", site, tmp_path / "there"]).returncode == 0

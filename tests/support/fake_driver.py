"""A driver of NVIDIA's that is none: libcuda.so.1 as fake_driver.c has it."""

import subprocess

from environments import shell
from places import SUPPORT


def build_driver(folder, name="libcuda.so.1"):
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(SUPPORT / "fake_driver.c")]
    subprocess.run(["g++", "-x", "c", *flags], check=True, env=shell())
    return folder / name

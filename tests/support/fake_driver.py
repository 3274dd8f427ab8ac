"""A driver of NVIDIA's that is none: libcuda.so.1 as fake_driver.c has it."""

import subprocess

from environments import shell
from places import SUPPORT


def build_driver(folder):
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        ["g++", "-x", "c", *flags, "-o", str(library), str(SUPPORT / "fake_driver.c")], check=True, env=shell()
    )

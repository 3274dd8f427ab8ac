"""Sets up a folder in which the wheel of ``mxnet-cu112`` runs without a GPU and NVIDIA's driver and libraries.

    python tests/cuda_emulator/build.py --out DIR

leaves in DIR the wheel's package (``mxnet/``) and the stand-ins for the libraries that it is linked against
(``lib/``). Then: ``PYTHONPATH=DIR LD_LIBRARY_PATH=DIR/lib python ...``. A repetition does what has changed.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEEL = "mxnet-cu112==1.9.1"

# NCCL is apart, for an MXNet without it; one library has the others' names.
CORE, NCCL = "libcuda.so.1", "libnccl.so.2"
#: soname: how the names begin that libmxnet.so takes from it. It asks for them with the soname as their version.
VERSIONED = {
    "libcudart.so.11.0": ("cuda", "__cuda"),
    "libnvrtc.so.11.2": ("nvrtc",),
    "libcudnn.so.8": ("cudnn",),
    "libcublas.so.11": ("cublas",),
    "libcusolver.so.11": ("cusolver",),
    "libcusparse.so.11": ("cusparse",),
    "libcurand.so.10": ("curand",),
    "libcufft.so.10": ("cufft",),
    "libnvToolsExt.so.1": ("nvtx",),
}
COMPILER = shlex.split(os.environ.get("CXX", "")) or ["g++"]
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-pthread", "-U_FORTIFY_SOURCE"]
STUB = """
extern "C" void {name}() {{
    std::fputs("cuda emulator: {name} is not emulated\\n", stderr);
    std::abort();
}}
"""


def run(*command):
    """What it prints."""
    given = list(map(str, command))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(given, **streams, text=True, env=dict(os.environ, LC_ALL="C"))
    if done.returncode:
        raise SystemExit(f"build.py: {shlex.join(given)}\n{done.stdout}")
    return done.stdout


def unpack(out):
    """The wheel's packages; returns the names that their libraries take from others."""
    stamp = out / ".mxnet-cu112"  # what is there, then the names
    lines = stamp.read_text().splitlines() if stamp.exists() else [""]
    if lines[0].strip() == WHEEL:
        return lines[1:]
    print(f"    fetching {WHEEL} (460 MB) ...", flush=True)
    options = ["--quiet", "--no-input", "--no-cache-dir", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    run(sys.executable, "-m", "pip", "install", *options, "--upgrade", "--target", out, WHEEL)
    for folder in out.glob("*.dist-info"):  # what is installed, the checkout's own MXNet says
        shutil.rmtree(folder)
    output = run("nm", "--dynamic", "--undefined-only", *(out / "mxnet").glob("*.so"))
    names = sorted(set(re.findall(r" U (\w+)", output)))
    stamp.write_text("\n".join([WHEEL, *names]))
    return names


def compiled(out, source):
    target = out / "objects" / f"{source.stem}.o"
    run(*COMPILER, *FLAGS, "-c", source, "-o", target)
    return target


def link(out, soname, *inputs):
    target = out / "lib" / soname
    run(*COMPILER, *FLAGS, "-shared", f"-Wl,-soname,{soname}", *inputs, "-o", f"{target}.new")
    # A rename: a process that has the old one mapped keeps it.
    os.replace(f"{target}.new", target)
    return target


def build_libraries(out, names):
    """``names``: what the package imports, so that a stub can be made of all that is not emulated."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".cc", ".h", ".py"))
    content = run(*COMPILER, "--version") + "".join(names)
    content += "".join(path.name + path.read_text(encoding="utf-8") for path in sources)
    identity = hashlib.sha256(content.encode()).hexdigest()
    stamp = out / ".libraries"
    if stamp.exists() and stamp.read_text() == identity:
        return
    print("    compiling the stand-ins for CUDA's libraries ...", flush=True)
    stamp.unlink(missing_ok=True)
    for folder in ("kernels", "cache"):  # results of the old compiler, and what programs have kept of them
        shutil.rmtree(out / folder, ignore_errors=True)
    for folder in ("lib", "include", "objects"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "shim.h", out / "include")

    with ThreadPoolExecutor(2) as pool:
        objects = {one.stem: one for one in pool.map(lambda source: compiled(out, source), HERE.glob("*.cc"))}
    have = run("nm", "--defined-only", *objects.values()).split()
    begins = tuple(chain(["cu", "nccl"], *VERSIONED.values()))
    missing = sorted({name for name in names if name.startswith(begins)}.difference(have))
    stubs, versions = out / "objects" / "stubs.cc", out / "objects" / "versions"
    stubs.write_text("#include <cstdio>\n#include <cstdlib>\n" + "".join(STUB.format(name=name) for name in missing))
    versions.write_text("".join(f"{soname} {{ {'*; '.join(begins)}*; }};\n" for soname, begins in VERSIONED.items()))
    nccl = objects.pop("nccl")
    link(out, CORE, *objects.values(), stubs, f"-Wl,--version-script={versions}", "-ldl")
    link(out, NCCL, nccl, out / "lib" / CORE, "-Wl,-rpath,$ORIGIN")
    for soname in VERSIONED:
        (out / "lib" / soname).unlink(missing_ok=True)
        (out / "lib" / soname).symlink_to(CORE)
    stamp.write_text(identity)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to set up")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another one may be at it
        build_libraries(out, unpack(out))


if __name__ == "__main__":
    main()

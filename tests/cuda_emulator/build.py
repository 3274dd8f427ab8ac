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
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEEL = "mxnet-cu112==1.9.1"

CORE = ["errors", "device", "memory", "streams", "launch", "copies", "driver"]
CORE_LIBRARY = "libcuda.so.1"
# soname: (sources, the prefix of the names that libmxnet.so takes from it)
LIBRARIES = {
    "libcudart.so.11.0": (["cudart"], r"(__)?cuda[A-Z]"),
    "libnvrtc.so.11.2": (["nvrtc"], "nvrtc"),
    "libnccl.so.2": (["nccl"], "nccl"),
    "libcudnn.so.8": (["cudnn"], "cudnn"),
    "libcublas.so.11": (["handles"], "cublas"),
    "libcusolver.so.11": (["handles"], "cusolver"),
    "libcusparse.so.11": ([], "cusparse"),
    "libcurand.so.10": ([], "curand"),
    "libcufft.so.10": ([], "cufft"),
    "libnvToolsExt.so.1": ([], "nvtx"),
}
# libcuda and libnccl are the two whose names carry no version.
UNVERSIONED = {CORE_LIBRARY, "libnccl.so.2"}
COMPILER_HINT = "g++ 9 or later for x86-64 is needed: apt-get install g++, or set CXX"
BINUTILS_HINT = "nm is needed: apt-get install binutils (g++ depends on it)"
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-pthread", "-U_FORTIFY_SOURCE"]
STUB = """
extern "C" void {name}() {{
    std::fputs("cuda emulator: {name} of {library} is not emulated\\n", stderr);
    std::abort();
}}
"""


def fail(message):
    raise SystemExit("build.py: " + message)


def run(command, hint):
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ, LC_ALL="C")
        )
    except OSError as error:
        fail(f"{command[0]} does not run ({error.strerror}): {hint}")
    if done.returncode:
        fail(f"{shlex.join(command)}\n{done.stdout}\n{hint}")
    return done.stdout


# ---- the wheel ---------------------------------------------------------------------------------------------


def fetch(folder):
    """The wheel, in this folder."""
    print(f"    fetching {WHEEL} (460 MB) ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that has failed
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    run(command, "is the package index reachable?")
    return next(folder.glob("*.whl"))


def unpack(out):
    """Unpacks its packages; returns the names that their libraries take from others. The wheel is not kept."""
    stamp = out / ".mxnet-cu112"  # what is there, then the names
    lines = stamp.read_text().splitlines() if stamp.exists() else [""]
    if lines[0].strip() == WHEEL:
        return lines[1:]
    stamp.unlink(missing_ok=True)
    temporary = out / "wheel"
    wheel = fetch(temporary)
    print(f"    unpacking {wheel.name} ...", flush=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [name for name in archive.namelist() if not name.split("/")[0].endswith((".dist-info", ".data"))]
            for package in {name.split("/")[0] for name in files}:
                shutil.rmtree(out / package, ignore_errors=True)
            archive.extractall(out, files)
    except (OSError, zipfile.BadZipFile) as error:
        fail(f"{wheel} does not unpack ({error}): make room on the disk, or remove the file if it is broken")
    libraries = [str(out / name) for name in files if name.endswith(".so")]
    output = run(["nm", "--dynamic", "--undefined-only", *libraries], BINUTILS_HINT)
    names = sorted(set(re.findall(r" U (\w+)", output)))
    stamp.write_text("\n".join([WHEEL, *names]))
    shutil.rmtree(temporary)
    return names


# ---- the libraries -----------------------------------------------------------------------------------------


def compiler():
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def compile_source(out, stem):
    target = out / "stubs" / f"{stem}.o"
    run([*compiler(), *FLAGS, "-c", str(HERE / f"{stem}.cc"), "-o", str(target)], COMPILER_HINT)
    return target


def link(out, soname, inputs):
    target = out / "lib" / soname
    command = [*compiler(), *FLAGS, "-shared", f"-Wl,-soname,{soname}"]
    if soname not in UNVERSIONED:
        command.append("-Wl,--default-symver")
    command += [*map(str, inputs), "-o", f"{target}.new", "-ldl"]
    if soname != CORE_LIBRARY:
        command += [f"-L{out / 'lib'}", f"-l:{CORE_LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    run(command, COMPILER_HINT)
    # A rename: a process that has the old one mapped keeps it.
    os.replace(f"{target}.new", target)
    return target


def build_library(out, soname, inputs, prefix, names):
    """The library; then, if it lacks some of ``names``, once more with a stub for each."""
    library = link(out, soname, inputs)
    defined = run(["nm", "--dynamic", "--defined-only", str(library)], BINUTILS_HINT)
    have = set(re.findall(r" [A-Z] (\w+)", defined))
    stubs = [name for name in names if re.match(prefix, name) and name not in have]
    if stubs:
        source = out / "stubs" / f"{soname}.cc"
        text = "#include <cstdio>\n#include <cstdlib>\n"
        source.write_text(text + "".join(STUB.format(name=name, library=soname) for name in stubs))
        link(out, soname, [*inputs, source])


def build_libraries(out, names):
    """``names``: what the package imports, so that a stub can be made of all that is not emulated."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".cc", ".h", ".py"))
    version = run([*compiler(), "--version"], COMPILER_HINT)
    content = version + "".join(names) + "".join(path.name + path.read_text(encoding="utf-8") for path in sources)
    identity = hashlib.sha256(content.encode()).hexdigest()
    stamp = out / ".libraries"
    if stamp.exists() and stamp.read_text() == identity:
        return
    print("    compiling the stand-ins for CUDA's libraries ...", flush=True)
    stamp.unlink(missing_ok=True)
    for folder in ("kernels", "cache"):  # results of the old compiler, and what programs have kept of them
        shutil.rmtree(out / folder, ignore_errors=True)
    for folder in ("lib", "include", "stubs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "shim.h", out / "include")

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda stem: compile_source(out, stem), CORE))
        build_library(out, CORE_LIBRARY, objects, "cu[A-Z]", names)  # the others are linked with it
        others = [
            pool.submit(build_library, out, soname, [HERE / f"{stem}.cc" for stem in stems], prefix, names)
            for soname, (stems, prefix) in LIBRARIES.items()
        ]
        for other in others:
            other.result()
    stamp.write_text(identity)


def build(out):
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another one may be at it
        build_libraries(out, unpack(out))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to set up")
    build(parser.parse_args().out.resolve())


if __name__ == "__main__":
    main()

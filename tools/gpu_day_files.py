"""Makes the files that `make gpu-day` needs on a machine without a network small enough to carry there, in parts.

    pip install lz4; python tools/gpu_day_files.py [--capability 90] [--wheels FOLDER]

It fetches the wheels of requirements/gpu_day.txt (1.3 GB, once), leaves out what cannot run on that GPU or is not asked
for, and writes the parts `build/gpu_day/1` and `build/gpu_day/2`. It prints the size of each file, and fails if a part
has more than 60 MiB. On the other machine, `python3 tools/gpu_day.py --unpack build/gpu_day/1` unpacks one.

Left out are machine code for other GPUs, recurrent nets of cuDNN, and its modules for tensor cores alone, as the net
computes in float32 without them. In the places of NCCL, cuBLAS, cuFFT, cuRAND and cuSOLVER are libraries that make
handles, and that answer everything else with an error. The machine code that stays is stored plainly, because xz
compresses it better than NVIDIA's LZ4 does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Dict, List, Sequence

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "requirements" / "gpu_day.txt"
PARTS, LARGEST = 2, 60 << 20  # bytes of a part; the device machine takes 64 MiB in a call, the checkout among them
PYTHON = ["--python-version", "3.12", "--only-binary", ":all:", "--no-deps"]
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"]

# What is unpacked of the wheels: files of a wheel's own folders "data" come without that folder.
KEPT = re.compile(
    r"mxnet/(?!include/)|dmlc_tracker/|mpi4py/|bin/(mpiexec|hydra_pmi)|lib/libmpi\.so\.12|lib/mpich/|"
    r"nvidia/cudnn/lib/libcudnn(_(ops|cnn)_\w+)?\.so|nvidia/cuda_(runtime|nvrtc)/lib/lib(cudart|nvrtc)"
)
# Each file that is packed by itself, so that the parts come out even; all others are in one more.
APART = ["libcudnn_cnn_infer.so.8", "libcudnn_cnn_train.so.8", "libmxnet.so", "libnvrtc.so.11.2"]
#: soname: (folder in nvidia/, the prefix of the functions that MXNet and cuDNN ask it for)
STUBS = {
    "libcublas.so.11": ("cublas", "cublas(?!Lt)"),
    "libcublasLt.so.11": ("cublas", "cublasLt"),
    "libcufft.so.10": ("cufft", "cufft"),
    "libcurand.so.10": ("curand", "curand"),
    "libcusolver.so.11": ("cusolver", "cusolver"),
    "libnccl.so.2": ("nccl", "nccl"),
    "libnvToolsExt.so.1": ("nvtx", "nvtx"),
}
MAKES = r"(cublas|cublasLt|cusolverDn)Create(_v2)?"
WORKS = r".*(Destroy|SetStream|SetMathMode|SetWorkspace|SetPointerMode)(_v2)?|nvtx.*"
STUB = """
int {name}(void** out) {{
#if {makes}
    *out = (void*)16;
#endif
#if {works}
    return 0;
#else
    fputs("{soname} is left out: {name}\\n", stderr);
    return 15;
#endif
}}
"""
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
MAGIC = b"\x50\xed\x55\xba"


# ---- machine code ----------------------------------------------------------------------------------------------


def only_for(capability: int, library: bytearray) -> int:
    """Leaves machine code for this capability alone, and stores it plainly; bytes of it.

    A container of the section .nv_fatbin has a head of 16 bytes, then code for one architecture after another: a head
    (kind, which is 2 for machine code and 1 for PTX, size, capability, whether LZ4 has compressed it) and the code.
    """
    kept, at = 0, 0
    while True:
        at = library.find(MAGIC, at)
        if at < 0:
            return kept
        _, version, head, size = struct.unpack_from("<IHHQ", library, at)
        if version != 1 or head != 16 or at + head + size > len(library):
            at += 4
            continue
        packed, chosen, end, entry = b"", b"", at + head + size, at + head
        while entry < end:
            kind, _, its_head, its_size, _ = struct.unpack_from("<HHIQI", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            if kind == 2 and architecture == capability:
                code = plain(library[entry : entry + its_head], library[entry + its_head : entry + its_head + its_size])
                kernels = re.findall(rb"\0\.text\.(\w+)", code)
                if not kernels or not all(b"cutlass_tensorop" in kernel for kernel in kernels):
                    packed += library[entry : entry + its_head + its_size]
                    chosen += code
            entry += its_head + its_size
        if len(chosen) > size:
            chosen = packed
        library[at:end] = (
            bytes(end - at) if not chosen else library[at : at + head] + chosen + bytes(size - len(chosen))
        )
        if chosen:
            struct.pack_into("<Q", library, at + 8, len(chosen))
        kept += len(chosen)
        at = end


def plain(head: bytes, code: bytes) -> bytes:
    """The same without compression, as nvcc writes it with -no-compress."""
    (compressed,) = struct.unpack_from("<I", head, 16)
    flags, _, size = struct.unpack_from("<QQQ", head, 40)
    if not flags & 0x2000:
        return head + code
    import lz4.block

    code = lz4.block.decompress(bytes(code[:compressed]), uncompressed_size=size)
    code += bytes(-len(code) % 8)
    head = bytearray(head)
    struct.pack_into("<QI", head, 8, len(code), 0)
    struct.pack_into("<QQQ", head, 40, flags & ~0x2000, 0, 0)
    return bytes(head) + code


# ---- libraries that are left out -------------------------------------------------------------------------------


def stubs(site: Path) -> None:
    """Puts one into the place of each library that is left out, with all that MXNet and cuDNN look for there."""
    libraries = [site / "mxnet" / "libmxnet.so", *(site / "nvidia" / "cudnn" / "lib").glob("*.so.8")]
    words = {word for library in libraries for word in re.findall(rb"\0(\w{6,60})(?=\0)", library.read_bytes())}
    for soname, (folder, prefix) in STUBS.items():
        names = sorted(word.decode() for word in words if re.fullmatch(rf"{prefix}[A-Z]\w*", word.decode()))
        text = "#include <stdio.h>\n"
        for name in names:
            makes = int(bool(re.fullmatch(MAKES, name)))
            works = int(makes or bool(re.fullmatch(WORKS, name)))
            text += STUB.format(name=name, soname=soname, makes=makes, works=works)
        place = site / "nvidia" / folder / "lib"
        place.mkdir(parents=True, exist_ok=True)
        versions = [] if soname == "libnccl.so.2" else ["-Wl,--default-symver"]
        command = ["gcc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{soname}", *versions, "-x", "c", "-", "-o"]
        subprocess.run([*command, str(place / soname)], input=text, text=True, check=True)


# ---- the parts -------------------------------------------------------------------------------------------------


def unpack(wheels: Path, site: Path, capability: int) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                kept = re.sub(r"^[\w.-]+\.data/(data|purelib|platlib|scripts)/", "", name)
                if name.endswith("/") or not KEPT.match(kept):
                    continue
                path = site / kept
                path.parent.mkdir(parents=True, exist_ok=True)
                data = bytearray(archive.read(name))
                if ".so" in path.name and MAGIC in data:
                    print(f"{kept}: {only_for(capability, data) / 1e6:.0f} MB of code for {capability}", flush=True)
                path.write_bytes(data)
                path.chmod(0o755 if "bin/" in kept else 0o644)


def pack(site: Path, out: Path) -> Dict[Path, int]:
    """Writes archives, and returns their sizes."""
    files = [path for path in sorted(site.rglob("*")) if path.is_file()]
    groups: Dict[str, List[Path]] = {name: [path for path in files if path.name == name] for name in APART}
    groups["others"] = [path for path in files if path.name not in APART]

    def write(name: str) -> Path:
        archive = out / f"{name}.tar.xz"
        with lzma.open(archive, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for path in groups[name]:
                tar.add(str(path), str(path.relative_to(site)))
        return archive

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return {archive: archive.stat().st_size for archive in pool.map(write, groups)}


def spread(sizes: Dict[Path, int]) -> List[List[Path]]:
    """The largest first, each into the part that has least."""
    parts: List[List[Path]] = [[] for _ in range(PARTS)]
    for archive in sorted(sizes, key=lambda one: -sizes[one]):
        min(parts, key=lambda part: sum(sizes[one] for one in part)).append(archive)
    return parts


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 90 is 9.0, Hopper")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "build" / "gpu_day_wheels", help="folder to fetch them into"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_day", help="folder for the parts")
    options = parser.parse_args(arguments)
    command = [sys.executable, "-m", "pip", "download", "--quiet", *PYTHON, "--dest", str(options.wheels)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, "--requirement", str(LISTED)], check=True)
    site = options.out / "site"
    shutil.rmtree(options.out, ignore_errors=True)
    unpack(options.wheels, site, options.capability)
    stubs(site)
    sizes = pack(site, options.out)
    shutil.rmtree(site)
    large = False
    for number, archives in enumerate(spread(sizes), 1):
        (options.out / str(number)).mkdir()
        for archive in archives:
            archive.rename(options.out / str(number) / archive.name)
            print(f"{number}/{archive.name}: {sizes[archive] / 2**20:.1f} MiB")
        total = sum(sizes[archive] for archive in archives)
        large |= total > LARGEST
        print(
            f"part {number}: {total / 2**20:.1f} of {LARGEST / 2**20:.0f} MiB{', too large' if total > LARGEST else ''}"
        )
    return int(large)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

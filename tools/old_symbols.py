"""Lets g++ of today make libraries for systems of 2014: ``LDFLAGS="$(old_symbols.py FOLDER)"``. ``CXX`` may be another
g++, of another processor too.

A library that is linked on a new system asks for the newest version of each symbol, and old systems lack it. Written
here are stand-ins for the C and C++ libraries that hold the names of this machine's, each in its newest version that is
not above `LIMITS` (those of manylinux_2_17, which MXNet 1.9.1's own wheel has), and nothing else. What is younger in
the C++ library is taken from libstdc++.a, as Red Hat's devtoolset does; what is younger in glibc does not link.

The C++ library stays a shared one for the rest, because the operator's errors are caught by MXNet (`dmlc::Error`): with
a copy of it inside, one would count what is thrown and the other what is caught.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LIMITS = {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7)}
YOUNGER = Path(__file__).with_name("younger.c")  # a stand-in for what headers of today call and glibc 2.17 has not
LIBRARIES = {"libc": "libc.so.6", "libm": "libm.so.6", "libstdc++": "libstdc++.so.6"}
CXX = os.environ.get("CXX") or "g++"
SPLIT = ("libdl.so.2", "libpthread.so.0")  # files that dlopen and threads had of their own before glibc 2.34
#: What linkers find under the names of the libraries.
SCRIPTS = {
    "libc": "GROUP ( {folder}/libc.so.6 {nonshared} {younger} {ld} )",
    "libm": "GROUP ( {folder}/libm.so.6 )",
    "libstdc++": "INPUT ( {folder}/libstdc++.so.6 {static} )",
}


def run(*command: str, **kwargs: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode:
        sys.exit(f"old_symbols.py: {' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def found(name: str) -> str:
    """The whole path of a file of the compiler's."""
    path = run(CXX, f"-print-file-name={name}").strip()
    if path == name:
        sys.exit(
            f"old_symbols.py: g++ does not find {name}: apt-get install g++ (Debian) or dnf install libstdc++-static"
        )
    return str(Path(path).resolve())


def symbols(library: str) -> dict[str, tuple]:
    """(version, is it a variable) of each name, in its newest version within the limits."""
    newest: dict[str, tuple] = {}
    for line in run("readelf", "--dyn-syms", "--wide", library).splitlines():
        match = re.match(
            r"\s*\d+: \S+\s+\S+\s+(\w+)\s+(GLOBAL|WEAK|UNIQUE)\s+\w+\s+(\w+)\s+(\S+?)@+(\w+?)_([\d.]+)$", line
        )
        if not match or match.group(3) == "UND" or match.group(5) not in LIMITS:
            continue
        kind, _, _, name, family, digits = match.groups()
        version = tuple(map(int, digits.split(".")))
        if version <= LIMITS[family] and (name not in newest or version > newest[name][0][1]):
            newest[name] = ((family, version, digits), kind)
    return newest


def write_stand_in(path: Path, names: dict[str, tuple]) -> None:
    source, script = path.with_suffix(".s"), path.with_suffix(".map")
    kinds = {"OBJECT": "object", "TLS": "tls_object"}
    lines, versions = ['.section .text\n.section .tbss,"awT",@nobits\n.section .data'], {}
    for name, ((family, version, digits), kind) in sorted(names.items()):
        section = {"TLS": ".tbss", "OBJECT": ".data"}.get(kind, ".text")
        lines.append(f'.section {section}\n.globl "{name}"\n.type "{name}", @{kinds.get(kind, "function")}\n"{name}":')
        lines.append(f'.zero 8\n.size "{name}", 8')
        versions.setdefault((family, version, digits), []).append(name)
    source.write_text("\n".join(lines) + '\n.section .note.GNU-stack,"",@progbits\n')
    nodes = [f"{key[0]}_{key[2]} {{ global: {' '.join(f'{n};' for n in found)} }};" for key, found in versions.items()]
    script.write_text("\n".join(nodes) or "NONE { };")
    options = [f"-Wl,-soname,{path.name}", *([f"-Wl,--version-script={script}"] if nodes else [])]
    run(CXX, "-shared", "-nostdlib", *options, str(source), "-o", str(path))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    places = {"folder": folder, "younger": folder / "younger.o"}
    loader = "ld-linux-x86-64.so.2" if run(CXX, "-dumpmachine").startswith("x86_64") else "ld-linux-aarch64.so.1"
    for name, file in (("static", "libstdc++.a"), ("nonshared", "libc_nonshared.a"), ("ld", loader)):
        places[name] = found(file)
    run(CXX, "-x", "c", "-c", "-O2", "-fPIC", "-fvisibility=hidden", str(YOUNGER), "-o", str(places["younger"]))
    for name, file in LIBRARIES.items():
        write_stand_in(folder / file, symbols(found(file)))
        (folder / f"{name}.so").write_text(SCRIPTS[name].format(**places) + "\n")
    for file in SPLIT:
        write_stand_in(folder / file, {})
    split = " ".join(f"-l:{file}" for file in SPLIT)
    print(
        f"-L{folder} -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,--push-state,--no-as-needed {split} -Wl,--pop-state"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

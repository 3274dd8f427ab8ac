"""The Pythons of this machine."""

import os
import shutil
import subprocess
from pathlib import Path

from environments import shell


def python(version):
    """The path of one, `3.9` for example, that runs and can make environments; None where there is none."""
    roots = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    places = [path for root in roots if root for path in sorted(Path(root).glob(f"versions/{version}.*/bin/python"))]
    on_path = shutil.which(f"python{version}")
    for path in [*reversed(places), *([on_path] if on_path else [])]:
        program = "import ensurepip, ctypes, ssl, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([str(path), "-c", program], capture_output=True, text=True, timeout=60, env=shell())
        if done.stdout.strip() == version:
            return str(path)
    return None

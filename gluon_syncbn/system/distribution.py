"""Says which version this is, and where it can be obtained today. That changes on the day of publication, as do the
docs that its test finds.

``setup.py`` reads the constants without importing the package.
"""

from __future__ import annotations

import sys

__version__ = "0.4.0"
#: The argument of pip: "." is the checkout. "gluon_syncbn" as soon as a package index has it.
TARGET = "."
#: Where such a command works. "" as soon as a package index has it.
WHERE = ", in the checkout or with a wheel file in place of the dot"


def command(extra: str) -> str:
    """Returns the command that installs this extra; quoted, because zsh expands brackets."""
    return f"`pip install '{TARGET}[{extra}]'`"


#: How to get MXNet. Its metadata asks for numpy<2, of which there is no wheel for Python 3.13 and later.
MXNET = f"{command('cpu')}, or for NVIDIA GPUs {command('cu112')}{WHERE}"
if sys.version_info >= (3, 13):
    MXNET = f"`pip install --no-deps mxnet==1.9.1` (for NVIDIA GPUs mxnet-cu112==1.9.1), then {MXNET}"

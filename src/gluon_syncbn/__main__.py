"""What ``python -m gluon_syncbn`` does: the self-check by itself, `run` with a script."""

from __future__ import annotations

import sys

# The self-check takes CPU contexts when it is imported, so that neither is imported before it is chosen.
if len(sys.argv) == 1:
    from . import selfcheck

    sys.exit(selfcheck.main())

from . import run

run.main(sys.argv[1:])

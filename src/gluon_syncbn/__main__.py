"""``python -m gluon_syncbn`` and ``gluon-syncbn``: the self-check by itself or with `check`, a script with `run`."""

from __future__ import annotations

import sys


def main() -> int:
    # The self-check takes CPU contexts when it is imported, so that neither is imported before it is chosen.
    if sys.argv[1:] in ([], ["check"]):
        from . import selfcheck

        return selfcheck.main()
    from . import run

    run.main(sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())

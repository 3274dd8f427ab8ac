"""Runs the command line: the self-check, alone or with `check`, and a user's script with `run`."""

from __future__ import annotations

import sys

from .command import report, run, selfcheck


def main() -> int:
    if sys.argv[1:] in ([], ["check"]):
        return selfcheck.main()
    if sys.argv[1:3] == ["check", report.OPTION] and len(sys.argv) < 5:
        return selfcheck.main(sys.argv[3] if sys.argv[3:] else report.NAME)
    run.main(sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())

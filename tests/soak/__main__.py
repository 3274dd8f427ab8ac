"""Trains random layers in random ways, and checks every step against truth.py. The exit code is 1 where something was
wrong, 3 where a step hung.

    make soak ARGS="--minutes 10"
    make soak ARGS="--seed 123 --cases 1"       # that case again, with what the package logs
"""

import argparse
import os
import sys

from .runner import Soak

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="how long (until all cases have run)")
    parser.add_argument("--cases", type=int, default=3000, help="end after so many, if that is earlier (3000)")
    parser.add_argument("--seed", type=int, help="of the first case; the next has the next (a random one)")
    parser.add_argument("--hang", type=float, default=120, help="seconds that a step may take (120)")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "little")
    sys.exit(Soak(options).run())

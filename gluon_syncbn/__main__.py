"""Runs the command line."""

import sys

from .command.run import main

if __name__ == "__main__":
    sys.exit(main())

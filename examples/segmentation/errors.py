"""Errors of the user, in one line each, and the exit codes of every command here."""

from __future__ import annotations

import os
import sys

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_NOT_FINITE = 3  # the loss became NaN or infinite
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in a shell


class UserError(Exception):
    """A mistake in an option, a file or a folder. The text names the mistake and the expected value.

    The exception holds nothing but its text, so it survives pickling between a loader worker and the main process.
    """

    exit_code = EXIT_BAD_INPUT


class NotFiniteError(UserError):
    """The loss is not finite."""

    exit_code = EXIT_NOT_FINITE


class ElsewhereError(UserError):
    """Another process of the job has found an error, and prints it. This process ends with the same exit code."""

    def __init__(self, exit_code: int):
        super().__init__("another process has found an error")
        self.exit_code = exit_code


def run(main, argv=None) -> int:
    """Call main(argv) and turn a UserError into one line on stderr and an exit code."""
    program = os.path.basename(sys.argv[0])
    try:
        return main(argv) or EXIT_OK
    except ElsewhereError as error:
        return error.exit_code
    except UserError as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before training installs its own handler, or after training
        print(f"{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED

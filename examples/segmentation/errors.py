"""What the user got wrong, said in one line; and the way every command here ends."""

from __future__ import annotations

import os
import sys

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_NOT_FINITE = 3  # the loss became NaN or infinite
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class UserError(Exception):
    """A mistake in an option, a file or a folder. The text names it and says what was expected.

    It holds nothing but its text, so that it survives pickling on its way from a loader worker.
    """

    exit_code = EXIT_BAD_INPUT


class NotFiniteError(UserError):
    """Training diverged."""

    exit_code = EXIT_NOT_FINITE


class ElsewhereError(UserError):
    """Another process of the job has found an error, and says which. This one ends like that one."""

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
    except KeyboardInterrupt:  # before training has its own handler, or after it
        print(f"{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED

"""Ranks of a job as children of one process, which imports MXNet for all of them."""

import os
import sys
import traceback
from pathlib import Path
from typing import Callable, List


def fork_ranks(ranks: int, folder: Path, work: Callable[[int], None]) -> List[int]:
    """The process id of each rank, which calls ``work(rank)`` and prints to ``folder/output.RANK``."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                work(rank)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    return children

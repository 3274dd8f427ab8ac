"""Runs the command line: the self-check, or a script as it is, with this package in place of contrib's layer and
GluonCV's helpers. Arguments after the script are the script's own.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, Callable, Iterator, List, Optional

from ..mxnet_side.advice import left_alone
from ..system.distribution import __version__
from ..training import steps
from ..training.session import session
from . import selfcheck
from .replacements import install


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command, by default that of the process. A script's exit code or exception ends it."""
    parser = argparse.ArgumentParser("gluon-syncbn", allow_abbrev=False)
    parser.epilog = "`python -m gluon_syncbn` is the same program, and by itself the check."
    parser.add_argument("--version", action="version", version=f"gluon_syncbn {__version__}")
    commands = parser.add_subparsers(dest="command")
    what = "reports what this machine supports, trains a small net on two CPU contexts and on all GPUs"
    commands.add_parser("check", allow_abbrev=False, help=what)
    what = "runs a training script as it is, with gluon_syncbn in the places of contrib's layer and GluonCV's helpers"
    command = commands.add_parser("run", allow_abbrev=False, help=what, description=what)
    command.add_argument("--cpus", type=int, metavar="N", help="lets mx.gpu(0) to mx.gpu(N - 1) be N CPU contexts")
    what = "synchronises plain BatchNorm too, in all nets that the script trains"
    command.add_argument("--convert", action="store_true", help=what)
    command.add_argument("script", nargs=argparse.PARSER, help="with its own options and arguments behind it")
    given = parser.parse_args(arguments)
    if given.command != "run":
        return selfcheck.main()
    script, *own = given.script[1:] if given.script[0] == "--" else given.script
    path = os.path.abspath(script) if sys.version_info >= (3, 9) else script  # Python's own value of __file__
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        command.error(f"script: {script!r} was given, expected a Python file that can be read ({error.strerror})")
    try:
        words = install(given.cpus, given.convert)
    except ValueError as error:
        command.error(str(error))

    # Launchers print to stderr too: stdout belongs to the script.
    print(f"gluon_syncbn: {script} runs with {words}", file=sys.stderr, flush=True)
    sys.argv = [script, *own]
    if not getattr(sys.flags, "safe_path", False):  # with python -P, neither a script nor -m adds its folder
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.excepthook = functools.partial(_show, path, sys.excepthook)
    # `runpy.run_path` would put this path into sys.argv[0], and would drop the module before the exit handlers run.
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins, __loader__=loader)
    code = loader.source_to_code(source, path)
    # multiprocessing, imported by now, has a second name for it, by which processes return objects of its classes.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    try:
        exec(code, vars(module))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        if steps.training_threads.objects():
            for text in _what_met(script, given.convert):
                print(f"gluon_syncbn: {text}", file=sys.stderr, flush=True)
    return 0


def _what_met(script: str, convert: bool) -> Iterator[str]:
    """Tells of a script that has trained how many layers met, or why nothing was synchronised."""
    between = [store for store in session.stores if store.layers and store.replicas > 1]
    within = {contexts: count for contexts, count in session.ran.items() if len(contexts) > 1 and count}
    met = sum(within.values()) + sum(store.layers for store in between)
    if met:
        over = [f"{store.replicas} replicas of {store.num_workers} processes" for store in between]
        contexts = max(within or [()], key=len)
        over += [f"{contexts[0]} to {contexts[-1]}"] if contexts else []
        yield f"{met} layer{'s' if met > 1 else ''} synchronised over {' and '.join(over)}"
    else:
        remedy = "try run --convert, if the script has no option of its own for it"
        if convert:
            remedy = "no gluon.Trainer or Module trains a layer of batch normalisation; call layers, not operators"
        if session.ran:
            remedy = "its layers had one device each, or are frozen"
        yield f"{script} has trained, and nothing was synchronised: {remedy}"
    if left_alone() and not session.stores and not session.chosen:
        yield left_alone()


def _show(path: str, hook: Callable[..., Any], kind: Any, error: BaseException, trace: Optional[TracebackType]) -> None:
    """Shows an exception without the frames that started the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    hook(kind, error.with_traceback(trace), trace)

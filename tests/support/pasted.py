"""Runs blocks of code as if each had been pasted into a script of its own: ``pasted.py BLOCKS.json [ANSWERS.json]``.

A block gets a fork of this process, which has imported the packages and run no operator, an empty folder, an empty home
and no network. Where it takes GPUs, CPU contexts stand in for them. Without ANSWERS.json the blocks are run one after
the other in this process, which MPI cannot be started in twice.
"""

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import gluoncv.model_zoo  # noqa: E402, F401
import mxnet as mx  # noqa: E402

import gluon_syncbn  # noqa: E402

LIMIT, AT_ONCE = 120, 2  # seconds that a block may take after those before it; processes


def no_network(*_args, **_kwargs):
    raise OSError("this block wants the network")


def prepare(folder):
    os.chdir(folder)
    os.environ["HOME"] = folder
    socket.getaddrinfo = no_network
    warnings.resetwarnings()
    for kind in (UserWarning, RuntimeWarning):
        warnings.simplefilter("error", kind)
    # GluonCV's models initialise their heads when they are made
    warnings.filterwarnings("ignore", "Parameter '.*' is already initialized", UserWarning)


def run(block):
    if "mx.gpu(" in block["text"] and "install(" not in block["text"]:
        gluon_syncbn.install(cpus=4)
    # Tracebacks name the line of the page.
    code = compile("\n" * (block["line"] - 1) + block["text"], block["page"], "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})
    mx.nd.waitall()


def answer(block):
    """[exit code, what it printed], in a process that ends with this block."""
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, ".output"), "w+") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        code = 1
        try:
            prepare(folder)
            run(block)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        return code, output.read()


def answers(blocks):
    with multiprocessing.get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:  # which ends all at its end
        for result in [pool.apply_async(answer, [block]) for block in blocks]:
            try:
                yield result.get(LIMIT)
            except multiprocessing.TimeoutError:
                yield 1, f"it crashed, or did not end within {LIMIT} s"


def main(blocks, answered=None):
    given = json.loads(Path(blocks).read_text(encoding="utf-8"))
    if answered:
        Path(answered).write_text(json.dumps(list(answers(given))), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for block in given:
            run(block)
            print(f"{block['page']}:{block['line']} has run", flush=True)
            gluon_syncbn.configure(kvstore=None)
        os.chdir("/")


if __name__ == "__main__":
    main(*sys.argv[1:])

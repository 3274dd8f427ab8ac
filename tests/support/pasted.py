"""Runs blocks of code as if each had been pasted into a script of its own: ``pasted.py BLOCKS.json [ANSWERS.json]``.

A block gets a fork of this process, which has imported the packages and run no operator, an empty folder, an empty home
and no network. Where it takes GPUs, CPU contexts stand in for them. Without ANSWERS.json the blocks are run one after
the other in this process, which MPI cannot be started in twice.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings

warnings.simplefilter("ignore")

import gluoncv.model_zoo  # noqa: E402, F401
import mxnet as mx  # noqa: E402

import gluon_syncbn  # noqa: E402

LIMIT, AT_ONCE = 120, 2  # seconds; processes


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


def started(block, folder):
    output = os.open(os.path.join(folder, ".output"), os.O_CREAT | os.O_RDWR | os.O_APPEND)
    pid = os.fork()
    if pid:
        os.close(output)
        return pid
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(output, stream)
        prepare(folder)
        run(block)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answers(blocks):
    """[exit code, what it printed], for each."""
    waiting, running, found = list(enumerate(blocks)), {}, {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, block = waiting.pop(0)
            folder = tempfile.TemporaryDirectory()
            running[started(block, folder.name)] = (number, folder, time.monotonic() + LIMIT)
        time.sleep(0.02)
        for pid, (number, folder, end) in list(running.items()):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if time.monotonic() > end else os.WNOHANG)
            if ended:
                with open(os.path.join(folder.name, ".output"), encoding="utf-8", errors="replace") as file:
                    found[number] = (status, file.read())
                folder.cleanup()
                del running[pid]
    return [found[number] for number in range(len(blocks))]


def main(blocks, answered=None):
    with open(blocks, encoding="utf-8") as file:
        given = json.load(file)
    if answered:
        found = answers(given)
        with open(answered, "w", encoding="utf-8") as file:
            json.dump(found, file)
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

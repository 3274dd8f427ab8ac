"""The process in which cases run: `python -m soak.layers.child SECONDS SEED...`. It writes the end of each, in JSON.

If there is nothing to write for so many seconds, or the process does not end, SIGALRM ends it.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import traceback

import light  # isort: skip  # noqa: F401
from .case import draw
from .trial import Wrong, contexts, run


def main() -> None:
    seconds, *seeds = map(int, sys.argv[1:])
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(seconds)
    if len(seeds) > 1:  # a case that is repeated may speak
        logging.getLogger("gluon_syncbn").addHandler(logging.NullHandler())
        logging.getLogger("gluon_syncbn").propagate = False
    places = contexts()
    for seed in seeds:
        case = draw(seed)
        signal.alarm(seconds)
        say(seed=seed, began=str(case))
        try:
            say(seed=seed, strain=run(case, places))
        except Wrong as error:
            say(seed=seed, wrong=str(error))
        except Exception:
            say(seed=seed, wrong=traceback.format_exc())
            os._exit(0)  # nobody knows what is still on its way


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

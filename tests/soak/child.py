"""The process in which cases run: `python -m soak.child SECONDS SEED...`. It writes the end of each, in JSON.

If there is nothing to write for so many seconds, or the process does not end, SIGALRM ends it.
"""

import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import traceback

import light  # isort: skip  # noqa: F401
import mxnet as mx

from gluon_syncbn import _native

from .case import draw
from .events import Wrong, choices
from .trial import contexts, run


def main() -> None:
    seconds, *seeds = map(int, sys.argv[1:])
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(seconds)
    signal.signal(signal.SIGINT, lambda *_: None)  # which a case sends; the runner's ends this process
    if len(seeds) > 1:  # a case that is repeated may speak
        logging.getLogger("gluon_syncbn").addHandler(logging.NullHandler())
        logging.getLogger("gluon_syncbn").propagate = False
    places = contexts()
    for seed in seeds:
        case = draw(seed)
        for _ in range(case.rng_of_events.randint(3)):
            place = case.rng_of_events.randint(1, len(case.steps) + 1)
            case.steps[place:place] = [str(case.rng_of_events.choice(choices(case))), "train"]
        signal.alarm(seconds)
        say(seed=seed, began=str(case))
        try:
            strain = run(case, places)
            mx.nd.waitall()
            gc.collect()
            if _native.layers():
                raise Wrong(f"{_native.layers()} layers live on")
            say(seed=seed, strain=strain)
        except Wrong as error:
            say(seed=seed, wrong=str(error))
        except Exception:
            say(seed=seed, wrong=traceback.format_exc())
            os._exit(0)  # nobody knows what is still on its way


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

"""The process in which cases run: `python -m soak.layers.child SEED...`. It writes what becomes of each, in JSON."""

import faulthandler
import json
import logging
import os
import sys
import traceback

import light  # isort: skip  # noqa: F401
from .case import draw
from .trial import Wrong, contexts, run


def main() -> None:
    seeds = list(map(int, sys.argv[1:]))
    faulthandler.enable()
    if len(seeds) > 1:  # a case that is repeated may speak
        logging.getLogger("gluon_syncbn").addHandler(logging.NullHandler())
        logging.getLogger("gluon_syncbn").propagate = False
    places = contexts()
    for seed in seeds:
        case = draw(seed)
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

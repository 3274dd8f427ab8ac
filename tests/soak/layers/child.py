"""The process in which cases run: `python -m soak.layers.child SEED...`. It writes what becomes of each, in JSON."""

import argparse
import faulthandler
import json
import logging
import os
import traceback

import light  # isort: skip  # noqa: F401
from .case import draw
from .faults import FAULTS
from .trial import Wrong, contexts, run
from .truth import Truth

# What the layer says of a slot whose input another slot's statistic hides. The draw makes some.
REFUSAL = "(inplace=True, mode='shuffle')"


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak.layers.child")
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--fault", choices=FAULTS, help="planted into what is expected")
    options = parser.parse_args()
    faulthandler.enable()
    if len(options.seeds) > 1:  # a case that is repeated may speak
        logging.getLogger("gluon_syncbn").addHandler(logging.NullHandler())
        logging.getLogger("gluon_syncbn").propagate = False
    places, truth = contexts(), FAULTS.get(options.fault, Truth)
    for seed in options.seeds:
        case = draw(seed)
        say(seed=seed, began=str(case))
        try:
            say(seed=seed, strain=run(case, places, truth))
        except Wrong as error:
            say(seed=seed, wrong=str(error))
        except Exception as error:
            refused = case.inplace and case.pooling.get("mode") == "shuffle" and REFUSAL in str(error)
            say(seed=seed, **{"refused" if refused else "wrong": traceback.format_exc()})
            os._exit(0)  # nobody knows what is still on its way


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

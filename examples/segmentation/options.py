"""The command line: GluonCV's option names where the meaning is the same, and the checks of their values."""

from __future__ import annotations

import argparse
import math
import os
import sys

from errors import EXIT_BAD_INPUT, UserError
from model import MODELS, check_model, described
from processes import STORES, check_launch

# A run is a function of these: a checkpoint is continued with the values that it was begun with.
RUN_OPTIONS = (
    "dataset model backbone syncbn aux aux_weight base_size crop_size batch_size epochs optimizer lr "
    "warmup_epochs momentum weight_decay no_wd seed"
).split()
CHECKPOINTS = ("last.ckpt", "best.ckpt")
# What a network is built from: evaluate.py and predict.py take these from the checkpoint.
MODEL_OPTIONS = "dataset model backbone aux base_size crop_size".split()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the page of usage."""

    def error(self, message):
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")


def number(kind, low, high=math.inf, low_included=True):
    """An argparse type: int or float within limits."""
    expected = "a whole number" if kind is int else "a number"
    expected += f" {'from' if low_included else 'above'} {low}"
    if high < math.inf:
        expected += f" to {high}"

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high) or (value == low and not low_included) or math.isinf(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def add_model_options(parser, required: bool = False) -> None:
    group = parser.add_argument_group("network")
    default = {} if required else {"default": None}
    group.add_argument("--dataset", default="ade20k", help="ade20k, the layout this example reads")
    group.add_argument(
        "--model",
        **(default or {"default": "fcn"}),
        help=f"one of {', '.join(MODELS)}" + (" (fcn)" if required else " (the checkpoint's)"),
    )
    group.add_argument("--backbone", **(default or {"default": "resnet50"}), help="resnet50, resnet101, ...")
    group.add_argument("--aux", action="store_true", **default, help="with the auxiliary head")
    for name, value in (("--base-size", 520), ("--crop-size", 480)):
        group.add_argument(
            name,
            type=number(int, 1),
            **(default or {"default": value}),
            metavar="N",
            help=f"pixels ({value})" if required else "pixels (the checkpoint's)",
        )
    parser.set_defaults(pretrained_base=False)


def add_device_options(parser) -> None:
    group = parser.add_argument_group("devices and data")
    group.add_argument("--data-root", default="~/.mxnet/datasets/ade", metavar="DIR")
    group.add_argument(
        "--ngpus", type=number(int, 0), metavar="N", help="GPUs, of each process (all; without GPUs: one CPU)"
    )
    group.add_argument("--cpus", type=number(int, 1), metavar="N", help="CPU devices in place of GPUs, of each process")
    group.add_argument("--no-cuda", action="store_true", help="the same as --cpus 1")
    group.add_argument("--cpu-temp-copies", type=number(int, 1), metavar="N", help="see gluon_syncbn.cpu_devices")
    group.add_argument(
        "--workers", type=number(int, 0), default=2, metavar="N", help="reader processes, of each process (2)"
    )
    group.add_argument(
        "--test-batch-size",
        type=number(int, 1),
        default=16,
        metavar="N",
        help="of all devices of all processes together (16)",
    )
    group.add_argument("--check-data", action="store_true", help="read every file first (small sets: always)")
    group.add_argument("--no-progress", action="store_true", help="no progress bars")


def train_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=os.path.basename(sys.argv[0]), description="Train a segmentation network.")
    add_model_options(parser, required=True)
    parser.add_argument("--pretrained-base", action="store_true", help="let GluonCV download weights")
    parser.add_argument("--syncbn", action="store_true", help="synchronise batch normalisation over devices")
    add_device_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--aux-weight", type=number(float, 0), default=0.5, help="of the auxiliary loss (0.5)")
    group.add_argument("--epochs", type=number(int, 1), default=50, metavar="N", help="(50)")
    group.add_argument(
        "--start-epoch",
        "--start_epoch",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="with --resume x.params",
    )
    group.add_argument(
        "--batch-size",
        type=number(int, 1),
        default=16,
        metavar="N",
        help="of all devices of all processes together (16)",
    )
    group.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    group.add_argument("--lr", type=number(float, 0, low_included=False), default=1e-3, help="(1e-3)")
    group.add_argument("--warmup-epochs", type=number(int, 0), default=0, metavar="N")
    group.add_argument("--momentum", type=number(float, 0, 1), default=0.9, metavar="M", help="(0.9)")
    group.add_argument("--weight-decay", type=number(float, 0), default=1e-4, metavar="M", help="(1e-4)")
    group.add_argument("--no-wd", action="store_true", help="no weight decay for bias, beta and gamma")
    group.add_argument(
        "--kvstore",
        choices=("local", "device", "nccl", *STORES),
        help="adds gradients: within this process (device; CPUs: local), or over all that mpiexec (mpi) or horovodrun "
        "(horovod) has started",
    )
    group.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, help="of everything random (0)")
    group.add_argument(
        "--mode",
        choices=("static", "hybrid", "imperative"),
        help="hybridize with static memory and shapes, hybridize, or neither (static; several CPUs: hybrid)",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--save-dir", default=None, metavar="DIR", help="runs/DATASET/MODEL/...")
    group.add_argument("--overwrite", action="store_true", help="let --save-dir be one that holds another run")
    group.add_argument("--checkname", default="default", help="last part of the default --save-dir")
    group.add_argument("--resume", default=None, metavar="FILE", help=".ckpt: go on; .params: start there")
    group.add_argument(
        "--log-interval", type=number(int, 1), default=20, metavar="N", help="steps per line without bar (20)"
    )
    group.add_argument("--eval", action="store_true", help="only evaluate --resume")
    group.add_argument("--no-val", action="store_true", help="no validation while training")
    return parser


def evaluate_parser(description: str) -> argparse.ArgumentParser:
    """For the programs that use a checkpoint: what the network is comes from there."""
    parser = Parser(prog=os.path.basename(sys.argv[0]), description=description)
    parser.add_argument("--resume", required=True, metavar="FILE", help=".ckpt, or .params with --model ...")
    add_model_options(parser)
    add_device_options(parser)
    group = parser.add_argument_group("whole images")
    group.add_argument("--scales", type=number(float, 0, 4, False), nargs="+", default=[1.0], metavar="S")
    group.add_argument("--flip", action="store_true", help="average with the mirrored image")
    return parser


def take_model_options(args, state: dict | None) -> None:
    """Fill in what was not given from a checkpoint's state; UserError if it is of another network."""
    theirs = (state or {}).get("options", {"model": "fcn", "backbone": "resnet50", "aux": False})
    theirs = {"dataset": "ade20k", "base_size": 520, "crop_size": 480, **theirs}
    for name in MODEL_OPTIONS:
        if getattr(args, name) is None:
            setattr(args, name, theirs[name])
    if state:
        check_same_model(args, state)
        args.aux = theirs["aux"]
    check_model(args.model, args.backbone, args.crop_size, args.aux)


def check_same_model(args, state: dict) -> None:
    """UserError, naming both, if a checkpoint's state is of another network than `args`."""
    check_model(args.model, args.backbone, args.crop_size, args.aux)
    theirs = argparse.Namespace(**state["options"])
    if described(args) != described(theirs):
        raise UserError(
            f"--resume {args.resume}: a checkpoint of {described(theirs)}, "
            f"but --model and --backbone ask for {described(args)}"
        )


def check_train(args) -> None:
    """UserError for values that do not go together; fills in defaults that depend on others."""
    check_dataset(args)
    check_model(args.model, args.backbone, args.crop_size, args.aux)
    if args.warmup_epochs >= args.epochs and args.warmup_epochs:
        raise UserError(f"--warmup-epochs {args.warmup_epochs}: must be less than --epochs {args.epochs}")
    if args.start_epoch >= args.epochs:
        raise UserError(f"--start-epoch {args.start_epoch}: must be less than --epochs {args.epochs}")
    if args.start_epoch and not (args.resume or "").endswith(".params"):
        raise UserError("--start-epoch: only with --resume FILE.params; a .ckpt knows its position")
    if args.eval and not args.resume:
        raise UserError("--eval: needs --resume FILE, the checkpoint to evaluate")
    if args.resume and not os.path.isfile(args.resume):
        raise UserError(f"--resume {args.resume}: no such file")
    if args.eval and args.kvstore in STORES:
        raise UserError(f"--eval: runs in one process; leave out --kvstore {args.kvstore}")
    check_launch(args)
    if args.save_dir is None:
        args.save_dir = os.path.join("runs", args.dataset, args.model, args.backbone, args.checkname)


def check_dataset(args) -> None:
    if args.dataset != "ade20k":
        raise UserError(f"--dataset {args.dataset}: unknown; expected ade20k")
    args.data_root = os.path.expanduser(args.data_root)


def continues(args) -> bool:
    """Whether --resume is a checkpoint of --save-dir."""
    return bool(args.resume) and os.path.dirname(os.path.realpath(args.resume)) == os.path.realpath(args.save_dir)


def check_save_dir(args) -> None:
    """UserError if it holds a run that is not the one to continue."""
    held = [name for name in CHECKPOINTS if os.path.exists(os.path.join(args.save_dir, name))]
    if held and not continues(args) and not args.overwrite:
        raise UserError(
            f"--save-dir {args.save_dir}: holds a run already; --resume {os.path.join(args.save_dir, held[0])} goes on "
            "with it, --overwrite replaces it, another --save-dir keeps it"
        )


def extends(args, state: dict) -> bool:
    """Whether further epochs are asked for of a run that has all that it was begun for."""
    return args.epochs > state["options"]["epochs"] == state["epoch"]


def check_options(args, checkpoint) -> None:
    """UserError if a checkpoint is of another model or of a run with other settings."""
    check_same_model(args, checkpoint.state)
    theirs = checkpoint.state["options"]
    for name in RUN_OPTIONS:
        if name == "epochs" and extends(args, checkpoint.state):
            continue
        if theirs[name] != getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} {getattr(args, name)}: the checkpoint {checkpoint.path} was made with "
                f"{theirs[name]}; continue with that, or start from its model.params"
            )

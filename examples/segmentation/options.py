"""The command line, and the checks of its values. Options have GluonCV's names if they mean the same."""

from __future__ import annotations

import argparse
import math
import os
import sys

from errors import EXIT_BAD_INPUT, UserError
from model import MODELS, check_model, described
from processes import STORES, check_launch

# A run is a function of these options. A checkpoint continues with the options of its first call.
RUN_OPTIONS = (
    "dataset model backbone syncbn aux aux_weight base_size crop_size batch_size epochs optimizer lr "
    "warmup_epochs momentum weight_decay no_wd seed"
).split()
CHECKPOINTS = ("last.ckpt", "best.ckpt")
# The options that define a network. evaluate.py and predict.py read them from the checkpoint.
MODEL_OPTIONS = "dataset model backbone aux base_size crop_size".split()


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, without the usage page."""

    def error(self, message):
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")


def number(kind, low, high=math.inf, low_included=True):
    """An argparse type: an int or float within limits."""
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
    group.add_argument("--dataset", default="ade20k", help="ade20k, the only layout of this example")
    group.add_argument(
        "--model",
        **(default or {"default": "fcn"}),
        help=f"one of {', '.join(MODELS)}" + (" (fcn)" if required else " (the checkpoint's)"),
    )
    group.add_argument("--backbone", **(default or {"default": "resnet50"}), help="resnet50, resnet101, ...")
    group.add_argument("--aux", action="store_true", **default, help="add the auxiliary head")
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
        "--ngpus", type=number(int, 0), metavar="N", help="GPUs of each process (all; without GPUs: one CPU)"
    )
    group.add_argument("--cpus", type=number(int, 1), metavar="N", help="CPU devices of each process, in place of GPUs")
    group.add_argument("--no-cuda", action="store_true", help="the same as --cpus 1")
    group.add_argument(
        "--workers", type=number(int, 0), default=2, metavar="N", help="reader processes of each process (2)"
    )
    group.add_argument(
        "--test-batch-size",
        type=number(int, 1),
        default=16,
        metavar="N",
        help="images of all devices of all processes (16)",
    )
    group.add_argument("--check-data", action="store_true", help="read every file first (always for small sets)")


def train_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=os.path.basename(sys.argv[0]), description="Train a segmentation network.")
    add_model_options(parser, required=True)
    parser.add_argument("--pretrained-base", action="store_true", help="let GluonCV download weights of the backbone")
    parser.add_argument("--syncbn", action="store_true", help="synchronise batch normalisation over devices")
    add_device_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--aux-weight", type=number(float, 0), default=0.5, help="weight of the auxiliary loss (0.5)")
    group.add_argument("--epochs", type=number(int, 1), default=50, metavar="N", help="number of epochs (50)")
    group.add_argument(
        "--start-epoch",
        "--start_epoch",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="position in the learning rate schedule, with --resume x.params",
    )
    group.add_argument(
        "--batch-size",
        type=number(int, 1),
        default=16,
        metavar="N",
        help="images of all devices of all processes (16)",
    )
    group.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    group.add_argument(
        "--lr", type=number(float, 0, low_included=False), default=1e-3, help="learning rate at the start (1e-3)"
    )
    group.add_argument("--warmup-epochs", type=number(int, 0), default=0, metavar="N")
    group.add_argument("--momentum", type=number(float, 0, 1), default=0.9, metavar="M", help="(0.9)")
    group.add_argument("--weight-decay", type=number(float, 0), default=1e-4, metavar="M", help="(1e-4)")
    group.add_argument("--no-wd", action="store_true", help="use no weight decay for bias, beta and gamma")
    group.add_argument(
        "--kvstore",
        choices=("local", "device", "nccl", *STORES),
        help="adds gradients: within this process (device; CPUs: local), or over all processes of mpiexec (mpi)",
    )
    group.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, help="seed of all random numbers (0)")
    group.add_argument(
        "--mode",
        choices=("static", "hybrid", "imperative"),
        default="static",
        help="hybridize with static memory and shapes, hybridize, or neither (static)",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--save-dir", default=None, metavar="DIR", help="folder of the results (runs/DATASET/MODEL/...)")
    group.add_argument("--overwrite", action="store_true", help="replace another run in --save-dir")
    group.add_argument("--checkname", default="default", help="last part of the default --save-dir")
    group.add_argument(
        "--resume", default=None, metavar="FILE", help=".ckpt: continue the run; .params: start from these parameters"
    )
    group.add_argument(
        "--log-interval",
        type=number(int, 1),
        default=20,
        metavar="N",
        help="steps per line of output without a progress bar (20)",
    )
    group.add_argument("--no-val", action="store_true", help="skip the validation during training")
    return parser


def evaluate_parser(description: str) -> argparse.ArgumentParser:
    """The options of programs that use a checkpoint. The checkpoint defines the network."""
    parser = Parser(prog=os.path.basename(sys.argv[0]), description=description)
    parser.add_argument("--resume", required=True, metavar="FILE", help="a .ckpt, or a .params with --model ...")
    add_model_options(parser)
    add_device_options(parser)
    group = parser.add_argument_group("whole images")
    group.add_argument("--scales", type=number(float, 0, 4, False), nargs="+", default=[1.0], metavar="S")
    group.add_argument("--flip", action="store_true", help="average with the prediction of the mirrored image")
    return parser


def take_model_options(args, state: dict | None) -> None:
    """Fill in missing options from a checkpoint's state. Raise a UserError if the state is of another network."""
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
    """Raise a UserError that names both networks, if a checkpoint's state is of another network than `args`."""
    check_model(args.model, args.backbone, args.crop_size, args.aux)
    theirs = argparse.Namespace(**state["options"])
    if described(args) != described(theirs):
        raise UserError(
            f"--resume {args.resume}: a checkpoint of {described(theirs)}, "
            f"but --model and --backbone ask for {described(args)}"
        )


def check_train(args) -> None:
    """Raise a UserError for values that contradict each other. Fill in defaults that depend on other options."""
    check_dataset(args)
    check_model(args.model, args.backbone, args.crop_size, args.aux)
    if args.warmup_epochs >= args.epochs and args.warmup_epochs:
        raise UserError(f"--warmup-epochs {args.warmup_epochs}: must be less than --epochs {args.epochs}")
    if args.start_epoch >= args.epochs:
        raise UserError(f"--start-epoch {args.start_epoch}: must be less than --epochs {args.epochs}")
    if args.start_epoch and not (args.resume or "").endswith(".params"):
        raise UserError("--start-epoch: only with --resume FILE.params; a .ckpt has its own position")
    if args.resume and not os.path.isfile(args.resume):
        raise UserError(f"--resume {args.resume}: no such file")
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
    """Raise a UserError if --save-dir holds another run than the one to continue."""
    held = [name for name in CHECKPOINTS if os.path.exists(os.path.join(args.save_dir, name))]
    if held and not continues(args) and not args.overwrite:
        raise UserError(
            f"--save-dir {args.save_dir}: holds a run already; --resume {os.path.join(args.save_dir, held[0])} "
            "continues it, --overwrite replaces it, another --save-dir keeps it"
        )


def extends(args, state: dict) -> bool:
    """Whether --epochs asks for further epochs of a finished run."""
    return args.epochs > state["options"]["epochs"] == state["epoch"]


def check_options(args, checkpoint) -> None:
    """Raise a UserError if a checkpoint is of another model, or of a run with other options."""
    check_same_model(args, checkpoint.state)
    theirs = checkpoint.state["options"]
    for name in RUN_OPTIONS:
        if name == "epochs" and extends(args, checkpoint.state):
            continue
        if theirs[name] != getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} {getattr(args, name)}: the checkpoint {checkpoint.path} was made with "
                f"{theirs[name]}; continue with that value, or start from its model.params"
            )

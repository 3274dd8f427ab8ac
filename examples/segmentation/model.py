"""GluonCV's segmentation networks and their losses, by name."""

from __future__ import annotations

import contextlib
import io
import os
from collections import namedtuple
from functools import partial

from errors import UserError

# We found min_crop and multiple by trying. Other sizes end in a shape error inside MXNet: the networks resize to sizes
# that are rounded down, but their strided convolutions round up. `aux` tells whether --aux finds an auxiliary head.
Kind = namedtuple("Kind", "backbones min_crop multiple aux")
RESNETS = ("resnet50", "resnet101", "resnet152", "resnest50", "resnest101", "resnest200", "resnest269")
MODELS = {
    "fcn": Kind(RESNETS, 8, 1, True),
    "psp": Kind(RESNETS, 8, 8, True),
    "deeplab": Kind(RESNETS, 8, 8, True),
    "deeplabplus": Kind(("xception",), 8, 8, True),
    "deeplabplusv3b": Kind(("wideresnet",), 8, 8, False),
    "icnet": Kind(RESNETS, 32, 16, False),
    "fastscnn": Kind((), 32, 32, True),
    "danet": Kind(RESNETS, 8, 1, False),
}


def check_model(model: str, backbone: str, crop_size: int, aux: bool) -> None:
    """Raise a UserError for options that the named network cannot be built with."""
    if model not in MODELS:
        raise UserError(f"--model {model}: unknown; expected one of {', '.join(MODELS)}")
    kind = MODELS[model]
    if kind.backbones and backbone not in kind.backbones:
        raise UserError(f"--backbone {backbone}: {model} expects one of {', '.join(kind.backbones)}")
    if crop_size < kind.min_crop:
        raise UserError(f"--crop-size {crop_size}: {model} needs at least {kind.min_crop}")
    if crop_size % kind.multiple:
        raise UserError(f"--crop-size {crop_size}: {model} needs a multiple of {kind.multiple}")
    if aux and not kind.aux:
        raise UserError(f"--aux: {model} has no auxiliary head; omit the option")


def build_model(args, norm_layer):
    """Build the network that `args` describe. Without --pretrained-base, its parameters have no values."""
    from gluoncv.model_zoo.segbase import get_segmentation_model
    from gluoncv.nn.dropblock import set_drop_prob

    check_model(args.model, args.backbone, args.crop_size, args.aux)
    kwargs = dict(
        dataset=args.dataset,
        norm_layer=norm_layer,
        norm_kwargs={},
        aux=args.aux,
        base_size=args.base_size,
        crop_size=args.crop_size,
        pretrained_base=args.pretrained_base,
    )
    if MODELS[args.model].backbones:
        kwargs["backbone"] = args.backbone
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # PSPNet prints its crop size
            net = get_segmentation_model(args.model, **kwargs)
    except (OSError, RuntimeError) as error:  # from requests, and GluonCV's download
        if not args.pretrained_base or not (isinstance(error, OSError) or type(error) is RuntimeError):
            raise
        root = os.environ.get("MXNET_HOME", os.path.join("~", ".mxnet"))
        raise UserError(
            f"--pretrained-base: GluonCV got no weights for the backbone of {described(args)} ({type(error).__name__}: "
            f"{str(error)[:200]}); connect to a network, or copy the file to {root}/models from another machine"
        ) from None
    net.apply(partial(set_drop_prob, 0.0))  # as in GluonCV: ResNeSt's DropBlock does not suit small crops
    return net


def norm_layer(syncbn: bool):
    """The class that GluonCV's networks take as norm_layer."""
    if not syncbn:
        from mxnet.gluon import nn

        return nn.BatchNorm
    # The class needs no arguments, because the replicas are the contexts of the parameters. Some networks do not pass
    # norm_kwargs to all of their layers.
    return package().SyncBatchNorm


def plain_network(args, devices):
    """A network for prediction: plain BatchNorm, no gradients. All values are zero until the caller sets them."""
    import mxnet as mx

    net = build_model(type(args)(**{**vars(args), "pretrained_base": False}), norm_layer(syncbn=False))
    net.initialize(mx.init.Zero(), ctx=devices, force_reinit=True)
    net.collect_params().setattr("grad_req", "null")
    # One forward fixes the shapes that GluonCV leaves open.
    net(mx.nd.zeros((1, 3, args.crop_size, args.crop_size), ctx=devices[0]))
    return net


def package():
    """The module gluon_syncbn."""
    try:
        import gluon_syncbn
    except ImportError as error:
        hint = "; install the package with pip install ." if error.name == "gluon_syncbn" else ""
        raise UserError(f"gluon_syncbn: {error}{hint}") from None
    return gluon_syncbn


def described(args) -> str:
    """The network in words."""
    return f"{args.model} with {args.backbone}" if MODELS[args.model].backbones else args.model


def build_loss(args):
    """The loss that GluonCV trains the named network with."""
    from gluoncv.loss import ICNetLoss, MixSoftmaxCrossEntropyLoss, SegmentationMultiLosses

    if args.model == "icnet":
        return ICNetLoss(crop_size=args.crop_size)
    if args.model == "danet":
        return SegmentationMultiLosses()
    return MixSoftmaxCrossEntropyLoss(args.aux, aux_weight=args.aux_weight)


def outputs(net, data) -> tuple:
    """The outputs of a network, as a tuple. The first is the prediction, and the loss uses the others."""
    result = net(data)
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)

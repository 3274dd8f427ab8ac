"""GluonCV's segmentation networks and their losses, by name."""

from __future__ import annotations

import contextlib
import io
import os
from collections import namedtuple
from functools import partial

from errors import UserError

# min_crop and multiple were found by trying: other sizes end in a shape error inside MXNet, because the
# networks resize to a size computed by whole-number division while their strided convolutions round up.
# aux: whether the network has the auxiliary head that --aux asks for.
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
    """UserError, naming the option, for what the named network cannot be built with."""
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
        raise UserError(f"--aux: {model} has no auxiliary head; leave the option out")


def build_model(args, norm_layer):
    """The network that `args` describe, without parameter values unless --pretrained-base."""
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
    except (OSError, RuntimeError) as error:  # what requests and GluonCV's download raise
        if not args.pretrained_base or not (isinstance(error, OSError) or type(error) is RuntimeError):
            raise
        root = os.environ.get("MXNET_HOME", os.path.join("~", ".mxnet"))
        raise UserError(
            f"--pretrained-base: GluonCV got no weights for the backbone of {described(args)} ({type(error).__name__}: "
            f"{str(error)[:200]}); needed is a network, or the file of a machine that has one, in {root}/models"
        ) from None
    net.apply(partial(set_drop_prob, 0.0))  # as GluonCV does: ResNeSt's DropBlock is not for small crops
    return net


def norm_layer(syncbn: bool):
    """The class given to GluonCV's networks as norm_layer."""
    if not syncbn:
        from mxnet.gluon import nn

        return nn.BatchNorm
    # No arguments are needed: the replicas are the devices that the parameters live on. Some networks
    # do not pass norm_kwargs on to all of their layers, so it is well that nothing depends on them.
    return package().SyncBatchNorm


def plain_network(args, devices):
    """For prediction: plain BatchNorm, no gradients, all values zero until they are set."""
    import mxnet as mx

    net = build_model(type(args)(**{**vars(args), "pretrained_base": False}), norm_layer(syncbn=False))
    net.initialize(mx.init.Zero(), ctx=devices, force_reinit=True)
    net.collect_params().setattr("grad_req", "null")
    # One pass fixes the shapes that GluonCV leaves open.
    net(mx.nd.zeros((1, 3, args.crop_size, args.crop_size), ctx=devices[0]))
    return net


def package():
    """The module gluon_syncbn."""
    try:
        import gluon_syncbn
    except ImportError as error:
        hint = "; install it first, with pip install ." if error.name == "gluon_syncbn" else ""
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
    """What a network says, as a tuple; the first is the prediction, the others serve the loss."""
    result = net(data)
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)

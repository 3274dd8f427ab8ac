"""The networks of `models.py` and `recompute.py`, their losses, and their images."""

from __future__ import annotations

import functools
from typing import Any, Callable

from _measuring import Cell

CLASSES = 150  # as in ADE20K


def classes_of(cell: Cell) -> int:
    return cell.get("classes", CLASSES)


def network(cell: Cell, layer: Any) -> Any:
    """The network of the cell's model, with such layers."""
    if cell["model"] == "depthwise chain":
        from mxnet.gluon import nn

        net = nn.HybridSequential()
        for _ in range(4):
            net.add(nn.Conv2D(64, 3, padding=1, groups=64, use_bias=False, in_channels=64))
            net.add(layer(in_channels=64), nn.Activation("relu"))
        return net
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.fastscnn import FastSCNN
    from gluoncv.model_zoo.pspnet import PSPNet

    classes = classes_of(cell)
    name = {"ResNet-18": "resnet18_v1", "ResNet-50": "resnet50_v1b", "MobileNetV2": "mobilenetv2_1.0"}.get(
        cell["model"]
    )
    if name:
        return get_model(name, classes=classes, norm_layer=layer)
    make = FastSCNN if cell["model"] == "FastSCNN" else functools.partial(PSPNet, backbone="resnet50")
    return make(classes, aux=True, pretrained_base=False, crop_size=cell["crop"], norm_layer=layer)


def criterion(cell: Cell) -> Callable[[Any, Any], Any]:
    """The loss of what the network gives, and labels."""
    if cell["model"] in ("FastSCNN", "PSPNet-ResNet50"):
        from gluoncv.loss import MixSoftmaxCrossEntropyLoss

        mixed = MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.4)
        return lambda outputs, labels: mixed(*outputs, labels)
    if cell["model"] == "depthwise chain":
        return lambda outputs, labels: (outputs * labels).mean()
    from mxnet.gluon.loss import SoftmaxCrossEntropyLoss

    return SoftmaxCrossEntropyLoss()


def batch(cell: Cell, context: Any) -> Any:
    """Images and labels of a device."""
    import mxnet as mx

    crop, images = cell["crop"], cell["images"]
    if cell["model"] == "depthwise chain":
        shape = (images, 64, crop, crop)
        return mx.nd.random.normal(shape=shape, ctx=context), mx.nd.random.normal(shape=shape, ctx=context)
    of_pixels = cell["model"] in ("FastSCNN", "PSPNet-ResNet50")
    labels = mx.nd.random.randint(0, classes_of(cell), (images, crop, crop) if of_pixels else (images,), ctx=context)
    return mx.nd.random.normal(shape=(images, 3, crop, crop), ctx=context), labels.astype("float32")

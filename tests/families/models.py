"""A small member of each of GluonCV's model families, without pretrained weights."""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import mxnet as mx
from gluoncv.model_zoo import get_model
from gluoncv.model_zoo.action_recognition.actionrec_inceptionv1 import ActionRecInceptionV1
from gluoncv.model_zoo.action_recognition.actionrec_inceptionv3 import ActionRecInceptionV3
from gluoncv.model_zoo.action_recognition.actionrec_resnetv1b import ActionRecResNetV1b
from gluoncv.model_zoo.deeplabv3_plus import DeepLabV3Plus
from gluoncv.model_zoo.hrnet import get_hrnet
from gluoncv.model_zoo.monodepthv2 import get_monodepth2, get_monodepth2posenet

# get_model would return the double-head R-CNN, which has the same name and cannot predict.
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn
from gluoncv.model_zoo.rcnn.mask_rcnn.mask_rcnn import custom_mask_rcnn_fpn
from gluoncv.model_zoo.segbase import get_segmentation_model
from gluoncv.model_zoo.senet import SENet
from mxnet.gluon import Block, nn

Shapes = Tuple[Tuple[int, ...], ...]


class Thawed(nn.BatchNorm):
    """`nn.BatchNorm` under another name, because GluonCV's R-CNNs freeze the layers of `nn.BatchNorm` itself."""


# With oneDNN, plain BatchNorm of MXNet 1.9.1 fails. In 5 dimensions it rejects the convolutions' output ("Check failed:
# to.IsDefaultData()"). NASNet's backward ends in "could not construct a sub-memory".
NO_ONEDNN = {"MXNET_MKLDNN_ENABLED": "0", "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0"}


class Model(NamedTuple):
    name: str
    build: Callable[..., Block]  # takes norm_layer=, or raises GluonCV's error
    inputs: Shapes  # of one sample
    targets: Shapes = ()  # further inputs of a training step's forward
    forward: Callable[..., Any] = lambda net, *inputs: net(*inputs)  # of a training step
    environment: Dict[str, str] = {}  # of the process
    part: str = ""  # why the forward covers a part only, and which

    def notes(self) -> List[str]:
        """The differences of its training step from those of other models."""
        without = ["without oneDNN, because plain BatchNorm fails with oneDNN"] if self.environment else []
        return without + ([f"GluonCV {self.part}"] if self.part else [])


def _zoo(name: str, *size: int, **settings: Any) -> Model:
    return Model(name, lambda **norm: get_model(name, pretrained=False, **settings, **norm), (size,))


def _based(name: str, *size: int, **settings: Any) -> Model:
    return _zoo(name, *size, pretrained_base=False, **settings)


def _segmentation(name: str, size: int, **settings: Any) -> Model:
    settings = {"dataset": "citys", "pretrained_base": False, "crop_size": size, "base_size": size, **settings}
    return Model(name, lambda **norm: get_segmentation_model(name, **settings, **norm), ((3, size, size),))


def _video(name: str, *size: int, **settings: Any) -> Model:
    return _based(name, *size, nclass=5, **settings)._replace(environment=NO_ONEDNN)


def _fpn(make: Callable[..., Block]) -> Model:
    def build(norm_layer: Any = Thawed) -> Block:
        return make(
            classes=["a", "b"], pretrained_base=False,
            norm_layer=norm_layer, norm_kwargs={}, sym_norm_layer=mx.sym.BatchNorm, sym_norm_kwargs={},
            num_fpn_filters=32, num_box_head_conv=1, num_box_head_conv_filters=32, num_box_head_dense_filters=32,
            rpn_channel=32, rpn_test_pre_nms=50, rpn_test_post_nms=10,
        )  # fmt: skip

    part = "samples regions at random, so the check covers features and box head only"
    return Model(make.__name__, build, ((3, 128, 128),), forward=_levels, part=part)


def _levels(net: Block, x: Any) -> List[Any]:
    """Returns the pyramid's levels, and the box head on a corner of the finest level."""
    levels = list(net.features(x))
    return levels + [net.box_features(levels[0].slice_axis(2, 0, 14).slice_axis(3, 0, 14))]


def _regions(net: Block, x: Any) -> Any:
    return net.top_features(net.features(x))


def _branches(net: Block, template: Any, search: Any) -> List[Any]:
    template, search = net.backbone(template), net.backbone(search)
    heads = (net.rpn_head.cls, net.rpn_head.loc)
    return [y for head in heads for y in (head.conv_kernel(template), head.conv_search(search))]


def _yolo(name: str) -> Model:
    boxes = 3 * (4 * 4 + 8 * 8 + 16 * 16)
    targets = ((1, 4), *((boxes, size) for size in (1, 2, 2, 2, 20)))
    return _based(name, 3, 128, 128)._replace(targets=targets)


MODELS: List[Model] = [
    _zoo("mobilenet0.25", 3, 64, 64),
    _zoo("mobilenetv2_0.25", 3, 64, 64),
    _zoo("mobilenetv3_small", 3, 64, 64),
    _zoo("mobilenetv3_large", 3, 64, 64),
    _zoo("resnet18_v1", 3, 64, 64),
    _zoo("resnet18_v2", 3, 64, 64),
    _zoo("resnet18_v1b", 3, 64, 64),
    _zoo("resnet50_v1d", 3, 64, 64),
    _zoo("resnet50_v1s", 3, 64, 64),
    _zoo("resnext50_32x4d", 3, 64, 64),
    _zoo("se_resnet18_v1", 3, 64, 64),
    _zoo("se_resnext50_32x4d", 3, 64, 64),
    Model("senet", lambda **norm: SENet([1, 1, 1, 1], 64, 4, **norm), ((3, 64, 64),)),
    _zoo("resnest14", 3, 64, 64),
    _zoo("densenet121", 3, 224, 224),
    _zoo("inceptionv3", 3, 299, 299),
    _zoo("xception", 3, 96, 96),
    _zoo("googlenet", 3, 224, 224),
    _zoo("squeezenet1.1", 3, 224, 224),
    _zoo("vgg11_bn", 3, 32, 32),
    _zoo("darknet53", 3, 64, 64),
    _zoo("shufflenet_v1", 3, 64, 64),
    _zoo("shufflenet_v2", 3, 64, 64),
    _zoo("nasnet_4_1056", 3, 64, 64)._replace(environment=NO_ONEDNN),
    _zoo("dla34", 3, 64, 64),
    Model("hrnet_w18_small_v1_c", lambda **norm: get_hrnet("w18_small_v1", **norm), ((3, 64, 64),)),
    Model("hrnet_w18_small_v1_s", lambda **norm: get_hrnet("w18_small_v1", purpose="seg", **norm), ((3, 64, 64),)),
    _zoo("residualattentionnet56", 3, 224, 224),
    _zoo("cifar_resnet20_v1", 3, 32, 32),
    _zoo("cifar_resnet20_v2", 3, 32, 32),
    _zoo("cifar_wideresnet16_10", 3, 32, 32),
    _zoo("cifar_resnext29_32x4d", 3, 32, 32),
    _zoo("cifar_residualattentionnet56", 3, 32, 32),
    _segmentation("fcn", 64, backbone="resnet50"),
    _segmentation("psp", 96, backbone="resnet50"),
    _segmentation("deeplab", 64, backbone="resnet50"),
    Model(
        "deeplab_plus", lambda **norm: DeepLabV3Plus(5, pretrained_base=False, crop_size=128, **norm), ((3, 128, 128),)
    ),
    _based("deeplab_v3b_plus_wideresnet_citys", 3, 64, 64, crop_size=64),
    _segmentation("danet", 64, backbone="resnet50"),
    _segmentation("icnet", 128, backbone="resnet50"),
    _segmentation("fastscnn", 128),
    _based("ssd_300_mobilenet0.25_voc", 3, 300, 300),
    _based("ssd_512_resnet18_v1_voc", 3, 256, 256),
    _yolo("yolo3_mobilenet0.25_voc"),
    _yolo("yolo3_darknet53_voc"),
    _based("faster_rcnn_resnet50_v1b_voc", 3, 128, 128)._replace(
        forward=_regions, part="samples regions at random, so the check covers features and top_features only"
    ),
    _fpn(custom_faster_rcnn_fpn),
    _fpn(custom_mask_rcnn_fpn),
    _based("center_net_resnet18_v1b_voc", 3, 128, 128),
    _based("center_net_dla34_voc", 3, 128, 128),
    _based("center_net_mobilenetv3_small_duc_voc", 3, 128, 128),
    _based("simple_pose_resnet18_v1b", 3, 128, 96),
    _based("mobile_pose_resnet18_v1b", 3, 128, 96),
    _based("mobile_pose_mobilenetv3_small", 3, 128, 96),
    _based("alpha_pose_resnet101_v1b_coco", 3, 128, 96),
    Model(
        "siamrpn_alexnet_v2_otb15",
        lambda **norm: get_model("siamrpn_alexnet_v2_otb15", **norm),
        ((3, 127, 127), (3, 287, 287)),
        forward=_branches,
        part="fixes the batch size, so the check covers the layers before the correlation only",
    ),
    # get_model would always ask for weights of the base network.
    Model("inceptionv1_kinetics400", lambda **norm: ActionRecInceptionV1(5, False, **norm), ((3, 224, 224),)),
    Model("inceptionv3_kinetics400", lambda **norm: ActionRecInceptionV3(5, False, **norm), ((3, 299, 299),)),
    Model("resnet18_v1b_kinetics400", lambda **norm: ActionRecResNetV1b(18, 5, False, **norm), ((3, 64, 64),)),
    _video("p3d_resnet50_kinetics400", 3, 16, 32, 32),
    _video("r2plus1d_resnet18_kinetics400", 3, 8, 32, 32),
    _video("i3d_resnet50_v1_kinetics400", 3, 8, 32, 32),
    _video("i3d_inceptionv1_kinetics400", 3, 16, 32, 32),
    _video("i3d_inceptionv3_kinetics400", 3, 8, 75, 75),
    _video("slowfast_4x16_resnet50_kinetics400", 3, 36, 32, 32),
    Model("monodepth2_resnet18", lambda **norm: get_monodepth2(pretrained_base=False, **norm), ((3, 64, 64),)),
    Model(
        "monodepth2_posenet_resnet18",
        lambda **norm: get_monodepth2posenet(pretrained_base=False, **norm),
        ((6, 64, 64),),
    ),
]

BY_NAME: Dict[str, Model] = {model.name: model for model in MODELS}

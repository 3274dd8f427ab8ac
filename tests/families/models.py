"""A small member of each of GluonCV's model families, without pretrained weights."""

from functools import partial
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
        without = "without oneDNN, because plain BatchNorm fails with oneDNN" if self.environment else ""
        return [note for note in (without, self.part) if note]


def _zoo(name: str, *size: int, **settings: Any) -> Model:
    return Model(name, partial(get_model, name, pretrained=False, **settings), (size,))


def _segmentation(name: str, size: int) -> Model:
    settings = dict(dataset="citys", backbone="resnet50", pretrained_base=False, crop_size=size, base_size=size)
    return Model(name, partial(get_segmentation_model, name, **settings), ((3, size, size),))


def _fpn(make: Callable[..., Block]) -> Model:
    def build(norm_layer: Any = Thawed) -> Block:
        return make(
            classes=["a", "b"], pretrained_base=False,
            norm_layer=norm_layer, norm_kwargs={}, sym_norm_layer=mx.sym.BatchNorm, sym_norm_kwargs={},
            num_fpn_filters=32, num_box_head_conv=1, num_box_head_conv_filters=32, num_box_head_dense_filters=32,
            rpn_channel=32, rpn_test_pre_nms=50, rpn_test_post_nms=10,
        )  # fmt: skip

    part = "GluonCV samples regions at random, so the check covers features and box head only"
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


WIDE = "deeplab_v3b_plus_wideresnet_citys"
BOXES = ((1, 4), *((3 * (4 * 4 + 8 * 8 + 16 * 16), size) for size in (1, 2, 2, 2, 20)))
#: By the side of the pictures: models of `get_model` as they are, and those on a base network.
ZOO = {
    32: "vgg11_bn cifar_resnet20_v1 cifar_resnet20_v2 cifar_wideresnet16_10 cifar_resnext29_32x4d "
    "cifar_residualattentionnet56",
    64: "mobilenet0.25 mobilenetv2_0.25 mobilenetv3_small mobilenetv3_large resnet18_v1 resnet18_v2 resnet18_v1b "
    "resnet50_v1d resnet50_v1s resnext50_32x4d se_resnet18_v1 se_resnext50_32x4d resnest14 darknet53 shufflenet_v1 "
    "shufflenet_v2 nasnet_4_1056 dla34",
    96: "xception",
    224: "densenet121 googlenet squeezenet1.1 residualattentionnet56",
    299: "inceptionv3",
}
BASED = {
    (128, 96): "simple_pose_resnet18_v1b mobile_pose_resnet18_v1b mobile_pose_mobilenetv3_small "
    "alpha_pose_resnet101_v1b_coco",
    (128, 128): "yolo3_mobilenet0.25_voc yolo3_darknet53_voc faster_rcnn_resnet50_v1b_voc center_net_resnet18_v1b_voc "
    "center_net_dla34_voc center_net_mobilenetv3_small_duc_voc",
    (256, 256): "ssd_512_resnet18_v1_voc",
    (300, 300): "ssd_300_mobilenet0.25_voc",
}
VIDEOS = {
    (16, 32, 32): "p3d_resnet50_kinetics400 i3d_inceptionv1_kinetics400",
    (8, 32, 32): "r2plus1d_resnet18_kinetics400 i3d_resnet50_v1_kinetics400",
    (8, 75, 75): "i3d_inceptionv3_kinetics400",
    (36, 32, 32): "slowfast_4x16_resnet50_kinetics400",
}
#: Those that `get_model` does not make, or for which it would ask for weights of the base network.
OTHERS: Dict[str, Tuple[Callable[..., Block], int]] = {
    "senet": (partial(SENet, [1, 1, 1, 1], 64, 4), 64),
    "hrnet_w18_small_v1_c": (partial(get_hrnet, "w18_small_v1"), 64),
    "hrnet_w18_small_v1_s": (partial(get_hrnet, "w18_small_v1", purpose="seg"), 64),
    WIDE: (partial(get_model, WIDE, pretrained_base=False, crop_size=64), 64),
    "deeplab_plus": (partial(DeepLabV3Plus, 5, pretrained_base=False, crop_size=128), 128),
    "inceptionv1_kinetics400": (partial(ActionRecInceptionV1, 5, False), 224),
    "inceptionv3_kinetics400": (partial(ActionRecInceptionV3, 5, False), 299),
    "resnet18_v1b_kinetics400": (partial(ActionRecResNetV1b, 18, 5, False), 64),
    "monodepth2_resnet18": (partial(get_monodepth2, pretrained_base=False), 64),
    "monodepth2_posenet_resnet18": (partial(get_monodepth2posenet, pretrained_base=False), 64),
    "siamrpn_alexnet_v2_otb15": (partial(get_model, "siamrpn_alexnet_v2_otb15"), 127),
}
SEGMENTATION = {"fcn": 64, "psp": 96, "deeplab": 64, "danet": 64, "icnet": 128, "fastscnn": 128}

#: What differs from other models.
SPECIAL: Dict[str, Dict[str, Any]] = {
    "nasnet_4_1056": {"environment": NO_ONEDNN},
    "yolo3_mobilenet0.25_voc": {"targets": BOXES},
    "yolo3_darknet53_voc": {"targets": BOXES},
    "faster_rcnn_resnet50_v1b_voc": {
        "forward": _regions,
        "part": "GluonCV samples regions at random, so the check covers features and top_features only",
    },
    "siamrpn_alexnet_v2_otb15": {
        "inputs": ((3, 127, 127), (3, 287, 287)),
        "forward": _branches,
        "part": "GluonCV fixes the batch size, so the check covers the layers before the correlation only",
    },
    "monodepth2_posenet_resnet18": {"inputs": ((6, 64, 64),)},
}

MODELS: List[Model] = [
    *(_zoo(name, 3, side, side) for side, names in ZOO.items() for name in names.split()),
    *(Model(name, build, ((3, side, side),)) for name, (build, side) in OTHERS.items()),
    *(_segmentation(name, side) for name, side in SEGMENTATION.items()),
    *(_zoo(name, 3, *size, pretrained_base=False) for size, names in BASED.items() for name in names.split()),
    *(
        _zoo(name, 3, *size, pretrained_base=False, nclass=5)._replace(environment=NO_ONEDNN)
        for size, names in VIDEOS.items()
        for name in names.split()
    ),
    _fpn(custom_faster_rcnn_fpn),
    _fpn(custom_mask_rcnn_fpn),
]
BY_NAME = {model.name: model._replace(**SPECIAL.get(model.name, {})) for model in MODELS}

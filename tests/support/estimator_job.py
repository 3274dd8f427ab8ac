"""Trains the SSD estimator of `gluoncv.auto` with its own syncbn setting on GPUs 0 and 1; prints JSON of its layers.

For `python -m gluon_syncbn run --cpus 2`: of gluon_syncbn it knows nothing. The data is drawn, and the networks start
without weights that would have to be downloaded. What has to be mended for it is said where it is done.
"""

import functools
import json
import os
import typing

import cv2
import mxnet as mx
import numpy as np
from autocfg import type_check

# autocfg 0.0.8 does not know, on Python 3.11, that Union[X, None] is called Optional and that Any is a class.
type_check._SPECIAL_INSTANCE_CHECKERS["Optional"] = type_check._instancecheck_union
_name = type_check._get_name
type_check._get_name = lambda kind: "Any" if kind is typing.Any else _name(kind)

from gluoncv.auto.data.dataset import ObjectDetectionDataset  # noqa: E402
from gluoncv.auto.estimators import SSDEstimator  # noqa: E402
from gluoncv.auto.estimators.ssd import ssd  # noqa: E402

ANNOTATION = (
    "<annotation><filename>{0}.jpg</filename><size><width>160</width><height>120</height><depth>3</depth></size>"
    "<object><name>{1}</name><difficult>0</difficult><bndbox><xmin>40</xmin><ymin>30</ymin><xmax>90</xmax>"
    "<ymax>80</ymax></bndbox></object></annotation>"
)


def draw_voc(root, images=6):
    """Noise, of which a part is an object, as Pascal VOC has them."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        os.makedirs(f"{root}/{folder}")
    for i in range(images):
        cv2.imwrite(f"{root}/JPEGImages/{i}.jpg", np.random.RandomState(i).randint(0, 255, (120, 160, 3)))
        with open(f"{root}/Annotations/{i}.xml", "w") as file:
            file.write(ANNOTATION.format(i, ("person", "car", "dog")[i % 3]))
    with open(f"{root}/ImageSets/Main/train.txt", "w") as file:
        file.writelines(f"{i}\n" for i in range(images))


def main():
    draw_voc("voc")
    data = ObjectDetectionDataset.from_voc("voc", splits=["train"])
    # SSD asks for the pretrained base whatever its settings are.
    ssd.get_model = functools.partial(ssd.get_model, pretrained_base=False)
    nets, init_network, init_trainer = [], SSDEstimator._init_network, SSDEstimator._init_trainer
    # Without weights, as the estimator makes a net that it loads afterwards.
    SSDEstimator._init_network = lambda self, **kwargs: init_network(self, load_only=True)
    SSDEstimator._init_trainer = lambda self: (nets.append(self.net), init_trainer(self))
    settings = {"ssd": {"syncbn": True, "transfer": "ssd_300_mobilenet0.25_coco"}, "gpus": (0, 1), "num_workers": 0}
    running = SSDEstimator({**settings, "train": {"batch_size": 3, "epochs": 1}})
    steps, statistics = [], {}  # as training leaves them: an evaluation takes the mean over the devices
    step = mx.gluon.Trainer.step

    def stepped(trainer, *args, **kwargs):
        steps.append(step(trainer, *args, **kwargs))
        mx.nd.waitall()  # plain BatchNorm moves its statistics in the backward, which a read does not wait for
        for name, parameter in nets[0].collect_params().items():
            if name.endswith(("running_mean", "moving_mean")):
                one, *others = (data.asnumpy() for data in parameter.list_data())
                moved = bool(np.isfinite(one).all() and one.any())
                statistics[name] = {"same": [(one == other).all() for other in others] == [True], "moved": moved}

    mx.gluon.Trainer.step = stepped
    running.fit(data, data)
    print(json.dumps({"steps": len(steps), "statistics": statistics}))


if __name__ == "__main__":
    main()

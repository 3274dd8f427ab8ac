"""Segment images with a checkpoint, and write a picture and a mask for each image.

    python predict.py --resume runs/demo/SyncBatchNorm/best.ckpt street.jpg --output-dir predicted

The command writes predicted/street_picture.png (image and prediction side by side, with a legend) and
predicted/street_mask.png (one channel of ADE20K class ids, 1 to 150).
"""

from __future__ import annotations

import os
import sys

from devices import contexts, prepare_mxnet
from errors import UserError, run
from options import evaluate_parser, take_model_options


def main(argv=None) -> int:
    parser = evaluate_parser(__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument("--output-dir", default="predicted", metavar="DIR")
    args = parser.parse_args(argv)
    prepare_mxnet(args)
    return predict(args)


def predict(args) -> int:
    """Segment args.images."""
    import numpy as np
    from checkpoint import load_checkpoint
    from dataset import read_image
    from pictures import draw_predictions
    from PIL import Image
    from predictor import Predictor, load_network

    devices = contexts(args)[:1]
    images = [(path, read_image(path)) for path in args.images]
    stems = [os.path.splitext(os.path.basename(path))[0] for path in args.images]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UserError(f"{stem}: two images of this name would write the same files; expected different names")
    checkpoint = load_checkpoint(args.resume)
    take_model_options(args, checkpoint.state)
    net = load_network(args, checkpoint, devices)
    predictor = Predictor(net, devices, args.base_size, args.crop_size, args.flip, args.scales)
    os.makedirs(args.output_dir, exist_ok=True)
    for stem, (_, image) in zip(stems, images):
        labels = predictor.labels(image)
        picture = os.path.join(args.output_dir, stem + "_picture.png")
        draw_predictions(picture, [image], None, {"prediction": [labels]})
        mask = os.path.join(args.output_dir, stem + "_mask.png")
        Image.fromarray((labels + 1).astype(np.uint8)).save(mask)
        print(f"{picture} {mask}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
